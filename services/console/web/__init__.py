"""`tidemill web`: pages about the runs of a folder; nothing but notes is written."""
