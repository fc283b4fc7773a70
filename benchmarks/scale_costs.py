"""What grows with the fleet or with the run: each thing that somebody does again and again, at two sizes.

    python -m benchmarks.scale_costs

A Redis is filled as a run of so many workers and steps leaves it: heartbeats, consumers, held tickets,
streams of small records, commits. Then each call is made as its caller makes it, ten times: processor time
of the caller and of Redis together, in milliseconds, and the ratio of the larger size to the smaller one.
Then a small run is looked at after some steps, and after many: what lies in Redis and in its folder.
"""

import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import typer
from prometheus_client import generate_latest

from benchmarks.report import machine, print_result, print_table
from benchmarks.scale_cluster import Cluster, Size
from tests.support.histories import BEGIN
from tests.support.training import make_parts, trainer_config
from tests.support.trajectories import make_trajectory
from tidemill.common.config import RunConfig
from tidemill.common.history import History
from tidemill.common.history.records import read_group
from tidemill.common.process.heartbeats import (
    Heartbeat,
    forget_heartbeats,
    publish_heartbeat,
    read_heartbeats,
)
from tidemill.common.process.programs import run_main
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.run.state import METRICS_FILE, publish_config
from tidemill.common.streams import (
    Consumer,
    append_numbered,
    backlog,
    ensure_group,
    entry_id_of,
    forget_consumers,
    group_status,
    read_raw,
)
from tidemill.common.wire import codec
from tidemill.common.wire.codec import PAYLOAD_FIELD, SCHEMA
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import Commit, SamplingParams, Score, ScoreStatus, Ticket, Trajectory
from tidemill.services.console.exporter.exporter import MetricsReader, set_gauges
from tidemill.services.console.status.snapshot import SnapshotReader
from tidemill.services.trainer.batch.batch_assembler import select_groups
from tidemill.services.trainer.batch.reconciler import Reconciler
from tidemill.services.trainer.batch.scheduler import _outstanding
from tidemill.services.trainer.batch.stream_join import PendingGroup
from tidemill.services.trainer.durable.checkpoint import CHECKPOINTS_FOLDER, STATE_FILE

ROUNDS, GROUP_SIZE = 10, 4
SMALL, LARGE = (100, 20), (1000, 200)
"""Rollout workers, and steps of one group for each worker of the small size."""
GROUPS = 100
HELD = 64
SMALL_RUN, AT_STEPS = (10, 0.3, 1.0), (8, 80)
Timed = Callable[[], Awaitable[Any]]


