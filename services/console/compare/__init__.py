"""Two runs, a step and its replay, or the scores of two rewards, side by side."""
