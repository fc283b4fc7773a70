"""What can be computed of trajectories before their scores are in, in time that would be spent waiting.

Several optimizer updates in one step move the weights within it, so the logprobs that PPO's ratio compares
with must be taken at the start of the step (the proximal policy, arXiv 2505.24298); so must the estimates of
a value head. They and the reference model's logprobs depend on tokens and weights alone: the trainer computes
them while trajectories wait for their reward.

Guarantees: what is prepared is of the weights at the start of the step, whenever it is computed
(after the first update the policy computes them with the weights it holds); one call takes one whole group
in the order of its indices, so that the bits depend on the group alone, and a replay gets the same.
"""

from collections.abc import Iterable

from common.config.trainer import TrainerConfig
from services.trainer.batch.stream_join import PendingGroup
from services.trainer.groups.group_filter import CompleteGroup, unscored_sample
from services.trainer.groups.samples import Prepared
from services.trainer.policy.policy import Policy, PolicyThread


class Preparer:
    """Computes proximal logprobs, reference logprobs and values of groups, where the algorithm uses them."""

    def __init__(self, trainer: TrainerConfig, policy: Policy, thread: PolicyThread) -> None:
        self.trainer, self.policy, self.thread = trainer, policy, thread
        algorithm = trainer.algorithm
        self.is_needed_always = algorithm.needs_reference or algorithm.value.head
        """Whether no group can be trained without; else those of the first mini-batch can."""
        self.is_needed = trainer.needs_proximal or self.is_needed_always
        self.needs_start_weights = trainer.mini_batches > 1 and (
            trainer.needs_proximal or algorithm.value.head
        )
        """Whether it has to be computed with the weights at the start of the step, also later in it."""

    def is_ready(self, group: CompleteGroup | None, step: int) -> bool:
        """Whether nothing is left to compute for training the group at `step`."""
        return not self.is_needed or (
            group is not None and group.prepared is not None and group.prepared.step == step
        )

    async def prepare(self, group: CompleteGroup, step: int) -> None:
        """Compute what `step` needs of one group, in the policy's thread."""
        if not self.is_ready(group, step):
            group.prepared = await self.thread.call(self._prepare, group, step)

    async def prepare_waiting(self, groups: Iterable[PendingGroup], step: int, places: int) -> bool:
        """Prepare one group whose trajectories are all there, of those that fill the `places` of `step`.

        For a caller that has nothing better to do: False says that there was nothing to prepare.
        """
        is_in_order = self.trainer.batch_order == "in_order"
        due = [group for group in groups if not group.is_taken and (group.step == step or not is_in_order)]
        for pending in sorted(due, key=lambda group: (group.step, group.ticket))[:places]:
            group = pending.complete()
            if len(group.trajectories) == pending.group_size and not self.is_ready(group, step):
                await self.prepare(group, step)
                # Unless what was read has been forgotten meanwhile, to be read again.
                if all(
                    (entry := pending.trajectories.get(index)) is not None and entry.message is trajectory
                    for index, trajectory in group.trajectories.items()
                ):
                    pending.prepared = group.prepared
                return True
        return False

    def _prepare(self, group: CompleteGroup, step: int) -> Prepared:
        indices = sorted(group.trajectories)
        try:
            samples = [unscored_sample(group.trajectories[index]) for index in indices]
        except ValueError:
            return Prepared(step, {})  # numbers that are not finite: the judge will refuse the group
        return Prepared(step, dict(zip(indices, self.policy.prepare(samples), strict=True)))
