"""Rewards that ask servers: replicas, routing, limits, retries. Judges and reward models build on it."""
