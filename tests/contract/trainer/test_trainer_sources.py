"""Sources and a curriculum in a whole trainer: killed and resumed anywhere, the prompts are the same."""

import asyncio
import contextlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.training import answering, assert_nothing_lost, make_context, messages, num_commits
from tidemill.common.config import RunConfig
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import METRICS_FILE, read_records
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Ticket, Trajectory
from tidemill.services.trainer.durable.checkpoint import CheckpointStore
from tidemill.services.trainer.service import serve

STEPS, GROUPS = 12, 4
SIZES = {"sums": 2, "words": 3, "code": 4}
WEIGHTS = {"sums": 2, "words": 1, "code": 1}


class Mortal:
    """A broker whose process dies with its n-th command, before or after Redis has done it."""

    def __init__(self, broker: Broker, num_commands: int, is_done: bool) -> None:
        self._broker, self._left, self._is_done = broker, num_commands, is_done
        self.process: asyncio.Future[None] | None = None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._broker, name)
        if name not in ("execute", "pipeline", "script"):
            return method

        async def call(*args: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == 0 and self._is_done:
                await method(*args, **options)
            if self._left <= 0 and self.process is not None:
                self.process.cancel()
                await asyncio.Event().wait()
            return await method(*args, **options)

        return call


@pytest.fixture
def make(tmp_path: Path, model: Path) -> Any:
    """The context of a trainer on three sources."""

    def make(broker: Any, keys: Keys, **trainer: Any) -> ServiceContext:
        sources = []
        for number, (name, size) in enumerate(SIZES.items()):
            path = tmp_path / f"{name}.jsonl"
            rows = [{"prompt": f"w{i} w{number}", "ground_truth": str(i)} for i in range(6 + number)]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            sources.append({"name": name, "path": str(path), "weight": WEIGHTS[name], "group_size": size})
        sources[1]["sampling"] = {"max_tokens": 5}
        tree = {
            "model": {"path": str(model), "max_model_len": 64},
            "data": {"train": sources, "max_prompt_tokens": 8, "curriculum": {"revisit": 2}},
            "rollout": {"engine": "simulated", "sampling": {"max_tokens": 8}},
            "trainer": {
                "policy": "simulated",
                "steps": STEPS,
                "groups_per_step": GROUPS,
                "group_size": 2,
                "checkpoint_every": 4,
                "loggers": [],
                "algorithm": {"filter_zero_variance": True},
                **trainer,
            },
            "streams": {"trim": False, "archive": {"enabled": False}},
        }
        return make_context(broker, keys, RunConfig.model_validate(tree), tmp_path / keys.run_id)

    return make


def reward_of(sample: Trajectory) -> float:
    """Of each source the prompts 1 and 5 are always solved, 2 never, the others by every other sample."""
    row = int(sample.ground_truth)
    return float(row % 4 == 1) if row % 4 in (1, 2) else float(sample.index % 2)


async def run(context: ServiceContext) -> None:
    async with answering(context.broker, context.keys, value_of=reward_of):
        await asyncio.wait_for(serve(context), 120)


async def prompts_of(broker: Broker, keys: Keys) -> list[tuple[Any, ...]]:
    tickets = await messages(broker, keys.prompts(), Ticket)
    assert [ticket.ticket for ticket in tickets] == list(range(len(tickets)))
    return [(t.source, t.row, t.group_size, t.sampling.max_tokens, t.prompt_ids.tolist()) for t in tickets]


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
async def test_killed_at_random_points_it_issues_the_same_prompts_as_undisturbed(
    make, broker, keys, max_staleness
):
    await run(make(broker, keys, max_staleness=max_staleness))
    expected = await prompts_of(broker, keys)
    commits = await assert_nothing_lost(broker, keys, len(expected))
    assert len(commits) == STEPS
    replaced = sum(len(commit.dropped) for commit in commits)
    assert replaced

    rng, other = random.Random(max_staleness), Keys(f"{keys.run_id}-killed")
    num_deaths = 0
    async with answering(broker, other, value_of=reward_of):
        while await num_commits(broker, other) < STEPS:
            mortal = Mortal(broker, rng.randrange(15, 150), rng.random() < 0.5)
            context = make(mortal, other, max_staleness=max_staleness)
            mortal.process = asyncio.ensure_future(serve(context))
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(mortal.process, 60)
            num_deaths += mortal.process.cancelled()
        await asyncio.wait_for(serve(make(broker, other, max_staleness=max_staleness)), 60)
    assert num_deaths >= 3
    assert await prompts_of(broker, other) == expected
    disturbed = await assert_nothing_lost(broker, other, len(expected))
    assert [sorted(c.outcomes) for c in disturbed] == [sorted(c.outcomes) for c in commits]


async def test_shares_sizes_and_metrics_are_those_of_the_sources(make, broker, keys):
    context = make(broker, keys, algorithm={})
    await run(context)
    prompts = await prompts_of(broker, keys)
    assert len(prompts) == STEPS * GROUPS
    assert Counter(name for name, *_ in prompts) == {"sums": 24, "words": 12, "code": 12}
    assert {(name, size, limit) for name, _, size, limit, _ in prompts} == {
        ("sums", 2, 8), ("words", 3, 5), ("code", 4, 8),
    }  # fmt: skip
    commits = await assert_nothing_lost(broker, keys, len(prompts))
    for commit in commits:
        sizes = Counter(ticket for ticket, _ in commit.trained_keys)
        assert all(sizes[ticket] == SIZES[prompts[ticket][0]] for ticket in commit.groups)
        assert commit.sizes == {str(t): size for t, size in sizes.items() if size != 2}
    for record in read_records(context.run_dir / METRICS_FILE):
        groups = {name: record.get(f"source/{name}/groups", 0.0) for name in SIZES}
        assert sum(groups.values()) == GROUPS
    checkpoint = CheckpointStore(context.run_dir, 2).load_latest()
    assert checkpoint is not None and checkpoint.state.data["positions"] == {
        "sums": 24,
        "words": 12,
        "code": 12,
    }


async def test_files_without_a_name_have_a_curriculum_too(make, broker, keys):
    context = make(broker, keys, algorithm={}, max_staleness=0)
    files = [source.path for source in context.config.data.sources]
    tree = context.config.model_dump(mode="json")
    tree["data"]["train"] = files[:1]
    await run(make_context(broker, keys, RunConfig.model_validate(tree), context.run_dir))
    prompts = await prompts_of(broker, keys)
    assert {(name, size) for name, _, size, *_ in prompts} == {("", 2)}
    late = Counter(row for _, row, *_ in prompts[12:])
    assert late[0] > late[1] and late[3] > late[2], "0, 3 and 4 lie between"
    commits = await assert_nothing_lost(broker, keys, len(prompts))
    assert all(commit.outcomes and not commit.sizes for commit in commits)
