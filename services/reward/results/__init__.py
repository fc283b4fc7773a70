"""What became of rewards: outcomes, their cache, published scores."""
