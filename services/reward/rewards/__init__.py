"""Kinds of rewards, and what all of them share: attempts, limits, cache, sums and groups."""
