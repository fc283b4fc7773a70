"""How much Redis holds over a run that archives: what is in flight, and no more.

    python -m benchmarks.retention                      # 200 steps of 8 groups of 8, 1,024 tokens each
    python -m benchmarks.retention --steps 400 --staleness 3

A real trainer with a simulated policy on a real Redis; workers in this process answer every ticket at once,
so that all that admission allows is in flight all the time. What may go is archived by the jobs worker's own
function, called in this process: to start a job takes half a second, which is nothing beside a real step and
much beside one of these. There is no checkpoint before the end, so nothing is trimmed for one.

`redis_mb_per_step` is what one step takes in Redis's memory, as Redis tells it; `ratio_to_in_flight` the most
that the streams ever took, over that of `1 + k` steps.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.report import machine, print_result, print_table
from tests.support.models import tiny_model
from tests.support.training import make_score
from tests.support.trajectories import make_trajectory
from tidemill.common.archive.archiver import archive_run
from tidemill.common.config import RunConfig, parse_config
from tidemill.common.history import StreamName
from tidemill.common.process.activity import Activity
from tidemill.common.process.programs import run_main
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.streams import Entry, OffsetReader, append, id_order, last_id
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Ticket
from tidemill.services.trainer.durable.archive_requests import ArchiveJobs
from tidemill.services.trainer.service import serve

MIB = 1 << 20
POINTS = 10
SAMPLE_S = 0.02


def config_of(
    folder: Path, steps: int, groups: int, size: int, staleness: int, segment_mb: float
) -> RunConfig:
    """A run whose trainer waits for nothing."""
    tree = {
        "run_id": "retention",
        "model": {"path": str(tiny_model(folder / "model")), "max_model_len": 64},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 8},
        "rollout": {"engine": "simulated", "sampling": {"max_tokens": 8}},
        "trainer": {
            "policy": "simulated",
            "steps": steps,
            "groups_per_step": groups,
            "group_size": size,
            "max_staleness": staleness,
            "checkpoint_every": 0,
            "tensorboard": False,
        },
        "streams": {"archive": {"segment_mb": segment_mb}},
    }
    rows = [f'{{"prompt": "w{i}", "ground_truth": null}}\n' for i in range(9)]
    (folder / "train.jsonl").write_text("".join(rows))
    return parse_config(tree, "the benchmark's config")


async def answer(broker: Broker, keys: Keys, num_tokens: int) -> None:
    """Generate and score every ticket as it is issued."""
    tickets = OffsetReader(broker, keys.prompts(), Ticket)
    rng = np.random.default_rng(0)
    while True:
        for entry in await tickets.read(block_s=1.0):
            if not isinstance(entry, Entry):
                continue
            ticket = entry.message
            for index in range(ticket.group_size):
                sample = make_trajectory(
                    ticket.ticket,
                    index,
                    step=ticket.step,
                    group_size=ticket.group_size,
                    spans=((ticket.min_version, 0),),
                    completion_ids=rng.integers(0, 1 << 17, num_tokens, dtype=np.int32),
                    logprobs=rng.normal(size=num_tokens).astype(np.float32),
                )
                await append(broker, keys.trajectories(), sample)
                await append(broker, keys.scores(), make_score(ticket.ticket, index, float(index)))


async def sizes(broker: Broker, keys: Keys) -> dict[StreamName, int]:
    """Bytes of each stream in Redis, all entries counted."""
    found = {}
    for stream in StreamName:
        found[stream] = int(await broker.execute("MEMORY", "USAGE", stream.key(keys), "SAMPLES", 0) or 0)
    return found


async def watch(broker: Broker, keys: Keys, curve: dict[int, int]) -> None:
    """The most that the streams take while each version is the newest."""
    while True:
        version = id_order(await last_id(broker, keys.commits))[0]  # commits are trimmed as well
        curve[version] = max(curve.get(version, 0), sum((await sizes(broker, keys)).values()))
        await asyncio.sleep(SAMPLE_S)


async def archive_here(jobs: ArchiveJobs, until: Mapping[StreamName, str], is_urgent: bool) -> None:
    """In place of a job: the same function, at once."""
    context = jobs.context
    await archive_run(context.broker, context.keys, context.run_dir, context.config.streams.archive, until)
    await jobs.on_progress()


async def bytes_of_step(broker: Broker, groups: int, size: int, num_tokens: int) -> int:
    """What one step takes: its tickets are issued by hand, and answered."""
    keys = Keys("one-step")
    ids, logprobs = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.float32)
    for ticket in range(groups):
        for index in range(size):
            sample = make_trajectory(ticket, index, completion_ids=ids, logprobs=logprobs)
            await append(broker, keys.trajectories(), sample)
            await append(broker, keys.scores(), make_score(ticket, index, float(index)))
    return sum((await sizes(broker, keys)).values())


async def measure(folder: Path, config: RunConfig, num_tokens: int) -> tuple[dict[int, int], int]:
    """The curve of a whole run, and the bytes of one of its steps."""
    trainer, keys = config.trainer, Keys(config.run_id)
    redis = EmbeddedRedis(folder / "redis")
    redis.start()
    try:
        broker = await Broker.connect(redis.url)
        one_step = await bytes_of_step(broker, trainer.groups_per_step, trainer.group_size, num_tokens)
        context = ServiceContext(
            "trainer", "t1", keys, config, broker, folder / config.run_id, Activity("trainer")
        )
        curve: dict[int, int] = {}
        beside = [answer(broker, keys, num_tokens), watch(broker, keys, curve)]
        tasks = [asyncio.ensure_future(work) for work in beside]
        await serve(context)
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await broker.close()
    finally:
        redis.stop()
    return curve, one_step


def main(
    steps: Annotated[int, typer.Option(min=20)] = 200,
    groups: Annotated[int, typer.Option(min=1)] = 8,
    size: Annotated[int, typer.Option(min=1)] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="of each completion")] = 1024,
    staleness: Annotated[int, typer.Option(min=0)] = 1,
) -> None:
    """Print the curve of Redis's memory over a run."""
    segment_mb = 8 * tokens * groups * size / MIB / 16
    """A sixteenth of a step: by default a file has 32 MiB, and a step of a large run a gigabyte."""
    ArchiveJobs.ask = archive_here  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory(prefix="tidemill-retention-") as name:
        config = config_of(Path(name), steps, groups, size, staleness, segment_mb)
        curve, one_step = run_main(measure(Path(name), config, tokens))
    in_flight = (1 + staleness) * one_step
    rows: list[Any] = []
    for first in range(0, steps, max(1, steps // POINTS)):
        part = [curve[step] for step in range(first, first + max(1, steps // POINTS)) if step in curve]
        most = max(part, default=0)
        rows.append((f"{first}", f"{most / MIB:.2f}", f"{most / in_flight:.2f}"))
    columns = ("from step", "most in Redis, MiB", f"of {1 + staleness} steps")
    print_table(f"Redis over {steps} steps", columns, rows, machine())
    ratio = max(curve.values()) / in_flight
    print_result({"redis_mb_per_step": round(one_step / MIB, 3), "ratio_to_in_flight": round(ratio, 3)})


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
