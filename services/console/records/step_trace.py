"""What one step was made of, put together from its commit and from the messages that it names.

Times of different machines are compared as they are: with clocks that differ, waiting times are off by that.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from common.errors import ConfigError
from common.history import History, Selection, StreamName
from common.streams.entries import Entry, entry_id_of
from common.wire.messages import Commit, Lane, Score, Ticket, Trajectory, TrajectoryKey, Try, WeightManifest
from services.console.records.ticket_trace import WHOLE_GROUP, advantages_in
from services.console.records.values import jsonable, plain_fields

STAGES = ("queued", "generated", "waited for reward", "scored", "waited for training")


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """One sample of the step, without its tokens. Times in seconds since 1970, 0 where they are not known."""

    key: TrajectoryKey
    num_prompt_tokens: int
    num_tokens: int
    versions: tuple[int, int]
    """The oldest and the newest that made a token."""
    worker: str
    started_at: float
    finished_at: float
    issued_at: float = 0.0
    scorer: str = ""
    scored_at: float = 0.0
    latency_s: float = 0.0
    attempts: int = 0
    tries: tuple[Try, ...] = ()
    reward: float | None = None
    error: str = ""

    @property
    def asked_at(self) -> float:
        """When the reward began, 0 where there is none."""
        return self.scored_at - self.latency_s if self.scored_at else 0.0

    def stages_s(self, trained_at: float) -> dict[str, float]:
        """Seconds in each stage, as far as both its ends are known."""
        ends = (
            ("queued", self.issued_at, self.started_at),
            ("generated", self.started_at, self.finished_at),
            ("waited for reward", self.finished_at, self.asked_at),
            ("scored", self.asked_at, self.scored_at),
            ("waited for training", self.scored_at, trained_at),
        )
        return {name: max(0.0, last - first) for name, first, last in ends if first and last}


@dataclass(frozen=True, slots=True)
class MicroBatchFacts:
    """One accumulation of gradients."""

    mini_batch: int
    micro_batch: int
    keys: tuple[TrajectoryKey, ...]
    num_prompt_tokens: int
    num_tokens: int


@dataclass(slots=True)
class StepTrace:
    """One committed step."""

    commit: Commit
    before: Commit | None
    """The step before it."""
    samples: dict[TrajectoryKey, SampleFacts] = field(default_factory=dict)
    """Of the groups that were trained, also those left out."""
    manifest: WeightManifest | None = None

    @property
    def rewards(self) -> list[float]:
        """Of all trained samples that have one in the streams."""
        trained = dict.fromkeys(self.commit.trained_keys)
        found = [self.samples[key].reward for key in trained if key in self.samples]
        return [value for value in found if value is not None]

    @property
    def num_lost(self) -> int:
        """Trained samples whose trajectories the streams do not have any more."""
        return sum(1 for key in set(self.commit.trained_keys) if key not in self.samples)

    def group(self, ticket: int) -> list[SampleFacts]:
        """The samples of a group, by index."""
        return sorted((s for s in self.samples.values() if s.key[0] == ticket), key=lambda s: s.key)

    def micro_batches(self) -> Iterator[MicroBatchFacts]:
        """In the order in which they were trained."""
        for mini, micros in enumerate(self.commit.mini_batches):
            for micro, keys in enumerate(micros):
                known = [self.samples[key] for key in keys if key in self.samples]
                prompts, made = sum(s.num_prompt_tokens for s in known), sum(s.num_tokens for s in known)
                yield MicroBatchFacts(mini, micro, tuple(keys), prompts, made)

    def complete_at(self, ticket: int) -> float:
        """When the last score of a group was there."""
        return max((sample.scored_at for sample in self.group(ticket)), default=0.0)

    @property
    def last_to_come(self) -> SampleFacts | None:
        """The sample whose score came last."""
        return max(self.samples.values(), key=lambda s: s.scored_at, default=None)

    @property
    def reversed_groups(self) -> list[int]:
        """Tickets whose advantages fall where their rewards rise, which no algorithm of ours does."""
        found = []
        for ticket in self.commit.groups:
            advantages = advantages_in(self.commit, ticket)
            pairs = [
                (sample.reward, advantages[sample.key[1]])
                for sample in self.group(ticket)
                if sample.reward is not None and sample.key[1] in advantages
            ]
            if len(pairs) > 1 and np.cov(np.array(pairs, dtype=np.float64).T)[0, 1] < 0:
                found.append(ticket)
        return found

    @property
    def dropped_groups(self) -> list[tuple[int, str]]:
        """(ticket, reason) of what was replaced before this step."""
        return [(t, reason) for t, index, reason in self.commit.dropped if index == WHOLE_GROUP]

    @property
    def left_out(self) -> list[tuple[int, int, str]]:
        """(ticket, index, reason) of samples that their groups were trained without."""
        return [drop for drop in self.commit.dropped if drop[1] != WHOLE_GROUP]

    def as_tree(self) -> dict[str, Any]:
        """For programs."""
        commit = self.commit
        trained_at = commit.finished_at
        return {
            "commit": jsonable(plain_fields(commit)),
            "groups": [
                {
                    "ticket": ticket,
                    "complete_at": self.complete_at(ticket),
                    "advantages": advantages_in(commit, ticket),
                    "samples": [
                        jsonable(asdict(sample)) | {"stages_s": sample.stages_s(trained_at)}
                        for sample in self.group(ticket)
                    ],
                }
                for ticket in commit.groups
            ],
            "micro_batches": [jsonable(asdict(batch)) for batch in self.micro_batches()],
            "dropped": [{"ticket": t, "reason": reason} for t, reason in self.dropped_groups],
            "left_out": [{"ticket": t, "index": i, "reason": reason} for t, i, reason in self.left_out],
            "reversed_groups": self.reversed_groups,
            "weights": jsonable(plain_fields(self.manifest)) if self.manifest else None,
        }


async def trace_step(history: History, step: int) -> StepTrace:
    """Gather what the streams tell of a step.

    Raises:
        ConfigError: they have no commit of it.
    """
    commit = await history.commit(step)
    if commit is None:
        raise ConfigError(await _absence(history, step))
    trace = StepTrace(commit, await history.commit(step - 1) if step else None)
    trace.samples = await samples_of(history, commit.groups)
    entry_id = entry_id_of(commit.version)
    async for record in history.scan(StreamName.WEIGHTS, Selection(first_id=entry_id, last_id=entry_id)):
        if isinstance(record, Entry) and isinstance(record.message, WeightManifest):
            trace.manifest = record.message
    return trace


async def samples_of(history: History, tickets: tuple[int, ...]) -> dict[TrajectoryKey, SampleFacts]:
    """The samples of these tickets, by key."""
    if not tickets:
        return {}
    wanted = set(tickets)
    found = await read_samples(history, Selection(tickets=(min(wanted), max(wanted))))
    return {key: sample for key, sample in found.items() if key[0] in wanted}


async def read_samples(
    history: History, near: Selection, lane: Lane = Lane.TRAIN
) -> dict[TrajectoryKey, SampleFacts]:
    """The selected trajectories with their tickets and scores, the first entry of each, by key."""
    suffix = ":eval" if lane is Lane.EVAL else ""
    made: dict[TrajectoryKey, SampleFacts] = {}
    async for record in history.scan(StreamName("trajectories" + suffix), near):
        if isinstance(record, Entry) and isinstance(record.message, Trajectory):
            made.setdefault(record.message.key, _generated(record.message))
    if not made:
        return {}
    of_them = Selection(tickets=(min(made)[0], max(made)[0]))
    issued: dict[int, float] = {}
    async for record in history.scan(StreamName("prompts" + suffix), of_them):
        if isinstance(record, Entry) and isinstance(record.message, Ticket):
            issued[record.message.ticket] = record.message.issued_at
    scores: dict[TrajectoryKey, Score] = {}
    async for record in history.scan(StreamName("scores" + suffix), of_them):
        if isinstance(record, Entry) and isinstance(record.message, Score):
            scores.setdefault(record.message.key, record.message)
    return {
        key: _scored(replace(sample, issued_at=issued.get(key[0], 0.0)), scores.get(key))
        for key, sample in made.items()
    }


def _generated(made: Trajectory) -> SampleFacts:
    versions = [version for version, _ in made.spans]
    return SampleFacts(
        key=made.key,
        num_prompt_tokens=len(made.prompt_ids),
        num_tokens=made.num_tokens,
        versions=(min(versions), max(versions)),
        worker=made.worker,
        started_at=made.started_at,
        finished_at=made.finished_at,
    )


def _scored(sample: SampleFacts, score: Score | None) -> SampleFacts:
    if score is None:
        return sample
    return replace(
        sample,
        scorer=score.worker,
        scored_at=score.scored_at,
        latency_s=score.latency_s,
        attempts=score.attempts,
        tries=score.tries,
        reward=score.value,
        error=score.error,
    )


async def _absence(history: History, step: int) -> str:
    ends = []
    for newest in (False, True):
        async for record in history.scan(StreamName.COMMITS, newest_first=newest):
            if isinstance(record, Entry) and isinstance(record.message, Commit):
                ends.append(record.message.step)
                break
    known = f"it has steps {ends[0]} to {ends[1]}, counted from 0" if len(ends) == 2 else "it has none yet"
    return f"run {history.run_id} has no commit of step {step}: {known}."
