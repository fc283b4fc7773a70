"""From tickets to the batch of a step: admission, joining of streams, assembly, repair."""
