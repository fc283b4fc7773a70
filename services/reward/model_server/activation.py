"""What vLLM puts over raw scores unless `use_activation` is false."""

from typing import Any

from torch import Tensor


def activate(scores: Tensor, config: Any) -> Tensor:
    """Sigmoid of one label, softmax over several; the config's `problem_type` goes first, as in vLLM."""
    problem = getattr(config, "problem_type", None)
    if problem == "regression":
        return scores
    if problem == "multi_label_classification" or (problem is None and config.num_labels < 2):
        return scores.sigmoid()
    return scores.sigmoid() if config.num_labels < 2 else scores.softmax(dim=-1)
