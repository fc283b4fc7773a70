"""Hands a step its groups as they complete, and replaces those that cannot be trained.

A step always gets `groups_per_step` groups: a filtered, failed, stale or dead one is replaced by a fresh
ticket for the same step, and the reason goes into the step's commit.

What runs at the same time, all in the trainer's event loop but the policy's thread:

    readers of StreamJoin, one a stream      the trainer's task
    ------------------------------------     ----------------------------------------------
    wait for entries of trajectories,        StepRunner waits in `BatchAssembler.take`:
    scores and dead letters
      | join an entry with its group    (1)    take what is complete; replace what is refused
      |------ join.changed -----------------> wait for `changed`, QUIET_S at most
      | or note a dead group                   |                                (2)
                                               |-- waiting groups --> PolicyThread computes logprobs
    Reconciler.watch, every WATCH_S            |                      of the start; `take` waits for it
    asks Redis who it is, and keeps            |-- a quiet time ----> Reconciler: has Redis restarted,
    the answer for `take`             (3)      |                      is something lost?
                                             v groups of the step

(1) A group may change at each `await`: what `take` decides between two of them holds only until the next.
(2) Readers go on meanwhile, and the same group is not precomputed twice.
(3) A restart is acted upon in `take` alone, so that nothing is read again while a step is taken.
"""

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import structlog

from tidemill.common.command_line import command_line
from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.errors import ConfigError
from tidemill.common.process.failures import FailureLog
from tidemill.common.process.service import ServiceContext, StoppedError
from tidemill.common.streams import append_dead_letter, dead_letter, has_entry
from tidemill.common.streams.code_errors import CodeErrors
from tidemill.common.telemetry import metrics
from tidemill.common.wire import codec
from tidemill.common.wire.keys import StreamName
from tidemill.services.trainer.batch.reconciler import RunStreams
from tidemill.services.trainer.groups.group import Group
from tidemill.services.trainer.groups.group_filter import (
    FAILED_SCORE,
    FEW_SCORES,
    STALE,
    ZERO_VARIANCE,
    GroupFilter,
)
from tidemill.services.trainer.policy.policy import Policy, PolicyThread

log = structlog.get_logger(__name__)

QUIET_S = 2.0
"""After this long without anything new, what Redis holds is compared with what it should hold."""
REST_PER_LOOK = 4.0
"""Pause after a selection among all groups, as a multiple of its duration: with thousands of groups it takes
milliseconds, and something may arrive hundreds of times a second."""
LEAST_WARN = 8
"""So many groups, or a step's worth, replaced in a row are a warning; twice as many the next one."""
LEAST_GIVE_UP = 256
STEPS_GIVE_UP = 8
"""This many groups, or steps' worth of them, replaced in a row end the run: none will ever be trained."""

Dropped = tuple[int, int, str]
"""`(ticket, index, reason)`: (7, 2, "failed_score"); index -1 means the whole group."""


class Precompute:
    """Proximal and reference logprobs, values and entropies of groups, where the algorithm uses them."""

    def __init__(self, trainer: TrainerConfig, policy: Policy, thread: PolicyThread) -> None:
        self.trainer = trainer
        self.policy = policy
        self.thread = thread
        algorithm = trainer.algorithm
        needs_proximal = trainer.needs_proximal
        needs_start = algorithm.needs_values or algorithm.needs_statistics
        self.is_needed_always = (
            algorithm.needs_reference or needs_start or (trainer.passes > 1 and needs_proximal)
        )
        """Whether every group needs some of these."""
        self.is_needed = needs_proximal or self.is_needed_always
        """Whether some groups do. If not all, those of a step's first mini-batch do not: until its update the
        weights are those at the start of the step, so that the ratio is 1."""
        self.needs_start_weights = trainer.mini_batches > 1 and (needs_proximal or needs_start)
        """Whether the weights at the start of the step are needed also after its first update."""

    def is_ready(self, group: Group, step: int) -> bool:
        """Whether nothing is left to compute for training the group at `step`."""
        return not self.is_needed or group.precomputed_for == step or group.is_demonstration

    async def compute(self, groups: Sequence[Group], step: int) -> int:
        """Compute what `step` needs for the first groups, in one call in the policy's thread: for as many as
        fill a forward pass on each rank, at least for one. Returns for how many."""
        tokens_up_to = np.cumsum([_num_tokens(group) for group in groups])
        most_tokens = self.trainer.rank_tokens * self.trainer.num_ranks
        num_fitting = int(np.searchsorted(tokens_up_to, most_tokens, side="right"))
        groups = groups[: max(1, num_fitting)]
        samples = [sample for group in groups for sample in group.make_samples().values()]
        arrived = [group.arrived for group in groups]
        computed = await self.thread.call(self.policy.precompute, samples)
        for sample, columns in zip(samples, computed, strict=True):
            for name, values_T in columns.items():
                sample.fill(name, values_T)
        for group, arrived_then in zip(groups, arrived, strict=True):
            # Unless what was read has been forgotten meanwhile, to be read again.
            if group.arrived is arrived_then:
                group.precomputed_for = step
        return len(groups)

    async def compute_waiting(self, groups: Iterable[Group], step: int, places: int) -> bool:
        """Compute for groups whose trajectories are all there, among those that fill the `places` of `step`.
        False where there is none."""
        is_in_order = self.trainer.batch_order == "in_order"
        due = [group for group in groups if not group.is_taken and (group.step == step or not is_in_order)]
        due = sorted(due, key=lambda group: (group.step, group.ticket))[:places]
        waiting = [group for group in due if group.is_generated and not self.is_ready(group, step)]
        if waiting:
            # One call: a group that is complete after it is trained before others are prepared.
            await self.compute(waiting, step)
        return bool(waiting)


