"""What survives a crash: commits, checkpoints, recovery, and what may be trimmed."""
