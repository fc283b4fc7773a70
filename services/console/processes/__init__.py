"""Processes that are started, watched, and never outlive the console."""
