"""What belongs to a run: state, records, weight files; its model's configuration, tokens, chat template."""
