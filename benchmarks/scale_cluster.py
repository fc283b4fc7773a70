"""A run of many workers against one real Redis: started, measured, and counted at the end.

Work is simulated, everything around it is the services' own code: see `scale_workers`. Lengths are log-normal
with sigma 0.99, cut at 16 times the median (Laminar, arXiv 2510.12633); rewards take from a hundredth to
four tenths of the mean completion (verl #2854: 1 to 40 s); the trainer works 0.7 of the time that generation
takes for a step, so that generation is the slowest stage and its slots are the limit.
"""

import asyncio
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

import psutil

from tests.support.runs import ServiceRun, simulated_config
from tidemill.common.config import RunConfig
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Entry, group_status, id_order, memory_bytes, scan
from tidemill.common.streams.entries import entry_id_of
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import Commit, DeadLetter, Message, Score, Ticket, Trajectory

SIGMA, CUT = 0.99, 16.0
MEDIAN_TOKENS, GROUP_SIZE, SLOTS, GROUPS_HELD = 64, 2, 1, 2
STALENESS, WARM_STEPS, STEPS = 8, 1, 4
"""Steps last two mean completions; the longest completion takes ten, and must not hold up the trainer."""
REWARD_SLOTS, WORKERS_PER_REWARD_WORKER = 4, 5
TRAINER_SHARE, REWARD_SHARES = 0.7, (0.01, 0.4)
LEASE_S, DRAIN_S = 6.0, 1.0
POLL_S, END_S = 0.2, 300.0


