"""A trainer whose disk is full, slow or damages what it has kept: never half of a file, never more than is
needed, and it goes on from what is whole."""

import asyncio
import builtins
import errno
import io
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.training import commits_of, messages, num_commits, replayed_digests
from tests.support.waiting import wait_until
from tests.support.whole_trainer import (
    GROUPS,
    assert_each_once,
    assert_trained_once,
    crash_after_commit,
    has_commits,
    run,
)
from tidemill.common.errors import TidemillError
from tidemill.common.files import StorageError
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import EVALUATION, METRICS_FILE, STEP, read_records
from tidemill.common.streams import id_order
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import WeightManifest
from tidemill.services.trainer.durable import waiting
from tidemill.services.trainer.durable.checkpoint import CheckpointError, CheckpointStore
from tidemill.services.trainer.durable.checkpointing import Checkpointer
from tidemill.services.trainer.durable.commits import JOURNAL_FILE
from tidemill.services.trainer.policy.simulated_policy import SimulatedPolicy
from tidemill.services.trainer.service import serve
from tidemill.services.trainer.weights.store import WeightStore

pytestmark = pytest.mark.usefixtures("answers")


def versions(context: ServiceContext) -> list[int]:
    """Those that have a checkpoint."""
    return CheckpointStore(context.run_dir, 2).versions()


def tear_newest(run_dir: Path) -> int:
    """Cut the newest checkpoint's tensors off; returns its version."""
    store = CheckpointStore(run_dir, keep=2)
    version = store.versions()[-1]
    files = [path for path in (store.folder / f"v{version:08d}").iterdir() if path.suffix != ".json"]
    tensors = max(files, key=lambda path: path.stat().st_size)
    tensors.write_bytes(tensors.read_bytes()[:-1])
    return version


class TestDamage:
    async def test_two_damaged_checkpoints_one_after_the_other_do_not_end_a_run(self, make, broker, keys):
        """Streams are trimmed meanwhile: only below what the oldest whole checkpoint needs."""
        options = {"checkpoint_every": 1, "keep_checkpoints": 2, "trims": True, "steps": 8}
        await crash_after_commit(make(**options), 3)
        first = tear_newest(make(**options).run_dir)
        await crash_after_commit(make(**options), 5)
        assert tear_newest(make(**options).run_dir) > first
        await run(make(**options))
        assert_each_once(await commits_of(broker, keys), 8)

    async def test_the_only_checkpoint_is_not_needed_while_the_streams_hold_everything(
        self, make, broker, keys
    ):
        options = {"checkpoint_every": 2, "keep_checkpoints": 2, "trims": True}
        await crash_after_commit(make(**options), 2)
        assert tear_newest(make(**options).run_dir) == 2
        await run(make(**options))
        assert_each_once(await commits_of(broker, keys), 6)

    async def test_streams_that_were_trimmed_are_no_place_to_start_over(self, make, broker, keys):
        options = {"checkpoint_every": 1, "keep_checkpoints": 1, "trims": True}
        await crash_after_commit(make(**options), 3)
        tear_newest(make(**options).run_dir)
        with pytest.raises(CheckpointError):
            await run(make(**options))
        assert await num_commits(broker, keys) == 4

    async def test_metrics_that_someone_has_emptied_come_back_from_the_commits(self, make, broker, keys):
        context = make(has_eval=True)
        await crash_after_commit(context, 4)
        path = context.run_dir / METRICS_FILE
        (before,) = [record for record in read_records(path) if record["kind"] == EVALUATION]
        path.write_bytes(b"")
        await run(make(has_eval=True))
        records = read_records(path)
        after = [record for record in records if record["kind"] == EVALUATION]
        assert after[0] == before and [record["version"] for record in after] == [0, 6]
        rewards = {record["step"]: record["reward"] for record in records if record["kind"] == STEP}
        commits = await commits_of(broker, keys)
        assert rewards == {commit.step: commit.metrics["reward"] for commit in commits}

    async def test_a_commit_whose_records_are_gone_is_said_without_waiting(self, make, broker, keys):
        """Everything was read: nothing more can come that was there when the step was committed."""
        await crash_after_commit(make(), 1)
        await broker.execute("DEL", keys.trajectories())
        with pytest.raises(TidemillError, match="step 0 was committed, but"):
            await asyncio.wait_for(serve(make()), 30.0)


