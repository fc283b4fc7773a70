"""One measurement of `benchmarks.reward_scaling`, in a process of its own.

    python -m benchmarks.reward_side CONSUMERS SLOTS KILLS < delays.json

Reads the delays of the samples as a JSON list, and prints one line of JSON: seconds on the wall, seconds of
CPU by part, and how many samples have no score (`lost`), and scores beyond one (`twice`). With KILLS, so many
reward workers are killed with SIGKILL meanwhile, in turn, and replaced.

It imports nothing that only this commit has: `--beside` copies it into the folder of an older one, and runs
it there.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.services import redis_time_s
from tests.support.runs import ServiceRun
from tests.support.trajectories import make_config, make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.process.heartbeats import read_heartbeats
from tidemill.common.process.programs import run_main
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import OffsetReader, append, id_order, length
from tidemill.common.streams.entries import Entry
from tidemill.common.wire.messages import Score, Trajectory

GROUP_SIZE = 5
TOKENS = 256
APPEND_BATCH = 512
READY_S = 300.0
READ_COUNT = 1000
POLL_S = 0.5
"""Between two looks at how many scores there are: with more, asking would be much of what is measured."""
PATIENCE_S = 60.0
"""A sample is lost where no score has come for so long: twice the lease after which the samples of a dead
worker are scored by another one, and far longer than a reward takes."""
LEASE_S = 3.0
"""Of runs whose workers are killed: what they held is taken over after it."""
REWARD = """
import asyncio

