"""A stretch of a run as a Chrome trace: every ticket through generation, queueing, reward and training."""
