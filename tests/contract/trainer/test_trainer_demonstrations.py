"""Demonstrations in a whole trainer: alone they need no worker, beside prompts they keep their share; killed
and resumed anywhere, the weights are the same bits."""

import json
from collections import Counter
from typing import Any

import pytest

from tests.support import whole_trainer
from tests.support.training import answering, commits_of, messages, replayed_digests
from tests.support.whole_trainer import trainer_context
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import append
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import FIRST_DEMONSTRATION, Commit, Score, Trajectory, is_demonstration
from tidemill.services.trainer.batch import batch_assembler
from tidemill.services.trainer.batch import scheduler as scheduler_module
from tidemill.services.trainer.policy.loading import open_policy

STEPS = 6
GROUPS = 4


@pytest.fixture
def make(tmp_path, model):
    """The context of a trainer on demonstrations, and on prompts where they have a weight."""

    def make(broker, keys, prompts=0.0, **trainer):
        rows = [{"prompt": f"w{i}", "completion": f" w{i} w{i + 1}", "ground_truth": "1"} for i in range(9)]
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources = [{"name": "shown", "kind": "demonstrations", "path": str(path), "imitation": 0.5}]
        if prompts:
            sources.append({"name": "sums", "path": str(path), "weight": prompts})
        options = {
            "policy": "transformers", "steps": STEPS, "groups_per_step": GROUPS, "checkpoint_every": 2,
            "num_threads": 1, "deterministic": True, "optimizer": {"lr": 1e-2},
            "algorithm": {"filter_zero_variance": True},
        }  # fmt: skip
        run_dir = tmp_path / keys.run_id
        return trainer_context(
            broker, keys, run_dir, model, data={"train": sources}, trainer=options | trainer
        )

    return make


async def run(context: ServiceContext) -> list[Commit]:
    await whole_trainer.run(context)
    return await commits_of(context.broker, context.keys)


async def run_killed(make: Any, broker: Broker, keys: Keys, **options: Any) -> list[Commit]:
    assert await whole_trainer.run_killed(make, broker, keys, STEPS, seed=7, **options)
    return await commits_of(broker, keys)


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_alone_they_need_no_worker_and_a_killed_trainer_ends_with_the_same_weights(
    make, broker, keys, max_staleness
):
    commits = await run(make(broker, keys, max_staleness=max_staleness))
    places = range(FIRST_DEMONSTRATION, FIRST_DEMONSTRATION + STEPS * GROUPS)
    assert [ticket for commit in commits for ticket in sorted(commit.groups)] == list(places)
    assert not await messages(broker, keys.scores(), Score)
    losses = [commit.metrics["imitation/loss"] for commit in commits]
    assert losses[-1] < losses[0], "it learns what it is shown"
    rows = Counter(t.prompt_text for t in await messages(broker, keys.trajectories(), Trajectory))
    assert sorted(rows.values()) == [2] * 3 + [3] * 6, "24 places over 9 rows"

    killed_keys = Keys(f"{keys.run_id}-killed")
    killed = await run_killed(make, broker, killed_keys, max_staleness=max_staleness)
    assert [commit.digest for commit in killed] == [commit.digest for commit in commits]
    assert [commit.mini_batches for commit in killed] == [commit.mini_batches for commit in commits]
    context = make(broker, killed_keys, max_staleness=max_staleness)
    policy = open_policy(context.config, context.run_dir)
    assert await replayed_digests(broker, killed_keys, context.config, policy) == [c.digest for c in commits]


async def test_beside_prompts_each_step_has_its_exact_share_also_where_groups_are_replaced(
    make, broker, keys
):
    """A quarter of each batch; of the prompts' groups every third is replaced, by prompts."""

    def value(ticket, index):
        return 0.0 if ticket % 3 == 0 else float(index)

    # These workers score demonstrations too, as those of an older release would: nobody reads that.
    async with answering(broker, keys, value):
        commits = await run_killed(make, broker, keys, prompts=3)
    assert len(commits) == STEPS
    for commit in commits:
        assert Counter(map(is_demonstration, commit.groups)) == {False: 3, True: 1}, commit.groups
        assert commit.metrics["source/shown/groups"] == 1.0 and commit.metrics["source/sums/groups"] == 3.0
        assert commit.metrics["reward"] == 0.5, "of the others alone"
    trained = [key for commit in commits for key in commit.trained_keys]
    assert len(trained) == len(set(trained)) == STEPS * (3 * 2 + 1)
    assert sum(len(commit.dropped) for commit in commits) > STEPS / 2
    assert all(not is_demonstration(ticket) for commit in commits for ticket, _, _ in commit.dropped)


async def test_what_redis_loses_of_them_is_published_again(make, broker, keys, monkeypatch):
    lost = []

    async def lose_the_first(*args):
        if len(lost) < 2:
            lost.append(args)
            return []
        return await append(*args)

    monkeypatch.setattr(scheduler_module, "append", lose_the_first)
    monkeypatch.setattr(batch_assembler, "QUIET_S", 0.05)
    commits = await run(make(broker, keys))
    assert len(commits) == STEPS and len(lost) == 2
