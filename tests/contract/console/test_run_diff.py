"""`tidemill diff`: the first step at which two runs differ, and what in it causes the rest."""

import io
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.conftest import SERVERS
from tests.support.letters import make_ticket
from tests.support.numbered import append_numbered
from tests.support.recorded_sessions import FORK, as_session
from tests.support.training import make_score, trainer_config
from tests.support.trajectories import make_trajectory
from tidemill.common.config import RunConfig
from tidemill.common.history import GroupCursor, History
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import append, trim_before
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit, Score, ScoreStatus, Ticket, Trajectory
from tidemill.services.console.compare.diff import MEANINGS, Aspect, DiffedRun, RunDiff, diff_runs, diff_tree
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.console.text.tree import print_tree

STEPS = 5
GROUPS = 2
SIZE = 2
# What differs between servers is hidden by `History`, and tested there.
pytestmark = pytest.mark.parametrize("redis_server", sorted(SERVERS)[:1], indirect=True)


@dataclass(frozen=True)
class Run:
    """What a run wrote; a test replaces single messages."""

    tickets: dict[int, Ticket]
    trajectories: dict[tuple[int, int], Trajectory]
    scores: dict[tuple[int, int], Score]
    commits: dict[int, Commit]

    def changed(self, stream: str, key: Any, **fields: Any) -> "Run":
        messages = dict(getattr(self, stream))
        messages[key] = messages[key].model_copy(update=fields)
        return replace(self, **{stream: messages})


