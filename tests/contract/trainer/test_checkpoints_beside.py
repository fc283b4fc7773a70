"""A checkpoint that is still being written while steps go on: it counts for nothing before it is whole."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.training import answering, num_commits
from tests.support.waiting import wait_until
from tests.support.whole_trainer import GROUPS, assert_trained_once, has_commits, run
from tidemill.common.files import StorageError
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.wire.keys import Keys
from tidemill.services.trainer.durable.checkpoint import CheckpointStore, TrainerState

STEPS, EVERY, HELD = 10, 2, 4
"""The checkpoint of version 4 is held up; the one before it is of version 2."""


OPTIONS: dict[str, Any] = {"steps": STEPS, "checkpoint_every": EVERY, "keep_checkpoints": 1}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the disk does with one checkpoint: waits, then takes it or not."""
    gate = SimpleNamespace(opened=threading.Event(), is_held=threading.Event(), error=None)
    save = CheckpointStore.save

    def held(store: CheckpointStore, state: TrainerState, write: Any) -> Any:
        if state.version == HELD and not gate.opened.is_set():
            gate.is_held.set()
            assert gate.opened.wait(60)
            if gate.error is not None:
                raise gate.error
        return save(store, state, write)

    monkeypatch.setattr(CheckpointStore, "save", held)
    return gate


async def until_it_waits(context: ServiceContext, broker: Broker, keys: Keys) -> None:
    """Steps go on until the next checkpoint is due, and the trainer says what it waits for."""
    await wait_until(lambda: has_commits(broker, keys, HELD + EVERY))
    await wait_until(lambda: context.activity.state == "checkpoint")
    assert await num_commits(broker, keys) == HELD + EVERY


async def first_ticket(broker: Broker, keys: Keys) -> int:
    ((entry_id, _), *_) = await broker.execute("XRANGE", keys.prompts(), "-", "+", "COUNT", 1)
    return int(entry_id.split(b"-")[0]) - 1


async def test_steps_go_on_and_the_next_checkpoint_waits(make, gate, broker, keys):
    context = make(trims=True, **OPTIONS)
    store = context.run_dir / "checkpoints"
    async with answering(broker, keys):
        serving = asyncio.ensure_future(run(context))
        await until_it_waits(context, broker, keys)
        assert [path.name for path in store.glob("v*")] == ["v00000002"]
        # Nothing that the checkpoint before it needs is gone.
        assert await first_ticket(broker, keys) <= 2 * GROUPS
        gate.opened.set()
        await serving
    assert [path.name for path in store.glob("v*")] == [f"v{STEPS:08}"]
    assert not await broker.execute("XLEN", keys.prompts())


@pytest.mark.parametrize("trims", [False, True])
async def test_a_trainer_that_dies_with_one_pending_goes_on_from_the_one_before(
    make, gate, broker, keys, trims
):
    """All its records are there: what is committed is replayed bit by bit."""
    context = make(trims=trims, **OPTIONS)
    async with answering(broker, keys):
        serving = asyncio.ensure_future(run(context))
        await until_it_waits(context, broker, keys)
        gate.error = InterruptedError("the process is gone")
        serving.cancel()
        gate.opened.set()
        await asyncio.gather(serving, return_exceptions=True)
        assert CheckpointStore(context.run_dir, 1).versions() == [2]
        with capture_logs() as logs:
            await run(make(trims=trims, **OPTIONS))
    replayed = [line["event"] for line in logs if line["event"].startswith("step replayed")]
    assert replayed == ["step replayed, same weights"] * (HELD + EVERY - 2)
    assert await num_commits(broker, keys) == STEPS
    if not trims:
        await assert_trained_once(broker, keys, STEPS)


async def test_a_full_disk_stops_nothing_before_the_next_checkpoint(make, gate, broker, keys):
    context = make(trims=True, **OPTIONS)
    gate.error = StorageError("a checkpoint", context.run_dir, 28, "No space left on device")
    async with answering(broker, keys):
        serving = asyncio.ensure_future(run(context))
        await asyncio.to_thread(gate.is_held.wait, 60)
        await wait_until(lambda: has_commits(broker, keys, HELD + 1))
        gate.opened.set()
        await serving
    assert CheckpointStore(context.run_dir, 1).versions() == [STEPS]


async def test_what_waiting_cannot_cure_ends_the_trainer_and_the_run_can_go_on(make, gate, broker, keys):
    context = make(trims=True, **OPTIONS)
    gate.error = StorageError("a checkpoint", context.run_dir, 20, "Not a directory")
    async with answering(broker, keys):
        serving = asyncio.ensure_future(run(context))
        await asyncio.to_thread(gate.is_held.wait, 60)
        gate.opened.set()
        with pytest.raises(StorageError, match=r"cannot write a checkpoint to .*: Not a directory"):
            await serving
        await run(make(trims=True, **OPTIONS))
    assert await num_commits(broker, keys) == STEPS


async def test_a_trainer_that_is_asked_to_stop_writes_it_first(make, gate, broker, keys):
    context = make(trims=True, **OPTIONS)
    async with answering(broker, keys):
        serving = asyncio.ensure_future(run(context))
        await until_it_waits(context, broker, keys)
        context.stopping.set()
        gate.opened.set()
        await serving
        assert CheckpointStore(context.run_dir, 1).versions() == [HELD + EVERY]
        await run(make(trims=True, **OPTIONS))
    assert await num_commits(broker, keys) == STEPS
