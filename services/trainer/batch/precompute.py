"""Computes what does not depend on rewards while trajectories wait for theirs.

Several optimizer updates in one step move the weights, so the logprobs that PPO's ratio compares with are
those at the start of the step (the proximal policy, arXiv 2505.24298); so are a value head's estimates. These
and the reference model's logprobs depend on tokens and weights alone. They are of the weights at the start of
the step whenever they are computed (after the first update the policy uses the weights it holds), and one
call takes one whole group in the order of its indices: so the bits depend on the group alone, and a replay
gets the same.
"""

from collections.abc import Iterable

from common.config.trainer import TrainerConfig
from services.trainer.batch.stream_join import PendingGroup
from services.trainer.groups.group_filter import CompleteGroup, unscored_sample
from services.trainer.groups.samples import Precomputed
from services.trainer.policy.policy import Policy, PolicyThread


class Precompute:
    """Proximal logprobs, reference logprobs and values of groups, where the algorithm uses them."""

    def __init__(self, trainer: TrainerConfig, policy: Policy, thread: PolicyThread) -> None:
        self.trainer, self.policy, self.thread = trainer, policy, thread
        algorithm = trainer.algorithm
        self.is_needed_always = algorithm.needs_reference or algorithm.value.head
        """Whether no group can be trained without; else those of the first mini-batch can."""
        self.is_needed = trainer.needs_proximal or self.is_needed_always
        self.needs_start_weights = trainer.mini_batches > 1 and (
            trainer.needs_proximal or algorithm.value.head
        )
        """Whether it takes the weights at the start of the step, also later in it."""

    def is_ready(self, group: CompleteGroup, step: int) -> bool:
        """Whether nothing is left to compute for training the group at `step`."""
        return not self.is_needed or (group.precomputed is not None and group.precomputed.step == step)

    async def compute(self, group: CompleteGroup, step: int) -> None:
        """Compute what `step` needs of one group, in the policy's thread."""
        if not self.is_ready(group, step):
            group.precomputed = await self.thread.call(self._compute, group, step)

    async def compute_waiting(self, groups: Iterable[PendingGroup], step: int, places: int) -> bool:
        """Compute one group whose trajectories are all there, of those that fill the `places` of `step`.
        False where there is none."""
        is_in_order = self.trainer.batch_order == "in_order"
        due = [group for group in groups if not group.is_taken and (group.step == step or not is_in_order)]
        for pending in sorted(due, key=lambda group: (group.step, group.ticket))[:places]:
            group = pending.complete()
            if len(group.trajectories) == pending.group_size and not self.is_ready(group, step):
                await self.compute(group, step)
                # Unless what was read has been forgotten meanwhile, to be read again.
                if all(
                    (entry := pending.trajectories.get(index)) is not None and entry.message is trajectory
                    for index, trajectory in group.trajectories.items()
                ):
                    pending.precomputed = group.precomputed
                return True
        return False

    def _compute(self, group: CompleteGroup, step: int) -> Precomputed:
        indices = sorted(group.trajectories)
        try:
            samples = [unscored_sample(group.trajectories[index]) for index in indices]
        except ValueError:
            return Precomputed(step, {})  # numbers that are not finite: the filter will refuse the group
        return Precomputed(step, dict(zip(indices, self.policy.precompute(samples), strict=True)))
