"""How reward consumers scale when a reward takes long, and what a score costs: the delays of verl #2854.

    python -m benchmarks.reward_scaling                         # 1 to 8 consumers, and one of 1,280 slots
    python -m benchmarks.reward_scaling --beside 638fa2b        # and the build of another commit, in turns
    python -m benchmarks.reward_scaling --trl --verl PYTHON     # and the reward calls of other trainers
    python -m benchmarks.reward_scaling --groups 256 --kills 6  # workers are killed with SIGKILL meanwhile

Reward services as processes on a real Redis. The reward is an async function that sleeps uniformly between 1
and 40 s, divided by 40, for each of 1,024 x 5 samples.

`ideal` is the time without any overhead: every slot takes the next sample the moment it is free, the same
delays are slept, and nothing else costs time; the tail is included. The clock is Redis's own, from just
before the first trajectory is appended to the last score; processes have started before that. `efficiency`
is ideal time over measured time. CPU is the processor time of a score, in milliseconds: of the reward
workers, of the children that run their function, of Redis, of this benchmark, which appends the samples and
waits for the scores, and of all of them. `lost` and `twice` are samples without a score, and scores beyond
one.

Other trainers call the same function for the same samples in their own process, with 512 calls in flight
(`benchmarks/reward_peers.py` says what is called, and how to install verl): nothing is written down, no other
machine can help, and what was scored goes with the process.

The last line is JSON: `efficiency` and `cpu_ms` by "consumers x slots", `lost`, `twice` and `killed` of all
settings, and `beside` and `peers` where they were asked for.
"""

import heapq
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.report import in_turns, machine, print_result, print_table
from benchmarks.reward_side import GROUP_SIZE

REPO = Path(__file__).resolve().parents[1]
SIDE = Path(__file__).with_name("reward_side.py")
PEERS = Path(__file__).with_name("reward_peers.py")
MODEL = REPO / "examples" / "arith" / "model"
"""For the peers, which need a model or its tokenizer."""
DELAY_S = (1.0, 40.0)
SCALE = 40.0
SETTINGS = ((1, 64), (2, 64), (4, 64), (8, 64), (1, 1280))
"""Consumers, and rewards in flight in each."""
PEER_SLOTS = 512
TODAY = "today"
START_LIMIT_S = 600.0
"""For all that one measurement does besides the delays."""
NUM_AT_LEAST = 8
"""Delays that are slept at the same time, far below what each setting has: a bound for the time of all."""
STOP_LIMIT_S = 60.0
PARTS = ("worker", "child", "redis", "benchmark")


def ideal_time_s(delays_s: Sequence[float], slots: int) -> float:
    """Time until all delays are slept, if each of `slots` sleeps takes the next one as soon as it ends.

    >>> ideal_time_s([3.0, 1.0, 1.0, 1.0], slots=2)
    3.0
    """
    free_at = [0.0] * slots
    for delay_s in delays_s:
        heapq.heapreplace(free_at, free_at[0] + delay_s)
    return max(free_at)


@dataclass(slots=True)
class Measured:
    """One scoring of all samples, or the medians of several."""

    wall_s: float
    cpu_ms: dict[str, float]
    """Of a score, by part."""
    lost: int = 0
    twice: int = 0
    killed: int = 0

    @property
    def total_ms(self) -> float:
        """CPU of a score in all processes."""
        return sum(self.cpu_ms.values())

    @classmethod
    def of(cls, tree: Mapping[str, Any], num_samples: int) -> "Measured":
        """The line of JSON of `reward_side`."""
        cpu_ms = {name: 1000 * tree["cpu_s"].get(name, 0.0) / num_samples for name in PARTS}
        return cls(tree["wall_s"], cpu_ms, tree["lost"], tree["twice"], tree["killed"])

    @classmethod
    def median_of(cls, rounds: Sequence["Measured"]) -> "Measured":
        """Medians of times; losses and kills are added up."""
        cpu_ms = {}
        for name in PARTS:
            cpu_ms[name] = median(measured.cpu_ms[name] for measured in rounds)
        return cls(
            median(measured.wall_s for measured in rounds),
            cpu_ms,
            sum(measured.lost for measured in rounds),
            sum(measured.twice for measured in rounds),
            sum(measured.killed for measured in rounds),
        )