def _num_tokens(group: Group) -> int:
    num_tokens = 0
    for trajectory in group.trajectories.values():
        for segment in trajectory.segments:
            num_tokens += len(segment.prompt_ids) + len(segment.completion_ids)
    return num_tokens


def select_groups(
    groups: Mapping[int, Group],
    complete: Sequence[int],
    trainer: TrainerConfig,
    step: int,
    places: int,
) -> list[int]:
    """Tickets of complete groups that `step` may train now, at most `places` of them.

    `as_ready` takes the lowest tickets first. Where the groups due by some later step would fill every place
    until then, only those may go: otherwise one of them would become too old.

    Two places at step 5, with `max_staleness` 1: tickets 9 and 10 are due by step 5, ticket 8 by step 6, and
    all but 10 are complete. Chosen: 9 alone, for the second place belongs to 10.
    """
    if trainer.batch_order == "in_order":
        return [ticket for ticket in complete if groups[ticket].step == step][:places]
    max_staleness = trainer.max_staleness
    # A group's deadline is the last step that may train it: its oldest version plus `max_staleness`.
    # Groups that are not complete yet count too: they will need places.
    counts = Counter(group.oldest_version + max_staleness for group in groups.values() if not group.is_taken)
    horizons = range(step, step + max_staleness + 1)
    due: dict[int, int] = {}
    """For each horizon, how many groups have a deadline up to it."""
    capacity: dict[int, int] = {}
    """For each horizon, how many places there are up to it."""
    for horizon in horizons:
        due[horizon] = sum(count for deadline, count in counts.items() if deadline <= horizon)
        capacity[horizon] = places + (horizon - step) * trainer.groups_per_step
    waiting: dict[int, list[int]] = defaultdict(list)
    """Tickets by deadline, the lowest last."""
    for ticket in sorted(complete, reverse=True):
        waiting[groups[ticket].oldest_version + max_staleness].append(ticket)
    chosen: list[int] = []
    while len(chosen) < places:
        # Up to the first horizon whose places are all needed, only groups that are due by then may go.
        tight = next((h for h in horizons if due[h] >= capacity[h]), math.inf)
        fitting = [deadline for deadline, tickets in waiting.items() if tickets and deadline <= tight]
        if not fitting:
            break
        deadline = min(fitting, key=lambda deadline: waiting[deadline][-1])
        chosen.append(waiting[deadline].pop())
        for horizon in horizons:
            capacity[horizon] -= 1
            if deadline <= horizon:
                due[horizon] -= 1
    return chosen


