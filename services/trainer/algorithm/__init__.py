"""Algorithms: advantages, losses, and the functions that users bring."""
