"""Many sessions held by one rollout service, against an environment that takes its time."""

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.support.models import tiny_model
from tests.support.runs import ServiceRun
from tests.support.waiting import wait_until
from tidemill.common.config import RunConfig
from tidemill.common.process.heartbeats import read_heartbeats
from tidemill.common.streams import append_missing, last_id, length
from tidemill.common.wire.messages import SamplingParams, Ticket

TURNS, GROUP_SIZE = 4, 8
DELAY_S = (0.05, 2.0)
ENGINE_S = 0.1

ENVIRONMENT = f"""
import asyncio
import time

class Slow:
    {{maybe_async}}def step(self, text):
        {{sleep}}(next(self.delays))
        self.left -= 1
        return "w1 w2", None, self.left <= 0

    {{maybe_async}}def reset(self, row):
        self.left = {TURNS}
        self.delays = iter(row["delays_s"])
"""
KINDS = {"blocking": ("", "time.sleep"), "async": ("async ", "await asyncio.sleep")}


@dataclass(frozen=True)
class Held:
    """Times in seconds."""

    wall_s: float
    ideal_s: float

    @property
    def efficiency(self) -> float:
        """Ideal time over measured time."""
        return self.ideal_s / self.wall_s


async def measure_held(kind: str, sessions: int) -> Held:
    """Play all sessions at once; the clock is Redis's, from the tickets to the last trajectory."""
    chance = random.Random(0)
    # The samples of a group share their row, and so their delays.
    rows = [[chance.uniform(*DELAY_S) for _ in range(TURNS)] for _ in range(sessions // GROUP_SIZE)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        maybe_async, sleep = KINDS[kind]
        (folder / "slow.py").write_text(ENVIRONMENT.format(maybe_async=maybe_async, sleep=sleep))
        async with ServiceRun(folder, _config(folder, len(rows)), "held") as run:
            run.start("rollout")
            await wait_until(lambda: _is_ready(run), 300)
            await _play(run, rows[:1], 0)  # processes start, modules load
            begun_s = await _redis_time_s(run)
            await _play(run, rows, 1)
            ended_s = int((await last_id(run.broker, run.keys.trajectories())).partition("-")[0]) / 1000
    return Held(ended_s - begun_s, max(sum(delays) for delays in rows) + TURNS * ENGINE_S)


async def _play(run: ServiceRun, rows: list[list[float]], first: int) -> None:
    before = await length(run.broker, run.keys.trajectories())
    tickets = {first + number: _ticket(first + number, delays) for number, delays in enumerate(rows)}
    await append_missing(run.broker, run.keys.prompts(), list(tickets), tickets.__getitem__)
    wanted = before + len(rows) * GROUP_SIZE

    async def is_done() -> bool:
        return await length(run.broker, run.keys.trajectories()) >= wanted

    await wait_until(is_done, 600)


async def _is_ready(run: ServiceRun) -> bool:
    beats = await read_heartbeats(run.broker, run.keys)
    return any("requests" in beat.counts for beat in beats)


async def _redis_time_s(run: ServiceRun) -> float:
    seconds, microseconds = await run.broker.execute("TIME")
    return int(seconds) + int(microseconds) / 1e6


def _ticket(number: int, delays_s: list[float]) -> Ticket:
    return Ticket(
        prompt_ids=np.arange(3, 19, dtype=np.int32),
        prompt_text="w1 w2",
        extra={"delays_s": delays_s},
        ticket=number,
        step=0,
        min_version=0,
        group_size=GROUP_SIZE,
        sampling=SamplingParams(max_tokens=16),
    )


def _config(folder: Path, groups: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_id": "held",
            "model": {"path": str(tiny_model(folder / "model")), "max_model_len": 256},
            "data": {"train": "unused", "max_prompt_tokens": 64},
            "reward": {"function": "exact_match"},
            "rollout": {
                "engine": "simulated",
                "simulated": {"tokens": 16, "group_s": ENGINE_S, "vocab_size": 32},
                "max_num_seqs": 65536,
                "sampling": {"max_tokens": 16},
                "max_groups_in_flight": groups + 1,
                "environment": {"use": f"{folder}/slow.py:Slow", "max_turns": TURNS},
            },
        }
    )
