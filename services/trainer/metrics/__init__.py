"""What a step measured: records, Prometheus, trackers, warnings."""
