"""What the trainer leaves on the disk and in Redis: never half of it, never more than is needed."""

import asyncio
import builtins
import errno
import io
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.training import answering, messages, num_commits, replayed_digests
from tests.support.waiting import wait_until
from tests.support.whole_trainer import (
    GROUPS,
    assert_trained_once,
    crash_after_commit,
    has_commits,
    run,
)
from tidemill.common.config import RunConfig
from tidemill.common.files import StorageError
from tidemill.common.redis.broker import Broker
from tidemill.common.run.weight_files import verified_files
from tidemill.common.streams import id_order, last_id
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import WeightManifest
from tidemill.services.trainer.durable import waiting
from tidemill.services.trainer.durable.checkpoint import CheckpointStore
from tidemill.services.trainer.durable.checkpointing import Checkpointer
from tidemill.services.trainer.durable.commits import JOURNAL_FILE
from tidemill.services.trainer.policy.simulated_policy import SimulatedPolicy
from tidemill.services.trainer.weights.store import WeightStore


async def test_a_full_disk_is_waited_out_and_can_be_stopped(make, broker, keys, monkeypatch):
    """A step whose weights cannot be written is not announced; no step is committed after it."""
    context = make()
    begin = WeightStore.begin

    def full(store: WeightStore, version: int, *rest: Any) -> Any:
        if version == 2:
            context_loop.call_soon_threadsafe(context.stopping.set)
            raise StorageError("the weights", store.folder, 28, "No space left on device")
        return begin(store, version, *rest)

    context_loop = asyncio.get_running_loop()
    async with answering(broker, keys):
        with monkeypatch.context() as patch:
            patch.setattr(WeightStore, "begin", full)
            await run(context)
        assert await num_commits(broker, keys) == 2
        announced = await messages(broker, keys.weights, WeightManifest)
        assert [manifest.version for manifest in announced] == [0, 1]
        await run(make())
    commits = await assert_trained_once(broker, keys, 6)
    digests = await replayed_digests(broker, keys, context.config, SimulatedPolicy(context.config))
    assert [commit.digest for commit in commits] == digests


class FirstRefusals:
    """A disk that refuses each file and folder once: whatever is written there, at a start or later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder, self.refused = str(folder), set[str]()
        for owner, name in ((builtins, "open"), (io, "open"), (os, "mkdir")):
            self._watch(monkeypatch, owner, name, getattr(owner, name))

    def _watch(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, real: Any) -> None:
        def watched(path: Any, *args: Any, **options: Any) -> Any:
            mode = options.get("mode", args[0] if args else "r")
            if name == "mkdir" or (isinstance(mode, str) and mode.strip("bt") != "r"):
                self._refuse(str(path))
            return real(path, *args, **options)

        monkeypatch.setattr(owner, name, watched)

    def _refuse(self, path: str) -> None:
        place = re.sub("[0-9a-f]{8}.aside", "aside", path)
        if path.startswith(self.folder) and place not in self.refused:
            self.refused.add(place)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


async def test_a_trainer_that_starts_on_a_full_disk_waits_for_it_wherever_it_writes(
    make, broker, keys, monkeypatch
):
    monkeypatch.setattr(waiting, "FIRST_PAUSE_S", 0.01)
    options: dict[str, Any] = {"archives": True, "checkpoint_every": 2}
    async with answering(broker, keys):
        await crash_after_commit(make(**options), 3)
        context = make(**options)
        with monkeypatch.context() as patch:
            disk = FirstRefusals(patch, context.run_dir)
            await run(context)
    names = {Path(place).name for place in disk.refused}
    assert {"trainer.lock", ".lock", JOURNAL_FILE, "metrics.jsonl"} <= names
    await assert_trained_once(broker, keys, 6)


async def test_an_older_checkpoint_can_still_be_restored_after_a_stop(make, broker, keys, monkeypatch):
    """A stop right after a checkpoint writes it once more; that does not make the one before dispensable."""
    context = make(steps=12, trims=True)
    begin = Checkpointer.begin

    async def begin_and_stop(checkpointer: Checkpointer, version: int, *rest: Any) -> None:
        await begin(checkpointer, version, *rest)
        if version == 8:
            context.stopping.set()

    async with answering(broker, keys):
        with monkeypatch.context() as patch:
            patch.setattr(Checkpointer, "begin", begin_and_stop)
            await run(context)
        store = CheckpointStore(context.run_dir, keep=2)
        assert store.versions() == [4, 8]
        (store.folder / "v00000008" / "checkpoint.json").write_text("torn")
        await run(make(steps=12, trims=True))
    assert await num_commits(broker, keys) == 12


async def test_weights_that_were_announced_stay_as_the_workers_know_them(make, broker, keys, monkeypatch):
    """A replay that is not exact must not change the bytes under a manifest that is out already."""
    async with answering(broker, keys):
        serving = asyncio.ensure_future(run(make(steps=100, max_staleness=0)))
        await wait_until(lambda: has_commits(broker, keys, 2))
    await wait_until(lambda: _is_at_rest(broker, keys))
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    for folder in (make().run_dir / "checkpoints").glob("v*"):
        shutil.rmtree(folder)

    def start_elsewhere(policy: SimulatedPolicy, config: RunConfig) -> None:
        initialise(policy, config)
        policy._chain = b"elsewhere elsew."

    initialise = SimulatedPolicy.__init__
    monkeypatch.setattr(SimulatedPolicy, "__init__", start_elsewhere)
    context = make(steps=100, max_staleness=0)
    serving = asyncio.ensure_future(run(context))
    await wait_until(lambda: context.activity.state in ("wait:trajectories", "wait:scores"))
    newest = (await messages(broker, keys.weights, WeightManifest))[-1]
    assert newest.version >= 2
    assert verified_files(context.run_dir, newest)
    context.stopping.set()
    await serving


async def test_memory_does_not_grow_with_the_steps(make, broker, keys):
    """Streams are trimmed below the oldest kept checkpoint; commits stay."""
    context = make(steps=40, trims=True, checkpoint_every=4, keep_checkpoints=1)
    async with answering(broker, keys):
        await run(context)
    lengths = {
        key: await broker.execute("XLEN", key)
        for key in (keys.prompts(), keys.trajectories(), keys.scores(), keys.weights)
    }
    assert await num_commits(broker, keys) == 40
    assert lengths[keys.prompts()] <= 2
    assert max(lengths[keys.trajectories()], lengths[keys.scores()]) <= 2
    assert lengths[keys.weights] <= 1 + context.config.trainer.keep_weights
    assert await broker.execute("KEYS", keys.progress(0).replace(":0", ":*")) == []


async def _is_at_rest(broker: Broker, keys: Keys) -> bool:
    """Nobody answers any more, and everything that was answered is trained and announced."""
    tickets = await broker.execute("XLEN", keys.prompts())
    num_announced = id_order(await last_id(broker, keys.weights))[0] - 1
    return num_announced == await num_commits(broker, keys) == tickets / GROUPS - 1


async def test_streams_are_trimmed_also_where_no_trainer_lives_for_two_checkpoints(make, broker, keys):
    """What a restarted trainer finds on the disk counts as kept, or memory would grow with every crash."""
    options = {"steps": 20, "trims": True, "checkpoint_every": 4, "keep_checkpoints": 2}
    async with answering(broker, keys):
        for step in (5, 9, 13):
            await crash_after_commit(make(**options), step)
    (first, _), *_ = await broker.execute("XRANGE", keys.prompts(), "-", "+", "COUNT", 1)
    assert id_order(first.decode())[0] > 8 * GROUPS, "the checkpoints of versions 8 and 12 are kept"
