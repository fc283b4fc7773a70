"""How reward consumers scale when a reward takes long: the delays of verl #2854, on a consumer group.

    python -m benchmarks.reward_scaling                       # 1, 2, 4 and 8 consumers
    python -m benchmarks.reward_scaling --slots 256 --scale 4 # the original's slots, slower delays

Real reward services as processes on a real Redis. The reward is an async function that sleeps uniformly
between 1 and 40 s, divided by `--scale`, for each of 1,024 x 5 samples.

`ideal` is what no scheduler of that many slots can beat in practice: every slot takes the next sample the
moment it is free, the very delays of this run are slept, and nothing else costs any time. It includes the
tail, when the last samples are slept and other slots have nothing to do. The clock is Redis's own, from just
before the first trajectory is appended until the last score is in its stream; processes have started and
loaded their reward before that. `efficiency` is ideal time over measured time.
"""

import asyncio
import heapq
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.report import machine, print_result, print_table
from tests.support.runs import ServiceRun
from tests.support.waiting import wait_until
from tidemill.common.config import RunConfig
from tidemill.common.process.heartbeats import HEARTBEAT_S, read_heartbeats
from tidemill.common.process.programs import run_main
from tidemill.common.streams import append, group_status, last_id, length
from tidemill.common.wire.keys import REWARD_GROUP
from tidemill.common.wire.messages import Trajectory

DELAY_S = (1.0, 40.0)
GROUPS, GROUP_SIZE = 1024, 5
TOKENS = 256
APPEND_BATCH = 512
POLL_S = 0.02

REWARD = """
import asyncio

async def compute_score(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(extra_info["delay_s"])
    return 1.0
"""


@dataclass(frozen=True)
class Outcome:
    """One number of consumers. Times in seconds."""

    consumers: int
    slots: int
    wall_s: float
    ideal_s: float
    most_in_flight: int
    loop_lag_ms: float

    @property
    def efficiency(self) -> float:
        """Ideal time over measured time."""
        return self.ideal_s / self.wall_s


def ideal_time_s(delays_s: Sequence[float], slots: int) -> float:
    """Time until all delays are slept, if each of `slots` sleeps takes the next one as soon as it ends.

    >>> ideal_time_s([3.0, 1.0, 1.0, 1.0], slots=2)
    3.0
    """
    free_at = [0.0] * slots
    for delay_s in delays_s:
        heapq.heappush(free_at, heapq.heappop(free_at) + delay_s)
    return max(free_at)


@dataclass
class Watch:
    """What was seen of the consumers while they worked."""

    most_in_flight: int = 0
    loop_lag_ms: float = 0.0

    async def keep(self, run: ServiceRun) -> None:
        """Look until cancelled."""
        while True:
            status = await group_status(run.broker, run.keys.trajectories(), REWARD_GROUP)
            self.most_in_flight = max(self.most_in_flight, status.pending if status else 0)
            beats = await read_heartbeats(run.broker, run.keys)
            lags = [beat.counts.get("loop_lag_ms", 0.0) for beat in beats]
            self.loop_lag_ms = max([self.loop_lag_ms, *lags])
            await asyncio.sleep(POLL_S * 5)


async def measure(consumers: int, slots: int, scale: float, groups: int) -> Outcome:
    """Score the whole batch once."""
    chance = random.Random(0)
    delays_s = [chance.uniform(*DELAY_S) / scale for _ in range(groups * GROUP_SIZE)]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "reward.py").write_text(REWARD)
        async with ServiceRun(Path(folder), _config(folder, slots), "scaling") as run:
            await _start(run, consumers)
            watch = Watch()
            watching = asyncio.create_task(watch.keep(run))
            started_s = await _redis_time_s(run)
            await _append(run, delays_s)
            ended_s = await _last_score_s(run, len(delays_s))
            await asyncio.sleep(HEARTBEAT_S)  # the next one tells the lag of the end
            watching.cancel()
    ideal_s = ideal_time_s(delays_s, consumers * slots)
    print(f"{consumers} x {slots}: {ended_s - started_s:.2f} s, ideal {ideal_s:.2f} s", file=sys.stderr)
    return Outcome(consumers, slots, ended_s - started_s, ideal_s, watch.most_in_flight, watch.loop_lag_ms)


async def _start(run: ServiceRun, consumers: int) -> None:
    """Start the consumers and wait until all of them have loaded their reward and read."""
    for number in range(consumers):
        run.start("reward", f"reward-{number}")
    await wait_until(lambda: _are_ready(run, consumers), 300)
    await asyncio.sleep(HEARTBEAT_S)  # the lag of the start is told, and over


