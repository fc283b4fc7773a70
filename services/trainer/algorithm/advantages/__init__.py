"""Advantages: one pure function for each algorithm, and `Advantages`, which gives them to samples."""

from tidemill.services.trainer.algorithm.advantages.registry import Advantages

__all__ = ["Advantages"]
