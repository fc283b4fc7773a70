"""The `tidemill` command: starts a whole run on one machine, watches any run, and says how it went."""
