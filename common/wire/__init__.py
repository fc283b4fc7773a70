"""The messages of a run, their encoding, and the names of Redis keys."""
