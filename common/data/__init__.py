"""Data sets: files and hubs, rows, values of columns, how long prompts are, epochs as steps."""
