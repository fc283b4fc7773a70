"""Algorithms: a file for each advantage (`advantages/`) and each loss (`losses/`), and their table."""
