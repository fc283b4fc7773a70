"""Runs code of completions: RQ workers, each of which starts a jail of its own for every completion."""
