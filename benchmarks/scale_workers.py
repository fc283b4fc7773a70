"""Many workers of one role in one process: `python -m benchmarks.scale_workers ROLE COUNT STRETCH DIR RUN`.

Each has what a process of its own would have: a context, a connection, a consumer for each lane, leases,
heartbeats, and the service's own loops. Only the thread that renews for a blocked loop and the port of
/metrics are missing; the loop here is shared, and `STRETCH` keeps it from being what limits.

They run until stdin ends. What the engines did is appended to `work-ROLE.jsonl` in the folder.
"""

import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tidemill.common.process.service as frame
import tidemill.common.redis.broker as broker
import tidemill.common.streams.lane_worker as lane_worker
import tidemill.services.reward.rewards.weighted_sum as weighted_sum
import tidemill.services.reward.worker as reward
import tidemill.services.rollout.service as rollout
import tidemill.services.rollout.weight_follower as weight_follower
from tidemill.common.config import RunConfig
from tidemill.common.process.activity import Activity
from tidemill.common.process.programs import run_main
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker, redis_url
from tidemill.common.redis.client import make_client
from tidemill.common.run.state import read_config
from tidemill.common.telemetry.logs import configure_logs
from tidemill.common.wire.keys import Keys
from tidemill.services.reward.outcome import RewardOutcome
from tidemill.services.reward.sample import RewardSample
from tidemill.services.rollout.engines.simulated import SimulatedEngine

INTERVALS: tuple[tuple[Any, str], ...] = (
    (frame, "HEARTBEAT_S"),
    (broker, "FIRST_PAUSE_S"),
    (broker, "LONGEST_PAUSE_S"),
    (lane_worker, "BLOCK_S"),
    (lane_worker, "LONGEST_BLOCK_S"),
    (weight_follower, "POLL_S"),
    (weight_follower, "RETRY_S"),
    (weight_follower, "LONGEST_SPREAD_S"),
    (weight_follower, "SPREAD_S_PER_GROUP"),
)
"""Pauses of the services' loops, which are stretched like everything that takes time."""
LOCAL_S = 1.0
"""Interval of probes of a process's own state, which services make 50 and 4 times a second."""
JOIN_S = 0.5
"""Starts are spread over this time, as those of processes that a scheduler starts."""


class MeasuredEngine(SimulatedEngine):
    """Records when each completion begins, and how long it takes."""

    def __init__(self, config: RunConfig, work: list[tuple[float, float]]) -> None:
        super().__init__(config)
        self.work = work

    def _duration_s(self, key: int, num_tokens: int) -> float:
        duration_s = super()._duration_s(key, num_tokens)
        self.work.append((time.time(), duration_s))
        return duration_s


class LoopReward:
    """A reward without the processes that a function is given; `reward.delay_s` is its time."""

    slots: int | None = None

    async def score(self, sample: RewardSample) -> RewardOutcome:
        """The same score for all samples: the policy is not real."""
        return RewardOutcome(0.5)

    async def close(self) -> None:
        """Nothing to free."""


SERVE: dict[str, Callable[[ServiceContext], Awaitable[None]]] = {
    "rollout": rollout.serve,
    "reward": reward.serve,
}


async def work(role: str, name: str, keys: Keys, config: RunConfig, folder: Path, join_s: float) -> None:
    """One worker, from its start until it is cancelled."""
    await asyncio.sleep(join_s * random.random())
    redis = Broker(make_client(redis_url()))
    activity = Activity(role, redis_s=redis.round_trips.total_s)
    context = ServiceContext(role, name, keys, config, redis, folder / keys.run_id, activity)
    endpoint: Any = SimpleNamespace(host="127.0.0.1", port=0, beat=lambda: None, close=lambda: None)
    try:
        async with frame._heartbeat(context, endpoint):
            await SERVE[role](context)
    except Exception as error:
        print(f"{name} ended: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def write_work(path: Path, begun: list[tuple[float, float]]) -> None:
    """Append what the engines began since the last call."""
    with open(path, "a") as file:
        file.writelines(f"[{at:.3f}, {duration_s:.4f}]\n" for at, duration_s in begun)
    begun.clear()


async def serve(role: str, count: int, stretch: float, folder: Path, run_id: str) -> None:
    """Run the workers until stdin ends."""
    for module, name in INTERVALS:
        setattr(module, name, getattr(module, name) * stretch)
    frame.LAG_PROBE_S, rollout.SAMPLE_S = LOCAL_S * stretch, LOCAL_S * stretch
    keys, redis = Keys(run_id), await Broker.connect()
    config = await read_config(redis, keys)
    await redis.close()
    begun: list[tuple[float, float]] = []
    rollout.build_engine = lambda config, _: MeasuredEngine(config, begun)  # type: ignore[attr-defined]
    weighted_sum.make_reward = lambda *_: LoopReward()  # type: ignore[attr-defined]
    workers = [
        asyncio.create_task(work(role, f"{role}-{number}", keys, config, folder, JOIN_S * stretch))
        for number in range(count)
    ]
    is_over = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    while not is_over.done():
        await asyncio.wait([is_over], timeout=1.0)
        write_work(folder / f"work-{role}.jsonl", begun)
    for worker in workers:
        worker.cancel()


def main() -> None:
    """Run until stdin ends."""
    role, count, stretch, folder, run_id = sys.argv[1:]
    configure_logs(role, f"{role} x {count}")
    run_main(serve(role, int(count), float(stretch), Path(folder), run_id))


if __name__ == "__main__":
    main()
