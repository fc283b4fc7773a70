"""What a sandboxed program costs: processor time of all processes, from the reward to its result and back.

    python -m benchmarks.sandbox                      # 300 programs of 1 ms of work in each form
    python -m benchmarks.sandbox --beside FOLDER      # and the same in another checkout, in turns

A reward asks, one sandbox worker runs, both over a real Redis. Completions have 1 or 10 tests; each test is a
program. `worker` is the sandbox worker with all that it starts, `reward` the process that asks, `Redis` the
server. The start of the worker and its first completion do not count.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
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
PARTS = ("worker", "reward", "redis")
SIDE = '''
import asyncio, json, os, sys, tempfile, time
from pathlib import Path

import psutil

from tests.support.rewards import code_reward, make_sample
from tests.support.runs import ServiceRun
from tests.support.trajectories import make_config
from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.redis.broker import URL_VARIABLE

_, form, tests, completions = sys.argv
tests, completions = range(int(tests)), int(completions)
IN_FLIGHT = 4
CONFIG = SandboxConfig(time_s=30.0, total_s=300.0)
WORK = "import time\\nbegan = time.process_time()\\nwhile time.process_time() - began < 0.001: pass\\n"
FUNCTION = "def f(x): return x + 1"
CODE, TESTS = {
    "stdin": (
        "print(int(input()) + 1)",
        {"inputs": [str(x) for x in tests], "outputs": [str(x + 1) for x in tests]},
    ),
    "call": (FUNCTION, {"fn_name": "f", "inputs": [[x] for x in tests], "outputs": [x + 1 for x in tests]}),
    "statement": (FUNCTION, [f"assert f({x}) == {x + 1}" for x in tests]),
}[form]


def used_s(root):
    """CPU of a process, its descendants, and those of them that were reaped."""
    return sum(sum(process.cpu_times()[:4]) for process in [root, *root.children(recursive=True)])


async def main(folder):
    config = make_config(reward={"rewards": {"code": {"sandbox": CONFIG.model_dump()}}})
    async with ServiceRun(folder, config, is_forked=False) as run:
        os.environ[URL_VARIABLE] = run.url
        worker = psutil.Process(run.start("jobs.sandbox", "sandbox").pid)
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
        before, began = await used(), time.monotonic()
        await asyncio.gather(*(score(number) for number in range(completions)))
        wall_s, after = time.monotonic() - began, await used()
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
    return {name: 1000 * value / (completions * tests) for name, value in seconds.items()}


def main(programs: int = 300, beside: Path | None = None) -> None:
    """Measure what a program costs, here and in another checkout."""
    checkouts = {"here": REPO} | ({"beside": beside.resolve()} if beside else {})
    rows: list[tuple[str, ...]] = []
    result: dict[str, Any] = {}
    for name, (form, tests) in SETTINGS.items():
        print(f"running: {name}", flush=True)

        def side(checkout: Path, form: str = form, tests: int = tests) -> dict[str, float]:
            return measure(checkout, form, tests, programs // ROUNDS)

        rounds = in_turns({key: lambda path=path: side(path) for key, path in checkouts.items()}, ROUNDS)
        totals: dict[str, list[float]] = {}
        for key, measured in rounds.items():
            totals[key] = [sum(each[part] for part in PARTS) for each in measured]
            means = {part: sum(each[part] for each in measured) / ROUNDS for part in (*PARTS, "wall")}
            total = sum(totals[key]) / ROUNDS
            cells = (*(means[part] for part in PARTS), total, means["wall"])
            rows.append((f"{name}: {key}", *(f"{cell:.1f}" for cell in cells)))
            result[f"{name}: {key}"] = round(total, 2)
        if beside:
            ratio = paired_ratio(totals["here"], totals["beside"])
            rows.append((f"{name}: ratio", "", "", "", f"{ratio:.2f}", ""))
            result[f"{name}: ratio"] = ratio
    columns = "form,worker ms,reward ms,Redis ms,CPU ms,time ms"
    title = f"A program of 1 ms of work, in the mean of {ROUNDS} x {programs // ROUNDS}"
    print_table(title, columns, rows, machine())
    print_result({"cpu_ms": result})


if __name__ == "__main__":
    typer.run(main)
