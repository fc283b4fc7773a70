"""The reference model of KL penalties: a copy of the policy's model.

A frozen reference is the model that the run started with, also after a restart; an updated one is part of the
checkpoint, and moves only at the end of a step. With adapters there is no copy: the model itself is the
reference, with its adapters off (`adapters.py`).
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tidemill.services.trainer.groups.choices import without_choices
from tidemill.services.trainer.groups.columns import SampleColumns
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy.forward import TokenScorer
from tidemill.services.trainer.policy.options import OptionSettings, PolicyCore, PolicyOption
from tidemill.services.trainer.policy.state import PolicyState
from tidemill.services.trainer.weights.store import model_tensors

PREFIX = "reference."
"""Prefix of its weights' names in a checkpoint."""


class ReferenceModel(PolicyOption):
    """A copy of the policy's model, which scores samples with routes of its own choice."""

    def __init__(self, settings: OptionSettings) -> None:
        self._config = settings.trainer.algorithm.reference

    def join(self, model: PreTrainedModel, policy: PolicyCore) -> None:
        self._model = copy.deepcopy(model).requires_grad_(False).eval()
        if self._config.dtype == "bfloat16":  # else in that of the policy's master weights
            self._model.to(torch.bfloat16)
        self._scorer = policy.make_scorer(self._model)

    def modules(self) -> list[nn.Module]:
        return [self._scorer.module]

    def precompute(self, parts: Sequence[Sequence[Sample]], policy: PolicyCore) -> list[SampleColumns]:
        return reference_columns(parts, policy, self._scorer)

    @torch.no_grad()
    def end_step(self, num_steps: int, model: PreTrainedModel) -> None:
        """Every `every` steps, move every weight by `mixup` of its distance to the policy's: 1 copies it."""
        if self._config.model != "updated" or num_steps % self._config.every:
            return
        current = model_tensors(model)
        for name, tensor in model_tensors(self._model).items():
            # Whole numbers cannot be mixed.
            if tensor.is_floating_point() and self._config.mixup < 1.0:
                tensor.lerp_(current[name].to(tensor.dtype), self._config.mixup)
            else:
                tensor.copy_(current[name])

    def state(self) -> PolicyState:
        """The weights of an updated reference."""
        if self._config.model != "updated":
            return PolicyState({})
        return PolicyState({f"{PREFIX}{name}": tensor for name, tensor in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """Its weights, by the model's names; views."""
        return model_tensors(self._model)


def reference_columns(
    parts: Sequence[Sequence[Sample]], policy: PolicyCore, scorer: TokenScorer
) -> list[SampleColumns]:
    """`reference_logprobs` of each sample: the logprobs of this scorer's model, without recorded choices of
    experts, for a reference makes its own."""
    own_choices = [list(map(without_choices, group)) for group in parts]
    return [
        {"reference_logprobs": scores["logprobs"]} for scores in policy.score_samples(own_choices, scorer)
    ]
