"""Exports a run's state in Redis to Prometheus: streams, workers, progress, and the addresses to scrape."""
