"""Trains committed steps of a run again without touching the run, to compare them with the record."""
