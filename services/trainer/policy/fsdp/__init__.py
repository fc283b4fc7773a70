"""One policy over several ranks, sharded with FSDP2."""
