"""Steps are trained again from the records alone, and come out bit by bit, whatever the algorithm."""

import json
from typing import Any

import pytest
import yaml

from tests.support.example_algorithms import example
from tests.support.training import answering, make_score, rewrite
from tests.support.whole_trainer import run
from tidemill.common.config import load_recorded
from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.history import History
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.run.state import CONFIG_FILE, read_config
from tidemill.common.streams import append, trim_before
from tidemill.common.wire.messages import Commit, Score, ScoreStatus
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.console.run.history import LIVE, RunAccess
from tidemill.services.trainer.policy.loading import open_policy
from tidemill.services.trainer.policy.policy import PolicyThread
from tidemill.services.trainer.replay.__main__ import check_committed
from tidemill.services.trainer.replay.steps import StepReplay

KL = {"reference": {"model": "frozen"}, "kl": {"place": "reward", "estimator": "k1", "coefficient": 0.01}}
TWO_REWARDS = {"rewards": {"right": {"function": "gsm8k"}, "short": {"function": "math", "weight": 0.5}}}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"preset": "grpo"}},
    "ppo with a value head": {"algorithm": {"preset": "ppo"}, "mini_batches": 2},
    "ppo with a critic, several passes": {"algorithm": {"preset": "ppo", "value": {"model": "own"}},
        "mini_batches": 2, "passes": 2},
    "advantages over the batch, with a reference": {"algorithm": {"preset": "reinforce_plus_plus", **KL}},
    "a reference that follows": {"algorithm": {"reference": {"model": "updated", "every": 2},
        "kl": {"place": "loss", "estimator": "k3", "coefficient": 0.01}}},
    "sessions of several turns": {"algorithm": {"preset": "reinforce_plus_plus", "gamma": 0.9}},
    "statistics of mini-batches": {"algorithm": {"top_entropy_quantile": 0.3,
        "importance": {"normalise": True}}, "mini_batches": 2},
    "coefficients that move": {"algorithm": {"reference": {"model": "frozen"}, "kl": {"place": "reward",
        "estimator": "k1", "coefficient": 0.5}, "kl_control": {"target": 1e-6, "horizon": 4.0},
        "entropy_control": {"target": 50.0, "delta": 0.1}}},
    "remax": {"algorithm": {"advantage": "remax"}},
    "lora": {"lora": {"rank": 2, "alpha": 4}},
    "delays in place of a model": {"policy": "simulated"},
    "gdpo": {"algorithm": {"advantage": "gdpo"}, "reward": TWO_REWARDS},
}  # fmt: skip
"""Those with state of their own or with other inputs; of all others `test_step` replays a step."""


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory):
    """One kind of server is enough: what is tested reads through the history."""
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


def reward(ticket: int, index: int) -> float | None:
    """Differs from group to group, and one sample in seven has none."""
    key = 5 * ticket + index
    return None if key % 7 == 0 else float(key % 3)


def rewards(ticket: int, index: int) -> dict[str, float] | None:
    """The same in two parts."""
    scored = reward(ticket, index)
    return None if scored is None else {"right": scored, "short": float(index % 2)}


def session_of(context: Any) -> StepReplay:
    history = History(context.keys.run_id, context.run_dir, context.broker)
    policy = open_policy(context.config)
    return StepReplay(history, context.config, context.run_dir, policy, PolicyThread(), lambda _: None)


async def replayed(context: Any, *steps: int) -> list[dict[str, Any]]:
    return [result async for result in session_of(context).results(steps)]


@pytest.mark.parametrize("name", ALGORITHMS)
async def test_what_an_algorithm_keeps_or_reads_replays_bit_by_bit(make, broker, keys, name):
    options = {"policy": "transformers"} | ALGORITHMS[name]
    context = make(steps=4, group_size=4, checkpoint_every=2, **options)
    value = rewards if name == "gdpo" else reward
    async with answering(broker, keys, value, plays="sessions" in name, has_baseline=name == "remax"):
        await run(context)
    results = await replayed(context, 0, 1, 3)  # from the starting model, on, and from a checkpoint
    assert [result["step"] for result in results] == [0, 1, 3]
    for result in results:
        assert result["equal"], result
        names = {row["name"] for row in result["metrics"]}
        assert {"loss", "grad_norm", "reward", "entropy", "scores/failed_ratio"} <= names
        assert not any(name.startswith("time/") or name == "step_time_s" for name in names)
        assert ("kl_coefficient" in names) is ("move" in name)


