"""A whole run on this machine or on a node of a cluster: its processes, kept alive, and the view of them."""
