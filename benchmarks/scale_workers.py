"""Many workers of one role in one process: `python -m benchmarks.scale_workers ROLE COUNT STRETCH DIR RUN`.

Each has what a process of its own would have: a context, a connection, a consumer for each lane, leases,
heartbeats, and the service's own loops. Only the thread that renews for a blocked loop and the port of
/metrics are missing; the loop here is shared, and `STRETCH` keeps it from being what limits.

Orders come as lines of JSON on stdin: `{"do": "start", "count": 5}`, `kill` (no command of theirs reaches
Redis any more), `stop` (as by SIGTERM), `cut` (a rack without network for `seconds`), `slow` (a share of the
engines takes `factor` as long). What the engines did is appended to `work-ROLE.jsonl` in the folder.
"""

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from redis import exceptions as redis_errors

import tidemill.common.process.service as frame
import tidemill.common.redis.broker as broker
import tidemill.common.streams.lane_worker as lane_worker
import tidemill.services.reward.rewards.weighted_sum as weighted_sum
import tidemill.services.reward.worker as reward
import tidemill.services.rollout.service as rollout
import tidemill.services.rollout.weight_follower as weight_follower
from benchmarks.slow_reward import compute_score
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
"""Probes that concern nobody but their own process, 50 and 4 times a second, come once a second here."""
JOIN_S = 0.5
"""Starts are spread over so long, as processes are that a scheduler starts."""


class MeasuredEngine(SimulatedEngine):
    """Tells how long each completion was to take, and may be slower than others."""

    def __init__(self, config: RunConfig, work: list[tuple[float, float, float]]) -> None:
        super().__init__(config)
        self.work, self.factor = work, 1.0
        self._ends_at = 0.0

    def _duration_s(self, key: int, num_tokens: int) -> float:
        nominal_s = super()._duration_s(key, num_tokens)
        self._ends_at = time.time() + nominal_s
        self.work.append((time.time(), nominal_s, nominal_s * self.factor))
        return nominal_s * self.factor

    def die(self) -> None:
        """What it is at is never finished: work of a negative time."""
        now = time.time()
        if self._ends_at > now:
            self.work.append((now, now - self._ends_at, 0.0))


class LoopReward:
    """A reward that follows from the text, without the processes that a function is given."""

    slots: int | None = None

    def __init__(self, config: RunConfig) -> None:
        self._bounds_s = config.reward.kwargs

    async def score(self, sample: RewardSample) -> RewardOutcome:
        """After the time that the config's `kwargs` bound."""
        return RewardOutcome(await compute_score(sample.trajectory.text, **self._bounds_s))

    async def close(self) -> None:
        """Nothing to free."""


class Cut:
    """A client whose connections are gone."""

    def __init__(self, is_dead: bool) -> None:
        self.is_dead = is_dead

    async def exchange(self, *_: Any, **__: Any) -> Any:
        """See `Client`."""
        if self.is_dead:  # a process that was killed says nothing and hears nothing
            await asyncio.Event().wait()
        raise redis_errors.ConnectionError("no route to host")

    execute_command = exchange


