"""What belongs to a run: state, records, weight files, prompts."""
