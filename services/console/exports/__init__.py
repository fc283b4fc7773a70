"""What leaves a run: models and archives."""
