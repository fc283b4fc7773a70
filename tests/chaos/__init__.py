"""Whole runs whose processes are killed, and what must be true of their history afterwards."""
