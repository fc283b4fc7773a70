"""What befalls a large run, one thing after the other, and what the run makes of it.

After each fault the slots of the engines are watched until they are as full as before; how many connections
and commands Redis had to take in its worst quarter of a second tells of a thundering herd. At the end every
ticket that was ever issued is looked for.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from redis import exceptions as redis_errors

from benchmarks.report import machine, print_result, print_table
from benchmarks.scale_cluster import Books, Cluster, Size

LOOK_S = 0.25
WINDOWS, STEADY = 4, 0.95
"""Slots are steady when so many looks in a row, one a second, see this share of what was full before."""
PATIENCE_S = 40.0
"""Unscaled."""
TENTH, WAVES, CUT_S, SLOWER = 10, 10, 3.0, 4.0


@dataclass
class Recovery:
    """What came of one fault. Seconds are unscaled."""

    fault: str
    lowest: float = 1.0
    """Share of the slots with work, in the worst second."""
    steady_s: float | None = None
    """From the fault until the slots were full again; None where they were not."""
    most_connections: int = 0
    """Opened in the worst quarter of a second, of the wall's time."""
    most_commands: int = 0


@dataclass
class Faults:
    """All of them, and how the run stood at the end."""

    recoveries: list[Recovery] = field(default_factory=list)
    before: float = 0.0
    """Share of the slots with work before the first one."""
    books: Books = field(default_factory=Books)


class Trouble:
    """Brings faults about, and watches."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.size = cluster, cluster.size
        self.tenth = max(1, self.size.workers // TENTH)

    async def kill_a_tenth(self) -> None:
        """At once, without a word; others are started, as a supervisor does."""
        self.cluster.tell("rollout", "kill", count=self.tenth)
        self.cluster.tell("reward", "kill", count=max(1, self.size.reward_workers // TENTH))
        await asyncio.sleep(self.size.stretch)
        self.cluster.tell("rollout", "start", count=self.tenth)
        self.cluster.tell("reward", "start", count=max(1, self.size.reward_workers // TENTH))

    async def replace_all(self) -> None:
        """A tenth after the other leaves in an orderly way, and as many come."""
        for _ in range(WAVES):
            self.cluster.tell("rollout", "stop", count=self.tenth)
            self.cluster.tell("rollout", "start", count=self.tenth)
            await asyncio.sleep(self.size.stretch)

    async def slow_a_tenth(self) -> None:
        """Engines that take four times as long, for a while."""
        self.cluster.tell("rollout", "slow", count=self.tenth, factor=SLOWER)
        await asyncio.sleep(CUT_S * self.size.stretch)
        self.cluster.tell("rollout", "slow", count=self.tenth, factor=1.0)

    async def restart_redis(self) -> None:
        """It dies, and comes back with its append-only file."""
        redis = self.cluster.run.redis
        await asyncio.to_thread(redis.kill)
        await asyncio.sleep(self.size.stretch)
        await asyncio.to_thread(redis.start)

    async def cut_a_rack(self) -> None:
        """Twice no network for a tenth of the workers."""
        for _ in range(2):
            self.cluster.tell("rollout", "cut", count=self.tenth, seconds=CUT_S)
            await asyncio.sleep(1.5 * CUT_S * self.size.stretch)

    async def join(self) -> None:
        """Half as many again, within a second."""
        self.cluster.tell("rollout", "start", count=self.size.workers // 2)

    async def watch(self, name: str, fault: Callable[[], Awaitable[None]], full: float) -> Recovery:
        """Bring it about, and wait until the slots are full again."""
        found, stretch = Recovery(name), self.size.stretch
        begun = time.time()
        herd = asyncio.create_task(self._watch_redis(found))
        await fault()
        good = 0
        while time.time() - begun < PATIENCE_S * stretch and good < WINDOWS:
            await asyncio.sleep(stretch)
            end = time.time() - 1.2  # pools tell what they did once a second
            share = self.cluster.busy_share(end - stretch, end)
            found.lowest = min(found.lowest, share)
            good = good + 1 if share >= STEADY * full else 0
        if good == WINDOWS:
            found.steady_s = max(0.0, (time.time() - begun) / stretch - WINDOWS)
        herd.cancel()
        print(found, file=sys.stderr)
        return found

    async def _watch_redis(self, found: Recovery) -> None:
        before: dict[str, int] = {}
        while True:
            try:
                info = await self.cluster.run.broker.redis.execute_command("INFO", "stats")
                pairs = (line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
                stats = {key: int(value) for key, value in pairs if key in COUNTED}
            except (redis_errors.RedisError, OSError):
                stats = {}
            since = {name: stats[name] - before[name] for name in COUNTED if name in stats and name in before}
            found.most_connections = max(found.most_connections, since.get(COUNTED[0], 0))
            found.most_commands = max(found.most_commands, since.get(COUNTED[1], 0))
            # A server that comes back counts connections anew, and as commands what it reads from its file.
            before = stats or {COUNTED[0]: 0}
            await asyncio.sleep(LOOK_S)


COUNTED = ("total_connections_received", "total_commands_processed")


async def measure_faults(folder: Path, size: Size, chosen: Sequence[str] = ()) -> Faults:
    """One run with all faults, or with those that are named."""
    found = Faults()
    async with Cluster(folder, size) as cluster:
        trouble = Trouble(cluster)
        await cluster.until_step(0, 120.0 + 30 * size.mean_s * size.stretch)
        await asyncio.sleep(1.5 + 2 * size.stretch)
        end = time.time() - 1.2
        found.before = cluster.busy_share(end - size.stretch, end)
        faults: tuple[tuple[str, Callable[[], Awaitable[None]]], ...] = (
            ("a tenth is killed", trouble.kill_a_tenth),
            ("all are replaced", trouble.replace_all),
            ("a tenth is slow", trouble.slow_a_tenth),
            ("Redis is restarted", trouble.restart_redis),
            ("a rack without network", trouble.cut_a_rack),
            ("half as many join", trouble.join),
        )
        for name, fault in faults:
            if chosen and name not in chosen:
                continue
            found.recoveries.append(await trouble.watch(name, fault, found.before))
        found.books = await cluster.end()
    return found


def print_faults(found: Faults, size: Size) -> None:
    """The table and the line."""
    rows = [
        (
            r.fault,
            f"{r.lowest:.2f}",
            "-" if r.steady_s is None else f"{r.steady_s:.1f}",
            f"{r.most_connections:,}",
            f"{r.most_commands:,}",
        )
        for r in found.recoveries
    ]
    print_table(
        f"Faults with {size.workers:,} + {size.reward_workers:,} workers",
        ("fault", "slots with work, at worst", "steady after s", "connections", "commands"),
        rows,
        f"Before: {found.before:.2f}. Time is stretched by {size.stretch:g}; seconds are unscaled.\n"
        f"Connections, commands: what Redis took in the worst {LOOK_S:g} s of the wall's time. {machine()}",
    )
    print_result(
        {
            "benchmark": "scale_faults",
            "workers": size.workers,
            "steady_s": {r.fault: r.steady_s and round(r.steady_s, 1) for r in found.recoveries},
            "steps": found.books.steps,
            "tickets": found.books.issued,
            "lost": len(found.books.lost),
            "duplicated": found.books.duplicated,
        }
    )
