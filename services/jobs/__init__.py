"""Jobs off the hot path, run by RQ workers: nothing that a training step waits for."""
