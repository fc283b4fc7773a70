"""The path of a single turn: through a player, and straight from the engine as before there were sessions."""

import asyncio
import gc
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.support.training import trainer_config
from tidemill.common.process.activity import Activity
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.streams import Consumer, Delivery, append_numbered
from tidemill.common.wire.keys import ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import Lane, SamplingParams, Ticket, Trajectory
from tidemill.services.rollout.engines.engine import GenerationRequest
from tidemill.services.rollout.engines.simulated import SimulatedEngine
from tidemill.services.rollout.environments import build_player
from tidemill.services.rollout.group import OF_THE_TICKET, GroupGenerator
from tidemill.services.rollout.weight_follower import WeightFollower

GROUPS, GROUP_SIZE, TOKENS = 48, 16, 256
Pair = tuple[float, float]
"""Samples per second of processor time, straight and through a player."""


class StraightGenerator(GroupGenerator):
    """Samples come from the engine with nothing between."""

    async def _generate_sample(self, delivery: Delivery[Ticket], index: int) -> None:
        ticket, started_at, history = delivery.message, time.time(), self.follower.history
        request = GenerationRequest(
            f"{self.lane}-{ticket.ticket}-{index}-{delivery.attempts}",
            ticket.prompt_ids.tolist(),
            ticket.sampling,
            is_urgent=self.lane is Lane.EVAL,
        )
        self._asked.add(request.request_id)
        try:
            generation = await self.engine.generate(request)
        finally:
            self._asked.discard(request.request_id)
        if history != self.follower.history:
            return
        sample = Trajectory(
            **{name: getattr(ticket, name) for name in OF_THE_TICKET},
            prompt_ids=ticket.prompt_ids,
            index=index,
            completion_ids=generation.token_ids,
            logprobs=generation.logprobs,
            spans=generation.spans,
            finish=generation.finish,
            text=self.engine.decode(generation.token_ids),
            worker=self.worker,
            started_at=started_at,
            finished_at=time.time(),
        )
        await self.consumer.publish_sample(delivery, *self._keys_of(ticket), sample)
        self.num_published += 1
        self.counts.observe(sample)


async def measure_path(rounds: int) -> list[Pair]:
    """Both sides in turn, `rounds` times, after one round that does not count."""
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedRedis(Path(folder))
        server.start()
        try:
            broker = await Broker.connect(server.url)
            pairs = []
            for number in range(rounds + 1):
                sides = [StraightGenerator, GroupGenerator]
                speeds = {}
                for side in sides if number % 2 else reversed(sides):
                    keys = Keys(f"{side.__name__}-{number}")
                    speeds[side] = await _measure_once(broker, keys, Path(folder), side)
                    await broker.execute("FLUSHALL")
                pairs.append((speeds[StraightGenerator], speeds[GroupGenerator]))
            await broker.close()
        finally:
            server.stop()
    return pairs[1:]


async def _measure_once(broker: Broker, keys: Keys, folder: Path, side: type[GroupGenerator]) -> float:
    """Samples per second of processor time of one worker that generates all groups: the machine may have
    other work."""
    config = trainer_config(group_size=GROUP_SIZE, rollout__simulated={"tokens": TOKENS})
    engine = SimulatedEngine(config)
    await engine.start()
    context = ServiceContext("rollout", "w", keys, config, broker, folder, Activity("rollout"))
    consumer: Consumer[Ticket] = Consumer(
        broker, keys.prompts(), ROLLOUT_GROUP, "w", Ticket, lease_s=60.0, dead_key=keys.dead
    )
    player = build_player(config, engine.decode)
    follower = WeightFollower(context, engine)
    generator = side(context, Lane.TRAIN, consumer, engine, follower, player)
    await append_numbered(broker, keys.prompts(), [(number, _ticket(number)) for number in range(GROUPS)])
    following = asyncio.ensure_future(follower.run())
    try:
        async with consumer:
            deliveries = [one for one in await consumer.fetch(GROUPS, 1.0) if isinstance(one, Delivery)]
            gc.collect()
            gc.disable()  # a full collection falls into every other round, and takes as long as the round
            begun = time.process_time()
            await asyncio.gather(*(generator.generate(delivery) for delivery in deliveries))
            return generator.num_published / (time.process_time() - begun)
    finally:
        gc.enable()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def _ticket(number: int) -> Ticket:
    return Ticket(
        prompt_ids=np.arange(1, 65, dtype=np.int32),
        ticket=number,
        step=0,
        min_version=0,
        group_size=GROUP_SIZE,
        sampling=SamplingParams(max_tokens=TOKENS),
    )
