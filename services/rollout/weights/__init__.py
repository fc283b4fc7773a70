"""How a version reaches this machine, and by which of its files the engine gets it."""
