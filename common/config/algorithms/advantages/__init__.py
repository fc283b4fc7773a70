"""Advantages: a file for each. `ADVANTAGES` at its end has names, traits, settings and rows of the docs."""