@dataclass(frozen=True)
class Size:
    """How many workers, and how time is scaled."""

    workers: int
    mean_s: float
    """What a completion takes, on average."""
    stretch: float
    """Wall seconds that stand for one second: all work and all pauses of loops take so much longer."""

    trims: bool = False
    """As a run does; tickets are then accounted for as far back as Redis has them."""

    @property
    def reward_workers(self) -> int:
        """A fifth as many as rollout workers."""
        return max(1, self.workers // WORKERS_PER_REWARD_WORKER)

    def config(self, folder: Path, steps: int) -> RunConfig:
        """The run's config."""
        mean_s, groups = self.mean_s * self.stretch, max(4, self.workers)
        step_s = groups * GROUP_SIZE * mean_s / (self.workers * SLOTS)
        return simulated_config(
            folder,
            model__max_model_len=MEDIAN_TOKENS * int(CUT) + 16,
            rollout__sampling={"max_tokens": MEDIAN_TOKENS * int(CUT)},
            rollout__simulated={
                "group_s": mean_s / mean_of_lengths(SIGMA, CUT),
                "sigma": SIGMA,
                "tokens": MEDIAN_TOKENS,
                "vocab_size": 32,
            },
            rollout__max_num_seqs=SLOTS,
            rollout__max_groups_in_flight=GROUPS_HELD,
            reward__kwargs={
                "shortest_s": REWARD_SHARES[0] * mean_s,
                "longest_s": REWARD_SHARES[1] * mean_s,
            },
            reward__max_in_flight=REWARD_SLOTS,
            trainer__steps=steps,
            trainer__groups_per_step=groups,
            trainer__group_size=GROUP_SIZE,
            trainer__max_staleness=STALENESS,
            trainer__batch_order="as_ready",
            trainer__micro_batch_tokens=65536,
            trainer__simulated={"group_s": TRAINER_SHARE * step_s / groups},
            trainer__checkpoint_every=2,
            streams__trim=self.trims,
            streams__lease_s=LEASE_S * self.stretch,
            streams__drain_s=DRAIN_S * self.stretch,
        )


@dataclass
class Books:
    """What became of every ticket that was issued."""

    issued: int = 0
    trained: int = 0
    in_flight: int = 0
    dead_lettered: int = 0
    """Given up and told in the dead letters; the next commit says that another ticket replaces it."""
    lost: list[int] = field(default_factory=list)
    duplicated: int = 0
    steps: int = 0


@dataclass
class Outcome:
    """One size."""

    size: Size
    efficiency: float
    samples_per_s: float
    step_s: float
    cpu_shares: dict[str, float]
    """CPU of each process, of one core, in wall time."""
    trainer_share: float
    """Of the time, the trainer's work."""
    steps: int
    mb_by_step: list[float]
    """What all streams take in Redis, in megabytes, after each step that counts."""
    commands_per_s: float
    """Of Redis, in the time that the run stands for."""
    books: Books

    @property
    def mb_per_step(self) -> float:
        """What a step takes in Redis, where nothing is trimmed."""
        return self.mb_by_step[-1] / self.steps

    @property
    def memory_growth(self) -> float:
        """The most that Redis held in the second half of the steps, over the most in the first."""
        half = len(self.mb_by_step) // 2
        return max(self.mb_by_step[half:]) / max(self.mb_by_step[: half or 1])

    @property
    def redis_share(self) -> float:
        """CPU of Redis, of one core, in the time that the run stands for."""
        return self.cpu_shares["redis"] * self.size.stretch

    @property
    def cores_per_worker(self) -> float:
        """What a worker and its share of the rest would take without stretching."""
        return sum(self.cpu_shares.values()) * self.size.stretch / self.size.workers


class Cluster:
    """The processes of one size; `async with`."""

    def __init__(self, folder: Path, size: Size, steps: int = 10_000) -> None:
        self.folder, self.size = folder, size
        self.config = size.config(folder, steps)
        self.run = ServiceRun(folder, self.config, "scale")
        self.pools: dict[str, subprocess.Popen[bytes]] = {}

    async def __aenter__(self) -> "Cluster":
        await self.run.__aenter__()
        self.run.start("trainer")
        for role, count in (("rollout", self.size.workers), ("reward", self.size.reward_workers)):
            self.pools[role] = self._start_pool(role, count)
        return self

    async def __aexit__(self, *error: Any) -> None:
        for pool in self.pools.values():
            if pool.poll() is None:
                pool.kill()
            pool.wait()
        await self.run.__aexit__(*error)

    def _start_pool(self, role: str, count: int) -> subprocess.Popen[bytes]:
        words = ["-m", "benchmarks.scale_workers", role, str(count), str(self.size.stretch)]
        words += [str(self.folder), self.run.keys.run_id]
        variables = {"TIDEMILL_REDIS_URL": self.run.url, "TIDEMILL_RUNS_DIR": str(self.folder)}
        quiet = {"OMP_NUM_THREADS": "1", "TIDEMILL_LOG_LEVEL": "ERROR"}
        with open(self.folder / f"{role}.log", "wb") as log:
            return subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.PIPE,
                stderr=log,
                env=os.environ | variables | quiet,
            )

    async def commits(self) -> list[Commit]:
        """All so far."""
        return [commit async for commit in messages(self.run.broker, self.run.keys.commits, Commit)]

    async def until_step(self, step: int, timeout_s: float) -> Commit:
        """Wait for the commit of a step."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = await self.run.broker.execute(
                "XRANGE", self.run.keys.commits, entry_id_of(step), "+", "COUNT", 1
            )
            if found:
                return next(commit for commit in await self.commits() if commit.step == step)
            if self.run.processes["trainer"].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no step {step}:\n{self.run.log_of('trainer')[-3000:]}")
            await asyncio.sleep(POLL_S)

    async def end(self) -> Books:
        """Stop the trainer as a person would, then everybody at once; and count."""
        await self.run.stop("trainer", END_S)
        for pool in self.pools.values():
            await asyncio.to_thread(pool.communicate, timeout=END_S)
        return await count(self.run.broker, self.run.keys)

    def work(self) -> list[tuple[float, float]]:
        """Begin and seconds of each completion so far."""
        path = self.folder / "work-rollout.jsonl"
        return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    def cpu_s(self) -> dict[str, float]:
        """Of each process, since its start."""
        pids = {role: pool.pid for role, pool in self.pools.items()}
        pids["trainer"] = self.run.processes["trainer"].pid
        times = {role: psutil.Process(pid).cpu_times() for role, pid in pids.items()}
        return {role: used.user + used.system for role, used in times.items()}

    def busy_share(self, begin: float, end: float) -> float:
        """Share of the engines' slots that had work."""
        spent = sum(max(0.0, min(end, at + took_s) - max(begin, at)) for at, took_s in self.work())
        return spent / (self.size.workers * SLOTS * (end - begin))


async def messages(broker: Broker, key: str, kind: type[Message]) -> Any:
    """Everything in a stream."""
    async for entry in scan(broker, key, kind, batch=1024):
        if isinstance(entry, Entry):
            yield entry.message


