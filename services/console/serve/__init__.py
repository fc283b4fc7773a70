"""`tidemill serve-rewards`: serves the rewards of a config to another trainer."""