async def fill(broker: Broker, keys: Keys, config: RunConfig, workers: int, steps: int) -> None:
    """The run as it stands after `steps` steps, with a ticket held by each of `workers`."""
    await publish_config(broker, keys, config)
    for number in range(workers):
        await publish_heartbeat(
            broker, keys, Heartbeat(f"rollout-{number}", "rollout", counts={"requests": 2})
        )
    ids, last = np.arange(8, dtype=np.int32), steps * GROUPS + workers + HELD
    tickets = [
        Ticket(
            ticket=n,
            step=n // GROUPS,
            min_version=max(0, n // GROUPS - 1),
            group_size=GROUP_SIZE,
            prompt_ids=ids,
            sampling=SamplingParams(max_tokens=8),
        )
        for n in range(last)
    ]
    await append_numbered(broker, keys.prompts(), [(ticket.ticket, ticket) for ticket in tickets])
    await ensure_group(broker, keys.prompts(), ROLLOUT_GROUP)
    await broker.execute("XGROUP", "SETID", keys.prompts(), ROLLOUT_GROUP, f"{steps * GROUPS}-0")
    for number in range(workers):
        name = ("GROUP", ROLLOUT_GROUP, f"rollout-{number}")
        await broker.execute("XREADGROUP", *name, "COUNT", 1, "STREAMS", keys.prompts(), ">")
    for step in range(steps):
        await _fill_step(broker, keys, step)
    await ensure_group(broker, keys.trajectories(), REWARD_GROUP)
    await broker.execute("XGROUP", "SETID", keys.trajectories(), REWARD_GROUP, "$")


async def _fill_step(broker: Broker, keys: Keys, step: int) -> None:
    numbers = range(step * GROUPS, (step + 1) * GROUPS)
    samples = [(n, i) for n in numbers for i in range(GROUP_SIZE)]
    commands: list[tuple[Any, ...]] = []
    for place, (n, i) in enumerate(samples):
        at = f"{int(1000 * BEGIN) + 10_000 * step + 20 * place}-0"
        score = Score(ticket=n, index=i, status=ScoreStatus.OK, value=1.0)
        for key, message in (
            (keys.trajectories(), make_trajectory(n, i, step=step, group_size=GROUP_SIZE)),
            (keys.scores(), score),
        ):
            commands.append(("XADD", key, at, "v", SCHEMA, "p", codec.encode_payload(message)))
    await broker.pipeline(commands)
    commit = Commit(step=step, version=step + 1, groups=tuple(numbers), mini_batches=((tuple(samples),),),
                    metrics={"step_time_s": 1.0, "reward": 0.5}, finished_at=BEGIN)  # fmt: skip
    await append_numbered(broker, keys.commits, [(step, commit)])


def selecting(groups_per_step: int) -> Callable[[], Awaitable[None]]:
    """Choose among the groups of nine steps, of which every second one is complete."""
    numbers = range(9 * groups_per_step)
    outstanding = {n: PendingGroup(n, 0, 0, GROUP_SIZE, started_version=n % 9) for n in numbers}

    async def select() -> None:
        select_groups(outstanding, numbers[1::2], order="as_ready", step=8, places=groups_per_step,
                      groups_per_step=groups_per_step, max_staleness=8)  # fmt: skip

    return select


async def calls(broker: Broker, keys: Keys, config: RunConfig, workers: int, steps: int) -> dict[str, Timed]:
    """What is timed, by who does it and how often."""
    consumer: Consumer[Ticket] = Consumer(
        broker, keys.prompts(), ROLLOUT_GROUP, "rollout-0", Ticket, lease_s=3600.0, dead_key=keys.dead
    )
    holder: Consumer[Ticket] = Consumer(
        broker, keys.prompts(), ROLLOUT_GROUP, "holder", Ticket, lease_s=3600.0, dead_key=keys.dead
    )
    await holder.fetch(HELD, 0.0)
    scheduler, join = make_parts(broker, keys, config)
    reconciler = Reconciler(broker, keys, scheduler)
    scheduler.next_ticket = steps * GROUPS
    exporter, history = MetricsReader(broker, keys), History(keys.run_id, None, broker)
    reading = await exporter.read()

    async def reclaim() -> None:
        consumer._next_reclaim = 0.0
        await consumer._reclaim(1)

    async def status() -> None:
        await (await SnapshotReader.attach(broker, keys.run_id)).read()

    async def departed() -> None:
        await forget_heartbeats(broker, keys, 3600.0)
        await forget_consumers(broker, keys.prompts(), ROLLOUT_GROUP, 3600.0)

    async def scrape() -> None:
        set_gauges(reading)
        generate_latest()

    async def admit() -> None:
        scheduler.next_ticket = steps * GROUPS  # tickets are there: their ids are taken
        join.groups.clear()
        join.expect([_outstanding(ticket) for ticket in await scheduler.adopt_issued()])

    return {
        "heartbeat (worker, 2 s)": lambda: publish_heartbeat(broker, keys, Heartbeat("rollout-0", "rollout")),
        "look for abandoned work (worker, half a lease)": reclaim,
        "renewal (worker, third of a lease)": consumer.renew,
        "where a group stands (trainer)": lambda: group_status(broker, keys.prompts(), ROLLOUT_GROUP),
        "backlog of trajectories (exporter)": lambda: backlog(
            broker, keys.trajectories(), REWARD_GROUP, Trajectory
        ),
        "all heartbeats (status, exporter)": lambda: read_heartbeats(broker, keys),
        "exporter's reading, after the first (5 s)": exporter.read,
        "exporter's answer to a scrape (15 s)": scrape,
        "status, top's first look": status,
        "tickets adopted (trainer, restart)": admit,
        "started versions (trainer, news)": lambda: reconciler.learn_started_versions(join.groups.values()),
        "groups that a step takes (trainer, news)": selecting(workers),
        f"renewal of {HELD} held (worker, third of a lease)": holder.renew,
        "what the dead left (trainer, 10 min)": departed,
        "trace of a group": lambda: read_group(history, steps * GROUPS // 2),
    }


async def measure(workers: int, steps: int) -> dict[str, float]:
    """Milliseconds of each call."""
    config = trainer_config(group_size=GROUP_SIZE, groups_per_step=GROUPS, steps=10_000)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedRedis(Path(folder), options=("--appendonly", "no"))
        server.start()
        try:
            broker, keys = await Broker.connect(server.url), Keys("costs")
            await fill(broker, keys, config, workers, steps)
            for name, call in (await calls(broker, keys, config, workers, steps)).items():
                await call()
                begun = await _cpu_s(broker)
                for _ in range(ROUNDS):
                    await call()
                found[name] = 1000 * (await _cpu_s(broker) - begun) / ROUNDS
            await broker.close()
        finally:
            server.stop()
    return found


async def _cpu_s(broker: Broker) -> float:
    """Processor time so far, of this process and of Redis."""
    cpu = await broker.info("cpu")
    return time.process_time() + float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])


