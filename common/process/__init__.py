"""What every process of a run has: lifecycle, heartbeat, activity, HTTP."""
