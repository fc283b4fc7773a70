"""Losses: a file for each kind. `LOSSES` at its end has names, traits, settings and rows of the docs."""