class ReplacementLimit:
    """Ends a run whose groups are replaced for ever: counts those replaced in a row, and in the step in
    progress those without variance."""

    def __init__(self, trainer: TrainerConfig, run_id: str) -> None:
        self._run_id = run_id
        self._groups_per_step = trainer.groups_per_step
        self._rounds = trainer.algorithm.max_filter_rounds
        self._rewards: Counter[float] = Counter()
        """The reward of all samples of each group without variance since the last group that was trained."""
        self._num_filtered = 0
        """Groups without variance that were replaced in the step in progress."""
        self._in_a_row = 0
        """Groups that were replaced since the last one that was trained."""
        self._warns_at = 0
        """How many in a row are the next warning."""
        self.note_trained()

    def begin_step(self, reasons: Iterable[str] = ()) -> None:
        """Begin a step, or go on in one in which groups were replaced for these reasons."""
        self._num_filtered = sum(reason == ZERO_VARIANCE for reason in reasons)

    @property
    def is_long(self) -> bool:
        """Whether so many groups in a row were replaced that it is a warning."""
        return self._in_a_row >= max(LEAST_WARN, self._groups_per_step)

    def note_trained(self) -> None:
        """A group was taken to be trained: count from 0 again."""
        self._in_a_row = 0
        self._warns_at = max(LEAST_WARN, self._groups_per_step)
        self._rewards.clear()

    def note_replaced(self, ticket: int, reason: str, detail: str, rewards: Sequence[float]) -> None:
        """The group of this ticket is about to be replaced; `rewards` are those of a group without variance.
        Raises ConfigError: too many were replaced."""
        self._in_a_row += 1
        if reason == ZERO_VARIANCE:
            self._num_filtered += 1
            # One is enough: they are all equal.
            self._rewards.update(rewards[:1])
        if self._in_a_row >= self._warns_at:
            self._warns_at = 2 * self._in_a_row
            log.warning(
                "no group could be trained recently; each is replaced",
                groups_in_a_row=self._in_a_row,
                last_reason=reason,
                detail=detail,
            )
        size = self._groups_per_step
        equal = "were replaced because all their rewards are equal."
        if self._rounds is not None and self._num_filtered > (self._rounds - 1) * size:
            raise ConfigError(
                f"a step of {size} groups needs more than {self._rounds} times as many "
                f"(trainer.algorithm.max_filter_rounds): {self._num_filtered} groups {equal} "
                f"{self._about_rewards(ticket)}"
            )
        if self._in_a_row > max(LEAST_GIVE_UP, STEPS_GIVE_UP * size):
            cause = f"could not be trained, the last one because of {reason!r} {detail}. Fix its cause, then"
            if self._rewards.total() == self._in_a_row:
                raise ConfigError(f"{self._in_a_row} groups in a row {equal} {self._about_rewards(ticket)}")
            raise ConfigError(f"{self._in_a_row} groups in a row {cause} resume the run.")

    def _about_rewards(self, ticket: int) -> str:
        if len(self._rewards) == 1 and self._rewards.total() == self._in_a_row > 1:
            (value,) = self._rewards
            trace = command_line("trace", str(ticket), self._run_id)
            return (
                f"The reward is constant: it was {value:g} for every sample of the last {self._in_a_row} "
                f"groups. Look at what the reward function is given and returns (`{trace}`), then resume the "
                "run."
            )
        rewards = ", ".join(f"{value:g} in {n} groups" for value, n in self._rewards.most_common(5))
        return (
            f"Rewards were {rewards or 'not kept'} recently: prompts are too easy or too hard. Choose them "
            "by difficulty (data.curriculum), raise trainer.group_size, or turn filter_zero_variance off; "
            "then resume the run."
        )


