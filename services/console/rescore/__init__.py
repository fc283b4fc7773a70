"""Runs without rollout and trainer: recorded trajectories go in, and real reward workers score them."""
