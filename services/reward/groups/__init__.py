"""Rewards of a group as a whole."""
