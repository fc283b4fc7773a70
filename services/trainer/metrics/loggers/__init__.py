"""Experiment trackers of a run, beside metrics.jsonl: each in a thread of its own, none can stop the run."""
