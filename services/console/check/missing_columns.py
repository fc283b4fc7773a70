"""Rows that lack a column without which a reward gives no score.

Which columns these are, the reward service says (`services/reward/check.py`): only it imports the functions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidemill.common.config import NamedRewardConfig, RunConfig
from tidemill.common.data.dataset import Row
from tidemill.common.errors import ConfigError

EVALUATION = "eval"
"""Beginning of the names of evaluation sets in the rows that are checked."""


@dataclass(slots=True)
class Gap:
    """How many rows that a reward scores lack a column.

    Example: `num_rows` 1243, `num_missing` 311, `first` "train.jsonl line 4".
    """

    num_rows: int = 0
    num_missing: int = 0
    first: str = ""


def find_missing_columns(
    config: RunConfig, columns: Mapping[str, Sequence[str]], rows: Mapping[str, Sequence[Row]]
) -> list[str]:
    """A note for each reward, column and data set in which rows lack the column.

    Args:
        config: the run's.
        columns: name of the reward -> columns that it needs.
        rows: the rows of each data set.

    Raises:
        ConfigError: no training row that a reward scores has a column that it needs.
    """
    notes = []
    for name, needed in columns.items():
        reward = config.reward.named[name]
        for column in needed:
            gaps = _count_gaps(reward, column, rows)
            _check_training(name, column, gaps)
            for dataset, gap in gaps.items():
                if gap.num_missing:
                    notes.append(
                        f"reward {name}: {gap.num_missing:,} of {gap.num_rows:,} rows of {dataset} have no "
                        f"{column!r} (first: {gap.first}): {_consequence(reward)}. Fill in the column, or "
                        f"{_remedy(reward)}"
                    )
    return notes


def _count_gaps(reward: NamedRewardConfig, column: str, rows: Mapping[str, Sequence[Row]]) -> dict[str, Gap]:
    """The gaps of each data set of which the reward scores rows."""
    gaps: dict[str, Gap] = {}
    for dataset, members in rows.items():
        lane = "eval" if dataset.startswith(EVALUATION) else "train"
        if lane not in reward.lanes:
            continue
        gap = Gap()
        for row in members:
            if not reward.scores_source(row.data_source, row.source):
                continue
            gap.num_rows += 1
            if column not in row.extra:
                gap.num_missing += 1
                gap.first = gap.first or row.origin
        if gap.num_rows:
            gaps[dataset] = gap
    return gaps


def _check_training(name: str, column: str, gaps: Mapping[str, Gap]) -> None:
    """Raises ConfigError: training rows are scored, and none has the column."""
    training = [gap for dataset, gap in gaps.items() if not dataset.startswith(EVALUATION)]
    num_rows = sum(gap.num_rows for gap in training)
    num_missing = sum(gap.num_missing for gap in training)
    if num_rows and num_missing == num_rows:
        raise ConfigError(
            f"reward {name} needs the column {column!r}, and none of the {num_rows:,} training rows that it "
            f"scores has it (first: {training[0].first}). Add the column to the data"
        )


def _consequence(reward: NamedRewardConfig) -> str:
    """What becomes of the samples of rows without the column."""
    value = reward.failure_value
    if value is None:
        return "their samples get no score"
    return f"the reward of their samples fails, and counts as {value:g} in training (on_failure)"


def _remedy(reward: NamedRewardConfig) -> str:
    if reward.teacher is not None:
        return "leave these rows out"
    return "give the argument a default in the function"