async def compute_score(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(extra_info["delay_s"])
    return 1.0
"""


class PartsOfCpu:
    """CPU seconds of a run by part: its reward workers, their children, Redis, and this process."""

    def __init__(self, run: ServiceRun) -> None:
        self._run = run
        self._of_killed = {"worker": 0.0, "child": 0.0}
        self._before = self._now()

    def seconds(self) -> dict[str, float]:
        """Those since this object was made."""
        now = self._now()
        return {name: now[name] - self._before[name] for name in now}

    def keep(self, name: str) -> None:
        """Keep what a worker has used, before it is killed."""
        worker_s, children_s = self._of_worker(name)
        self._of_killed["worker"] += worker_s
        self._of_killed["child"] += children_s

    def _now(self) -> dict[str, float]:
        used_s = {
            **self._of_killed,
            "redis": cpu_s(self._run.redis.pid or 0),
            "benchmark": time.process_time(),
        }
        for name in self._run.processes:
            worker_s, children_s = self._of_worker(name)
            used_s["worker"] += worker_s
            used_s["child"] += children_s
        return used_s

    def _of_worker(self, name: str) -> tuple[float, float]:
        pid = self._run.processes[name].pid
        try:
            children = psutil.Process(pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return 0.0, 0.0
        return cpu_s(pid), sum(cpu_s(child.pid) for child in children)


def cpu_s(pid: int) -> float:
    """User and system time of a process; 0 where it has ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


class ScoreCount:
    """Counts the scores of a run."""

    def __init__(self, broker: Broker, key: str) -> None:
        self._broker = broker
        self._key = key
        self._reader = OffsetReader(broker, key, Score, "0-0")
        self._samples: dict[str, tuple[int, int]] = {}
        """By id of the entry: after a reconnect some entries are read again."""
        self._scored: set[tuple[int, int]] = set()
        self.ended_s = 0.0
        """When the last sample got its first score, by Redis's clock."""

    async def wait_for(self, num_samples: int) -> bool:
        """Wait until so many samples have a score; False where no score has come for `PATIENCE_S`."""
        deadline = time.monotonic() + PATIENCE_S
        num_before = len(self._samples)
        while len(self._scored) < num_samples:
            num_entries = await length(self._broker, self._key)
            # Reading each score at once would cost Redis and this process much of their time.
            if num_entries - len(self._samples) >= num_samples - len(self._scored):
                await self.read()
            if num_entries > num_before:
                num_before = num_entries
                deadline = time.monotonic() + PATIENCE_S
            elif time.monotonic() > deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True

    async def read(self) -> None:
        """Take what the stream has."""
        while entries := await self._reader.read(READ_COUNT):
            for entry in entries:
                if isinstance(entry, Entry):
                    self._take(entry)

    def _take(self, entry: Entry[Score]) -> None:
        sample = entry.message.key
        self._samples[entry.entry_id] = sample
        if sample not in self._scored:
            self._scored.add(sample)
            self.ended_s = id_order(entry.entry_id)[0] / 1000

    def against(self, num_samples: int) -> dict[str, int]:
        """How many of so many samples have no score (`lost`), and scores beyond one of a sample (`twice`)."""
        num_scored = len(self._scored)
        return {"lost": num_samples - num_scored, "twice": len(self._samples) - num_scored}


async def measure(consumers: int, slots: int, kills: int, delays_s: Sequence[float]) -> dict[str, Any]:
    """Score the whole batch once."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "reward.py").write_text(REWARD)
        reward = {"function": f"{folder}/reward.py:compute_score", "max_in_flight": slots}
        streams = {"lease_s": LEASE_S, "max_attempts": kills + 10} if kills else {}
        config = make_config(reward=reward, streams=streams)
        async with ServiceRun(Path(folder), config, "scaling") as run:
            for number in range(consumers):
                run.start("reward", f"reward-{number}")
            await wait_until(lambda: are_ready(run, consumers), READY_S)
            batch = trajectories(delays_s)
            parts = PartsOfCpu(run)
            scores = ScoreCount(run.broker, run.keys.scores())
            started_s = await redis_time_s(run)
            for start in range(0, len(batch), APPEND_BATCH):
                await append(run.broker, run.keys.trajectories(), *batch[start : start + APPEND_BATCH])
            num_killed = await kill_in_turn(run, parts, scores, consumers, kills, len(batch))
            await scores.wait_for(len(batch))
            spent_s = parts.seconds()
            await stop_all(run)
            await scores.read()
            wall_s = scores.ended_s - started_s
            return {"wall_s": wall_s, "cpu_s": spent_s, "killed": num_killed, **scores.against(len(batch))}


async def are_ready(run: ServiceRun, consumers: int) -> bool:
    """Whether so many workers have begun."""
    beats = await read_heartbeats(run.broker, run.keys)
    return sum("in_flight" in beat.counts for beat in beats) == consumers


async def kill_in_turn(
    run: ServiceRun, parts: PartsOfCpu, scores: ScoreCount, consumers: int, kills: int, num_samples: int
) -> int:
    """Kill a worker after each of `kills` shares of the work, the oldest first, and start another.

    Returns how many were killed: fewer where scores have stopped coming.
    """
    for kill in range(kills):
        if not await scores.wait_for(num_samples * (kill + 1) // (kills + 1)):
            return kill
        parts.keep(f"reward-{kill}")
        run.kill(f"reward-{kill}")
        run.start("reward", f"reward-{kill + consumers}")
    return kills


async def stop_all(run: ServiceRun) -> None:
    """Stop the workers that still run: a score beyond one may come until then."""
    for name, process in run.processes.items():
        if process.poll() is None:
            await run.stop(name)


def trajectories(delays_s: Sequence[float]) -> list[Trajectory]:
    """One for each delay, in groups."""
    ids = np.arange(TOKENS, dtype=np.int32)
    logprobs = np.zeros(TOKENS, dtype=np.float32)
    common: dict[str, Any] = {"text": "a completion " * 64, "group_size": GROUP_SIZE, "prompt_ids": ids}
    common |= {"completion_ids": ids, "logprobs": logprobs}
    return [
        make_trajectory(*divmod(number, GROUP_SIZE), extra={"delay_s": delay_s}, **common)
        for number, delay_s in enumerate(delays_s)
    ]


def main(consumers: int, slots: int, kills: int) -> None:
    """Measure once."""
    delays_s = json.load(sys.stdin)
    print(json.dumps(run_main(measure(consumers, slots, kills, delays_s))), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
