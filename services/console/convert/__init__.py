"""Converts configs of verl, TRL and prime-rl: a table of options for each, and code for all else."""
