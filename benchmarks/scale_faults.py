"""Faults of a large run, one after the other, and how long the run takes to be as before.

After each fault the slots of the engines are watched until they are as full as before. At the end every
ticket that was ever issued is looked for.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import machine, print_result, print_table
from benchmarks.scale_cluster import Books, Cluster, Size

WINDOWS, STEADY = 4, 0.95
"""Slots are steady when so many looks in a row, one a second, see this share of what was full before."""
PATIENCE_S = 40.0
"""Unscaled. How long slots may take to be full again."""
TENTH, WAVES, CUT_S, SLOWER = 10, 10, 3.0, 4.0


@dataclass
class Recovery:
    """What came of one fault. Seconds are unscaled."""

    fault: str
    lowest: float = 1.0
    """Share of the slots with work, in the worst second."""
    steady_s: float | None = None
    """From the fault until the slots were full again; None where they were not."""


@dataclass
class Faults:
    """All of them, and how the run stood at the end."""

    recoveries: list[Recovery] = field(default_factory=list)
    before: float = 0.0
    """Share of the slots with work before the first one."""
    books: Books = field(default_factory=Books)


Fault = Callable[["Trouble"], Awaitable[None]]


class Trouble:
    """Brings faults about, and watches."""

    def __init__(self, cluster: Cluster, patience_s: float) -> None:
        self.cluster, self.size, self.patience_s = cluster, cluster.size, patience_s
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

    async def watch(self, name: str, fault: Fault, full: float) -> Recovery:
        """Bring it about, and wait until the slots are full again."""
        found, stretch = Recovery(name), self.size.stretch
        begun = time.time()
        await fault(self)
        good = 0
        until = time.time() + self.patience_s * stretch
        while time.time() < until and good < WINDOWS:
            await asyncio.sleep(stretch)
            end = time.time() - 1.2  # pools tell what they did once a second
            share = self.cluster.busy_share(end - stretch, end)
            found.lowest = min(found.lowest, share)
            good = good + 1 if share >= STEADY * full else 0
        if good == WINDOWS:
            found.steady_s = max(0.0, (time.time() - begun) / stretch - WINDOWS)
        print(found, file=sys.stderr)
        return found


FAULTS: dict[str, tuple[str, Fault]] = {
    "killed": ("a tenth is killed", Trouble.kill_a_tenth),
    "replaced": ("all are replaced", Trouble.replace_all),
    "slow": ("a tenth is slow", Trouble.slow_a_tenth),
    "restarted": ("Redis is restarted", Trouble.restart_redis),
    "cut": ("a rack without network", Trouble.cut_a_rack),
    "joining": ("half as many join", Trouble.join),
}


async def measure_faults(
    folder: Path, size: Size, chosen: Sequence[str] = tuple(FAULTS), patience_s: float = PATIENCE_S
) -> Faults:
    """One run with these faults, one after the other."""
    found = Faults()
    async with Cluster(folder, size) as cluster:
        trouble = Trouble(cluster, patience_s)
        await cluster.until_step(0, 120.0 + 30 * size.mean_s * size.stretch)
        await asyncio.sleep(1.5 + 2 * size.stretch)
        end = time.time() - 1.2
        found.before = cluster.busy_share(end - size.stretch, end)
        for name in chosen:
            title, fault = FAULTS[name]
            found.recoveries.append(await trouble.watch(title, fault, found.before))
        found.books = await cluster.end()
    return found


def print_faults(found: Faults, size: Size) -> None:
    """The table and the line."""
    rows = [
        (
            r.fault,
            f"{r.lowest:.2f}",
            "-" if r.steady_s is None else f"{r.steady_s:.1f}",
        )
        for r in found.recoveries
    ]
    print_table(
        f"Faults with {size.workers:,} + {size.reward_workers:,} workers",
        ("fault", "slots with work, at worst", "steady after s"),
        rows,
        f"Before: {found.before:.2f}. Unscaled seconds; time is stretched by {size.stretch:g}. {machine()}",
    )
    print_result(
        {
            "benchmark": "scale_faults",
            "workers": size.workers,
            "stretch": size.stretch,
            "steady_s": {r.fault: r.steady_s and round(r.steady_s, 1) for r in found.recoveries},
            "steps": found.books.steps,
            "tickets": found.books.issued,
            "dead_letters": found.books.buried,
            "lost": len(found.books.lost),
            "duplicated": found.books.duplicated,
        }
    )
