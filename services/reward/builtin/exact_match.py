"""Exact match: the completion equals the ground truth, without the spaces around either."""

from typing import Any


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    ignore_case: bool = False,
) -> float:
    """1 where the texts are equal, else 0. A list of ground truths holds alternative right answers."""
    truths = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    solution = _normalised(solution_str, ignore_case)
    return float(any(_normalised(str(truth), ignore_case) == solution for truth in truths))


def _normalised(text: str, ignore_case: bool) -> str:
    return text.strip().casefold() if ignore_case else text.strip()
