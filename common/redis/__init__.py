"""Redis: clients, the broker that waits out trouble, scripts, a server of the run's own."""
