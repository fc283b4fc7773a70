"""Exports of a run: models and archives."""
