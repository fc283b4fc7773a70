"""One rollout worker's parts between real streams and an engine that the test controls."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.support.numbered import append_numbered
from tests.support.training import make_parts, messages, trainer_config
from tests.support.versions import write_version
from tidemill.common.process.activity import Activity
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Delivery, group_status
from tidemill.common.wire.keys import ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import Lane, Ticket, Trajectory
from tidemill.services.rollout.engines.engine import Generation, GenerationRequest
from tidemill.services.rollout.engines.simulated import SimulatedEngine
from tidemill.services.rollout.environments import build_player
from tidemill.services.rollout.sessions.player import Player
from tidemill.services.rollout.weight_follower import WeightFollower
from tidemill.services.rollout.worker import RolloutWorker
from tidemill.services.trainer.policy.simulated_policy import SimulatedPolicy
from tidemill.services.trainer.weights.store import WeightStore

SIZE = 4
RUN_UID = "9f86d081"


class GatedEngine(SimulatedEngine):
    """Records its requests; indices in `held` wait until the test sets `released`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.asked: list[int] = []
        self.request_ids: list[str] = []
        self.temperatures: dict[int, float] = {}
        self.held: set[int] = set()
        self.refused: set[int] = set()
        self.released = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> Generation:
        index = int(request.request_id.split("-")[2])
        self.asked.append(index)
        self.request_ids.append(request.request_id)
        self.temperatures[index] = request.sampling.temperature
        if index in self.refused:
            raise ValueError("the prompt is too long")
        if index in self.held:
            await self.released.wait()
        return await super().generate(request)


class Worker:
    """One rollout worker's parts, without its loop."""

    def __init__(self, broker: Broker, keys: Keys, folder: Path, name: str, **config: Any) -> None:
        settings = {
            "group_size": SIZE,
            "rollout__simulated": {"tokens": 4},
            "streams__lease_s": 60.0,
        } | config
        self.config = trainer_config(**settings)
        self.context = ServiceContext("rollout", name, keys, self.config, broker, folder, Activity("rollout"))
        self.engine = GatedEngine(self.config)
        self.follower = WeightFollower(self.context, self.engine)
        self.player: Player = build_player(self.config, self.engine.decode, self.engine.read, run_dir=folder)
        self.player.containers.run_uid = RUN_UID
        self.lane = self.new_lane()
        self.consumer = self.lane.consumer

    def new_lane(self) -> RolloutWorker:
        return RolloutWorker(self.context, Lane.TRAIN, self.engine, self.follower, self.player)

    async def fetch(self) -> Delivery[Ticket]:
        (delivery,) = await self.consumer.fetch(1, 1.0)
        assert isinstance(delivery, Delivery)
        return delivery


@contextlib.asynccontextmanager
async def started(
    broker: Broker, keys: Keys, folder: Path, name: str, **config: Any
) -> AsyncIterator[Worker]:
    """A worker, its follower included, for the length of a block."""
    worker = Worker(broker, keys, folder, name, **config)
    await worker.engine.start()
    following = asyncio.ensure_future(worker.follower.run())
    try:
        async with worker.consumer:
            yield worker
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def announce_version(broker: Broker, keys: Keys, folder: Path, version: int, term: int = 1) -> None:
    """Announce a version as trainer process number `term` does; weights of different terms differ."""
    policy = SimulatedPolicy(trainer_config())
    manifest = await asyncio.to_thread(write_version, WeightStore(folder), version, policy)
    manifest = manifest.model_copy(update={"term": term, "digest": f"{term:032x}"})
    await append_numbered(broker, keys.weights, [(version, manifest)])


async def issue(broker: Broker, keys: Keys, version: int = 0, **trainer: Any) -> None:
    """Issue the tickets of all steps up to `version + 1`, two groups each."""
    scheduler, _ = make_parts(broker, keys, trainer_config(**{"group_size": SIZE} | trainer))
    await scheduler.admit(version)


async def samples_of(broker: Broker, keys: Keys, ticket: int = 0) -> list[Trajectory]:
    trajectories = await messages(broker, keys.trajectories(), Trajectory)
    return [sample for sample in trajectories if sample.ticket == ticket]


async def is_settled(broker: Broker, keys: Keys, ticket: int = 0) -> bool:
    """Whether the ticket is acknowledged, as all others, and nothing is left of its progress."""
    pending = (await group_status(broker, keys.prompts(), ROLLOUT_GROUP)).pending
    return not pending and not await broker.execute("EXISTS", keys.progress(ticket))


async def take_over(
    broker: Broker, keys: Keys, delivery: Delivery[Ticket], worker: Worker
) -> Delivery[Ticket]:
    """Give a held ticket to another worker, as a takeover does after its lease."""
    name = worker.consumer.name
    entry_id = delivery.entry_id
    await broker.execute("XCLAIM", keys.prompts(), ROLLOUT_GROUP, name, 0, entry_id)
    (row,) = await broker.execute("XPENDING", keys.prompts(), ROLLOUT_GROUP, entry_id, entry_id, 1)
    delivery_here = Delivery(entry_id, delivery.fields, delivery.message, row[3])
    worker.consumer.held[delivery.entry_id] = delivery_here
    return delivery_here


async def has_samples(broker: Broker, keys: Keys, count: int, ticket: int | None = 0) -> bool:
    trajectories = await messages(broker, keys.trajectories(), Trajectory)
    return sum(ticket is None or sample.ticket == ticket for sample in trajectories) == count