def make_run() -> Run:
    numbers = range(STEPS * GROUPS)
    keys = [(ticket, index) for ticket in numbers for index in range(SIZE)]
    tickets = {
        n: make_ticket(n, step=n // GROUPS, row=n, prompt_ids=np.array([3, n], np.int32), issued_at=float(n))
        for n in numbers
    }
    trajectories = {
        key: make_trajectory(*key, step=key[0] // GROUPS, group_size=SIZE, spans=((key[0] // GROUPS, 0),))
        for key in keys
    }
    scores = {key: make_score(*key, float(key[1]), scored_at=0.0) for key in keys}
    return Run(tickets, trajectories, scores, {step: make_commit(step) for step in range(STEPS)})


def make_commit(step: int) -> Commit:
    groups = tuple(range(step * GROUPS, (step + 1) * GROUPS))
    return Commit(
        step=step,
        version=step + 1,
        mini_batches=((tuple((t, i) for t in groups for i in range(SIZE)),),),
        groups=groups,
        advantages={str(ticket): [-1.0, 1.0] for ticket in groups},
        metrics={"loss": 0.5, "learning_rate": 1e-3, "time/train_s": step * 1.5, "step_time_s": 1.0},
        digest=f"{step:032x}",
    )


@pytest.fixture
def publish(broker: Broker) -> Callable[..., Any]:
    async def publish(run: Run, config: RunConfig | None = None) -> DiffedRun:
        keys = Keys(f"diff-{uuid.uuid4().hex[:12]}")
        await append_numbered(broker, keys.prompts(), sorted(run.tickets.items()))
        await append(broker, keys.trajectories(), *run.trajectories.values())
        await append(broker, keys.scores(), *run.scores.values())
        await append_numbered(broker, keys.commits, sorted(run.commits.items()))
        history = History(keys.run_id, None, broker)
        return DiffedRun(history, config or trainer_config(steps=STEPS))

    return publish


@pytest.fixture
def diff(publish: Any) -> Callable[..., Any]:
    """The difference between a run and a changed one."""

    async def diff(changed: Run, tolerance: float = 1e-3) -> RunDiff:
        return await diff_runs(await publish(make_run()), await publish(changed), tolerance)

    return diff


async def test_the_same_run_twice_has_no_difference_but_its_clocks(diff):
    result = await diff(make_run())
    assert result.is_equal and result.num_steps == STEPS and not result.longer
    clocked = make_commit(2).metrics | {"time/train_s": 99.0, "step_time_s": 98.0}
    assert (await diff(make_run().changed("commits", 2, started_at=7.0, metrics=clocked))).is_equal


OTHER = np.array([0, 1, 9], np.int32)
SPLIT = (((0, 0), (0, 1)),), (((1, 0), (1, 1)),)
UNSCORED = {"status": ScoreStatus.FAILED, "value": None}
DROPPED = {"dropped": ((2, -1, "zero_variance"),)}


@pytest.mark.parametrize(
    ("stream", "key", "fields", "aspect", "position", "values"),
    [
        ("tickets", 4, {"row": 17}, "prompts", (2, 4, -1, "row"), (4, 17)),
        (
            "trajectories",
            (5, 1),
            {"spans": ((2, 0), (3, 1))},
            "versions",
            (2, 5, 1, "version from token"),
            None,
        ),
        ("trajectories", (3, 0), {"prompt_ids": OTHER}, "prompts", (1, 3, 0, "prompt_ids"), None),
        ("trajectories", (3, 0), {"completion_ids": OTHER}, "tokens", (1, 3, 0, "from token 2 on"), None),
        ("scores", (6, 1), UNSCORED, "rewards", (3, 6, 1, "status"), ("ok", "failed")),
        ("commits", 1, DROPPED, "groups", (1, 2, -1, "dropped"), (None, [2, -1, "zero_variance"])),
        ("commits", 0, {"mini_batches": SPLIT}, "composition", (0, -1, -1, "micro-batch 0"), None),
        ("commits", 1, {"advantages": {"2": [1.0]}}, "advantages", (1, 2, -1, "number of samples"), (2, 1)),
    ],
)
async def test_the_first_cause_is_named_with_both_values(diff, stream, key, fields, aspect, position, values):
    result = await diff(make_run().changed(stream, key, **fields))
    cause = result.cause
    assert (cause.aspect, cause.step, cause.ticket, cause.index, cause.what) == (aspect, *position)
    assert values is None or (cause.a, cause.b) == values
    text = printed(result)
    assert MEANINGS[aspect] in text and f"step {cause.step} bad --runs-dir b" in text


def printed(result: RunDiff) -> str:
    console = Console(file=io.StringIO(), width=200)
    runs = (RunFolder(Path("a"), "good"), RunFolder(Path("b"), "bad"))
    print_tree(console, diff_tree(runs, result))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("position", "where"),
    [(8, "turn 1, from token 8 on"), (5, "the environment's answer to turn 0, from token 5 on")],
)
async def test_sessions_differ_at_a_turn(publish, position, where):
    run = make_run()
    session = as_session(run.trajectories[3, 0])
    ids = session.completion_ids.copy()
    ids[position] = 99
    runs = [run.changed("trajectories", (3, 0), **session.__dict__ | {"completion_ids": ids_of_run})
            for ids_of_run in (session.completion_ids, ids)]  # fmt: skip
    cause = (await diff_runs(*[await publish(run) for run in runs], 1e-3)).cause
    assert (cause.aspect, cause.ticket, cause.index, cause.what) == (Aspect.TOKENS, 3, 0, where)
    assert (cause.a["ids"][0], cause.b["ids"][0], cause.a["num_turns"]) == (10 + position, 99, 3)


async def test_a_fork_and_the_environments_reward_are_compared_too(publish):
    run = make_run()
    session = as_session(run.trajectories[3, 0])
    other_fork = FORK.model_copy(update={"completion_ids": FORK.completion_ids + 1})
    kinds = {"fork 1, turn 0, from token 0 on": {"forks": (other_fork,)}, "number of forks": {"forks": ()},
             "the environment's": {"reward": 0.5}, "end": {"end": "timeout"}}  # fmt: skip
    first = await publish(run.changed("trajectories", (3, 0), **session.__dict__))
    for kind, fields in kinds.items():
        changed = as_session(run.trajectories[3, 0], **fields)
        changed_run = await publish(run.changed("trajectories", (3, 0), **changed.__dict__))
        assert (await diff_runs(first, changed_run, 1e-3)).cause.what == kind


async def test_a_flipped_reward_is_the_cause_and_its_advantage_follows(diff):
    run = make_run().changed("scores", (6, 1), value=-1.0)
    run = run.changed("commits", 3, advantages={"6": [1.0, -1.0], "7": [-1.0, 1.0]}, digest="f" * 32)
    result = await diff(run.changed("commits", 4, digest="e" * 32))
    assert result.num_steps == 4, "nothing is read behind the first step that differs"
    aspects = [item.aspect for item in result.differences]
    assert aspects == [Aspect.REWARDS, Aspect.ADVANTAGES, Aspect.WEIGHTS]
    cause = result.cause
    assert (cause.step, cause.ticket, cause.index, cause.a, cause.b) == (3, 6, 1, 1.0, -1.0)
    assert result.differences[1].num_places == 2
    assert "tidemill trace 6.1 bad" in printed(result) and "advantages (+1)" in printed(result)


async def test_groups_in_another_order_are_noted_and_passed_over(diff):
    keys = tuple((ticket, index) for ticket in (1, 0) for index in range(SIZE))
    run = make_run().changed("commits", 0, mini_batches=((keys,),), groups=(1, 0), digest="f" * 32)
    result = await diff(run)
    assert result.cause is None and not result.is_equal and result.num_steps == STEPS
    assert "the same up to rounding" in printed(result)
    assert [item.aspect for item in result.earlier] == [Aspect.COMPOSITION, Aspect.WEIGHTS]


@pytest.mark.parametrize(("apart", "is_real"), [(1e-6, False), (0.1, True)])
async def test_numbers_differ_by_more_than_the_tolerance_or_by_rounding(diff, apart, is_real):
    logprobs = np.full(3, -0.5 - apart, np.float32)
    run = make_run().changed("trajectories", (2, 0), logprobs=logprobs)
    result = await diff(run.changed("commits", 1, metrics=make_commit(1).metrics | {"loss": 0.5 + apart}))
    if is_real:
        assert [item.aspect for item in result.differences] == [Aspect.LOGPROBS, Aspect.METRICS]
        assert result.cause.step == 1
    else:
        assert result.cause is None
        assert [item.aspect for item in result.earlier] == [Aspect.LOGPROBS, Aspect.METRICS]
        exact = await diff(run, tolerance=0.0)
        assert exact.cause.aspect is Aspect.LOGPROBS


async def test_a_change_of_the_config_is_listed_and_the_longer_run_is_named(publish):
    config = trainer_config(steps=STEPS, optimizer={"lr": 1e-3})
    short = make_run()
    del short.commits[STEPS - 1]
    result = await diff_runs(await publish(short), await publish(make_run(), config), 1e-3)
    assert [(c["field"], c["b"]) for c in result.config] == [("trainer.optimizer.lr", 1e-3)]
    assert result.is_equal and (result.num_steps, result.longer) == (STEPS - 1, "b")
    assert "config  trainer.optimizer.lr" in printed(result) and "run b has more" in printed(result)


async def test_where_records_are_trimmed_commits_are_compared(publish, broker):
    first = await publish(make_run())
    second = await publish(make_run().changed("commits", 1, digest="f" * 32))
    key = second.history.keys.trajectories()
    newest = (await broker.execute("XRANGE", key, "-", "+"))[-4][0].decode()
    await trim_before(broker, key, newest)
    result = await diff_runs(first, second, 1e-3)
    assert result.num_steps == STEPS and result.unread_steps == [0, 1, 2, 3]
    assert [item.aspect for item in result.earlier] == [Aspect.WEIGHTS]
    assert "steps 0 to 3" in printed(result)


async def test_no_more_is_held_than_was_outstanding(publish, monkeypatch):
    take = GroupCursor._take
    most = 0

    def count(self: GroupCursor, message: Any) -> int:
        nonlocal most
        ticket = take(self, message)
        most = max(most, len(self.open))
        return ticket

    monkeypatch.setattr(GroupCursor, "_take", count)
    result = await diff_runs(await publish(make_run()), await publish(make_run()), 1e-3)
    assert result.num_steps == STEPS and most == GROUPS
