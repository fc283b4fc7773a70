"""Reward functions: how they are found, called, and what they are given."""
