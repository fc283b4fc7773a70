"""The columns of samples: one number for each completion token, [T] in a `Sample` and [N] in `Tokens`.

A new quantity is a row of `COLUMNS`, and the file that fills it. All samples of a micro-batch have a column,
or none of them has it; demonstrations, and samples without a teacher, get the value that the table says.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.floating[Any]]
SampleColumns = dict[str, Values]
"""Arrays [T] by name."""


class Column(NamedTuple):
    """What is known of a column, whichever sample has it."""

    of_demonstration: float | Literal["current"] = 0.0
    """Value at a demonstration's tokens; `current`: the current policy's logprob, so that what compares
    policies finds no difference there."""
    of_others: float | None = None
    """Value for a sampled completion that has none beside others that have it; None: that is an error."""
    is_floored: bool = False
    """Whether it is a logprob of a model that may rule a token out: it is at least `LOGPROB_FLOOR` in a
    loss."""
    is_trained_with: bool = True
    """Whether the loss of a token reads it; else only what is computed before."""


COLUMNS: dict[str, Column] = {
    # By the rollout: of the engine, with sampling's temperature and over the ids that it kept.
    "rollout_logprobs": Column(of_demonstration="current"),
    # By the policy, under the weights at the start of the step.
    "proximal_logprobs": Column(of_demonstration="current", is_floored=True),
    # By the policy, under the reference model, over all ids.
    "reference_logprobs": Column(of_demonstration="current", is_floored=True),
    # By the policy: the value head's estimates at the start of the step, before each token is chosen.
    "values": Column(),
    # By the policy, under the weights at the start: for the statistics of a mini-batch alone.
    "start_logprobs": Column(is_trained_with=False),
    "entropies": Column(is_trained_with=False),
    # By the reward: a teacher's, over all ids; 0 at tokens that the model did not sample.
    "teacher_logprobs": Column(of_others=0.0),
    # By the estimator of advantages.
    "advantages": Column(),
    # By the estimator of advantages: targets of the value head.
    "returns": Column(),
    # By the mini-batch: factor of the policy's term; 0 is a token that is left out of it.
    "factors": Column(of_demonstration=1.0),
    # By the mini-batch: 1 for tokens that the loss penalises.
    "penalised": Column(),
}
"""All columns by name, and who fills them."""


def trained_names() -> list[str]:
    """Columns that a loss gets, where a micro-batch has them."""
    return [name for name, column in COLUMNS.items() if column.is_trained_with]