class BatchAssembler:
    """Takes groups from the stream join for one step after the other."""

    def __init__(
        self,
        context: ServiceContext,
        streams: RunStreams,
        group_filter: GroupFilter,
        precompute: Precompute | None = None,
    ) -> None:
        self.context = context
        self.trainer = context.config.trainer
        self.scheduler = streams.scheduler
        self.join = streams.join
        self.reconciler = streams.reconciler
        # With GPUs used in turn nothing is computed before all groups are there: engines would have to leave.
        self.takes_turns = context.config.rollout.trainer_gpus == "turns"
        self.group_filter = group_filter
        self.precompute = None if self.takes_turns else precompute
        self.dropped: list[Dropped] = []
        self.limit = ReplacementLimit(self.trainer, context.keys.run_id)
        self.code_errors = CodeErrors.of_training(context.config)
        self.join.on_score = self.code_errors.note
        self.failures = FailureLog()
        """Groups that were replaced, by cause."""
        self._rest_s = 0.0
        """Pause before the next selection; see `REST_PER_LOOK`."""

    async def take(self, step: int, places: int) -> list[Group]:
        """Wait for groups that `step` can train, and take them: at least one, at most `places`. Without
        `start_early`, and with GPUs used in turn, it waits for all. They stay outstanding until `settle`.

        Raises:
            StoppedError: the service must stop.
            ConfigError: no group will ever be trained.
        """
        groups: list[Group] = []
        quiet_since = time.monotonic()
        self.code_errors.begin(self.join.high_water()[StreamName.SCORES])
        while True:
            if self.context.stopping.is_set():
                raise StoppedError
            self.code_errors.check()
            await self._replace_dead(step)
            selected = await self._select(step, places - len(groups))
            # Between selecting and taking: a group may have been joined from entries that Redis has lost.
            if selected and await self._recover_if_redis_restarted():
                continue
            for ticket in selected:
                await self._take(ticket, step, groups)
            starts_early = self.trainer.start_early and not self.takes_turns
            if groups and (starts_early or len(groups) == places):
                return groups
            if await self.precompute_waiting(step, places - len(groups)):
                continue
            self.join.observe()
            with self.context.activity.during(*self._waiting_for(step)):
                has_arrived = await self.context.unless_stopping(self.join.wait(QUIET_S))
            if has_arrived is None:
                raise StoppedError
            if has_arrived:
                quiet_since = time.monotonic()
                await asyncio.sleep(self._rest_s)
            else:
                await self._look_for_losses(step, time.monotonic() - quiet_since)

    async def precompute_waiting(self, step: int, places: int) -> bool:
        """Precompute groups that wait for their scores; False where there is none."""
        if self.precompute is None or not self.precompute.is_needed:
            return False
        with self.context.activity.during("prepare"):
            return await self.precompute.compute_waiting(self.join.groups.values(), step, places)

    def settle(self, groups: list[Group]) -> None:
        """The groups are committed: they are no longer outstanding."""
        for group in groups:
            self.scheduler.settle(group.ticket)
            self.join.close(group.ticket)
            metrics.GROUPS_SETTLED.labels("trained").inc()

    def drain_dropped(self) -> list[Dropped]:
        dropped = self.dropped
        self.dropped = []
        self.limit.begin_step()
        return dropped

    async def drop(
        self, ticket: int, reason: str, step: int, detail: str = "", rewards: Sequence[float] = ()
    ) -> None:
        """Replace a whole group while `step` is in progress; the reason goes into the next commit. `rewards`
        are those of a group without variance. Raises ConfigError: so many could not be trained that none
        ever will be."""
        # A crash before the commit forgets this; the ticket that is issued below names what it replaces.
        self.dropped.append((ticket, -1, reason))
        self.limit.note_replaced(ticket, reason, detail, rewards)
        self._note_failure(reason, detail)
        metrics.GROUPS_SETTLED.labels(reason.partition(":")[0]).inc()
        # Before the await: an entry that arrives meanwhile must not complete a group that is being replaced.
        self.join.close(ticket)
        await self.scheduler.replace(ticket, step, rewards)

    def _note_failure(self, reason: str, detail: str) -> None:
        """Have the heartbeat say why a group was replaced. Failed scores are the reward workers' to report;
        a group of equal rewards is no failure, unless nothing else comes."""
        is_scores = reason in (FEW_SCORES, FAILED_SCORE)
        is_usual = reason == ZERO_VARIANCE and not self.limit.is_long
        if not is_scores and not is_usual:
            kind, _, error = reason.partition(": ")
            self.failures.note("training on a group", kind, detail or error or kind)

    async def _select(self, step: int, places: int) -> list[int]:
        if not self.join.complete:
            return []
        if self.trainer.batch_order == "as_ready":
            await self.reconciler.learn_started_versions(self.join.groups.values())
        begun = time.monotonic()
        selected = select_groups(self.join.groups, self.join.complete, self.trainer, step, places)
        self._rest_s = REST_PER_LOOK * (time.monotonic() - begun)
        return selected

    async def _take(self, ticket: int, step: int, groups: list[Group]) -> None:
        """Filter one complete group: add it to the step, or replace it."""
        group = self.join.groups[ticket]
        refusal = self.group_filter.apply(group, step)
        if refusal is not None:
            log.info("group replaced", ticket=ticket, reason=refusal.reason, detail=refusal.detail)
            if refusal.reason == STALE:
                await self._report_stale(group, step, refusal.detail)
            await self.drop(ticket, refusal.reason, step, refusal.detail, refusal.rewards)
            return
        self.join.complete.remove(ticket)
        # A dead letter about it may have come since: it must not be replaced as well.
        self.join.dead.pop(ticket, None)
        group.is_taken = True
        self.limit.note_trained()
        groups.append(group)

    async def _report_stale(self, group: Group, step: int, detail: str) -> None:
        """Count a violation of the staleness bound, and dead-letter the sample for the operator."""
        metrics.STALENESS_VIOLATIONS.inc()
        trajectories = group.trajectories.values()
        oldest = min(trajectories, key=lambda trajectory: trajectory.min_version)
        newest = max(trajectories, key=lambda trajectory: trajectory.max_version)
        is_too_old = step - oldest.min_version > self.trainer.max_staleness
        example = oldest if is_too_old else newest
        fields = codec.encode(example)
        error = f"staleness bound violated: {detail}"
        dead = dead_letter("trajectories", "", fields, error, self.context.name, message=example)
        await append_dead_letter(self.context.broker, self.context.keys.dead, dead)

    async def _replace_dead(self, step: int) -> None:
        # A copy: `drop` takes from it, and a reader may add to it at each await.
        for ticket, (dead_id, error) in list(self.join.dead.items()):
            if not await has_entry(self.context.broker, self.context.keys.dead, dead_id):
                # The operator has put the message back in the meantime, so the group goes on.
                self.join.dead.pop(ticket, None)
                continue
            log.warning("group is dead, replacing it", ticket=ticket, error=error)
            await self.drop(ticket, f"dead: {error}"[:200], step)

    async def _recover_if_redis_restarted(self) -> bool:
        """Returns whether another server answers than when this was last called, or an emptied one. It may
        lack the last second of what the old one held: what is missing is appended again, and what no step has
        taken is read again."""
        # Before the check: all that was read until now came from the server that the check is about.
        seen = self.join.seen()
        if not await self.reconciler.take_restart():
            self.join.trust(seen)
            return False
        log.warning("Redis has restarted; comparing what it holds, and reading what is not trained again")
        self.join.reread(self.reconciler.epoch)
        await self.reconciler.restore_lost()
        return True

    async def _look_for_losses(self, step: int, quiet_s: float) -> None:
        if not await self._recover_if_redis_restarted():
            await self.reconciler.restore_lost()
        groups = self.join.groups.values()
        lost = [g.ticket for g in groups if g.is_demonstration and not g.is_generated]
        if lost:
            await self.scheduler.publish_demonstrations(lost)
        # Where something unreadable or refused arrived, a group may wait for it in vain: so not for long.
        is_suspicious = time.monotonic() - self.join.unread_at < 2 * self.trainer.reissue_after_s
        if quiet_s > (QUIET_S if is_suspicious else self.trainer.reissue_after_s):
            for ticket in await self._find_abandoned():
                log.warning("no stream holds what is missing of this group", ticket=ticket)
                await self.drop(ticket, "lost: unreadable or refused" if is_suspicious else "lost", step)

    async def _find_abandoned(self) -> list[int]:
        """Tickets of groups that nothing will complete any more.

        Checked twice, and all that the streams hold is read after each check: what was still on its way to
        the join in the first check is known in the second.
        """
        groups = [group for group in self.join.groups.values() if not group.is_demonstration]
        for _ in range(2):
            abandoned = set(await self.reconciler.find_abandoned(groups))
            groups = [group for group in groups if group.ticket in abandoned]
            if not groups or not await self.join.has_read_all() or await self._recover_if_redis_restarted():
                return []
        tickets = []
        for group in groups:
            # Meanwhile a group may have been closed, or completed after all.
            is_open = self.join.groups.get(group.ticket) is group
            if is_open and not group.is_complete and not group.is_taken:
                tickets.append(group.ticket)
        return tickets

    def _waiting_for(self, step: int) -> tuple[str, str]:
        """What the trainer waits for: trajectories that are missing, or only their scores."""
        due = [group for group in self.join.groups.values() if group.step <= step and not group.is_complete]
        if not all(group.is_generated for group in due):
            return "wait:trajectories", f"{len(due)} groups of step {step} are not complete"
        return "wait:scores", f"{len(due)} groups of step {step} have unscored trajectories"
