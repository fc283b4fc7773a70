"""What a run has written: streams, and the traces of tickets and steps."""
