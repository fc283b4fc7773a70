"""What a group is while it is trained: samples, micro-batches, and the filter for staleness and validity."""
