"""Sources and a curriculum in a whole trainer: killed and resumed anywhere, the prompts are the same."""

import json
from collections import Counter
from typing import Any

import pytest

from tests.support import whole_trainer
from tests.support.training import answering, assert_nothing_lost, make_context, messages
from tests.support.whole_trainer import trainer_context
from tidemill.common.config import RunConfig
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import METRICS_FILE, read_records
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Ticket, Trajectory
from tidemill.services.trainer.durable.checkpoint import CheckpointStore

STEPS = 12
GROUPS = 4
SIZES = {"sums": 2, "words": 3, "code": 4}
WEIGHTS = {"sums": 2, "words": 1, "code": 1}


@pytest.fixture
def make(tmp_path, model):
    """The context of a trainer on three sources."""

    def make(broker, keys, **trainer):
        sources = []
        for number, (name, size) in enumerate(SIZES.items()):
            path = tmp_path / f"{name}.jsonl"
            rows = [{"prompt": f"w{i} w{number}", "ground_truth": str(i)} for i in range(6 + number)]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            sources.append({"name": name, "path": str(path), "weight": WEIGHTS[name], "group_size": size})
        sources[1]["sampling"] = {"max_tokens": 5}
        options = {"steps": STEPS, "groups_per_step": GROUPS, "algorithm": {"filter_zero_variance": True}}
        return trainer_context(
            broker, keys, tmp_path / keys.run_id, model,
            data={"train": sources, "curriculum": {"revisit": 2}}, trainer=options | trainer,
        )  # fmt: skip

    return make


def reward_of(sample: Trajectory) -> float:
    """Of each source the prompts 1 and 5 are always solved, 2 never, the others by every other sample."""
    row = int(sample.ground_truth)
    return float(row % 4 == 1) if row % 4 in (1, 2) else float(sample.index % 2)


async def run(context: ServiceContext) -> None:
    async with answering(context.broker, context.keys, value_of=reward_of):
        await whole_trainer.run(context)


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

    killed_keys = Keys(f"{keys.run_id}-killed")
    async with answering(broker, killed_keys, value_of=reward_of):
        num_deaths = await whole_trainer.run_killed(
            make, broker, killed_keys, STEPS, seed=max_staleness, max_staleness=max_staleness
        )
    assert num_deaths >= 3
    assert await prompts_of(broker, killed_keys) == expected
    disturbed = await assert_nothing_lost(broker, killed_keys, len(expected))
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