async def measure_sizes() -> dict[str, list[int]]:
    """What lies there after few steps of a real run, and after many."""
    found: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with Cluster(Path(folder), Size(*SMALL_RUN)) as cluster:
            broker, keys, run_dir = cluster.run.broker, cluster.run.keys, cluster.run.run_dir
            for step in AT_STEPS:
                await cluster.until_step(step, 300.0)
                _, fields = (await read_raw(broker, keys.commits, entry_id_of(step), count=1))[0]
                newest = max((run_dir / CHECKPOINTS_FOLDER).glob(f"v*/{STATE_FILE}"))
                sizes = {
                    "keys in Redis": int(await broker.execute("DBSIZE")),
                    "a commit, bytes": len(fields[PAYLOAD_FIELD]),
                    "a record of metrics.jsonl, bytes": len(_last_line(run_dir / METRICS_FILE)),
                    "a checkpoint's positions and tickets, bytes": newest.stat().st_size,
                }
                for name, size in sizes.items():
                    found.setdefault(name, []).append(size)
    return found


def _last_line(path: Path) -> bytes:
    return path.read_bytes().splitlines()[-1]


def main() -> None:
    """Both sizes."""
    small, workers, run = (
        run_main(measure(*size)) for size in (SMALL, (LARGE[0], SMALL[1]), (SMALL[0], LARGE[1]))
    )
    print_table(
        "What it costs, in ms of processor time",
        ("call", f"{SMALL[0]} workers, {SMALL[1]} steps", "10 x workers", "10 x steps"),
        [
            (
                name,
                f"{ms:.2f}",
                f"{workers[name]:.2f} (x {workers[name] / max(ms, 0.01):.1f})",
                f"{run[name]:.2f} (x {run[name] / max(ms, 0.01):.1f})",
            )
            for name, ms in small.items()
        ],
        machine(),
    )
    sizes = run_main(measure_sizes())
    print_table(
        f"What lies there, with {SMALL_RUN[0]} workers",
        ("what", *(f"after step {step}" for step in AT_STEPS)),
        [(name, *(f"{size:,}" for size in found)) for name, found in sizes.items()],
    )
    print_result(
        {
            "benchmark": "scale_costs",
            "ms": {name: round(ms, 2) for name, ms in small.items()},
            "sizes": sizes,
            "with_workers": {name: round(workers[name] / max(ms, 0.01), 2) for name, ms in small.items()},
            "with_steps": {name: round(run[name] / max(ms, 0.01), 2) for name, ms in small.items()},
        }
    )


if __name__ == "__main__":
    typer.run(main)
