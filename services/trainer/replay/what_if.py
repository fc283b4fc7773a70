"""One step with another config: the same start, the same records, and what would have come out.

A change may touch what the trainer makes of its groups, never what was collected (`__main__.py`). Each step
starts from the recorded weights and moments; the change is not carried on.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tidemill.common.config import RunConfig
from tidemill.common.config.recorded import changed_fields
from tidemill.common.errors import TidemillError
from tidemill.common.history import RecordedGroup
from tidemill.common.wire.messages import Commit
from tidemill.services.trainer.groups.group_filter import CompleteGroup, GroupFilter, Refusal, TrainableGroup
from tidemill.services.trainer.groups.samples import Composition, form_micro_batches
from tidemill.services.trainer.policy.loading import open_policy
from tidemill.services.trainer.policy.policy import Policy, PolicyThread
from tidemill.services.trainer.policy.state import PolicyState
from tidemill.services.trainer.replay.session import ReplayContext, complete_groups, metrics_of
from tidemill.services.trainer.step import StepRunner

NOT_WEIGHTS = ("optimizer.", "rng.", "reference.")
"""Beginnings of names in a policy's state."""


def copied_state(policy: Policy) -> PolicyState:
    """A copy of all that the policy's next step depends on."""
    state = policy.state()
    return PolicyState(
        {name: tensor.detach().clone() for name, tensor in state.tensors.items()}, state.values
    )


def named_weights(state: PolicyState) -> dict[str, Tensor]:
    """What is trained, under the names of the model's own parameters; those of a value head keep theirs."""
    return {
        name.removeprefix("model."): tensor.detach().cpu()
        for name, tensor in state.tensors.items()
        if not name.startswith(NOT_WEIGHTS)
    }


def weight_distance(start: PolicyState, replayed: PolicyState, changed: PolicyState) -> dict[str, Any] | None:
    """How far the two results lie apart, beside how far each step went; None of a policy without weights.
    Norms are over all trained weights, in float64; `cosine` is that of the angle between the two steps."""
    names = [
        name
        for name, tensor in start.tensors.items()
        if not name.startswith(NOT_WEIGHTS) and tensor.is_floating_point()
    ]
    if not names:
        return None
    apart, first, second, product, greatest = 0.0, 0.0, 0.0, 0.0, 0.0
    for name in names:
        origin = _wide(start.tensors[name])
        one, other = _wide(replayed.tensors[name]) - origin, _wide(changed.tensors[name]) - origin
        apart += float((other - one).square().sum())
        first, second = first + float(one.square().sum()), second + float(other.square().sum())
        product += float((one * other).sum())
        greatest = max(greatest, float((other - one).abs().max())) if one.numel() else greatest
    lengths = (first * second) ** 0.5
    return {
        "norm": apart**0.5,
        "max_abs": greatest,
        "replayed_update_norm": first**0.5,
        "changed_update_norm": second**0.5,
        "cosine": product / lengths if lengths else None,
    }


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)


RECOMPOSED = ("trainer.micro_batch_tokens", "trainer.mini_batches", "trainer.passes")
"""Fields that the recorded composition follows from."""


class WhatIf:
    """A second policy that takes single steps from the first one's state."""

    def __init__(self, config: RunConfig, changed: RunConfig, thread: PolicyThread) -> None:
        self.config, self.thread = changed, thread
        self.group_filter = GroupFilter(changed)
        self.is_recomposed = any(change.field in RECOMPOSED for change in changed_fields(config, changed))
        self.changes = [
            {"field": change.field, "before": change.before, "after": change.after}
            for change in changed_fields(config, changed)
        ]
        self.policy: Policy | None = None
        self._start: PolicyState | None = None

    async def remember(self, policy: Policy) -> None:
        """Keep a copy of the state before the step."""
        self._start = await self.thread.call(copied_state, policy)

    async def train(
        self, commit: Commit, recorded: Mapping[int, RecordedGroup], replayed: Policy
    ) -> dict[str, Any]:
        """Train the step with the change; `replayed` has just trained it without.

        Raises:
            ConfigError: the policy cannot be made with the change.
            TidemillError: nothing of the step can be trained with it.
        """
        assert self._start is not None, "`remember` comes first"
        if self.policy is None:
            self.policy = await self.thread.call(open_policy, self.config)
        random_state = torch.get_rng_state()
        await self.thread.call(self.policy.load_state, self._start)
        runner = StepRunner(ReplayContext(self.config), self.policy, self.thread, self.group_filter)
        groups = complete_groups(recorded, commit)
        refusals, composed = self._compose(commit, groups)
        if not composed.mini_batches:
            raise TidemillError(
                f"with the change, nothing of step {commit.step} would have been trained: group "
                f"{refusals[0].ticket} would have been replaced ({refusals[0].reason}), and so all others."
            )
        result = await runner.replay(composed, groups)
        torch.set_rng_state(random_state)
        return {
            "changes": self.changes,
            "metrics": metrics_of(commit, result, self.config),
            "digest": await self.thread.call(self.policy.digest, commit.digest),
            "refused": [
                {"ticket": item.ticket, "reason": item.reason, "detail": item.detail} for item in refusals
            ],
            "distance": weight_distance(self._start, replayed.state(), self.policy.state()),
        }

    def _compose(self, commit: Commit, groups: dict[int, CompleteGroup]) -> tuple[list[Refusal], Commit]:
        """The commit as it would have been: without groups that are refused now, and recomposed where due."""
        verdicts = [self.group_filter.apply(groups[ticket], commit.step) for ticket in commit.groups]
        refusals = [verdict for verdict in verdicts if isinstance(verdict, Refusal)]
        trainable = {v.ticket: v for v in verdicts if isinstance(v, TrainableGroup)}
        if self.is_recomposed:
            mini_batches = self._recompose(list(trainable.values()))
        else:
            mini_batches = tuple(_without(mini, trainable) for mini in commit.mini_batches)
        return refusals, commit.model_copy(
            update={
                "groups": tuple(trainable),
                "mini_batches": tuple(mini for mini in mini_batches if mini),
                "passes": self.config.trainer.passes,
            }
        )

    def _recompose(self, groups: list[TrainableGroup]) -> tuple[Composition, ...]:
        """Groups in the order in which they came, as many to each mini-batch as the config says."""
        trainer = self.config.trainer
        size = trainer.groups_per_step // trainer.mini_batches
        chunks = [groups[start : start + size] for start in range(0, len(groups), size)]
        return tuple(
            tuple(
                batch.keys
                for batch in form_micro_batches(
                    (sample for group in chunk for sample in group.samples), trainer.tile_tokens
                )
            )
            for chunk in chunks
        )


def _without(composition: Composition, trainable: Mapping[int, TrainableGroup]) -> Composition:
    """The composition with the samples that are still there."""
    keys = {sample.key for group in trainable.values() for sample in group.samples}
    batches = (tuple(key for key in batch if tuple(key) in keys) for batch in composition)
    return tuple(batch for batch in batches if batch)
