"""A run for Prometheus, as Redis knows it: streams, workers, progress, and where every process is scraped."""
