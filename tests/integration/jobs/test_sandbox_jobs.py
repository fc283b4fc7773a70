"""Code rewards from end to end: reward, RQ queue, workers; their deaths lose nothing and fake nothing."""

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.preloaded import REPO
from tests.support.rewards import code_reward
from tests.support.samples import make_sample
from tests.support.trajectories import make_config
from tests.support.waiting import wait_until
from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.redis.broker import URL_VARIABLE, Broker
from tidemill.common.redis.client import make_blocking_client
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.run.state import publish_config
from tidemill.common.wire.keys import Keys
from tidemill.services.reward.outcome import AttemptError
from tidemill.services.reward.rewards import sandbox
from tidemill.services.reward.rewards.sandbox import SandboxReward, extract_code
from tidemill.services.reward.sample import RewardSample

MakeReward = Callable[..., SandboxReward]

KEYS = Keys("coded")
CONFIG = SandboxConfig(time_s=30.0, total_s=60.0)
TESTS = {"inputs": ["1", "2"], "outputs": ["2", "4"]}
DOUBLES = "Here it is:\n```python\nprint(int(input()) * 2)\n```\nDone."


def sample(text: str, tests: Any = TESTS, number: int = 0) -> RewardSample:
    return make_sample((number, 0), False, "code", text, tests)


@pytest.fixture
async def redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    server = EmbeddedRedis(tmp_path / "redis")
    server.start()
    monkeypatch.setenv(URL_VARIABLE, server.url)
    broker = await Broker.connect(server.url)
    rewards = {"code": {"sandbox": CONFIG.model_dump()}}
    await publish_config(broker, KEYS, make_config(run_id=KEYS.run_id, reward={"rewards": rewards}))
    await broker.close()
    yield server.url
    server.stop()


@pytest.fixture
async def make(redis: str) -> AsyncIterator[MakeReward]:
    broker, made = await Broker.connect(redis), list[SandboxReward]()

    def make(**changes: Any) -> SandboxReward:
        made.append(code_reward(broker, KEYS, CONFIG.model_copy(update=changes)))
        return made[-1]

    yield make
    for reward in made:
        await reward.close()
    await broker.close()


@pytest.fixture
def start(redis: str, tmp_path: Path, isolated: None) -> Any:
    """Start a sandbox worker; what still runs at the end is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def start(
        name: str = "sandbox-0", module: str = "tidemill.services.jobs.sandbox"
    ) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", module, "--run", KEYS.run_id, "--name", name]
        with open(tmp_path / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                command, cwd=REPO, env=os.environ | {URL_VARIABLE: redis}, stdout=log, stderr=log
            )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_code_is_taken_from_its_fence() -> None:
    assert extract_code("a\n```python\nx = 1\n```\nb\n```py\nx = 2\n```\n```\nno\n```") == "x = 2\n"
    assert extract_code("a\n```\nx = 1\n```") == "x = 1\n"
    assert extract_code("```python\nx = 1") == "x = 1\n"[:-1]
    assert extract_code("x = 1") == "x = 1"


async def test_code_is_scored_by_the_workers_of_its_run(make: MakeReward, start: Callable[..., Any]) -> None:
    worker = start()
    reward, part = make(), make(score="fraction")
    wrong = "```python\nn = int(input())\nprint(2)\n```"
    found = await asyncio.gather(
        *(reward.score(sample(DOUBLES, number=n)) for n in range(8)),
        reward.score(sample(wrong)),
        part.score(sample(wrong)),
        reward.score(sample("```python\n\n```")),
    )
    assert [outcome.value for outcome in found] == [1.0] * 8 + [0.0, 0.5, 0.0]
    assert found[8].detail["sandbox"]["first_failure"]["stdout"] == "2\n"
    with pytest.raises(AttemptError, match="ground truth") as caught:
        await reward.score(sample(DOUBLES, tests={"inputs": [1]}))
    assert caught.value.is_final
    worker.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(worker.wait, 120) == 0


RAN = {"passed": 1, "total": 1, "outcomes": ["done"], "wall_s": 0.1, "first_failure": None}


@pytest.mark.parametrize(
    "written",
    [b"garbage", b"\xff", b"[" * 100_000, b"[1]", b"{}"]
    + [
        json.dumps(RAN | change).encode()
        for change in (
            {"passed": 2},
            {"total": 0},
            {"wall_s": math.nan},
            {"first_failure": {"code": 1 << 64}},
        )
    ],
)
async def test_a_result_that_cannot_be_read_fails_one_attempt_and_no_other(
    make: MakeReward, redis: str, written: bytes
) -> None:
    """Whoever has the password of a sandbox worker may write it."""
    reward = make()
    with make_blocking_client(redis) as hostile:

        async def answered(code: str, answer: bytes) -> Any:
            running = asyncio.create_task(reward.run(code, TESTS))
            await wait_until(lambda: hostile.keys("rq:job:*"))
            key = hostile.keys("rq:job:*")[0].decode()
            hostile.set(KEYS.sandbox_result(key.removeprefix("rq:job:")), answer)
            try:
                return await asyncio.wait_for(running, 30)
            finally:
                hostile.delete(key)

        with pytest.raises(AttemptError, match="cannot be read"):
            await answered("print(1)", written)
        assert (await answered("print(2)", json.dumps(RAN).encode()))["passed"] == 1


async def test_a_run_killed_with_its_worker_is_done_by_another(
    make: MakeReward,
    start: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(sandbox, "LOST_S", 6.0)
    first = start("first")
    waiting = asyncio.create_task(make().score(sample("import time\ntime.sleep(3)\nprint(int(input()) * 2)")))
    await wait_until(lambda: _jail_below(first.pid))
    worker = psutil.Process(first.pid)
    for process in [worker, *worker.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended with the one before
            process.kill()
    start("second")
    outcome = await asyncio.wait_for(waiting, 120)
    assert outcome.value == 1.0


async def test_without_workers_there_is_a_timeout_and_no_zero(
    make: MakeReward, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "JOB_MARGIN_S", 1)
    monkeypatch.setattr(sandbox, "QUEUE_S", 0.5)
    with pytest.raises(AttemptError, match="no sandbox worker had a result") as caught:
        await make(total_s=0.5).score(sample(DOUBLES))
    assert caught.value.is_timeout


async def test_a_result_is_there_for_whoever_asks_again(
    make: MakeReward, start: Callable[..., Any], redis: str
) -> None:
    worker = start()
    first = await make().score(sample(DOUBLES))
    worker.kill()
    worker.wait()
    another = make()  # as after the death of a reward worker
    assert await asyncio.wait_for(another.score(sample(DOUBLES)), 120) == first


async def test_a_run_without_sandboxes_is_said_in_words(redis: str, start: Any, tmp_path: Path) -> None:
    broker = await Broker.connect(redis)
    await publish_config(broker, KEYS, make_config(run_id=KEYS.run_id))
    await broker.close()
    worker = start()
    assert await asyncio.to_thread(worker.wait, 120) == 2
    said = (tmp_path / "sandbox-0.log").read_text()
    assert "no reward of kind sandbox" in said
    assert "Traceback" not in said


def _jail_below(pid: int) -> bool:
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "-ISBc" in child.cmdline():
                return True
    return False
