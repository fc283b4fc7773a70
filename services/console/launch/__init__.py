"""A whole run on this machine: its Redis, its processes, and the view of them."""
