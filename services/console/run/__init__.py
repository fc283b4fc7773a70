"""Access to a run: its folder, its Redis, its history."""
