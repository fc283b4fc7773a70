"""A worker behind real streams and files holds what was committed, whatever happened to the chain."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.models import run_config, tiny_model
from tests.support.numbered import append_numbered
from tests.support.versions import Chain
from tests.support.waiting import wait_until
from tidemill.common.errors import DamagedWeightsError, WeightsError
from tidemill.common.process.activity import Activity
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import entry_id_of, id_after
from tidemill.common.streams.log import append_after
from tidemill.common.telemetry import metrics
from tidemill.common.weights.digest import digest_of
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import WeightManifest
from tidemill.services.rollout import weight_follower
from tidemill.services.rollout.engines.transformers import TransformersEngine
from tidemill.services.rollout.weight_follower import WeightFollower


class WatchedEngine(TransformersEngine):
    """Notes the deltas of each load, and whether it began with a full version."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.loads: list[tuple[bool, int]] = []

    async def load(self, version: int, files: Sequence[Path], deltas: Any = (), digest: str = "") -> Any:
        self.loads.append((bool(files), len(deltas)))
        return await super().load(version, files, deltas, digest)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def chain(model: Path, tmp_path: Path) -> Chain:
    """A run whose version 0 is the starting model."""
    chain = Chain(tmp_path / "run")
    chain.full(0, model / "model.safetensors")
    return chain


class Following:
    def __init__(
        self,
        engine: WatchedEngine,
        follower: WeightFollower,
        announce: Callable[..., Any],
        running: asyncio.Future[None],
    ) -> None:
        self.engine = engine
        self.follower = follower
        self.announce = announce
        self.running = running

    async def reach(self, manifest: WeightManifest) -> None:
        await self.announce(manifest)
        async with asyncio.timeout(60):
            await self.follower.reach(manifest.version)

    def holds(self, chain: Chain) -> bool:
        """Whether every value is that of the newest version, bit for bit."""
        state = self.engine._model.state_dict()
        return all(
            np.array_equal(state[name].numpy().reshape(-1).view(np.uint32), bits)
            for name, (_, bits) in chain.tensors.items()
        )


@pytest.fixture
def follow(broker: Broker, keys: Keys, model: Path, chain: Chain) -> Callable[..., Any]:
    async def announce(manifest: WeightManifest) -> None:
        await append_numbered(broker, keys.weights, [(manifest.version, manifest)])

    @contextlib.asynccontextmanager
    async def start(lease_s: float = 30.0) -> AsyncIterator[Following]:
        rollout = {"engine": "transformers", "num_threads": 1}
        config = run_config(model, rollout=rollout, streams={"lease_s": lease_s})
        engine = WatchedEngine(config)
        await engine.start()
        context = ServiceContext("rollout", "w", keys, config, broker, chain.run_dir, Activity("rollout"))
        follower = WeightFollower(context, engine)
        running = asyncio.ensure_future(follower.run())
        try:
            yield Following(engine, follower, announce, running)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await engine.close()

    return start


async def test_deltas_are_written_over_what_is_held_and_a_late_worker_holds_the_same(follow, chain):
    async with follow() as worker:
        for version in (1, 2):
            await worker.reach(chain.delta(version))
            assert worker.holds(chain)
        # Nothing is known of the model that the engine started with, so the first delta brings its base.
        assert worker.engine.loads == [(True, 1), (False, 1)]
        for version in range(3, 103):
            chain.delta(version, share=0.002)
        await worker.reach(chain.newest)
        assert worker.holds(chain)
        assert worker.engine.loads[-1] == (False, 100), "away for a hundred versions, it loads once"
        await worker.reach(chain.base(103))
        await worker.reach(chain.delta(104))
        assert worker.holds(chain) and worker.engine.loads[-2:] == [(True, 0), (False, 1)]
        assert worker.follower.num_mismatches == 0
    async with follow() as late:
        await late.reach(chain.newest)
        assert late.holds(chain) and late.engine.loads == [(True, 1)]


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("fault", [tear, flip, Path.unlink])
async def test_a_fault_in_the_chain_is_never_loaded_and_the_next_full_version_ends_it(follow, chain, fault):
    async with follow() as worker:
        await worker.reach(chain.delta(1))
        fault(chain.paths(2)[0] if chain.delta(2) else None)
        await worker.announce(chain.delta(3))
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await worker.follower.reach(3)
        assert worker.engine.version == 1
        await worker.reach(chain.base(4))
        assert worker.holds(chain)