class Member:
    """One worker."""

    def __init__(self, pool: "Pool", number: int) -> None:
        self.pool, self.number, self.name = pool, number, f"{pool.role}-{number}"
        self.engine: MeasuredEngine | None = None
        self.broker = Broker(make_client(redis_url()))
        self.context = ServiceContext(
            pool.role,
            self.name,
            pool.keys,
            pool.config,
            self.broker,
            pool.folder / pool.keys.run_id,
            Activity(pool.role, redis_s=self.broker.round_trips.total_s),
        )
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        await asyncio.sleep(self.pool.join_s * random.random())
        endpoint: Any = SimpleNamespace(host="127.0.0.1", port=0, beat=lambda: None, close=lambda: None)
        try:
            async with frame._heartbeat(self.context, endpoint):
                await SERVE[self.pool.role](self.context)
        except Exception as error:
            print(f"{self.name} ended: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            self.pool.members.discard(self)
            await self.broker.redis.aclose()

    def kill(self) -> None:
        """As by SIGKILL: nothing that it still does is seen by anybody."""
        if self.engine is not None:
            self.engine.die()
        redis = self.broker.redis
        self.broker.redis = Cut(is_dead=True)  # type: ignore[assignment]
        self.broker.redis.aclose = redis.aclose  # type: ignore[method-assign]
        self.task.cancel()

    def stop(self) -> None:
        """As by SIGTERM."""
        self.context.stopping.set()

    async def cut(self, seconds: float) -> None:
        """No network for a while."""
        redis = self.broker.redis
        self.broker.redis = Cut(is_dead=False)  # type: ignore[assignment]
        await redis.aclose()
        await asyncio.sleep(seconds)
        self.broker.redis = redis


SERVE: dict[str, Callable[[ServiceContext], Awaitable[None]]] = {
    "rollout": rollout.serve,
    "reward": reward.serve,
}


class Pool:
    """All workers of the process."""

    def __init__(self, role: str, keys: Keys, config: RunConfig, folder: Path, stretch: float) -> None:
        self.role, self.keys, self.config, self.folder = role, keys, config, folder
        self.members: set[Member] = set()
        self.num_started = 0
        self.work: list[tuple[float, float, float]] = []
        self.stretch, self.join_s = stretch, JOIN_S * stretch

    def start(self, count: int) -> None:
        """Start so many more."""
        for _ in range(count):
            self.members.add(Member(self, self.num_started))
            self.num_started += 1

    def engine(self, config: RunConfig, name: str) -> MeasuredEngine:
        """In place of `build_engine`."""
        engine = MeasuredEngine(config, self.work)
        next(member for member in self.members if member.name == name).engine = engine
        return engine

    async def obey(self, order: dict[str, Any]) -> None:
        """Carry out one order."""
        chosen = sorted(self.members, key=lambda member: member.number)[: order.get("count", 0)]
        match order["do"]:
            case "start":
                self.start(order["count"])
            case "kill":
                for member in chosen:
                    member.kill()
            case "stop":
                for member in chosen:
                    member.stop()
            case "cut":
                await asyncio.gather(*(member.cut(order["seconds"] * self.stretch) for member in chosen))
            case "slow":
                for member in chosen:
                    if member.engine is not None:
                        member.engine.factor = order["factor"]
            case "quit":
                for member in list(self.members):
                    member.kill()

    def write(self) -> None:
        """Append what the engines began since the last call."""
        work, self.work[:] = list(self.work), []
        with open(self.folder / f"work-{self.role}.jsonl", "a") as file:
            file.writelines(f"[{at:.3f}, {nominal:.4f}, {spent:.4f}]\n" for at, nominal, spent in work)


async def serve(role: str, count: int, stretch: float, folder: Path, run_id: str) -> None:
    """Run the workers until stdin ends or says quit."""
    for module, name in INTERVALS:
        setattr(module, name, getattr(module, name) * stretch)
    frame.LAG_PROBE_S, rollout.SAMPLE_S = LOCAL_S * stretch, LOCAL_S * stretch
    keys = Keys(run_id)
    redis = await Broker.connect()
    config = await read_config(redis, keys)
    pool = Pool(role, keys, config, folder, stretch)
    rollout.build_engine = pool.engine  # type: ignore[attr-defined, assignment]
    weighted_sum.make_reward = lambda *_: LoopReward(config)  # type: ignore[attr-defined]
    await redis.close()
    pool.start(count)
    lines: asyncio.StreamReader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    orders: set[asyncio.Task[None]] = set()

    async def report() -> None:
        while True:
            await asyncio.sleep(1.0)
            pool.write()

    reporting = asyncio.create_task(report())
    while line := await lines.readline():
        order = json.loads(line)
        orders.add(task := asyncio.create_task(pool.obey(order)))
        task.add_done_callback(orders.discard)
        if order["do"] == "quit":
            await task
            break
    reporting.cancel()
    pool.write()


def main() -> None:
    """Run until told to quit."""
    role, count, stretch, folder, run_id = sys.argv[1:]
    configure_logs(role, f"{role} x {count}")
    with contextlib.suppress(KeyboardInterrupt):
        run_main(serve(role, int(count), float(stretch), Path(folder), run_id))
    sys.stdout.flush()
    os._exit(0)  # what was killed is not waited for


if __name__ == "__main__":
    main()
