"""The reward service as processes: scores flow, stopping loses nothing, dying loses nothing."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
import pytest

from tests.support.preloaded import Process, start_module
from tests.support.reward_worker import num_pending
from tests.support.training import messages
from tests.support.trajectories import make_config, make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.errors import ConfigError
from tidemill.common.process.checks import check_reward
from tidemill.common.process.heartbeats import read_heartbeats
from tidemill.common.redis.broker import URL_VARIABLE, Broker
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.run.state import publish_config
from tidemill.common.streams import append
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import DeadLetter, Score, ScoreStatus

KEYS = Keys("rewarded")


class Service:
    """One `python -m tidemill.services.reward`."""

    def __init__(self, process: Process, log: Path) -> None:
        self.process, self.log = process, log

    async def ends(self) -> int:
        """Its exit code."""
        return await asyncio.to_thread(self.process.wait, 120)

    @property
    def stderr(self) -> str:
        return self.log.read_text(errors="replace")


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    """A connection to a Redis of the test's own, whose address the services get."""
    server = EmbeddedRedis(tmp_path / "redis")
    server.start()
    broker = await Broker.connect(server.url)
    broker.url = server.url  # type: ignore[attr-defined]
    yield broker
    await broker.close()
    server.stop()


@pytest.fixture
async def start(broker: Broker, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Start a worker by name; what still runs at the end is killed."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(name: str = "w1") -> Service:
            words, log = ["--run", KEYS.run_id, "--name", name], tmp_path / f"{name}.log"
            environment = {**os.environ, URL_VARIABLE: broker.url}  # type: ignore[attr-defined]
            process = start_module("tidemill.services.reward", words, log, environment)
            stack.callback(process.kill)
            return Service(process, log)

        yield start


@pytest.fixture
def reward(broker: Broker, tmp_path: Path) -> Callable[..., Any]:
    """Write a reward function and publish a run's config that uses it."""

    async def reward(source: str, streams: dict[str, Any] | None = None, **config: Any) -> None:
        path = tmp_path / "reward.py"
        path.write_text(dedent(source))
        section = {"function": f"{path}:compute_score", "backoff_s": 0.01, **config}
        await publish_config(
            broker, KEYS, make_config(run_id=KEYS.run_id, reward=section, streams=streams or {})
        )

    return reward


async def scores(broker: Broker) -> list[Score]:
    return await messages(broker, KEYS.scores(), Score)


async def has(broker: Broker, count: int) -> bool:
    return len(await scores(broker)) >= count


ASYNC = """
    import asyncio
    async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        await asyncio.sleep(float(solution_str))
        return {"score": 1.0, "slept": float(solution_str)}
"""
PLAIN = """
    import time, os
    from pathlib import Path
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        if solution_str == "hang":
            Path(ground_truth).write_text(str(os.getpid()))
            while True:
                pass
        return 1.0
"""


async def test_scores_flow_and_sigterm_drains(broker: Broker, start: Any, reward: Any) -> None:
    await reward(ASYNC)
    await append(broker, KEYS.trajectories(), *[make_trajectory(t, text="0.01") for t in range(50)])
    worker = await start()
    await wait_until(lambda: has(broker, 50))
    (beat,) = await wait_until(lambda: read_heartbeats(broker, KEYS))
    assert (beat.name, beat.role) == ("w1", "reward")
    await append(broker, KEYS.trajectories(), *[make_trajectory(t, text="1.5") for t in range(50, 60)])
    await wait_until(lambda: _pending(broker, 10))
    worker.process.send_signal(signal.SIGTERM)
    assert await worker.ends() == 0, worker.stderr
    made = await scores(broker)
    assert sorted(score.key for score in made) == [(t, 0) for t in range(60)]
    assert {score.components["slept"] for score in made} == {0.01, 1.5}
    assert await num_pending(broker, KEYS) == 0
    assert await read_heartbeats(broker, KEYS) == []


async def test_a_killed_worker_leaves_no_process_behind(
    broker: Broker, start: Any, reward: Any, tmp_path: Path
) -> None:
    await reward(PLAIN, timeout_s=3600.0)
    await append(
        broker, KEYS.trajectories(), make_trajectory(0, text="hang", ground_truth=str(tmp_path / "pid"))
    )
    worker = await start()
    pid = await wait_until(lambda: _read_number(tmp_path / "pid"))
    worker.process.kill()
    try:
        await wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def compute_score(text): return 1", "takes (text)"),
        ("import missing_module_of_test", "No module named 'missing_module_of_test'"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import os; print('x'); os._exit(3)", "its import ended Python"),
    ],
)
async def test_a_bad_function_ends_the_service_with_2_and_is_found_by_the_check(
    broker: Broker, start: Any, reward: Any, tmp_path: Path, source: str, expected: str
) -> None:
    await reward(source)
    with pytest.raises(ConfigError) as caught:
        check_reward(make_config(reward={"function": f"{tmp_path}/reward.py:compute_score"}))
    assert expected in str(caught.value) and "reward.py:compute_score" in str(caught.value)
    if expected == "SystemExit":  # the hardest to turn into an exit code of ours
        worker = await start()
        assert await worker.ends() == 2
        assert "Traceback" not in worker.stderr
        assert expected in worker.stderr and "reward.py:compute_score" in worker.stderr


