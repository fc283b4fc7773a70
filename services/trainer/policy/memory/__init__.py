"""What a run takes of GPUs and hosts, computed before it starts."""
