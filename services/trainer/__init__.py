"""The trainer: issues tickets, trains on scored groups, commits steps and announces versions."""
