"""Losses: what each algorithm makes of probabilities and advantages, as sums over tokens."""
