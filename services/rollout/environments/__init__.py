"""What answers the model: environments, and the sessions that are played with them."""
