"""Exact match: the completion equals the ground truth, without the spaces around either.

A number is a text like any other: the truth 5 is the text `5`, and so is 5.0, which a column of integers
becomes where it has gaps. Accents count in either form of Unicode. A row without a ground truth is a failure.
"""

import unicodedata
from typing import Any

from tidemill.services.reward.outcome import truth_error


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
    texts = [text for truth in truths for text in _texts(truth)]
    if not texts:
        raise truth_error("exact_match needs a ground truth, got an empty list")
    solution = _normalised(solution_str, ignore_case)
    return float(solution in [_normalised(text, ignore_case) for text in texts])


def _texts(truth: Any) -> list[str]:
    """The texts that are right. `True` may be written as in JSON."""
    if isinstance(truth, bool):
        return [str(truth), str(truth).lower()]
    if isinstance(truth, float) and truth.is_integer():
        return [str(truth), str(int(truth))]
    is_text = isinstance(truth, str) and truth.strip()
    if not is_text and not (isinstance(truth, int | float) and truth == truth):
        raise truth_error(
            f"exact_match needs a text, a number or a list of them as ground truth, got {str(truth)[:80]!r}"
        )
    return [str(truth)]


def _normalised(text: str, ignore_case: bool) -> str:
    text = unicodedata.normalize("NFC", text.strip())
    return text.casefold() if ignore_case else text
