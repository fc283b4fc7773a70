"""`tidemill web`: read-only pages about the runs of a folder."""
