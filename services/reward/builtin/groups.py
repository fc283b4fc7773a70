"""Built-in group functions: they map the rewards of a group, None where one failed, to new rewards."""

from typing import Literal

STD_EPSILON = 1e-4
"""Added to the standard deviation, as in GRPO: a group without variance is not divided by zero."""

Scores = list[float | None]


def rank(scores: Scores) -> Scores:
    """The share of the other samples that a sample beats, from 0 to 1; a tie counts as half.

    >>> rank([3.0, 1.0, None, 3.0])
    [0.75, 0.0, None, 0.75]
    """
    values = [score for score in scores if score is not None]
    num_others = max(len(values) - 1, 1)

    def share(score: float) -> float:
        num_beaten = sum(value < score for value in values)
        num_ties = sum(value == score for value in values) - 1
        return (num_beaten + num_ties / 2) / num_others if len(values) > 1 else 0.5

    return [None if score is None else share(score) for score in scores]


def normalise(scores: Scores, scale: Literal["std", "none"] = "std") -> Scores:
    """Rewards minus the group's mean, over its unbiased standard deviation unless `scale` is `none`."""
    values = [score for score in scores if score is not None]
    if not values:
        return scores
    mean = sum(values) / len(values)
    variance = sum((score - mean) ** 2 for score in values) / max(len(values) - 1, 1)
    divisor = variance**0.5 + STD_EPSILON if scale == "std" else 1.0
    return [None if score is None else (score - mean) / divisor for score in scores]


def replace_failures_by_mean(scores: Scores) -> Scores:
    """Samples whose reward failed get the mean of the others; where all failed, nothing changes."""
    values = [score for score in scores if score is not None]
    if not values:
        return scores
    mean = sum(values) / len(values)
    return [mean if score is None else score for score in scores]


GROUP_FUNCTIONS = {"rank": rank, "normalise": normalise, "replace_failures_by_mean": replace_failures_by_mean}
