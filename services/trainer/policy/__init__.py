"""The model that is trained: loading, forward passes, packing, optimizer, and what stands beside it."""
