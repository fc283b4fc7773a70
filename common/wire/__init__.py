"""What travels: messages, their bytes, and the names of keys."""