async def test_a_step_differs_with_another_algorithm_and_is_refused_with_other_rewards(make, broker, keys):
    settings: dict[str, Any] = {"policy": "transformers", "steps": 3, "group_size": 4, "checkpoint_every": 10}
    context = make(**settings)
    async with answering(broker, keys, lambda ticket, index: float(index % 3)):
        await run(context)
    [result] = await replayed(make(**settings, algorithm={"preset": "dr_grpo"}), 2)
    assert not result["equal"] and not result["digest"]["equal"]
    different = {row["name"] for row in result["metrics"] if not row["equal"]}
    assert {"loss", "grad_norm"} <= different and "completions/mean_length" not in different
    assert result["advantages"]["first"]["ticket"] in range(4, 6)
    await broker.execute("DEL", keys.scores())
    await append(broker, keys.scores(), *(make_score(t, i, 2.0 - i % 3) for t in range(6) for i in range(4)))
    with pytest.raises(TidemillError, match="cannot be trained again: the streams hold other samples"):
        await replayed(context, 2)


async def test_a_run_with_an_advantage_that_was_built_in_replays_bit_by_bit(make, broker, keys):
    """Its config, on disk and in Redis, is as an earlier release has recorded it."""
    options: dict[str, Any] = {"policy": "transformers", "steps": 2, "group_size": 4}
    context = make(**options, algorithm={"advantage": example("gpg.py:gpg")})
    async with answering(broker, keys, reward):
        await run(context)
    path = context.run_dir / CONFIG_FILE
    recorded = yaml.safe_load(path.read_text())
    recorded["trainer"]["algorithm"]["advantage"] = "gpg"
    path.write_text(yaml.safe_dump(recorded))
    await broker.execute("SET", keys.config, json.dumps(recorded))
    history = History(keys.run_id, context.run_dir, broker)
    config = load_recorded(path)
    assert config.trainer == (await read_config(broker, keys)).trainer == context.config.trainer
    moved = RunFolder(context.run_dir / "of a run that left only its streams", keys.run_id)
    assert RunAccess(moved, history, LIVE, raw_config=json.dumps(recorded).encode()).config == config
    context.config = config
    assert [result["equal"] for result in await replayed(context, 0, 1)] == [True, True]


async def test_the_first_score_of_a_key_counts_and_failures_are_left_out_again(make, broker, keys):
    context = make(policy="transformers", steps=2, group_size=4)
    async with answering(broker, keys, reward):
        await run(context)
    late = [Score(ticket=t, index=i, status=ScoreStatus.OK, value=9.0) for t in range(4) for i in range(4)]
    await append(broker, keys.scores(), *late)
    results = await replayed(context, 0, 1)
    assert all(result["equal"] for result in results)
    assert any(result["left_out"]["replayed"] for result in results), "some scores had failed"


async def test_what_was_trimmed_is_said_to_be_missing(make, broker, keys, answers):
    context = make(steps=4, checkpoint_every=10)
    await run(context)
    newest = (await broker.execute("XREVRANGE", keys.trajectories(), "+", "-", "COUNT", 1))[0][0].decode()
    await trim_before(broker, keys.trajectories(), newest)
    with pytest.raises(TidemillError, match=r"step 0 cannot be trained again.*archive"):
        await replayed(context, 2)


async def test_a_step_that_the_run_never_made_is_refused(make, broker, keys, answers):
    context = make(steps=2)
    await run(context)
    with pytest.raises(ConfigError, match=r"no commit of step 7: its commits end with step 1"):
        await check_committed(History(keys.run_id, None, broker), [1, 7])


async def test_nothing_of_the_run_is_written(make, broker, keys, answers):
    context = make(policy="transformers", steps=3, checkpoint_every=2)
    await run(context)

    async def everything():
        files = {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in context.run_dir.rglob("*")}
        names = sorted(await broker.execute("KEYS", f"*{keys.run_id}*"))
        return files, {name: await broker.execute("DUMP", name) for name in names}

    before = await everything()
    await replayed(context, 0, 2)
    assert await everything() == before


async def test_a_checkpoint_that_is_not_what_was_committed_is_named(make, broker, keys, answers):
    """As after a crash, where the replay on other hardware did not come out bit by bit."""
    context = make(steps=3, checkpoint_every=2)
    await run(context)
    forged = {1: {"digest": "f" * 32}}
    change = lambda commit: commit.model_copy(update=forged.get(commit.step))  # noqa: E731
    await rewrite(broker, keys.commits, Commit, change)
    session = session_of(context)
    assert [result["first_difference"] async for result in session.results([2])] == [1]
