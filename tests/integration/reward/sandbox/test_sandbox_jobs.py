"""Code rewards from end to end: reward, RQ queue, workers; their deaths lose nothing and fake nothing."""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.rewards import code_reward, make_sample
from tests.support.runs import ServiceRun
from tests.support.trajectories import make_config
from tests.support.waiting import PATIENCE_S, wait_until
from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.redis.blocking_client import make_blocking_client
from tidemill.common.redis.broker import URL_VARIABLE
from tidemill.common.run.state import publish_config
from tidemill.services.reward.outcome import AttemptError
from tidemill.services.reward.rewards import sandbox
from tidemill.services.reward.rewards.sandbox import SandboxReward, extract_code
from tidemill.services.reward.sample import RewardSample

CONFIG = SandboxConfig(time_s=30.0, total_s=60.0)
TESTS = {"inputs": ["1", "2"], "outputs": ["2", "4"]}
DOUBLES = "Here it is:\n```python\nprint(int(input()) * 2)\n```\nDone."


def sample(text: str, tests: Any = TESTS, number: int = 0) -> RewardSample:
    return make_sample((number, 0), False, "code", text, tests)


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ServiceRun]:
    config = make_config(run_id="test", reward={"rewards": {"code": {"sandbox": CONFIG.model_dump()}}})
    async with ServiceRun(tmp_path, config, is_forked=False) as run:
        monkeypatch.setenv(URL_VARIABLE, run.url)
        yield run


@pytest.fixture
async def make(run: ServiceRun) -> AsyncIterator[Callable[..., SandboxReward]]:
    async with contextlib.AsyncExitStack() as stack:

        def make(**changes: Any) -> SandboxReward:
            reward = code_reward(run.broker, run.keys, CONFIG.model_copy(update=changes))
            stack.push_async_callback(reward.close)
            return reward

        yield make


@pytest.fixture
def start(run: ServiceRun, isolated: None) -> Any:
    """Start a sandbox worker."""
    return lambda name="sandbox-0": run.start("reward.sandbox", name)


def test_code_is_taken_from_its_fence() -> None:
    assert extract_code("a\n```python\nx = 1\n```\nb\n```py\nx = 2\n```\n```\nno\n```") == "x = 2\n"
    assert extract_code("a\n```\nx = 1\n```") == "x = 1\n"
    assert extract_code("```python\nx = 1") == "x = 1\n"[:-1]
    assert extract_code("x = 1") == "x = 1"


@pytest.mark.parametrize("text", [
    "~~~python\nx = 1\n~~~", "````python\nx = 1\n````", "```{.python}\nx = 1\n```",
    '```python title="a.py"\nx = 1\n```',
    "1. So:\n   ```python\n   x = 1\n   ```", "> ```python\n> x = 1\n> ```",
    "```python\nx = 0``` first, then ```python\nx = 1\n```",
    "````text\n```python\nx = 0\n```\n````\n```python\nx = 1\n```",
    "<answer>x = 0</answer> no: <answer>\nx = 1\n</answer>",
])  # fmt: skip
def test_code_is_taken_from_any_kind_of_block(text: str) -> None:
    assert extract_code(text).strip() == "x = 1"


def test_backticks_in_a_line_of_code_do_not_end_it() -> None:
    assert extract_code("```python\n# in ``` marks\nx = 1\n```") == "# in ``` marks\nx = 1\n"


async def test_code_is_scored_by_the_workers_of_its_run(make, start, run):
    start()
    reward = make()
    fraction = make(score="fraction")
    wrong = "```python\nn = int(input())\nprint(2)\n```"
    outcomes = await asyncio.gather(
        *(reward.score(sample(DOUBLES, number=n)) for n in range(8)),
        reward.score(sample(wrong)),
        fraction.score(sample(wrong)),
        reward.score(sample("```python\n\n```")),
    )
    assert [outcome.value for outcome in outcomes] == [1.0] * 8 + [0.0, 0.5, 0.0]
    assert outcomes[8].detail["sandbox"]["first_failure"]["stdout"] == "2\n"
    with pytest.raises(AttemptError, match="ground truth") as caught:
        await reward.score(sample(DOUBLES, tests={"inputs": [1]}))
    assert caught.value.is_final and caught.value.is_code_error
    await run.stop_all("sandbox-0")


RAN = {"passed": 1, "total": 1, "outcomes": ["done"], "wall_s": 0.1, "first_failure": None}


@pytest.mark.parametrize("written", [
    b"garbage", b"\xff", b"[" * 100_000, b"[1]", b"{}",
    *(json.dumps(RAN | change).encode() for change in (
        {"passed": 2}, {"total": 0}, {"wall_s": math.nan}, {"first_failure": {"code": 1 << 64}},
    )),
])  # fmt: skip
async def test_a_result_that_cannot_be_read_fails_one_attempt_and_no_other(make, run, written):
    """Whoever has the password of a sandbox worker may write it."""
    reward = make()
    with make_blocking_client(run.url) as hostile:

        async def answered(code: str, answer: bytes) -> Any:
            running = asyncio.create_task(reward.run(code, TESTS))
            await wait_until(lambda: hostile.keys("rq:job:*"))
            key = hostile.keys("rq:job:*")[0].decode()
            hostile.set(run.keys.sandbox_result(key.removeprefix("rq:job:")), answer)
            try:
                return await asyncio.wait_for(running, 30)
            finally:
                hostile.delete(key)

        with pytest.raises(AttemptError, match="cannot be read"):
            await answered("print(1)", written)
        assert (await answered("print(2)", json.dumps(RAN).encode()))["passed"] == 1


async def test_a_run_killed_with_its_worker_is_done_by_another(make, start, monkeypatch):
    monkeypatch.setattr(sandbox, "LOST_S", 6.0)
    first = start("first")
    waiting = asyncio.create_task(make().score(sample("import time\ntime.sleep(3)\nprint(int(input()) * 2)")))
    await wait_until(lambda: _jail_below(first.pid))
    worker = psutil.Process(first.pid)
    for process in [worker, *worker.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended with the one before
            process.kill()
    start("second")
    assert (await asyncio.wait_for(waiting, PATIENCE_S)).value == 1.0


async def test_without_workers_there_is_a_timeout_and_no_zero(make, monkeypatch):
    monkeypatch.setattr(sandbox, "JOB_MARGIN_S", 1)
    monkeypatch.setattr(sandbox, "QUEUE_S", 0.5)
    with pytest.raises(AttemptError) as caught:
        await make(total_s=0.5).score(sample(DOUBLES))
    assert caught.value.is_timeout


async def test_a_result_is_there_for_whoever_asks_again(make, start, run):
    start()
    first = await make().score(sample(DOUBLES))
    run.kill("sandbox-0")
    another = make()  # as after the death of a reward worker
    assert await asyncio.wait_for(another.score(sample(DOUBLES)), PATIENCE_S) == first


async def test_a_run_without_sandboxes_is_said_in_words(run, start):
    await publish_config(run.broker, run.keys, make_config(run_id="test"))
    start()
    assert await run.wait("sandbox-0") == 2
    said = run.log_of("sandbox-0")
    assert "no reward of kind sandbox" in said and "Traceback" not in said


def _jail_below(pid: int) -> bool:
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "-ISBc" in child.cmdline():
                return True
    return False
