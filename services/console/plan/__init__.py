"""How large a run has to be."""
