"""Runs on the nodes of a cluster: what each node does, and the scripts that start it."""
