"""Configs of verl, TRL and prime-rl as ours: a table of options for each, and what no table can say."""
