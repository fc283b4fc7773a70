"""What a run has written, how it stands, why it is slow, its result, models, archives and dead letters."""