async def count(broker: Broker, keys: Keys) -> Books:
    """Each ticket is trained once, a dead letter, or on its way to somebody who will be given it, or lost."""
    books, trained = Books(), Counter[tuple[int, int]]()
    done: set[int] = set()
    async for commit in messages(broker, keys.commits, Commit):
        trained.update(set(commit.trained_keys))
        done.update(commit.groups, (ticket for ticket, index, _ in commit.dropped if index < 0))
        books.steps += 1
    made: dict[int, dict[int, str]] = {}
    async for entry in scan(broker, keys.trajectories(), Trajectory, batch=1024):
        if isinstance(entry, Entry) and entry.message.ticket not in done:
            made.setdefault(entry.message.ticket, {}).setdefault(entry.message.index, entry.entry_id)
    scored = {score.key async for score in messages(broker, keys.scores(), Score)}
    dead_letters = {letter.ticket async for letter in messages(broker, keys.dead, DeadLetter)}
    held = await pending(broker, keys.prompts(), ROLLOUT_GROUP)
    judging = await pending(broker, keys.trajectories(), REWARD_GROUP)
    async for ticket in messages(broker, keys.prompts(), Ticket):
        books.issued += 1
        number, samples = ticket.ticket, made.get(ticket.ticket, {})
        if number in done:
            continue
        is_scored = all((number, i) in scored or judging(entry_id) for i, entry_id in samples.items())
        if number in dead_letters:
            books.dead_lettered += 1
        elif held(entry_id_of(number)) or (len(samples) == ticket.group_size and is_scored):
            books.in_flight += 1
        else:
            books.lost.append(number)
    books.trained, books.duplicated = len(trained), sum(number > 1 for number in trained.values())
    return books


async def pending(broker: Broker, key: str, group: str) -> Any:
    """A function that says of an entry whether it is held, or will be given to somebody."""
    status = await group_status(broker, key, group)
    delivered = id_order(status.last_delivered) if status else (0, 0)
    held: set[str] = set()
    first = "-"
    while status and (rows := await broker.execute("XPENDING", key, group, first, "+", 4096)):
        held.update(row[0].decode() for row in rows)
        first = f"({rows[-1][0].decode()}"
    return lambda entry_id: entry_id in held or id_order(entry_id) > delivered


async def measure(folder: Path, size: Size, steps: int = STEPS, warm: int = WARM_STEPS) -> Outcome:
    """Run `steps` steps; the first `warm` of them are warming up."""
    patience_s = 120.0 + 30 * size.mean_s * size.stretch
    async with Cluster(folder, size) as cluster:
        broker, keys = cluster.run.broker, cluster.run.keys
        await cluster.until_step(warm - 1, patience_s)
        before, begin = await _used(cluster), time.time()
        mb_by_step = []
        for step in range(warm, steps):
            last = await cluster.until_step(step, patience_s)
            mb_by_step.append(sum([await memory_bytes(broker, key) for key in _streams(keys)]) / 1e6)
        after, end = await _used(cluster), time.time()
        await asyncio.sleep(1.5)  # pools have written what they did
        commits = await cluster.commits()
        books = await cluster.end()
        wall_s = end - begin
        in_window = [commit for commit in commits if warm <= commit.step <= last.step]
        step_s = wall_s / (steps - warm) / size.stretch
        kept = len(in_window) / (steps - warm)  # where streams are trimmed, the oldest commits are gone
        samples = sum(len(set(commit.trained_keys)) for commit in in_window) / kept
        waits = [v for c in in_window for name, v in c.metrics.items() if name.startswith("time/wait_")]
        return Outcome(
            size,
            cluster.busy_share(begin, end),
            samples * size.stretch / wall_s,
            step_s,
            {name: (after[name] - before[name]) / wall_s for name in before if name != "commands"},
            1.0 - sum(waits) / kept / wall_s,
            steps,
            mb_by_step,
            (after["commands"] - before["commands"]) * size.stretch / wall_s,
            books,
        )


def mean_of_lengths(sigma: float, cut: float) -> float:
    """Mean length of completions: log-normal with median 1, where what is above `cut` is `cut`.

    >>> round(mean_of_lengths(0.99, 16.0), 2)
    1.61
    """
    normal, edge = NormalDist(), math.log(cut) / sigma
    return math.exp(sigma**2 / 2) * normal.cdf(edge - sigma) + cut * (1.0 - normal.cdf(edge))


def _streams(keys: Keys) -> list[str]:
    return [keys.prompts(), keys.trajectories(), keys.scores(), keys.commits, keys.weights]


async def _used(cluster: Cluster) -> dict[str, float]:
    broker = cluster.run.broker
    cpu, stats = await broker.info("cpu"), await broker.info("stats")
    redis_s = float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])
    return {"redis": redis_s, "commands": float(stats["total_commands_processed"]), **cluster.cpu_s()}