async def _are_ready(run: ServiceRun, consumers: int) -> bool:
    beats = await read_heartbeats(run.broker, run.keys)
    return sum("in_flight" in beat.counts for beat in beats) == consumers


async def _append(run: ServiceRun, delays_s: Sequence[float]) -> None:
    ids, logprobs = np.arange(TOKENS, dtype=np.int32), np.zeros(TOKENS, dtype=np.float32)
    trajectories = [
        Trajectory(
            ticket=number // GROUP_SIZE,
            index=number % GROUP_SIZE,
            step=0,
            group_size=GROUP_SIZE,
            prompt_ids=ids,
            completion_ids=ids,
            logprobs=logprobs,
            spans=((0, 0),),
            text="a completion " * 64,
            extra={"delay_s": delay_s},
        )
        for number, delay_s in enumerate(delays_s)
    ]
    for start in range(0, len(trajectories), APPEND_BATCH):
        await append(run.broker, run.keys.trajectories(), *trajectories[start : start + APPEND_BATCH])


async def _last_score_s(run: ServiceRun, count: int) -> float:
    """Redis's time when the last of `count` scores came in."""
    await wait_until(lambda: _has_scores(run, count), 3600)
    return int((await last_id(run.broker, run.keys.scores())).partition("-")[0]) / 1000


async def _has_scores(run: ServiceRun, count: int) -> bool:
    return await length(run.broker, run.keys.scores()) >= count


async def _redis_time_s(run: ServiceRun) -> float:
    seconds, microseconds = await run.broker.execute("TIME")
    return int(seconds) + int(microseconds) / 1e6


def _config(folder: str, slots: int) -> RunConfig:
    tree = {
        "run_id": "scaling",
        "model": {"path": "unused"},
        "data": {"train": "unused"},
        "reward": {"function": f"{folder}/reward.py:compute_score", "max_in_flight": slots},
    }
    return RunConfig.model_validate(tree)


def main(
    consumers: Annotated[str, typer.Option(help="Numbers of consumers to measure.")] = "1,2,4,8",
    slots: Annotated[int, typer.Option(help="Requests in flight in each consumer.")] = 64,
    scale: Annotated[float, typer.Option(help="Delays of 1 to 40 s are divided by this.")] = 40.0,
    groups: Annotated[int, typer.Option(help="Groups of five samples.")] = GROUPS,
    deep: Annotated[int, typer.Option(help="Slots of one consumer in a row of its own; 0: none.")] = 1280,
) -> None:
    """Measure every number of consumers, and one consumer with very many requests in flight."""
    outcomes = [run_main(measure(int(number), slots, scale, groups)) for number in consumers.split(",")]
    alone = [run_main(measure(1, deep, scale, groups))] if deep else []
    samples = groups * GROUP_SIZE
    print_table(
        f"Scoring {samples:,} samples of {DELAY_S[0] / scale:g} to {DELAY_S[1] / scale:g} s",
        (
            "consumers x slots",
            "time s",
            "ideal s",
            "scores/s",
            "ideal",
            "efficiency",
            "in flight",
            "loop lag ms",
        ),
        [_row(outcome, samples) for outcome in outcomes + alone],
        "ideal: every slot takes the next sample the moment it is free, the same delays are slept, and\n"
        "nothing else costs time; the tail is included, starting processes is not. in flight: most held\n"
        f"at once, seen in Redis. loop lag: the worst of any consumer. {machine()}",
    )
    print_result(
        {
            "benchmark": "reward_scaling",
            "efficiency": {str(outcome.consumers): round(outcome.efficiency, 3) for outcome in outcomes},
            "scores_per_s": {str(o.consumers): round(samples / o.wall_s, 1) for o in outcomes},
            "loop_lag_ms": {str(outcome.consumers): outcome.loop_lag_ms for outcome in outcomes},
            "slots": slots,
            "deep": {
                "slots": deep,
                "efficiency": round(alone[0].efficiency, 3),
                "most_in_flight": alone[0].most_in_flight,
                "loop_lag_ms": alone[0].loop_lag_ms,
            }
            if alone
            else None,
        }
    )


def _row(outcome: Outcome, samples: int) -> tuple[str, ...]:
    return (
        f"{outcome.consumers} x {outcome.slots:,}",
        f"{outcome.wall_s:.2f}",
        f"{outcome.ideal_s:.2f}",
        f"{samples / outcome.wall_s:,.0f}",
        f"{samples / outcome.ideal_s:,.0f}",
        f"{outcome.efficiency:.1%}",
        f"{outcome.most_in_flight:,}",
        f"{outcome.loop_lag_ms:.1f}",
    )


if __name__ == "__main__":
    typer.run(main)
