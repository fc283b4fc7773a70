"""A thousand rollout workers, two hundred reward workers and a trainer on one Redis.

    python -m benchmarks.scale                    # 10, 100 and 1,000 workers
    python -m benchmarks.scale --workers 10 --mean-s 0.3 --steps 100 --trim

Workers are the services' real code on a real Redis; engines, rewards and the policy are delays (see
`scale_workers`). Lengths are log-normal with sigma 0.99, cut at 16 times the median (Laminar, arXiv
2510.12633); rewards take from a hundredth to four tenths of the mean completion (verl #2854: 1 to 40 s); the
trainer works 0.7 of the time that generation takes for a step, so that generation is the slowest stage and
its slots are the limit. `efficiency` is the share of the slots that was filled with work, counted by its
nominal time. After the measured steps the run goes on until no ticket is ahead of the trainer, and ends; what
was lost or trained twice is then counted from its commits, as in a run's summary.

Time is scaled: all work and all pauses of loops take `stretch` times as long, so that the cores of this
machine, which stand for those of hundreds, are not what limits. Without --stretch it follows from what the
size before took of the cores, and from what the cores have left; Redis's figures are for unscaled time.
"""

import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Annotated

import psutil
import typer

from benchmarks.report import machine, print_result, print_table
from tests.support.runs import ServiceRun, simulated_config
from tidemill.common.config import RunConfig
from tidemill.common.process.programs import run_main
from tidemill.common.run.state import read_state
from tidemill.common.streams import Entry, OffsetReader, memory_bytes
from tidemill.common.wire.messages import Commit
from tidemill.services.console.status.report import CommitTotals, RunSummary

SIGMA, CUT = 0.99, 16.0
MEDIAN_TOKENS, GROUP_SIZE, SLOTS, GROUPS_HELD = 64, 2, 1, 2
STALENESS, WARM_STEPS, STEPS = 8, 1, 4
"""A step lasts two mean completions, the longest completion ten: this staleness keeps the trainer going."""
REWARD_SLOTS, WORKERS_PER_REWARD_WORKER = 4, 5
TRAINER_SHARE, REWARD_SHARES = 0.7, (0.01, 0.4)
LEASE_S, DRAIN_S = 6.0, 1.0
POLL_S, END_S, WRITTEN_AFTER_S = 0.2, 300.0, 1.5
MEAN_S, MOST_STRETCH = 1.5, 12.0
FIRST_CORES_PER_WORKER = 0.008
"""Assumed before anything was measured."""
CORES_USED = 0.4
"""Share of the cores' free time that is used; the rest is for bursts."""


