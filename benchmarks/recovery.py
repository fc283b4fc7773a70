"""What a run loses when a part of it dies: `kill -9` of each part of the demo's run, in turn.

    python -m benchmarks.recovery                 # each part once; ten minutes on two cores
    python -m benchmarks.recovery --rounds 3 --steps 60

A run of `examples/arith` as `tidemill up` does it, on a Redis with an append-only file; what dies is started
again after half a second. `node` is everything at once, and Redis comes back without the end of its file.
`useful again` is from the death to the first sample, score, commit or answer that was begun after it: loading
is in it, and the lease of what was held (`streams.lease_s`, here 5 s). `held` are samples under the lease of
the victim, of which at most so many are generated or scored again. Then the streams are judged: samples that
no commit accounts for, and samples that were trained twice; and every version is trained once more,
undisturbed, and compared bit by bit.
"""

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.report import machine, print_result, print_table
from tests.chaos.__main__ import ARITH, OVERRIDES
from tests.chaos.driver import Driver, Outcome, torment
from tests.chaos.faults import Fault, Kind
from tests.chaos.recovery import Event
from tidemill.common.config import RunConfig, load_config
from tidemill.common.errors import TidemillError
from tidemill.common.process.programs import run_main
from tidemill.common.streams import group_status
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP
from tidemill.services.trainer.policy.transformers_policy import load_policy

PARTS = {
    Kind.ROLLOUT: "rollout worker",
    Kind.REWARD: "reward worker",
    Kind.TRAINER: "trainer",
    Kind.REDIS: "Redis",
    Kind.POWER: "node",
}
FIRST_VERSION, DELAY_S, LOOK_S = 3, 0.7, 0.1
REPLAYED = "step replayed"
"""In the trainer's log, once for each step that it trained again from its records."""


def plan(steps: int, rounds: int) -> list[Fault]:
    """Each part dies once in each round, evenly over the steps, in the middle of one.

    >>> [fault.at_version for fault in plan(steps=30, rounds=1)]
    [3, 7, 11, 15, 19]
    """
    kinds = [*PARTS] * rounds
    gap = (steps - 2 * FIRST_VERSION) // (len(kinds) + 1)
    return [Fault(kind, FIRST_VERSION + place * gap, DELAY_S) for place, kind in enumerate(kinds)]


class HeldSamples:
    """Follows what each worker holds under a lease."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._seen: list[tuple[float, dict[str, int]]] = []

    async def follow(self, driver: Driver) -> None:
        """Look, for ever; while Redis is away there is nothing to see."""
        while True:
            with contextlib.suppress(TidemillError):
                self._seen.append((time.time(), await self._look(driver)))
            await asyncio.sleep(LOOK_S)

    async def _look(self, driver: Driver) -> dict[str, int]:
        broker, keys = driver.fleet.broker, driver.fleet.keys
        held: dict[str, int] = {}
        for key, group, size in (
            (keys.prompts(), ROLLOUT_GROUP, self._group_size),
            (keys.trajectories(), REWARD_GROUP, 1),
        ):
            if await group_status(broker, key, group) is None:
                continue
            for raw in await broker.execute("XINFO", "CONSUMERS", key, group):
                consumer = dict(zip(raw[::2], raw[1::2], strict=True))
                name = consumer[b"name"].decode().rpartition(".")[0]
                held[name] = held.get(name, 0) + size * int(consumer[b"pending"])
        return held

    def at(self, event: Event) -> int:
        """What the victim held just before its death; of a node what all did."""
        before: dict[str, int] = next((held for at, held in reversed(self._seen) if at < event.died_at), {})
        return sum(before.values()) if event.kind is Kind.POWER else before.get(event.victim, 0)


async def measure(config: RunConfig, folder: Path, rounds: int) -> tuple[Outcome, HeldSamples, int]:
    """The run and its verdict; what was held; and how many steps trainers replayed."""
    held, looking = HeldSamples(config.trainer.group_size), list[asyncio.Task[None]]()
    drivers: list[Driver] = []

    def begin(driver: Driver) -> None:
        drivers.append(driver)
        looking.append(asyncio.create_task(held.follow(driver)))

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        faults = plan(config.trainer.steps, rounds)
        outcome = await torment(folder, config, faults, config.seed, load_policy, say, begin)
    finally:
        for task in looking:
            task.cancel()
    return outcome, held, drivers[0].fleet.log_of("trainer").count(REPLAYED)


def rows(events: Sequence[Event], held: HeldSamples) -> Iterator[dict[str, Any]]:
    """Of each part: deaths, median seconds, and the most samples that were held."""
    for kind, part in PARTS.items():
        own = [event for event in events if event.kind is kind]
        times = [
            event.recovered_s for event in own if event.recovered_s is not None and not event.is_overtaken
        ]
        yield {
            "part": part,
            "deaths": len(own),
            "useful_again_s": round(statistics.median(times), 1) if times else None,
            "held_samples": max((held.at(event) for event in own), default=0),
        }


def main(
    steps: Annotated[int, typer.Option(min=20, help="of the run")] = 30,
    rounds: Annotated[int, typer.Option(min=1, help="how often each part dies")] = 1,
) -> None:
    """Kill each part, and say what is lost; the last line is JSON."""
    config = load_config(ARITH, [*OVERRIDES, f"trainer.steps={steps}", "run_id=recovery"])
    with tempfile.TemporaryDirectory() as folder:
        outcome, held, num_replayed = run_main(measure(config, Path(folder), rounds))
    found, verdict = list(rows(outcome.watch.events, held)), outcome.verdict
    shown = [
        (
            row["part"],
            str(row["deaths"]),
            "-" if row["useful_again_s"] is None else f"{row['useful_again_s']:.1f}",
            str(row["held_samples"]),
        )
        for row in found
    ]
    note = (
        f"{machine()}. {verdict.trained} samples trained, {verdict.lost} lost, {verdict.duplicated} trained "
        f"twice; {num_replayed} steps replayed by trainers, {len(outcome.replay.different)} of "
        f"{outcome.replay.num_compared} versions different."
    )
    columns = ("what dies", "deaths", "useful again, s", "held, at most")
    print_table(f"The demo's run, {steps} steps", columns, shown, note)
    result = {
        "lost": verdict.lost,
        "trained_twice": verdict.duplicated,
        "trained": verdict.trained,
        "replayed_steps": num_replayed,
        "different_versions": len(outcome.replay.different),
        "compared_versions": outcome.replay.num_compared,
        "parts": {row.pop("part"): row for row in found},
    }
    print_result(result)
    sys.exit(0 if outcome.is_good else 1)


if __name__ == "__main__":
    typer.run(main)
