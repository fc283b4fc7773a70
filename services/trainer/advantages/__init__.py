"""Advantages: one pure function for each algorithm, and `Advantages`, which gives them to samples."""

from services.trainer.advantages.assignment import Advantages

__all__ = ["Advantages"]
