"""What a sandboxed program costs: processor time of all processes, from the reward to its result and back.

    python -m benchmarks.sandbox                      # 300 programs of 1 ms of work in each form
    python -m benchmarks.sandbox --beside FOLDER      # and the same in another checkout, in turns
    python -m benchmarks.sandbox --only "1 test"

A reward asks, one sandbox worker runs, both over a real Redis. Completions have 1 or 10 tests; each test is a
program. `worker` is the sandbox worker with all that it starts, `reward` the process that asks, `Redis` the
server. The start of the worker and its first completion do not count.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import typer

from benchmarks.report import in_turns, machine, paired_ratio, print_result, print_table

REPO = Path(__file__).resolve().parents[1]
ROUNDS = 3
SETTINGS = {
    "stdin, 1 test": ("stdin", 1),
    "stdin, 10 tests": ("stdin", 10),
    "call, 10 tests": ("call", 10),
    "statement, 10 tests": ("statement", 10),
}
PROCESSES = ("worker", "reward", "redis")
SIDE = '''
import asyncio, contextlib, json, os, sys, tempfile, time
from pathlib import Path

import psutil

from tests.support.rewards import code_reward, make_sample
from tests.support.runs import ServiceRun
from tests.support.trajectories import make_config
from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.redis.broker import URL_VARIABLE

form = sys.argv[1]
tests = range(int(sys.argv[2]))
completions = int(sys.argv[3])
IN_FLIGHT = 4
# Earlier checkouts have it in another folder.
SERVICE = "reward.sandbox" if Path("services/reward/sandbox").exists() else "jobs.sandbox"
CONFIG = SandboxConfig(time_s=30.0, total_s=300.0)
WORK = "import time\\nbegan = time.process_time()\\nwhile time.process_time() - began < 0.001: pass\\n"
FUNCTION = "def f(x): return x + 1"
CODE = "print(int(input()) + 1)" if form == "stdin" else FUNCTION
TESTS = {
    "stdin": {"inputs": [str(x) for x in tests], "outputs": [str(x + 1) for x in tests]},
    "call": {"fn_name": "f", "inputs": [[x] for x in tests], "outputs": [x + 1 for x in tests]},
    "statement": [f"assert f({x}) == {x + 1}" for x in tests],
}[form]


def used_s(root):
    """CPU of a process, its descendants, and those of them that were reaped."""
    seconds = 0.0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended, and its parent has its time
            seconds += sum(process.cpu_times()[:4])
    return seconds


async def main(folder):
    config = make_config(reward={"rewards": {"code": {"sandbox": CONFIG.model_dump()}}})
    async with ServiceRun(folder, config, is_forked=False) as run:
        os.environ[URL_VARIABLE] = run.url
        worker = psutil.Process(run.start(SERVICE, "sandbox").pid)
        reward = code_reward(run.broker, run.keys, CONFIG)
        places = asyncio.Semaphore(IN_FLIGHT)

        async def score(number):
            async with places:
                text = f"```python\\n{WORK}{CODE} # {number}\\n```"
                outcome = await reward.score(make_sample((number, 0), False, "code", text, TESTS))
                assert outcome.value == 1.0, outcome

        async def used():
            cpu = await run.broker.info("cpu")
            redis = float(cpu["used_cpu_sys"]) + float(cpu["used_cpu_user"])
            return {"worker": used_s(worker), "reward": time.process_time(), "redis": redis}

        await score(completions)
        before = await used()
        began = time.monotonic()
        await asyncio.gather(*(score(number) for number in range(completions)))
        wall_s = time.monotonic() - began
        after = await used()
        await reward.close()
    figures = {name: after[name] - before[name] for name in before}
    print(json.dumps(figures | {"wall": wall_s}))


with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(Path(folder)))
'''
"""Runs in either checkout, with its packages."""


def measure(checkout: Path, form: str, tests: int, programs: int) -> dict[str, float]:
    """Milliseconds of CPU of a program, by part, and its share of the time on the clock."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "side.py"
        script.write_text(SIDE, encoding="utf-8")
        completions = max(1, programs // tests)
        done = subprocess.run(
            [sys.executable, str(script), form, str(tests), str(completions)],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    seconds = json.loads(done.stdout.splitlines()[-1])
    figures = {name: 1000 * value / (completions * tests) for name, value in seconds.items()}
    print(f"  {total_ms(figures):6.1f} ms of CPU in {checkout}", flush=True)
    return figures


def total_ms(figures: dict[str, float]) -> float:
    """CPU of a program in all processes."""
    return sum(figures[process] for process in PROCESSES)


def mean_of(name: str, measured: Sequence[dict[str, float]]) -> float:
    return mean(figures[name] for figures in measured)


def main(programs: int = 300, beside: Path | None = None, only: str = "") -> None:
    """Measure what a program costs, here and in another checkout; `only` is part of the names of forms."""
    checkouts = {"here": REPO}
    if beside:
        checkouts["beside"] = beside.resolve()
    in_round = programs // ROUNDS
    rows: list[tuple[str, ...]] = []
    result: dict[str, Any] = {}
    for name, (form, tests) in SETTINGS.items():
        if only not in name:
            continue
        print(f"running: {name}", flush=True)
        sides = {key: partial(measure, path, form, tests, in_round) for key, path in checkouts.items()}
        totals: dict[str, list[float]] = {}
        for key, measured in in_turns(sides, ROUNDS).items():
            totals[key] = [total_ms(figures) for figures in measured]
            cells = [mean_of(process, measured) for process in PROCESSES]
            cells += [mean(totals[key]), mean_of("wall", measured)]
            rows.append((f"{name}: {key}", *(f"{cell:.1f}" for cell in cells)))
            result[f"{name}: {key}"] = round(mean(totals[key]), 2)
        if beside:
            ratio = paired_ratio(totals["here"], totals["beside"])
            rows.append((f"{name}: ratio", "", "", "", f"{ratio:.2f}", ""))
            result[f"{name}: ratio"] = ratio
    columns = "form,worker ms,reward ms,Redis ms,CPU ms,time ms"
    title = f"A program of 1 ms of work, in the mean of {ROUNDS} x {in_round}"
    print_table(title, columns, rows, machine())
    print_result({"cpu_ms": result})


if __name__ == "__main__":
    typer.run(main)
