"""Redis: clients, the broker that repeats commands during outages, scripts, a server of the run's own."""
