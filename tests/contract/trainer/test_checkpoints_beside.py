"""A checkpoint that is still being written while steps go on: it counts for nothing before it is whole."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.training import answering, num_commits, replayed_digests
from tests.support.waiting import wait_until
from tests.support.whole_trainer import GROUPS, assert_trained_once, has_commits, run
from tidemill.common.files import StorageError
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.wire.keys import Keys
from tidemill.services.trainer.durable.checkpoint import CheckpointStore, TrainerState
from tidemill.services.trainer.policy.simulated_policy import SimulatedPolicy

STEPS, EVERY, HELD = 10, 2, 4
"""The checkpoint of version 4 is held up; the one before it is of version 2."""


class Gate:
    """What the disk does with one checkpoint: waits, then takes it or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.is_held = threading.Event(), threading.Event()
        self.error: Exception | None = None
        save = CheckpointStore.save

        def held(store: CheckpointStore, state: TrainerState, write: Any) -> Any:
            if state.version == HELD and not self.opened.is_set():
                self.is_held.set()
                assert self.opened.wait(60)
                if self.error is not None:
                    raise self.error
            return save(store, state, write)

        monkeypatch.setattr(CheckpointStore, "save", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def make_context(make: Callable[..., ServiceContext]) -> Callable[[], ServiceContext]:
    return lambda: make(STEPS, trims=True, checkpoint_every=EVERY, keep_checkpoints=1)


async def until_it_waits(context: ServiceContext, broker: Broker, keys: Keys) -> None:
    """Steps go on until the next checkpoint is due, and the trainer says what it waits for."""
    await wait_until(lambda: has_commits(broker, keys, HELD + EVERY))
    await wait_until(lambda: context.activity.state == "checkpoint")
    assert await num_commits(broker, keys) == HELD + EVERY


async def first_ticket(broker: Broker, keys: Keys) -> int:
    ((entry_id, _), *_) = await broker.execute("XRANGE", keys.prompts(), "-", "+", "COUNT", 1)
    return int(entry_id.split(b"-")[0]) - 1


async def test_steps_go_on_and_the_next_checkpoint_waits(make_context, gate, broker, keys):
    context = make_context()
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


async def test_a_trainer_that_dies_with_one_pending_goes_on_from_the_one_before(make, gate, broker, keys):
    """All its records are there: what is committed is replayed bit by bit."""
    # Nothing is trimmed, so that the whole run can be trained again at the end.
    options: dict[str, Any] = {"steps": STEPS, "checkpoint_every": EVERY, "keep_checkpoints": 1}
    context = make(**options)
    async with answering(broker, keys):
        serving = asyncio.ensure_future(run(context))
        await until_it_waits(context, broker, keys)
        gate.error = InterruptedError("the process is gone")
        serving.cancel()
        gate.opened.set()
        await asyncio.gather(serving, return_exceptions=True)
        assert CheckpointStore(context.run_dir, 1).versions() == [2]
        await run(make(**options))
    commits = await assert_trained_once(broker, keys, STEPS)
    digests = await replayed_digests(broker, keys, context.config, SimulatedPolicy(context.config))
    assert [commit.digest for commit in commits] == digests


async def test_a_full_disk_stops_nothing_before_the_next_checkpoint(make_context, gate, broker, keys):
    context = make_context()
    gate.error = StorageError("a checkpoint", context.run_dir, 28, "No space left on device")
    async with answering(broker, keys):
        serving = asyncio.ensure_future(run(context))
        await asyncio.to_thread(gate.is_held.wait, 60)
        await wait_until(lambda: has_commits(broker, keys, HELD + 1))
        gate.opened.set()
        await serving
    assert CheckpointStore(context.run_dir, 1).versions() == [STEPS]


async def test_what_waiting_cannot_cure_ends_the_trainer_and_the_run_can_go_on(
    make_context, gate, broker, keys
):
    context = make_context()
    gate.error = StorageError("a checkpoint", context.run_dir, 20, "Not a directory")
    async with answering(broker, keys):
        serving = asyncio.ensure_future(run(context))
        await asyncio.to_thread(gate.is_held.wait, 60)
        gate.opened.set()
        with pytest.raises(StorageError, match=r"cannot write a checkpoint to .*: Not a directory"):
            await serving
        await run(make_context())
    assert await num_commits(broker, keys) == STEPS


async def test_a_trainer_that_is_asked_to_stop_writes_it_first(make_context, gate, broker, keys):
    context = make_context()
    async with answering(broker, keys):
        serving = asyncio.ensure_future(run(context))
        await until_it_waits(context, broker, keys)
        context.stopping.set()
        gate.opened.set()
        await serving
        assert CheckpointStore(context.run_dir, 1).versions() == [HELD + EVERY]
        await run(make_context())
    assert await num_commits(broker, keys) == STEPS
