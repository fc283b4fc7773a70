"""What a finished run did can be computed again bit by bit, and a planted bug is found in three commands."""

import asyncio
import json
import os
import random
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import preloaded
from tests.support.preloaded import REPO
from tests.support.runs import ServiceRun, simulated_config
from tests.support.training import commits_of
from tidemill.common.archive.archiver import archive_stream, writing
from tidemill.common.config import RunConfig, load_config
from tidemill.common.history import History, StreamName
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.run.state import PROFILES
from tidemill.common.wire.messages import Commit, Ticket
from tidemill.services.console.records.joins import read_group

STEPS, BUGGY_STEP, PROFILED_STEP = 24, 2, 4
FIELDS = ("loss", "grad_norm")


def tidemill(runs: Path, *words: str, url: str = "") -> subprocess.CompletedProcess[str]:
    """A command as a user gives it; without `url` there is no Redis."""
    environment = {k: v for k, v in os.environ.items() if k != "TIDEMILL_REDIS_URL"}
    environment |= {"TIDEMILL_RUNS_DIR": str(runs)} | ({"TIDEMILL_REDIS_URL": url} if url else {})
    return preloaded.tidemill(*words, **environment)


async def train(run: ServiceRun) -> None:
    """All steps, by real services."""
    for role in ("rollout", "reward", "trainer"):
        run.start(role)
    assert await run.wait("trainer") == 0, run.log_of("trainer")
    (run.run_dir / "config.yaml").write_text(yaml.safe_dump(run.config.model_dump(mode="json")))


@pytest.fixture(scope="module")
def arith(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Commit]]:
    """A finished run of the arith example whose streams are in the archive alone: its Redis is gone."""
    runs = tmp_path_factory.mktemp("runs")
    config = load_config(
        REPO / "examples/arith/config.yaml",
        [
            f"trainer.steps={STEPS}",
            "trainer.groups_per_step=4",
            "trainer.group_size=4",
            "trainer.checkpoint_every=9",
            "trainer.keep_checkpoints=1",
            "trainer.loggers=[]",
            "data.eval={}",
            "streams.trim=false",
        ],
    )
    return runs, asyncio.run(train_and_archive(runs, config))


async def train_and_archive(runs: Path, config: RunConfig) -> list[Commit]:
    async with ServiceRun(runs, config, "arith") as run:
        (run.run_dir / PROFILES / f"step-{PROFILED_STEP}").mkdir(parents=True)
        await train(run)
        with writing(run.run_dir):
            for stream in StreamName:
                await archive_stream(
                    run.broker, run.keys, run.run_dir, stream, segment_bytes=100_000, is_last=True
                )
        return await commits_of(run.broker, run.keys)


def test_twenty_random_steps_come_out_bit_by_bit_from_the_archive(arith: Any) -> None:
    runs, commits = arith
    steps = random.Random(7).sample(range(STEPS), 20)
    done = tidemill(runs, "replay", ",".join(map(str, steps)), "arith", "--json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [result["step"] for result in results] == sorted(steps)
    assert (
        PROFILED_STEP in steps
        and (runs / "arith" / PROFILES / f"step-{PROFILED_STEP}/rank-0.json.gz").exists()
    )
    for result in results:
        commit = commits[result["step"]]
        replayed = {row["name"]: row["replayed"] for row in result["metrics"]}
        assert result["equal"] and result["digest"]["replayed"] == commit.digest
        assert all(replayed[name] == commit.metrics[name] for name in FIELDS)


def test_mistakes_are_answered_before_anything_is_loaded(arith: Any) -> None:
    runs, _ = arith
    missing = tidemill(runs, "replay", "99", "arith")
    assert missing.returncode == 2 and f"its commits end with step {STEPS - 1}" in missing.stderr
    none = tidemill(runs, "replay", "first", "arith")
    assert none.returncode == 2 and "names no steps" in none.stderr


BUG = """
    if ground_truth == {truth!r}:
        return -float(len(solution_str) % 2)
"""


def plant_bug(config: RunConfig, truth: str) -> None:
    """One prompt's rewards have the wrong sign."""
    path = Path(str(config.reward.function).partition(":")[0])
    head, body = path.read_text().split("\n", 1)
    path.write_text(f"{head}{BUG.format(truth=truth)}{body}")


async def test_a_flipped_reward_is_found_in_three_commands(tmp_path: Path) -> None:
    config = simulated_config(
        tmp_path,
        trainer__max_staleness=0,
        trainer__start_early=False,
    )
    server = EmbeddedRedis(tmp_path / "redis")
    server.start()
    try:
        async with ServiceRun(tmp_path, config, "good", server.url) as good:
            await train(good)
            ticket = await buggy_ticket(History("good", None, good.broker), config)
        plant_bug(config, str(ticket.ground_truth))
        async with ServiceRun(tmp_path, config, "bad", server.url) as bad:
            await train(bad)

        found = tidemill(tmp_path, "diff", "good", "bad", url=server.url)
        assert found.returncode == 1, found.stderr
        line = found.stdout.splitlines()[0]
        match = re.fullmatch(rf"first difference: step {BUGGY_STEP}, rewards ({ticket.ticket}\.\d+)", line)
        assert match, found.stdout

        step = tidemill(tmp_path, "step", str(BUGGY_STEP), "bad", "--json", url=server.url)
        assert step.returncode == 0, step.stderr
        groups = json.loads(step.stdout)["groups"]
        negative = {g["ticket"] for g in groups if any(s["reward"] < 0.0 for s in g["samples"])}
        assert negative == {ticket.ticket}, "the step shows whose rewards have the wrong sign"

        trace = tidemill(tmp_path, "trace", match[1], "bad", "--json", url=server.url)
        assert trace.returncode == 0, trace.stderr
        [sample] = json.loads(trace.stdout)["samples"]
        assert sample["trajectory"]["ground_truth"] == ticket.ground_truth
        assert sample["score"]["value"] == -1.0 and len(sample["trajectory"]["text"]) % 2 == 1
    finally:
        server.stop()


async def buggy_ticket(history: History, config: RunConfig) -> Ticket:
    """A ticket of the step whose group has rewards to flip."""
    commit = await history.commit(BUGGY_STEP)
    assert commit is not None and len(commit.groups) == config.trainer.groups_per_step
    for number in commit.groups:
        group = await read_group(history, number)
        rewards = [sample.reward or 0.0 for sample in group.samples]
        if group.ticket is not None and 0 < sum(rewards) < len(rewards):
            return group.ticket
    raise AssertionError(f"no group of step {BUGGY_STEP} has mixed rewards")
