"""A planted bug is found in three commands, and mistakes of who looks for it are answered."""

import json
import os
import re
import subprocess
from pathlib import Path

import yaml

from tests.support import preloaded
from tests.support.runs import ServiceRun, simulated_config
from tidemill.common.config import RunConfig
from tidemill.common.history import History
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.wire.messages import Ticket
from tidemill.services.console.look.joins import read_group

BUGGY_STEP = 2


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


BUG = """
    if ground_truth == {truth!r}:
        return -float(len(solution_str) % 2)
"""


def plant_bug(config: RunConfig, truth: str) -> None:
    """One prompt's rewards have the wrong sign."""
    path = Path(str(config.reward.function).partition(":")[0])
    head, body = path.read_text().split("\n", 1)
    path.write_text(f"{head}{BUG.format(truth=truth)}{body}")


async def test_a_flipped_reward_is_found_in_three_commands(tmp_path):
    config = simulated_config(tmp_path, trainer__max_staleness=0, trainer__start_early=False)
    server = EmbeddedRedis(tmp_path / "redis")
    server.start()
    try:
        async with ServiceRun(tmp_path, config, "good", server.url) as good:
            await train(good)
            ticket = await buggy_ticket(History("good", None, good.broker), config)
        plant_bug(config, str(ticket.ground_truth))
        async with ServiceRun(tmp_path, config, "bad", server.url) as bad:
            await train(bad)

        difference = tidemill(tmp_path, "diff", "good", "bad", url=server.url)
        assert difference.returncode == 1, difference.stderr
        line = difference.stdout.splitlines()[0]
        match = re.fullmatch(rf"first difference: step {BUGGY_STEP}, rewards ({ticket.ticket}\.\d+)", line)
        assert match, difference.stdout

        step = tidemill(tmp_path, "step", str(BUGGY_STEP), "bad", "--json", url=server.url)
        assert step.returncode == 0, step.stderr
        groups = json.loads(step.stdout)["groups"]
        negative = set()
        for group in groups:
            if any(sample["reward"] < 0.0 for sample in group["samples"]):
                negative.add(group["ticket"])
        assert negative == {ticket.ticket}, "the step shows whose rewards have the wrong sign"

        trace = tidemill(tmp_path, "trace", match[1], "bad", "--json", url=server.url)
        assert trace.returncode == 0, trace.stderr
        [sample] = json.loads(trace.stdout)["samples"]
        assert sample["trajectory"]["ground_truth"] == ticket.ground_truth
        assert sample["score"]["value"] == -1.0 and len(sample["trajectory"]["text"]) % 2 == 1

        for steps, answer in (("99", "its commits end with step"), ("first", "names no steps")):
            mistaken = tidemill(tmp_path, "replay", steps, "bad", url=server.url)
            assert mistaken.returncode == 2 and answer in mistaken.stderr
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
