"""The two ends of `benchmarks.metrics`: those of `benchmarks.transport`, with the metrics of real services.

`on` counts, `off` has metrics that do nothing. Everything else is the same, so what differs is
what metrics cost.
"""

import asyncio
import sys
from collections.abc import Callable
from typing import Any

from prometheus_client import Counter, Gauge
from prometheus_client.metrics import MetricWrapperBase

from benchmarks.transport import IN_FLIGHT
from benchmarks.transport_ends import (
    BLOCK_S,
    LEASE_S,
    Stopwatch,
    score_of,
    trajectories,
)
from tidemill.common.process.activity import Activity
from tidemill.common.process.programs import run_main
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Consumer, Garbled, append
from tidemill.common.telemetry.batched import Batched, Histogram
from tidemill.common.wire.keys import REWARD_GROUP, Keys
from tidemill.common.wire.messages import Lane, Trajectory
from tidemill.services.reward.worker_metrics import WorkerMetrics
from tidemill.services.rollout.group import SampleCounts


def silence() -> None:
    """Metrics that do nothing."""

    def nothing(*_: Any, **__: Any) -> None: ...

    for kind, methods in (
        (Counter, ("inc",)),
        (Gauge, ("inc", "dec", "set", "set_function")),
        (Histogram, ("observe", "observe_many")),
    ):
        for method in methods:
            setattr(kind, method, nothing)
    Batched.add = nothing  # type: ignore[method-assign]
    MetricWrapperBase.labels = lambda self, *_, **__: self  # type: ignore[assignment, misc]


async def write(url: str, run_id: str, records: int, per_call: int, counts: bool) -> None:
    """As a rollout worker that publishes: with `counts`, each record is counted as a sample is."""
    broker, key, batch = await Broker.connect(url), Keys(run_id).trajectories(), trajectories(records)
    calls, counters = iter(range(0, records, per_call)), SampleCounts(Lane.TRAIN)

    async def send() -> None:
        for first in calls:
            part = batch[first : first + per_call]
            await append(broker, key, *part)
            if counts:
                for record in part:
                    counters.observe(record)

    watch = Stopwatch()
    await asyncio.gather(*(send() for _ in range(IN_FLIGHT)))
    watch.stop()
    await broker.close()


async def read(url: str, run_id: str, records: int, per_call: int, counts: bool) -> None:
    """As a reward worker: with `counts`, each record goes through its counts."""
    broker, keys = await Broker.connect(url), Keys(run_id)
    consumer = Consumer(
        broker, keys.trajectories(), REWARD_GROUP, "reader", Trajectory, lease_s=LEASE_S, dead_key=keys.dead
    )
    counts, finished, num_done = WorkerMetrics(Activity("reward")), asyncio.Event(), 0

    async def take() -> None:
        nonlocal num_done
        while num_done < records:
            found = await consumer.fetch(per_call, BLOCK_S)
            held = [delivery for delivery in found if not isinstance(delivery, Garbled)]
            if not held:
                continue
            results = [(delivery, score_of(delivery.message)) for delivery in held]
            if counts:
                for _ in results:
                    counts.took(Lane.TRAIN)
                for _ in results:
                    counts.scored()
            done = await consumer.complete(results, keys.scores())
            num_done += sum(done)
            if counts:
                for _, score in results:
                    counts.published(Lane.TRAIN, score)
                    counts.settled(Lane.TRAIN)
        finished.set()

    async with consumer:
        watch = Stopwatch()
        takers = [asyncio.create_task(take()) for _ in range(IN_FLIGHT)]
        await finished.wait()
        watch.stop()
        for taker in takers:
            taker.cancel()
        await asyncio.gather(*takers, return_exceptions=True)
    await broker.close()


ENDS: dict[str, Callable[..., Any]] = {"write": write, "read": read}

if __name__ == "__main__":
    name, url, run_id, num_records, num_per_call = sys.argv[1:]
    end, kind, state = name.split("-")
    if state == "off":
        silence()
    run_main(ENDS[end](url, run_id, int(num_records), int(num_per_call), kind == "services"))
