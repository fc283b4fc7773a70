"""How numbers and text of unknown origin are written for people."""
