"""What a run is doing now, why it is slow, and its result."""
