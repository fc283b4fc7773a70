"""Trains committed steps of a run again, beside the run and without touching it, to look at what happened."""
