"""The trainer's surroundings for tests: prompts, groups, and workers that answer at once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.letters import make_ticket
from tests.support.samples import sample_of
from tests.support.sessions import played
from tests.support.trajectories import make_config, make_trajectory
from tidemill.common.config import RunConfig
from tidemill.common.process.activity import Activity
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Delivery, Entry, OffsetReader, append, id_order, last_id, read_range
from tidemill.common.streams.consumer import Consumer
from tidemill.common.wire import codec
from tidemill.common.wire.codec import SCHEMA
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import Commit, Lane, Message, Score, ScoreStatus, Ticket, Trajectory
from tidemill.services.trainer.batch.prompt_plan import PromptPlan
from tidemill.services.trainer.batch.prompts import Prompt, PromptSource
from tidemill.services.trainer.batch.reconciler import Reconciler
from tidemill.services.trainer.batch.scheduler import Scheduler
from tidemill.services.trainer.batch.stream_join import STREAMS, StreamJoin
from tidemill.services.trainer.durable.trimming import Trimmer
from tidemill.services.trainer.groups.group import Group
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy.policy import Policy, PolicyThread
from tidemill.services.trainer.step import StepRunner


def trainer_config(**trainer: Any) -> RunConfig:
    """Two groups of two in a step, one step of staleness; fields of other sections with `section__field`."""
    sections: dict[str, Any] = {
        "trainer": {"steps": 10, "groups_per_step": 2, "group_size": 2, "max_staleness": 1},
        "streams": {"archive": {"enabled": False}},
    }
    for name, value in trainer.items():
        section, _, field = name.rpartition("__")
        sections.setdefault(section or "trainer", {})[field] = value
    return make_config(**sections)


def make_prompts(count: int = 7) -> PromptSource:
    """Prompts whose ids tell them apart."""
    rows = [Prompt(np.array([3, 3 + i], np.int32), f"p{i}", "test", str(i), {}, i) for i in range(count)]
    return PromptSource(rows, seed=0, shuffle=True)


def make_plan(config: RunConfig) -> PromptPlan:
    """The plan of a run on one source without a name."""
    return PromptPlan([make_prompts()], config)


def make_context(broker: Broker, keys: Keys, config: RunConfig, folder: Path = Path()) -> ServiceContext:
    return ServiceContext("trainer", "t1", keys, config, broker, folder, Activity("trainer"))


def make_score(ticket: int, index: int, value: float | None = 1.0, **fields: Any) -> Score:
    """A score; a value of None is a failure."""
    status = ScoreStatus.OK if value is not None else ScoreStatus.FAILED
    return Score(ticket=ticket, index=index, status=status, value=value, **fields)


def plain_sample(ticket: int, index: int, reward: float = 0.0, num_tokens: int = 3, **fields: Any) -> Sample:
    """Two prompt tokens, and completion tokens that are all trained."""
    logprobs = np.full(num_tokens, -1.0)
    return sample_of((ticket, index), np.arange(2), np.arange(num_tokens), logprobs, reward=reward, **fields)


def group_of_samples(ticket: int, *samples: Sample) -> Group:
    """A group that passed the filter, without its records."""
    return Group(ticket, 0, samples=list(samples))


def make_parts(broker: Broker, keys: Keys, config: RunConfig) -> tuple[Scheduler, StreamJoin]:
    join = StreamJoin(broker, keys)
    return Scheduler(broker, keys, config, make_plan(config), join.expect), join


def make_trimmer(context: ServiceContext) -> Trimmer:
    """A trimmer without a trainer around it."""
    return Trimmer(context, Reconciler(context.broker, context.keys, Scheduler.__new__(Scheduler)))


def outstanding(*tickets: int, **fields: Any) -> list[Ticket]:
    """Tickets of step 0, with groups of two."""
    return [make_ticket(ticket, **{"step": 0, "group_size": 2} | fields) for ticket in tickets]


async def publish_group(
    broker: Broker, keys: Keys, ticket: int, size: int = 2, version: int = 0, **fields: Any
) -> None:
    """All trajectories of a ticket with scores 0, 1, 2, ..."""
    for index in range(size):
        sample = make_trajectory(ticket, index, group_size=size, spans=((version, 0),), **fields)
        await append(broker, keys.trajectories(), sample)
        await append(broker, keys.scores(), make_score(ticket, index, float(index)))


async def messages(broker: Broker, key: str, kind: type[Message]) -> list[Any]:
    """Everything in a stream that can be decoded."""
    return [entry.message for entry in await read_range(broker, key, kind) if isinstance(entry, Entry)]


async def append_at(broker: Broker, key: str, entry_id: str, message: Message) -> None:
    """Append under a given id."""
    flat = [word for pair in codec.encode(message).items() for word in pair]
    await broker.execute("XADD", key, entry_id, *flat)


async def rewrite(
    broker: Broker, key: str, kind: type[Message], change: Callable[[Any], Message] = lambda message: message
) -> None:
    """Write every entry again under its id, with its message changed by `change`."""
    entries = await read_range(broker, key, kind)
    await broker.execute("DEL", key)
    for entry in entries:
        assert isinstance(entry, Entry)
        await append_at(broker, key, entry.entry_id, change(entry.message))


async def lose_tail(broker: Broker, key: str, last: str) -> None:
    """Remove the entries above `last`, as a Redis does that comes back without its last second."""
    gone = await broker.execute("XRANGE", key, f"({last}", "+")
    args = [SCHEMA, last, *(word for entry_id, _ in gone for word in (entry_id, b""))]
    await broker.script("move_aside", [key, f"{key}:none"], args)


@contextlib.asynccontextmanager
async def reading(join: StreamJoin) -> AsyncIterator[None]:
    """The join's three readers, for the length of a block."""
    loops = [join.read(stream) for stream in STREAMS]
    tasks = [asyncio.ensure_future(loop) for loop in loops]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def answering(
    broker: Broker,
    keys: Keys,
    value: Any = None,
    lanes: Iterable[Lane] = tuple(Lane),
    plays: bool = False,
    value_of: Callable[[Trajectory], float] | None = None,
    has_baseline: bool = False,
) -> AsyncIterator[None]:
    """Workers that answer every ticket at once, with the version of its `min_version`; with `plays`, by
    sessions of several turns and segments; with `has_baseline`, the first sample of a group is greedy.

    `value(ticket, index)` is the reward of training samples, or several by name; index % 2 by default; or
    `value_of(sample)`.
    """
    by_key = value or (lambda _, index: float(index % 2))
    reward = value_of or (lambda sample: by_key(*sample.key))
    tasks = [
        asyncio.ensure_future(_answer(broker, keys, lane, reward, plays, has_baseline)) for lane in lanes
    ]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def answering_with(
    broker: Broker, keys: Keys, make: Callable[[Ticket, int], Trajectory]
) -> AsyncIterator[None]:
    """Appends what `make` gives for each sample of each ticket, and a score of index % 2."""

    async def answer() -> None:
        tickets = OffsetReader(broker, keys.prompts(), Ticket)
        while True:
            for entry in await tickets.read(block_s=0.2):
                ticket: Ticket = entry.message  # type: ignore[union-attr]
                for index in range(ticket.group_size):
                    await append(broker, keys.trajectories(), make(ticket, index))
                    await append(broker, keys.scores(), make_score(ticket.ticket, index, float(index % 2)))

    working = asyncio.create_task(answer())
    try:
        yield
    finally:
        working.cancel()


