"""Kinds of rewards, and what all of them share: limits, cache, sums and groups."""
