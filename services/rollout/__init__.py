"""Rollout: tickets in, trajectories out."""
