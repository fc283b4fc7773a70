"""How reward consumers scale when a reward takes long: the delays of verl #2854, on a consumer group.

    python -m benchmarks.reward_scaling    # 1, 2, 4 and 8 consumers, and one with 1,280 in flight

Reward services as processes on a real Redis. The reward is an async function that sleeps uniformly between 1
and 40 s, divided by 40, for each of 1,024 x 5 samples.

`ideal` is the time without any overhead: every slot takes the next sample the moment it is free, the same
delays are slept, and nothing else costs time; the tail is included. The clock is Redis's own, from just
before the first trajectory is appended to the last score; processes have started before that. `efficiency`
is ideal time over measured time; `CPU` is the processor time of a score, in all processes.
"""

import heapq
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import typer

from benchmarks.report import machine, print_result, print_table
from benchmarks.services import redis_time_s, time_of_entry
from tests.support.runs import ServiceRun
from tests.support.trajectories import make_config, make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.process.heartbeats import read_heartbeats
from tidemill.common.process.programs import run_main
from tidemill.common.streams import append
from tidemill.common.wire.messages import Trajectory

DELAY_S, SCALE = (1.0, 40.0), 40.0
SETTINGS = ((1, 64), (2, 64), (4, 64), (8, 64), (1, 1280))
"""Consumers, and rewards in flight in each."""
GROUP_SIZE, TOKENS, APPEND_BATCH = 5, 256, 512
REWARD = """
import asyncio

async def compute_score(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(extra_info["delay_s"])
    return 1.0
"""


def ideal_time_s(delays_s: Sequence[float], slots: int) -> float:
    """Time until all delays are slept, if each of `slots` sleeps takes the next one as soon as it ends.

    >>> ideal_time_s([3.0, 1.0, 1.0, 1.0], slots=2)
    3.0
    """
    free_at = [0.0] * slots
    for delay_s in delays_s:
        heapq.heapreplace(free_at, free_at[0] + delay_s)
    return max(free_at)


async def measure(consumers: int, slots: int, delays_s: Sequence[float]) -> tuple[float, float]:
    """Score the whole batch once: seconds on the wall, and seconds of CPU in all processes."""
    print(f"running: {consumers} x {slots}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "reward.py").write_text(REWARD)
        reward = {"function": f"{folder}/reward.py:compute_score", "max_in_flight": slots}
        async with ServiceRun(Path(folder), make_config(reward=reward), "scaling") as run:
            for number in range(consumers):
                run.start("reward", f"reward-{number}")

            async def are_ready() -> bool:
                beats = await read_heartbeats(run.broker, run.keys)
                return sum("in_flight" in beat.counts for beat in beats) == consumers

            await wait_until(are_ready, 300)
            batch, started_s, before_s = trajectories(delays_s), await redis_time_s(run), cpu_s()
            for start in range(0, len(batch), APPEND_BATCH):
                await append(run.broker, run.keys.trajectories(), *batch[start : start + APPEND_BATCH])
            ended_s = await time_of_entry(run, run.keys.scores(), len(batch))
            return ended_s - started_s, cpu_s() - before_s


def cpu_s() -> float:
    """CPU seconds of this process and of its descendants that are alive."""
    alive = psutil.Process().children(recursive=True)
    return time.process_time() + sum(sum(process.cpu_times()[:2]) for process in alive)


def trajectories(delays_s: Sequence[float]) -> list[Trajectory]:
    ids, logprobs = np.arange(TOKENS, dtype=np.int32), np.zeros(TOKENS, dtype=np.float32)
    common: dict[str, Any] = {"text": "a completion " * 64, "group_size": GROUP_SIZE, "prompt_ids": ids}
    common |= {"completion_ids": ids, "logprobs": logprobs}
    return [
        make_trajectory(*divmod(number, GROUP_SIZE), extra={"delay_s": delay_s}, **common)
        for number, delay_s in enumerate(delays_s)
    ]


def main(groups: int = 1024) -> None:
    """Measure how scoring scales with consumers and slots."""
    chance = random.Random(0)
    delays_s = [chance.uniform(*DELAY_S) / SCALE for _ in range(groups * GROUP_SIZE)]
    rows, efficiency = [], {}
    for consumers, slots in SETTINGS:
        wall_s, used_s = run_main(measure(consumers, slots, delays_s))
        ideal_s, name = ideal_time_s(delays_s, consumers * slots), f"{consumers} x {slots}"
        efficiency[name] = round(ideal_s / wall_s, 3)
        per_second, cpu_ms = len(delays_s) / wall_s, 1000 * used_s / len(delays_s)
        cells = f"{wall_s:.2f}", f"{ideal_s:.2f}", f"{per_second:,.0f}", f"{cpu_ms:.2f}", efficiency[name]
        rows.append((name, *cells))
    columns = "consumers x slots,time s,ideal s,scores/s,CPU ms,efficiency"
    title = f"Scoring {len(delays_s):,} samples of {DELAY_S[0] / SCALE:g} to {DELAY_S[1] / SCALE:g} s"
    print_table(title, columns, rows, machine())
    print_result({"efficiency": efficiency})


if __name__ == "__main__":
    typer.run(main)
