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
machine, which stand for those of hundreds, are not what limits. Without --stretch it follows from their
number. Samples, commands and Redis's share of a core are for unscaled time.
"""

import json
import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import typer

from benchmarks.report import machine, print_result, print_table
from tests.support.runs import ServiceRun, simulated_config
from tidemill.common.config import RunConfig
from tidemill.common.process.programs import run_main
from tidemill.common.run.state import read_state
from tidemill.common.streams import Entry, OffsetReader, memory_bytes
from tidemill.common.wire.messages import Commit
from tidemill.services.console.look.report import CommitTotals, RunSummary

SIGMA = 0.99
CUT = 16.0
MEDIAN_TOKENS = 64
GROUP_SIZE = 2
SLOTS = 1
GROUPS_HELD = 2
STALENESS = 8
WARM_STEPS = 1
"""A step lasts two mean completions, the longest completion ten: this staleness keeps the trainer going."""
REWARD_SLOTS = 4
WORKERS_PER_REWARD_WORKER = 5
TRAINER_SHARE = 0.7
REWARD_SHARES = (0.01, 0.4)
LEASE_S = 6.0
DRAIN_S = 1.0
POLL_S = 0.2
END_S = 300.0
CORES_PER_WORKER = 0.0075
"""What a worker, and its share of everything else, takes of the cores at stretch 1, over the share of them
that may be busy; the rest is for bursts."""


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
        mean_s = self.mean_s * self.stretch
        groups = max(4, self.workers)
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
            reward__function="exact_match",  # it runs in a worker's own loop
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
    """Measurements of one size; all but `mb_by_step` in unscaled time."""

    size: Size
    efficiency: float
    samples_per_s: float
    redis_share: float
    """CPU of Redis, as a share of one core."""
    commands_per_s: float
    mb_by_step: list[float]
    """Megabytes of all streams in Redis, after each measured step."""
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


async def measure(folder: Path, size: Size, steps: int = 4) -> Outcome:
    """Measure `steps` steps but for the first, which warms up."""
    run = ServiceRun(folder, size.config(folder, steps), "scale")
    commits = list[Commit]()
    mb_by_step = []

    async def until_step(step: int) -> None:
        """Read the commits up to that of a step."""
        deadline = time.monotonic() + 120.0 + 30 * size.mean_s * size.stretch
        while len(commits) <= step:
            entries = await reader.read(64, POLL_S)
            commits.extend(entry.message for entry in entries if isinstance(entry, Entry))
            has_ended = run.processes["trainer"].poll() is not None and not entries
            if has_ended or time.monotonic() > deadline:
                raise RuntimeError(f"no step {step}:\n{run.log_of('trainer')[-3000:]}")

    async with run:
        reader = OffsetReader(run.broker, run.keys.commits, Commit)
        run.start("trainer")
        for role, count in (("rollout", size.workers), ("reward", size.reward_workers)):
            run.start("benchmarks.scale_workers", role, arguments=(str(count), str(size.stretch)))
        await until_step(WARM_STEPS - 1)
        before = await used(run)
        for step in range(WARM_STEPS, steps):
            await until_step(step)
            keys = run.keys
            streams = (keys.prompts(), keys.trajectories(), keys.scores(), keys.commits, keys.weights)
            mb_by_step.append(sum([await memory_bytes(run.broker, key) for key in streams]) / 1e6)
        after = await used(run)
        await until_step(run.config.trainer.steps - 1)
        if await run.wait("trainer", END_S):
            raise RuntimeError(f"the trainer failed:\n{run.log_of('trainer')[-3000:]}")
        totals = CommitTotals(keys.run_id, GROUP_SIZE)
        state = await read_state(run.broker, keys)
    for commit in commits:
        totals.add(commit)
    differences = [later - earlier for later, earlier in zip(after, before, strict=True)]
    seconds, *numbers = differences
    samples = sum(len(set(commit.trained_keys)) for commit in commits[WARM_STEPS:steps])
    rates = (size.stretch * each / seconds for each in (samples, *numbers))
    busy_s = sum(
        max(0.0, min(after[0], at + took_s) - max(before[0], at))
        for at, took_s in map(json.loads, (folder / "work-rollout.jsonl").read_text().splitlines())
    )
    efficiency = busy_s / (size.workers * SLOTS * seconds)
    return Outcome(size, efficiency, *rates, mb_by_step, totals.finish(int(state["tickets_issued"])))


async def used(run: ServiceRun) -> tuple[float, float, float]:
    """Now; CPU seconds of Redis since its start, and its commands."""
    cpu = await run.broker.info("cpu")
    stats = await run.broker.info("stats")
    seconds = float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])
    return time.time(), seconds, float(stats["total_commands_processed"])


def mean_of_lengths(sigma: float, cut: float) -> float:
    """Mean length of completions: log-normal with median 1, where what is above `cut` is `cut`.

    >>> round(mean_of_lengths(0.99, 16.0), 2)
    1.61
    """
    normal = NormalDist()
    edge = math.log(cut) / sigma
    return math.exp(sigma**2 / 2) * normal.cdf(edge - sigma) + cut * (1.0 - normal.cdf(edge))


NOTE = """\
efficiency: slots filled with work, of all. Redis: CPU, of a core, in unscaled time, like samples
and commands. MB a step: what streams take in Redis; growth: the most of it in the second half of
the steps, over the first.
"""


def main(
    workers: str = "10,100,1000",
    mean_s: float = 1.5,
    stretch: float = 0.0,
    steps: int = 4,
    trim: bool = False,
) -> None:
    """Measure one size after the other, and print one line of JSON."""
    outcomes: list[Outcome] = []
    for number in map(int, workers.split(",")):
        needed = max(1.0, round(number * CORES_PER_WORKER / len(os.sched_getaffinity(0)), 1))
        size = Size(number, mean_s, stretch or needed, trim)
        with tempfile.TemporaryDirectory() as folder:
            outcomes.append(run_main(measure(Path(folder), size, steps)))
        print(f"{number} workers: {outcomes[-1].efficiency:.3f}", file=sys.stderr)
    rows = [
        (
            f"{o.size.workers:,} + {o.size.reward_workers:,}",
            f"{o.size.stretch:g}",
            f"{o.efficiency:.3f}",
            f"{o.samples_per_s:,.1f}",
            f"{o.commands_per_s:,.0f}",
            f"{o.redis_share:.3f}",
            f"{o.mb_per_step:.2f}",
            f"{o.memory_growth:.2f}",
            o.summary.lost,
            o.summary.duplicated_in_training,
        )
        for o in outcomes
    ]
    columns = "workers,stretch,efficiency,samples/s,commands/s,Redis,MB a step,growth,lost,twice"
    print_table("Workers on one Redis", columns, rows, NOTE + machine())
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
