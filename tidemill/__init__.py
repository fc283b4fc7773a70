"""Tidemill: reinforcement learning for language models, as services that meet in Redis Streams."""
