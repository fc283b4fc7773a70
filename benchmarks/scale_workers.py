"""Many workers of one role in one process: a module that `ServiceRun` starts with COUNT and STRETCH.

Each has what a process of its own would have: a context, a connection, a consumer for each lane, leases,
heartbeats, and the service's own loops. Only the thread that renews for a blocked loop and the port of
/metrics are missing; the loop here is shared, and `STRETCH` keeps it from being what limits.

They run until the process is killed. What the engines do is appended to `work-ROLE.jsonl`.
"""

import asyncio
import os
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TextIO

import tidemill.common.process.service as frame
import tidemill.common.redis.broker as broker
import tidemill.common.streams.lane_worker as lane_worker
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
SERVE = {"rollout": rollout.serve, "reward": reward.serve}


class MeasuredEngine(SimulatedEngine):
    """Records when each completion begins, and how long it takes."""

    work: ClassVar[TextIO]

    def _duration_s(self, key: int, num_tokens: int) -> float:
        duration_s = super()._duration_s(key, num_tokens)
        self.work.write(f"[{time.time():.3f}, {duration_s:.4f}]\n")
        return duration_s


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


async def serve(run_id: str, role: str, count: int, stretch: float, folder: Path) -> None:
    for module, name in INTERVALS:
        setattr(module, name, getattr(module, name) * stretch)
    frame.LAG_PROBE_S = LOCAL_S * stretch
    rollout.SAMPLE_S = LOCAL_S * stretch
    keys = Keys(run_id)
    redis = await Broker.connect()
    config = await read_config(redis, keys)
    await redis.close()
    rollout.build_engine = lambda config, _: MeasuredEngine(config)  # type: ignore[attr-defined]
    names = (f"{role}-{number}" for number in range(count))
    await asyncio.gather(*(work(role, name, keys, config, folder, JOIN_S * stretch) for name in names))


def main() -> None:
    _, run_id, _, role, count, stretch = sys.argv[1:]
    folder = Path(os.environ["TIDEMILL_RUNS_DIR"])
    os.environ["TIDEMILL_LOG_LEVEL"] = "ERROR"
    configure_logs(role, f"{role} x {count}")
    with open(folder / f"work-{role}.jsonl", "a", buffering=1) as MeasuredEngine.work:
        run_main(serve(run_id, role, int(count), float(stretch), folder))


if __name__ == "__main__":
    main()