async def _answer(
    broker: Broker, keys: Keys, lane: Lane, value: Any, plays: bool, has_baseline: bool
) -> None:
    tickets = _consumer(broker, keys, keys.prompts(lane), ROLLOUT_GROUP, Ticket)
    samples = _consumer(broker, keys, keys.trajectories(lane), REWARD_GROUP, Trajectory)
    async with tickets, samples:
        while True:
            for delivery in await tickets.fetch(64, 0.2):
                if isinstance(delivery, Delivery):
                    await _generate(keys, lane, tickets, delivery, plays, has_baseline)
            for held in await samples.fetch(256, 0.01):
                if isinstance(held, Delivery):
                    key = held.message.key
                    reward = value(held.message) if lane is Lane.TRAIN else 1.0
                    is_split = isinstance(reward, dict)
                    score = make_score(
                        *key,
                        sum(reward.values()) if is_split else reward,
                        components=reward if is_split else {},
                    )
                    await samples.complete([(held, score)], keys.scores(lane))


async def _generate(
    keys: Keys, lane: Lane, tickets: Any, delivery: Any, plays: bool, has_baseline: bool
) -> None:
    ticket: Ticket = delivery.message
    for index in range(ticket.group_size):
        sample = make_trajectory(
            ticket.ticket,
            index,
            step=ticket.step,
            group_size=ticket.group_size,
            spans=((ticket.min_version, 0),),
            completion_ids=np.array([3 + ticket.ticket % 20, 4 + index], np.int32),
            logprobs=np.full(2, -1.0, np.float32),
            ground_truth=ticket.ground_truth,
            source=ticket.source,
            is_greedy=has_baseline and index == 0,
        )
        if plays:
            sample = played(sample)
        progress = keys.progress(ticket.ticket, lane)
        await tickets.publish_sample(delivery, keys.trajectories(lane), progress, sample)


