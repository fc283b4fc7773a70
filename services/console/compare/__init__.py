"""Two runs, or a step and its replay, side by side."""
