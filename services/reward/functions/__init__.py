"""Reward functions: loading them, making their arguments, and running them in processes."""
