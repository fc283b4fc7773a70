"""Advantages and losses that bring settings of their own, a file each."""
