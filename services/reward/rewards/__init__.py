"""Kinds of rewards, and what stands around all of them alike."""
