"""`tidemill web`: pages about the runs of a folder; nothing is written."""
