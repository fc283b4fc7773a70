"""Everything that can be wrong with a run before it starts."""
