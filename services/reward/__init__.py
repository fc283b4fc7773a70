"""The reward service: a consumer group that turns trajectories into scores."""