class FirstRefusals:
    """A disk that refuses each file and folder once: whatever is written there, at a start or later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder = str(folder)
        self.refused: set[str] = set()
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
        name = re.sub("[0-9a-f]{8}.aside", "aside", path)
        if path.startswith(self.folder) and name not in self.refused:
            self.refused.add(name)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


class TestFullDisk:
    async def test_it_is_waited_out_and_can_be_stopped(self, make, broker, keys, monkeypatch):
        """A step whose weights cannot be written is not announced; no step is committed after it."""
        context = make()
        begin = WeightStore.begin
        loop = asyncio.get_running_loop()

        def full(store, version, *arguments):
            if version == 2:
                loop.call_soon_threadsafe(context.stopping.set)
                raise StorageError("the weights", store.folder, 28, "No space left on device")
            return begin(store, version, *arguments)

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

    @pytest.mark.parametrize("crashed_after", [0, 3])
    async def test_a_trainer_that_starts_waits_for_it_wherever_it_writes(
        self, make, broker, keys, monkeypatch, crashed_after
    ):
        monkeypatch.setattr(waiting, "FIRST_PAUSE_S", 0.01)
        options: dict[str, Any] = {"archives": True, "checkpoint_every": 2}
        if crashed_after:
            await crash_after_commit(make(**options), crashed_after)
        context = make(**options)
        with monkeypatch.context() as patch:
            disk = FirstRefusals(patch, context.run_dir)
            await run(context)
        names = {Path(path).name for path in disk.refused}
        assert {"trainer.lock", ".lock", JOURNAL_FILE, "metrics.jsonl"} <= names
        await assert_trained_once(broker, keys, 6)


class TestWhatIsKept:
    async def test_an_older_checkpoint_can_still_be_restored_after_a_stop(
        self, make, broker, keys, monkeypatch
    ):
        """A stop right after a checkpoint writes it once more; the one before stays needed."""
        context = make(steps=12, trims=True)
        begin = Checkpointer.begin

        async def begin_and_stop(checkpointer, version, *arguments):
            await begin(checkpointer, version, *arguments)
            if version == 8:
                context.stopping.set()

        with monkeypatch.context() as patch:
            patch.setattr(Checkpointer, "begin", begin_and_stop)
            await run(context)
        assert versions(context) == [4, 8]
        (context.run_dir / "checkpoints" / "v00000008" / "checkpoint.json").write_text("torn")
        await run(make(steps=12, trims=True))
        assert await num_commits(broker, keys) == 12

    async def test_memory_does_not_grow_with_the_steps(self, make, broker, keys):
        """Streams are trimmed below the oldest kept checkpoint; commits stay."""
        context = make(steps=40, trims=True, checkpoint_every=4, keep_checkpoints=1)
        await run(context)
        assert await num_commits(broker, keys) == 40
        for key in (keys.prompts(), keys.trajectories(), keys.scores()):
            assert await broker.execute("XLEN", key) <= 2
        assert await broker.execute("XLEN", keys.weights) <= 1 + context.config.trainer.keep_weights
        assert await broker.execute("KEYS", keys.progress(0).replace(":0", ":*")) == []

    async def test_streams_are_trimmed_also_where_no_trainer_lives_for_two_checkpoints(
        self, make, broker, keys
    ):
        """What a restarted trainer finds on the disk counts as kept, or memory would grow with crashes."""
        options = {"steps": 20, "trims": True, "checkpoint_every": 4, "keep_checkpoints": 2}
        for step in (5, 9, 13):
            await crash_after_commit(make(**options), step)
        (first, _), *_ = await broker.execute("XRANGE", keys.prompts(), "-", "+", "COUNT", 1)
        assert id_order(first.decode())[0] > 8 * GROUPS, "the checkpoints of versions 8 and 12 are kept"


STEPS = 10
EVERY = 2
HELD = 4
"""The checkpoint of version 4 is held up; the one before it is of version 2."""


class TestCheckpointBesideSteps:
    """One that is still being written while steps go on counts for nothing before it is whole."""

    @pytest.fixture
    def gate(self, monkeypatch):
        """What the disk does with one checkpoint: waits, then takes it or not."""
        gate = SimpleNamespace(opened=threading.Event(), is_held=threading.Event(), error=None)
        save = CheckpointStore.save

        def held(store, state, write):
            if state.version == HELD and not gate.opened.is_set():
                gate.is_held.set()
                assert gate.opened.wait(60)
                if gate.error is not None:
                    raise gate.error
            return save(store, state, write)

        monkeypatch.setattr(CheckpointStore, "save", held)
        return gate

    @pytest.fixture
    def context(self, make):
        """Of the trainer whose checkpoint is held up; call it again for the one after."""
        return lambda trims=True: make(trims=trims, steps=STEPS, checkpoint_every=EVERY, keep_checkpoints=1)

    @staticmethod
    async def until_it_waits(context: ServiceContext, broker: Broker, keys: Keys) -> None:
        """Steps go on until the next checkpoint is due, and the trainer says what it waits for."""
        await wait_until(lambda: has_commits(broker, keys, HELD + EVERY))
        await wait_until(lambda: context.activity.state == "checkpoint")
        assert await num_commits(broker, keys) == HELD + EVERY

    @pytest.mark.parametrize("is_full", [False, True], ids=["slow", "full"])
    async def test_steps_go_on_and_the_next_checkpoint_waits(self, context, gate, broker, keys, is_full):
        """Also for a disk that is full for a while."""
        first = context()
        if is_full:
            gate.error = StorageError("a checkpoint", first.run_dir, 28, "No space left on device")
        serving = asyncio.ensure_future(run(first))
        await self.until_it_waits(first, broker, keys)
        assert versions(first) == [2]
        ((entry_id, _), *_) = await broker.execute("XRANGE", keys.prompts(), "-", "+", "COUNT", 1)
        assert int(entry_id.split(b"-")[0]) - 1 <= 2 * GROUPS, "what the checkpoint before needs is there"
        gate.opened.set()
        await serving
        assert versions(first) == [STEPS]
        assert not await broker.execute("XLEN", keys.prompts())

    @pytest.mark.parametrize("trims", [False, True])
    async def test_a_trainer_that_dies_goes_on_from_the_one_before(self, context, gate, broker, keys, trims):
        """All its records are there: what is committed is replayed bit by bit."""
        first = context(trims)
        serving = asyncio.ensure_future(run(first))
        await self.until_it_waits(first, broker, keys)
        gate.error = InterruptedError("the process is gone")
        serving.cancel()
        gate.opened.set()
        await asyncio.gather(serving, return_exceptions=True)
        assert versions(first) == [2]
        with capture_logs() as logs:
            await run(context(trims))
        replayed = [line["event"] for line in logs if line["event"].startswith("step replayed")]
        assert replayed == ["step replayed, same weights"] * (HELD + EVERY - 2)
        assert_each_once(await commits_of(broker, keys), STEPS)

    async def test_what_waiting_cannot_cure_ends_the_trainer_and_the_run_can_go_on(
        self, context, gate, broker, keys
    ):
        first = context()
        gate.error = StorageError("a checkpoint", first.run_dir, 20, "Not a directory")
        serving = asyncio.ensure_future(run(first))
        await asyncio.to_thread(gate.is_held.wait, 60)
        gate.opened.set()
        with pytest.raises(StorageError) as raised:
            await serving
        assert raised.value is gate.error
        await run(context())
        assert await num_commits(broker, keys) == STEPS

    async def test_a_trainer_that_is_asked_to_stop_writes_it_first(self, context, gate, broker, keys):
        first = context()
        serving = asyncio.ensure_future(run(first))
        await self.until_it_waits(first, broker, keys)
        first.stopping.set()
        gate.opened.set()
        await serving
        assert versions(first) == [HELD + EVERY]
        await run(context())
        assert await num_commits(broker, keys) == STEPS