@dataclass(frozen=True)
class Size:
    """How many workers, and how time is scaled."""

    workers: int
    mean_s: float
    """Seconds of a completion, on average."""
    stretch: float
    """Wall seconds that stand for one second: all work and all pauses of loops take so much longer."""
    trims: bool = False
    """Whether streams are trimmed, as those of a run are."""

    @property
    def reward_workers(self) -> int:
        """A fifth as many as rollout workers."""
        return max(1, self.workers // WORKERS_PER_REWARD_WORKER)

    def config(self, folder: Path, steps: int) -> RunConfig:
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
            reward__delay_s=[share * mean_s for share in REWARD_SHARES],
            reward__max_in_flight=REWARD_SLOTS,
            trainer__steps=steps + STALENESS + 1,
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
class Outcome:
    """Measurements of one size."""

    size: Size
    efficiency: float
    samples_per_s: float
    step_s: float
    cpu_shares: dict[str, float]
    """CPU of each process, as a share of one core, in wall time."""
    trainer_share: float
    """Share of the time in which the trainer works."""
    mb_by_step: list[float]
    """Megabytes of all streams in Redis, after each measured step."""
    commands_per_s: float
    """Commands of Redis in unscaled time."""
    summary: RunSummary

    @property
    def mb_per_step(self) -> float:
        """Megabytes of a step in Redis, where nothing is trimmed."""
        return self.mb_by_step[-1] / (WARM_STEPS + len(self.mb_by_step))

    @property
    def memory_growth(self) -> float:
        """The most that Redis held in the second half of the steps, over the most in the first."""
        half = len(self.mb_by_step) // 2
        return max(self.mb_by_step[half:]) / max(self.mb_by_step[: half or 1])

    @property
    def redis_share(self) -> float:
        """CPU of Redis, as a share of one core, in unscaled time."""
        return self.cpu_shares["redis"] * self.size.stretch

    @property
    def cores_per_worker(self) -> float:
        """What a worker and its share of the rest would take without stretching."""
        return sum(self.cpu_shares.values()) * self.size.stretch / self.size.workers


class Cluster:
    """The processes of one size, and the commits that were read so far."""

    def __init__(self, folder: Path, size: Size, steps: int) -> None:
        self.folder, self.size = folder, size
        self.run = ServiceRun(folder, size.config(folder, steps), "scale")
        self.pools: dict[str, subprocess.Popen[bytes]] = {}
        self.commits: list[Commit] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run all processes during the block."""
        async with self.run:
            self.run.start("trainer")
            self._reader = OffsetReader(self.run.broker, self.run.keys.commits, Commit)
            try:
                for role, count in (("rollout", self.size.workers), ("reward", self.size.reward_workers)):
                    self.pools[role] = self._start_pool(role, count)
                yield
            finally:
                for pool in self.pools.values():
                    pool.kill()
                    pool.wait()

    def _start_pool(self, role: str, count: int) -> subprocess.Popen[bytes]:
        words = ["-m", "benchmarks.scale_workers", role, str(count), str(self.size.stretch)]
        words += [str(self.folder), self.run.keys.run_id]
        variables = {"TIDEMILL_REDIS_URL": self.run.url, "TIDEMILL_RUNS_DIR": str(self.folder)}
        variables |= {"OMP_NUM_THREADS": "1", "TIDEMILL_LOG_LEVEL": "ERROR"}
        with open(self.folder / f"{role}.log", "wb") as log:
            return subprocess.Popen(
                [sys.executable, *words], stdin=subprocess.PIPE, stderr=log, env=os.environ | variables
            )

    async def until_step(self, step: int) -> None:
        """Read the commits up to that of a step."""
        deadline = time.monotonic() + 120.0 + 30 * self.size.mean_s * self.size.stretch
        while len(self.commits) <= step:
            entries = await self._reader.read(64, POLL_S)
            self.commits += [entry.message for entry in entries if isinstance(entry, Entry)]
            has_ended = self.run.processes["trainer"].poll() is not None and not entries
            if has_ended or time.monotonic() > deadline:
                raise RuntimeError(f"no step {step}:\n{self.run.log_of('trainer')[-3000:]}")

    async def used(self) -> dict[str, float]:
        """CPU seconds of each process since its start, and Redis's commands."""
        cpu, stats = await self.run.broker.info("cpu"), await self.run.broker.info("stats")
        pids = {role: pool.pid for role, pool in self.pools.items()}
        pids["trainer"] = self.run.processes["trainer"].pid
        times = {role: psutil.Process(pid).cpu_times() for role, pid in pids.items()}
        return {
            "commands": float(stats["total_commands_processed"]),
            "redis": float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"]),
            **{role: used.user + used.system for role, used in times.items()},
        }

    async def megabytes(self) -> float:
        """Megabytes of all streams in Redis."""
        keys = self.run.keys
        streams = (keys.prompts(), keys.trajectories(), keys.scores(), keys.commits, keys.weights)
        return sum([await memory_bytes(self.run.broker, key) for key in streams]) / 1e6

    def busy_share(self, begin: float, end: float) -> float:
        """Share of the engines' slots that had work."""
        lines = (self.folder / "work-rollout.jsonl").read_text().splitlines()
        work: list[tuple[float, float]] = [json.loads(line) for line in lines]
        spent = sum(max(0.0, min(end, at + took_s) - max(begin, at)) for at, took_s in work)
        return spent / (self.size.workers * SLOTS * (end - begin))

    async def end(self) -> RunSummary:
        """Wait for the run's end; what its commits account for."""
        await self.until_step(self.run.config.trainer.steps - 1)
        if await self.run.wait("trainer", END_S):
            raise RuntimeError(f"the trainer failed:\n{self.run.log_of('trainer')[-3000:]}")
        for pool in self.pools.values():
            await asyncio.to_thread(pool.communicate, timeout=END_S)
        keys = self.run.keys
        totals, state = CommitTotals(keys.run_id, GROUP_SIZE), await read_state(self.run.broker, keys)
        for commit in self.commits:
            totals.add(commit)
        return totals.finish(int(state["tickets_issued"]))


async def measure(folder: Path, size: Size, steps: int = STEPS) -> Outcome:
    """Measure `steps` steps but for the first, which warms up."""
    cluster = Cluster(folder, size, steps)
    async with cluster.running():
        await cluster.until_step(WARM_STEPS - 1)
        before, begin = await cluster.used(), time.time()
        mb_by_step = []
        for step in range(WARM_STEPS, steps):
            await cluster.until_step(step)
            mb_by_step.append(await cluster.megabytes())
        after, end = await cluster.used(), time.time()
        await asyncio.sleep(WRITTEN_AFTER_S)  # pools have written what they did
        efficiency = cluster.busy_share(begin, end)
        measured, wall_s = cluster.commits[WARM_STEPS:steps], end - begin
        waits = [v for c in measured for name, v in c.metrics.items() if name.startswith("time/wait_")]
        shares = {name: (after[name] - before[name]) / wall_s for name in before}
        return Outcome(
            size,
            efficiency,
            sum(len(set(commit.trained_keys)) for commit in measured) * size.stretch / wall_s,
            wall_s / len(measured) / size.stretch,
            shares,
            1.0 - sum(waits) / wall_s,
            mb_by_step,
            shares.pop("commands") * size.stretch,
            await cluster.end(),
        )


def mean_of_lengths(sigma: float, cut: float) -> float:
    """Mean length of completions: log-normal with median 1, where what is above `cut` is `cut`.

    >>> round(mean_of_lengths(0.99, 16.0), 2)
    1.61
    """
    normal, edge = NormalDist(), math.log(cut) / sigma
    return math.exp(sigma**2 / 2) * normal.cdf(edge - sigma) + cut * (1.0 - normal.cdf(edge))


def stretch_for(workers: int, cores_per_worker: float) -> float:
    """The stretch with which all processes together take `CORES_USED` of the cores' free time."""
    begun, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - begun < 1.0:
        pass
    share = (time.process_time() - used) / (time.perf_counter() - begun)
    wanted = workers * cores_per_worker / (CORES_USED * share * len(os.sched_getaffinity(0)))
    return round(min(max(1.0, wanted), MOST_STRETCH), 1)


NOTE = """\
efficiency: slots filled with work, of all. trainer: share of time that it works. Redis: CPU, of
a core, in unscaled time, like samples, steps and commands. loop: CPU of all rollout workers, of a
core, in wall time: below 0.9 the loop that they share does not limit. MB a step: what streams
take in Redis; growth: the most of it in the second half of the steps, over the first.
"""


def print_outcomes(outcomes: list[Outcome]) -> None:
    rows = [
        (
            f"{o.size.workers:,} + {o.size.reward_workers:,}",
            f"{o.size.stretch:g}",
            f"{o.efficiency:.3f}",
            f"{o.samples_per_s:,.1f}",
            f"{o.step_s:.2f}",
            f"{o.trainer_share:.2f}",
            f"{o.commands_per_s:,.0f}",
            f"{o.redis_share:.3f}",
            f"{o.cpu_shares['rollout']:.2f}",
            f"{o.mb_per_step:.2f}",
            f"{o.memory_growth:.2f}",
            str(o.summary.lost),
            str(o.summary.duplicated_in_training),
        )
        for o in outcomes
    ]
    titles = "workers,stretch,efficiency,samples/s,step s,trainer,commands/s,Redis,loop,MB a step,growth,lost"
    print_table("Workers on one Redis", (*titles.split(","), "twice"), rows, NOTE + machine())


def main(
    workers: Annotated[str, typer.Option(help="numbers of rollout workers")] = "10,100,1000",
    mean_s: Annotated[float, typer.Option(help="what a completion takes, on average")] = MEAN_S,
    stretch: Annotated[float, typer.Option(help="wall seconds of a second; 0: as the machine needs")] = 0.0,
    steps: Annotated[int, typer.Option(min=2, help="of each run, that count or warm up")] = STEPS,
    trim: Annotated[
        bool, typer.Option("--trim", help="streams, as a run does: is Redis's memory flat?")
    ] = False,
) -> None:
    """Measure one size after the other, and print one line of JSON."""
    outcomes: list[Outcome] = []
    for number in map(int, workers.split(",")):
        per_worker = outcomes[-1].cores_per_worker if outcomes else FIRST_CORES_PER_WORKER
        size = Size(number, mean_s, stretch or stretch_for(number, per_worker), trim)
        with tempfile.TemporaryDirectory() as folder:
            outcomes.append(run_main(measure(Path(folder), size, steps)))
        print(f"{number} workers: {outcomes[-1].efficiency:.3f}", file=sys.stderr)
    print_outcomes(outcomes)
    largest = outcomes[-1]
    print_result(
        {
            "efficiency": {str(o.size.workers): round(o.efficiency, 3) for o in outcomes},
            "redis_mb_per_step": round(largest.mb_per_step, 2),
            "redis_memory_growth": round(largest.memory_growth, 2),
            f"redis_cpu_share_{largest.size.workers}": round(largest.redis_share, 3),
            "lost": sum(o.summary.lost for o in outcomes),
            "duplicated": sum(o.summary.duplicated_in_training for o in outcomes),
        }
    )


if __name__ == "__main__":
    typer.run(main)
