"""What `import tidemill` offers: runs, checks and recorded history from Python. docs/api.md is made of it."""
