"""Rewards that ask servers (judges, reward models, teachers), and replicas, routing, limits and retries."""