async def _pending(broker: Broker, count: int) -> bool:
    return await num_pending(broker, KEYS) == count


def _read_number(path: Path) -> int:
    return int(path.read_text() or 0) if path.exists() else 0


async def test_a_reward_that_blocks_in_async_def_costs_no_lease_and_is_named(
    broker: Broker, start: Any, reward: Any
) -> None:
    await reward(
        """
        import time
        async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            time.sleep(0.2)  # as requests.post does
            return 1.0
        """,
        streams={"lease_s": 1.0},
    )
    await append(broker, KEYS.trajectories(), *[make_trajectory(ticket) for ticket in range(80)])
    workers = [await start(f"w{number}") for number in (1, 2)]

    async def is_named() -> bool:
        beats = await read_heartbeats(broker, KEYS)
        return any(
            "blocks its event loop" in beat.detail and "reward.py, line 4" in beat.detail for beat in beats
        )

    await wait_until(is_named)
    await wait_until(lambda: has(broker, 80))
    assert {score.status for score in await scores(broker)} == {ScoreStatus.OK}
    assert await broker.execute("XLEN", KEYS.dead) == 0
    for worker in workers:
        worker.process.terminate()
        assert await worker.ends() == 0
        assert "lease lost" not in worker.stderr
    assert any("blocks its event loop" in worker.stderr for worker in workers)


async def test_of_forty_samples_that_die_with_their_worker_only_the_one_to_blame_is_dead_lettered(
    broker: Broker, start: Any, reward: Any
) -> None:
    await reward(
        """
        import os, signal, time
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            time.sleep(0.1)
            if solution_str == "poison":
                os.kill(os.getppid(), signal.SIGKILL)  # the worker: as running out of memory does
            return 1.0
        """,
        streams={"lease_s": 0.5},
        processes=1,
        max_in_flight=40,
    )
    texts = ["poison" if ticket == 17 else "fine" for ticket in range(40)]
    await append(
        broker, KEYS.trajectories(), *[make_trajectory(i, text=text) for i, text in enumerate(texts)]
    )

    async def is_over(worker: Service) -> bool:
        return worker.process.poll() is not None or await broker.execute("XLEN", KEYS.dead) > 0

    for life in range(8):
        worker = await start(f"w{life}")
        await wait_until(partial(is_over, worker))
        if worker.process.poll() is None:
            break
    await wait_until(lambda: has(broker, 39))
    assert [letter.ticket for letter in await messages(broker, KEYS.dead, DeadLetter)] == [17]
    assert sorted(score.ticket for score in await scores(broker)) == [i for i in range(40) if i != 17]
