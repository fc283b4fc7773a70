"""Measurements of what Tidemill claims. Each module is a command and ends with one line of JSON."""
