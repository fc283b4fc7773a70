"""Weights of versions: encoded, written, kept."""
