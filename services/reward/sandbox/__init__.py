"""Runs code of completions: RQ workers that start a separate jail for every test."""
