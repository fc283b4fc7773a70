"""Parts of every process of a run: lifecycle, heartbeat, activity, HTTP."""
