"""Runs code of completions: RQ workers that run each test as a program of its own, in a jail."""
