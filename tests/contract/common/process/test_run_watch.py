"""A worker notices that its run has ended, and leaves one that nobody continues."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.servers import RedisServer
from tests.support.waiting import wait_until
from tidemill.common.process import run_watch
from tidemill.common.process.heartbeats import Heartbeat, publish_heartbeat, remove_heartbeat
from tidemill.common.process.run_watch import RunWatch
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import update_state
from tidemill.common.wire.keys import Keys

STEPS = 4


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_watch, "LOOK_S", 0.01)


async def until_trouble(watch: RunWatch) -> "asyncio.Task[str]":
    """The watching as a task, once it has noticed that the run does not go on."""
    watching = asyncio.create_task(watch.until_over())
    await wait_until(lambda: watch.trouble)
    return watching


async def test_a_finished_run_is_left_at_once(broker: Broker, keys: Keys) -> None:
    await update_state(broker, keys, status="finished", version=STEPS)
    assert await RunWatch(broker, keys, STEPS, wait_s=1e9).until_over() == "the run is finished"


async def test_a_run_with_more_steps_to_do_is_not_finished(broker: Broker, keys: Keys) -> None:
    await update_state(broker, keys, status="finished", version=STEPS)
    assert not await RunWatch(broker, keys, STEPS + 1).look()


@pytest.mark.parametrize("status", ["running", "failed", "stopped"])
async def test_a_run_without_a_trainer_is_left_after_a_while(broker: Broker, keys: Keys, status: str) -> None:
    await update_state(broker, keys, status=status, version=1)
    why = await RunWatch(broker, keys, STEPS, wait_s=0.05).until_over()
    assert why.startswith(f"the run is {status} and has no trainer") and "TIDEMILL_RESUME_WAIT_S" in why


async def test_a_run_that_goes_on_is_not_left(broker: Broker, keys: Keys) -> None:
    await update_state(broker, keys, status="stopped", version=1)
    watch = RunWatch(broker, keys, STEPS, wait_s=1e9)
    watching = await until_trouble(watch)
    before = watch.alive_at
    beat = Heartbeat("trainer", "trainer")
    await publish_heartbeat(broker, keys, beat)
    await wait_until(lambda: not watch.trouble)
    assert watch.alive_at > before and not watching.done()
    await remove_heartbeat(broker, keys, beat)
    await update_state(broker, keys, status="finished", version=STEPS)
    assert await watching == "the run is finished"


@pytest.mark.parametrize("state", [{}, {"status": "starting"}, {"status": "running", "kind": "rescore"}])
async def test_a_run_that_needs_no_trainer_now_is_not_left(
    broker: Broker, keys: Keys, state: dict[str, Any]
) -> None:
    await update_state(broker, keys, version=1, **state)
    watch = RunWatch(broker, keys, STEPS, wait_s=0.0)
    assert not await watch.look() and not watch.trouble


async def test_a_run_of_rewards_alone_that_has_failed_waits_for_who_goes_on_with_it(
    broker: Broker, keys: Keys
) -> None:
    await update_state(broker, keys, status="failed", kind="rescore")
    watch = RunWatch(broker, keys, STEPS, wait_s=1e9)
    with capture_logs() as lines:
        for _ in range(3):
            assert not await watch.look()
    assert "failed" in watch.trouble
    assert [line["why"] for line in lines] == [watch.trouble], "a look that finds the same says nothing"


async def test_a_run_whose_redis_is_gone_is_left_after_a_while(
    tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_watch, "SILENT_S", 0.02)
    server = RedisServer(tmp_path)
    server.start()
    broker = await Broker.connect(server.url)
    try:
        await update_state(broker, keys, status="starting")
        watch = RunWatch(broker, keys, STEPS, wait_s=0.05)
        assert not await watch.look()
        server.kill()
        assert (await watch.until_over()).startswith("its Redis has not answered")
    finally:
        server.kill()
        await broker.close()
