"""The inputs of a loss, and what weighs and divides its terms.

Shape legend: N trained tokens of one forward pass, S whole sequences that they belong to.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tidemill.common.config.algorithm import Normalisation as Normalisation
from tidemill.common.config.algorithms.loss import MAX_LOG_RATIO as MAX_LOG_RATIO
from tidemill.common.config.algorithms.loss import Surrogate as Surrogate
from tidemill.common.config.algorithms.loss import sequence_means as sequence_means
from tidemill.common.config.algorithms.loss import sequence_sums as sequence_sums
from tidemill.services.trainer.groups.columns import COLUMNS

if TYPE_CHECKING:
    from tidemill.services.trainer.algorithm.losses.routing import LayerRouting

LOGPROB_FLOOR = -1e4
"""Logprob of a token that the model rules out (a logit of -inf): far below any other, and finite."""
NO_RATIO = torch.zeros(())
"""The ratio's logarithm before the loss sets it."""


@dataclass(slots=True, eq=False)
class Tokens:
    """The N >= 1 trained tokens of a forward pass. Segments of a session may lie in several passes, unless
    the algorithm needs whole sequences. None is changed; like `Tile` not frozen.

    With gradient: `logprobs_N`, `log_mass_N`, `values_N`, and `entropies_N` where there is an entropy bonus.
    The rest are constants. Tensors have one dtype and device, `sequence_N` is int64 in [0, S).

    Example: two tokens of one sequence: `logprobs_N` [-0.5, -1.2], `sequence_N` [0, 0], `num_sequences` 1,
    `columns` {"rollout_logprobs": [-0.6, -1.2], "advantages": [0.7, 0.7]}.
    """

    logprobs_N: Tensor
    """Over the ids that a token was sampled from, as are those of the rollout and of the step's start."""
    weights_N: Tensor
    """Normalisation: `token_weight` of each token's sequence."""
    sequence_N: Tensor
    num_sequences: int
    entropies_N: Tensor
    columns: dict[str, Tensor]
    """[N] each, of the tokens' samples (`groups/columns.py`): `rollout_logprobs` and `advantages`, and what
    the algorithm needs beside them."""
    log_mass_N: Tensor | None = None
    """Logarithm of the probability of the ids that sampling kept; None: all were kept."""
    values_N: Tensor | None = None
    teacher_weights_N: Tensor | None = None
    """Weight of the teacher's term for each token: 0 where the token has no teacher, or one that is measured
    only. None: no token of the pass has a teacher."""
    imitation_N: Tensor | None = None
    """For demonstrations, the weight of -logprob, which is their whole loss; 0 for the other tokens."""
    routing: "tuple[LayerRouting, ...]" = ()
    """Routing of each mixture layer, where it is wanted; with gradient."""

    log_N: Tensor = NO_RATIO
    """Logarithm of the ratio: log(current / old), with gradient; 0 until `policy_loss` sets it, before it
    asks a surrogate."""

    @property
    def rollout_logprobs_N(self) -> Tensor:
        return self.columns["rollout_logprobs"]

    @property
    def advantages_N(self) -> Tensor:
        return self.columns["advantages"]

    @property
    def penalised_N(self) -> Tensor | None:
        """1 for the tokens that the loss chose to penalise, else 0; None for a loss that chooses none."""
        return self.columns.get("penalised")

    @property
    def ratio_N(self) -> Tensor:
        """current / old, per token, finite."""
        return self.log_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    @property
    def old_logprobs_N(self) -> Tensor:
        """Logprobs under the old policy, without gradient."""
        return (self.logprobs_N - self.log_N).detach()

    def comparable(self) -> "Tokens":
        """The same, so that all logprobs are finite and policies do not differ at demonstrations:

        * Logprobs are at least `LOGPROB_FLOOR`. A token with -inf has no gradient, for no change of the
          weights brings it back: it adds finite numbers to the loss and its metrics, and the gradients of the
          others stay what they are. NaN stays NaN: the model has diverged, and the update is skipped.
        * At demonstrations other policies have the current logprobs, and the entropy is 0.
        """
        floored = replace(self, logprobs_N=self.logprobs_N.clamp(min=LOGPROB_FLOOR))
        is_demonstrated_N = self.is_demonstrated_N
        columns = {}
        for name, values_N in self.columns.items():
            column = COLUMNS[name]
            if column.is_floored:
                values_N = values_N.clamp(min=LOGPROB_FLOOR)
            if is_demonstrated_N is not None and column.of_demonstration == "current":
                values_N = torch.where(is_demonstrated_N, floored._current_N(name), values_N)
            columns[name] = values_N
        return replace(floored, columns=columns, entropies_N=self.of_sampled(self.entropies_N))

    def completed(self, names: Sequence[str]) -> "Tokens":
        """The same with all columns in `names` and with weights of a teacher. Columns that the pass lacks
        have the values of demonstrations, which are 0 or make no difference; weights that it lacks are 0."""
        weights_N = self.teacher_weights_N
        if weights_N is None:
            weights_N = torch.zeros_like(self.weights_N)
        absent = {}
        for name in names:
            if name in self.columns:
                continue
            number = COLUMNS[name].of_demonstration
            if number == "current":
                absent[name] = self._current_N(name)
            else:
                absent[name] = torch.full_like(self.weights_N, number)
        return replace(self, columns=self.columns | absent, teacher_weights_N=weights_N)

    def _current_N(self, name: str) -> Tensor:
        """The current logprobs, as a column of this name would have them; without gradient."""
        # A reference's are over all ids.
        logprobs_N = self.unmasked_logprobs_N if name == "reference_logprobs" else self.logprobs_N
        return logprobs_N.detach()

    @property
    def unmasked_logprobs_N(self) -> Tensor:
        """Logprobs over all ids, with gradient: what a reference's or a teacher's compare with.

        Of ids with 0.5, 0.4 and 0.1 sampling kept the first two: over these the first has 5/9, over all 0.5.
        """
        if self.log_mass_N is None:
            return self.logprobs_N
        return (self.logprobs_N + self.log_mass_N).clamp(min=LOGPROB_FLOOR)

    @property
    def is_demonstrated_N(self) -> Tensor | None:
        """Which tokens are of demonstrations; None where all were sampled."""
        return None if self.imitation_N is None else self.imitation_N > 0

    def of_sampled(self, values_N: Tensor) -> Tensor:
        """The values, 0 for demonstrations."""
        is_demonstrated_N = self.is_demonstrated_N
        return values_N if is_demonstrated_N is None else values_N.masked_fill(is_demonstrated_N, 0.0)


def token_weight(normalisation: Normalisation, num_trained: int, group_trained: int = 0) -> float:
    """The weight of each trained token of a sequence with `num_trained` of them, in a group with
    `group_trained`."""
    if normalisation == "sequence" and num_trained:
        return 1.0 / num_trained
    if normalisation == "prompt" and group_trained:
        return 1.0 / group_trained
    return 1.0


def denominator(
    normalisation: Normalisation,
    num_sequences: int,
    num_trained: int,
    max_completion_tokens: int,
    num_groups: float = 0.0,
) -> float:
    """What these sequences and tokens add to the denominator of an update, which is the sum over its parts.

    `num_groups` counts a sequence as its share of its group: of 4 completions, one is 0.25.
    """
    if normalisation in ("sequence", "sequence_sum"):
        return float(num_sequences)
    if normalisation == "prompt":
        return num_groups
    if normalisation == "token":
        return float(num_trained)
    # `constant`: as if every completion had its full length.
    return float(num_sequences * max_completion_tokens)