@dataclass(slots=True)
class Figures:
    """What the last line says of one build."""

    efficiency: dict[str, float] = field(default_factory=dict)
    cpu_ms: dict[str, float] = field(default_factory=dict)
    lost: int = 0
    twice: int = 0
    killed: int = 0

    def add(self, setting: str, measured: Measured, ideal_s: float) -> None:
        """Take a setting's figures."""
        self.efficiency[setting] = round(ideal_s / measured.wall_s, 3)
        self.cpu_ms[setting] = round(measured.total_ms, 3)
        self.lost += measured.lost
        self.twice += measured.twice
        self.killed += measured.killed


def measure(folder: Path, consumers: int, slots: int, kills: int, delays_s: Sequence[float]) -> Measured:
    """Score all samples once, by the build in this folder."""
    print(f"running: {consumers} x {slots} in {folder}", flush=True)
    command = [sys.executable, "-m", "benchmarks.reward_side", str(consumers), str(slots), str(kills)]
    # In front of where this build is installed.
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return Measured.of(run_for_json(command, delays_s, folder, environment), len(delays_s))


def run_for_json(
    command: Sequence[str], delays_s: Sequence[float], folder: Path, environment: Mapping[str, str]
) -> Any:
    """The last line of a program that gets the delays.

    Raises:
        SystemExit: it failed or took too long; the message has the end of what it said.
    """
    limit_s = START_LIMIT_S + sum(delays_s) / NUM_AT_LEAST
    with subprocess.Popen(
        command,
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            output, errors = process.communicate(json.dumps(delays_s), timeout=limit_s)
            end = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            # As Ctrl-C: it stops its workers and its Redis.
            process.send_signal(signal.SIGINT)
            output, errors = _output_of(process)
            end = f"no result within {limit_s:.0f} s"
    if end != "exit code 0":
        raise SystemExit(f"{(output + errors)[-4000:]}\n{' '.join(command)} in {folder}: {end}")
    return json.loads(output.splitlines()[-1])


def _output_of(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """What a program printed that has been asked to end."""
    try:
        return process.communicate(timeout=STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return "", "it did not end when asked to, and was killed"


@contextmanager
def files_of(ref: str) -> Iterator[Path]:
    """A folder with the files of a commit, and with today's measurement of one setting.

    Raises:
        SystemExit: git does not give them; the message is git's.
    """
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "beside"
        folder.mkdir()
        # Not `git worktree`, which the clone would still list after a run that was killed.
        archived = subprocess.run(["git", "archive", ref], cwd=REPO, capture_output=True)
        if archived.returncode:
            raise SystemExit(f"--beside {ref}: {archived.stderr.decode(errors='replace').strip()}")
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archived.stdout, check=True)
        shutil.copy(SIDE, folder / "benchmarks" / SIDE.name)
        yield folder


def measure_builds(
    builds: Mapping[str, Path], delays_s: Sequence[float], kills: int, rounds: int
) -> dict[str, Figures]:
    """Measure all settings of all builds in turns, and print them."""
    figures = {name: Figures() for name in builds}
    rows = []
    for consumers, slots in SETTINGS:
        setting = f"{consumers} x {slots}"
        ideal_s = ideal_time_s(delays_s, consumers * slots)
        sides: dict[str, Callable[[], Measured]] = {
            name: partial(measure, folder, consumers, slots, kills, delays_s)
            for name, folder in builds.items()
        }
        for name, results in in_turns(sides, rounds).items():
            measured = Measured.median_of(results)
            figures[name].add(setting, measured, ideal_s)
            rows.append(row_of(name, setting, measured, ideal_s, len(delays_s)))
    columns = "build,slots,time s,ideal s,scores/s,worker,child,Redis,bench,all,efficiency"
    title = f"Scoring {len(delays_s):,} samples of {DELAY_S[0] / SCALE:g} to {DELAY_S[1] / SCALE:g} s"
    note = f"{machine()}. CPU in ms a score, by part and of all. Medians of {rounds}."
    print_table(title, columns, rows, note)
    for name, of_build in figures.items():
        print(
            f"{name}: {of_build.killed} workers killed, {of_build.lost} samples lost, {of_build.twice} twice"
        )
    return figures


def row_of(
    build: str, setting: str, measured: Measured, ideal_s: float, num_samples: int
) -> tuple[object, ...]:
    """A line of the table."""
    parts = [f"{measured.cpu_ms[name]:.2f}" for name in PARTS]
    per_second = f"{num_samples / measured.wall_s:,.0f}"
    efficiency = f"{ideal_s / measured.wall_s:.3f}"
    times = (f"{measured.wall_s:.2f}", f"{ideal_s:.2f}")
    return build, setting, *times, per_second, *parts, f"{measured.total_ms:.2f}", efficiency


def measure_peers(pythons: Mapping[str, str], delays_s: Sequence[float]) -> dict[str, dict[str, float]]:
    """What the reward calls of other trainers do with the same samples, printed too."""
    ideal_s = ideal_time_s(delays_s, PEER_SLOTS)
    figures = {}
    rows = []
    for peer, python in pythons.items():
        print(f"running: {peer}, {PEER_SLOTS} in flight", flush=True)
        command = [python, str(PEERS), peer, str(PEER_SLOTS), str(MODEL)]
        tree = run_for_json(command, delays_s, REPO, os.environ)
        wall_s = tree["wall_s"]
        cpu_ms = 1000 * tree["cpu_s"] / len(delays_s)
        per_second = len(delays_s) / wall_s
        name = f"{peer} {tree['version']}"
        figures[name] = {
            "scores_per_s": round(per_second, 1),
            "cpu_ms": round(cpu_ms, 3),
            "efficiency": round(ideal_s / wall_s, 3),
        }
        rows.append((name, f"{wall_s:.2f}", f"{ideal_s:.2f}", f"{per_second:,.0f}", f"{cpu_ms:.2f}"))
    title = f"The same samples in one process of another trainer, {PEER_SLOTS} calls in flight"
    print_table(title, "peer,time s,ideal s,scores/s,CPU ms", rows, machine())
    return figures


def main(
    groups: int = 1024,
    rounds: int = 1,
    kills: int = 0,
    beside: Annotated[str, typer.Option(help="a commit to measure in turns")] = "",
    trl: Annotated[bool, typer.Option("--trl", help="TRL's reward call, too")] = False,
    verl: Annotated[str, typer.Option(help="interpreter of an environment with verl")] = "",
) -> None:
    """Measure how scoring scales with consumers and slots, and what a score costs."""
    chance = random.Random(0)
    delays_s = [chance.uniform(*DELAY_S) / SCALE for _ in range(groups * GROUP_SIZE)]
    pythons = ({"trl": sys.executable} if trl else {}) | ({"verl": verl} if verl else {})
    peers = measure_peers(pythons, delays_s) if pythons else {}
    if beside:
        with files_of(beside) as folder:
            figures = measure_builds({TODAY: REPO, beside: folder}, delays_s, kills, rounds)
    else:
        figures = measure_builds({TODAY: REPO}, delays_s, kills, rounds)
    today = figures[TODAY]
    result: dict[str, Any] = {"efficiency": today.efficiency, "cpu_ms": today.cpu_ms}
    result |= {"lost": today.lost, "twice": today.twice, "killed": today.killed}
    if beside:
        older = figures[beside]
        ratios = {name: round(today.cpu_ms[name] / older.cpu_ms[name], 3) for name in today.cpu_ms}
        result["beside"] = {"ref": beside, "efficiency": older.efficiency, "cpu_ms": older.cpu_ms}
        result["beside"]["cpu_ratio"] = ratios
    if peers:
        result["peers"] = peers
    print_result(result)


if __name__ == "__main__":
    typer.run(main)