def _consumer(broker: Broker, keys: Keys, key: str, group: str, kind: type[Any]) -> Consumer[Any]:
    return Consumer(broker, key, group, "answers", kind, lease_s=30.0, dead_key=keys.dead)


async def commits_of(broker: Broker, keys: Keys) -> list[Commit]:
    return await messages(broker, keys.commits, Commit)


async def num_commits(broker: Broker, keys: Keys) -> int:
    return id_order(await last_id(broker, keys.commits))[0]


async def assert_nothing_lost(broker: Broker, keys: Keys, num_tickets: int) -> list[Commit]:
    """Every ticket has exactly one end, trained or dropped, and no trajectory was trained twice."""
    commits = await commits_of(broker, keys)
    assert [commit.step for commit in commits] == list(range(len(commits)))
    tickets = [ticket.ticket for ticket in await messages(broker, keys.prompts(), Ticket)]
    assert ends_of(commits) == tickets == list(range(num_tickets))
    samples = [sample.key for sample in await messages(broker, keys.trajectories(), Trajectory)]
    assert len(samples) == len(set(samples)), "a trajectory was published twice"
    return commits


def ends_of(commits: list[Commit]) -> list[int]:
    """Tickets that were trained or dropped, with repeats. Asserts that no trajectory was trained twice."""
    trained = [key for commit in commits for key in commit.trained_keys]
    assert len(trained) == len(set(trained)), "a trajectory was trained twice"
    ends = [ticket for commit in commits for ticket in commit.groups]
    return sorted(ends + [ticket for commit in commits for ticket, index, _ in commit.dropped if index < 0])


def assert_full_steps(commits: list[Commit], groups: int) -> None:
    """Every ticket was trained or replaced for a reason, and every step has all its groups."""
    ends = ends_of(commits)
    assert ends == list(range(len(ends))), "a ticket is without an end, or has two"
    assert [len(commit.groups) for commit in commits] == [groups] * len(commits)


def pending_groups(samples: Iterable[Trajectory], scores: Iterable[Score]) -> dict[int, Group]:
    """Groups of what streams hold; the first entry of a key wins."""
    groups: dict[int, Group] = {}
    for sample in samples:
        group = groups.setdefault(sample.ticket, Group(sample.ticket, sample.step, {}, {}))
        group.trajectories.setdefault(sample.index, sample)
    for score in scores:
        if score.ticket in groups:
            groups[score.ticket].scores.setdefault(score.index, score)
    return groups


async def replayed_digests(broker: Broker, keys: Keys, config: RunConfig, policy: Policy) -> list[str]:
    """Train all commits once more, undisturbed, from a fresh policy on what the streams hold now."""
    runner = StepRunner(config, policy, PolicyThread(), Activity("replay"))
    samples = await messages(broker, keys.trajectories(), Trajectory)
    groups = pending_groups(samples, await messages(broker, keys.scores(), Score))
    digests = []
    for commit in await commits_of(broker, keys):
        await runner.replay(commit, groups)
        digests.append(policy.digest())
    return digests