async def test_deltas_of_another_history_are_not_written_over_this_one(follow, chain, tmp_path):
    """The trainer went back to version 1 and made another version 2; the worker holds the old one."""
    async with follow() as worker:
        await worker.reach(chain.delta(1))
        kept = {name: (info, bits.copy()) for name, (info, bits) in chain.tensors.items()}
        await worker.reach(chain.delta(2))
        del chain.manifests[2]
        chain.tensors = kept
        chain.term = 2
        chain.delta(2)
        await worker.reach(chain.delta(3))
        assert worker.holds(chain) and worker.engine.loads[-1] == (True, 3)


async def test_an_engine_that_holds_something_else_says_so_and_loads_the_full_version(follow, chain):
    async with follow() as worker:
        await worker.reach(chain.delta(1))
        with torch.inference_mode():
            next(worker.engine._model.parameters()).mul_(1.5)
        await worker.reach(chain.delta(2, share=0.3))
        assert worker.follower.num_mismatches == 1
        assert worker.holds(chain)
        assert worker.engine.loads[1:] == [(False, 1), (True, 2)]


async def test_a_delta_whose_digest_is_not_that_of_its_result_is_not_loaded(follow, chain):
    async with follow() as worker:
        await worker.reach(chain.delta(1))
        wrong = chain.delta(2).model_copy(update={"digest": str(digest_of([]))})
        await worker.announce(wrong)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await worker.follower.reach(2)
        assert worker.engine.version == 1 and worker.follower.num_mismatches >= 1


async def test_a_worker_waits_for_a_damaged_version_while_the_trainer_replaces_its_files(
    follow, chain, broker, keys
):
    """For longer than two leases: first its bytes are others, then it is gone, then it is there in full."""
    async with follow(lease_s=0.2) as worker:
        await worker.reach(chain.delta(1))
        chain.delta(2)
        paths = chain.paths(2)
        flip(paths[0])
        await worker.announce(chain.newest)
        await wait_until(lambda: worker.follower.damaged_version == 2)
        for path in paths:
            path.unlink()
        await wait_until(lambda: worker.follower.damaged_version == -1)
        num_failures = metrics.WEIGHT_FAILURES._value.get()
        await wait_until(lambda: metrics.WEIGHT_FAILURES._value.get() > num_failures + 1)
        assert not worker.running.done()
        announced = entry_id_of(2)
        assert await append_after(broker, keys.weights, announced, id_after(announced), chain.base(2))
        async with asyncio.timeout(60):
            await worker.follower.reach(2)
        assert worker.holds(chain)


async def test_a_worker_ends_where_a_version_stays_away_for_two_leases(follow, chain):
    async with follow(lease_s=0.2) as worker:
        await worker.reach(chain.delta(1))
        chain.delta(2)
        for path in chain.paths(2):
            path.unlink()
        await worker.announce(chain.newest)
        with pytest.raises(WeightsError, match="version 2"):
            async with asyncio.timeout(60):
                await worker.running


async def test_a_repaired_version_is_waited_for_as_long_as_any(follow, chain, monkeypatch):
    """Its announcement may come a moment before the other machine's file system shows its files."""
    monkeypatch.setattr(weight_follower, "REPAIR_S", 0.0)
    async with follow(lease_s=0.2) as worker:
        follower = worker.follower
        missing = WeightsError("version 2 is missing")
        damaged = chain.delta(2)
        now = time.monotonic()
        monkeypatch.setattr(weight_follower.time, "monotonic", lambda: now)
        follower._note_failure(damaged, DamagedWeightsError("version 2 is damaged"))
        now += 0.5
        repaired = chain.base(2)
        follower._note_failure(repaired, missing)
        with pytest.raises(WeightsError, match="missing"):
            now += 0.5
            follower._note_failure(repaired, missing)
