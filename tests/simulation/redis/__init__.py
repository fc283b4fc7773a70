"""A Redis in memory: what Tidemill uses of one, with its log of writes, so that any suffix can be lost."""
