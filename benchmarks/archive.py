"""How fast a run's streams are archived, how small they get, and how fast people find things in them.

    python -m benchmarks.archive                        # 1,000,000 trajectories of 64 tokens
    python -m benchmarks.archive --trajectories 100000 --keep runs

Tickets, trajectories, scores and commits are made up and archived as a run's archiver does it, past Redis:
what is measured is the archive. Every question is asked by a fresh process, as a command is; its time is that
from the start of the process to the answer, imports included, the median over several tickets.
"""

import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.report import machine, print_result, print_table
from tidemill.common.archive import stream_folder
from tidemill.common.archive.archiver import MIB, has_archive
from tidemill.common.archive.columns import RawEntry
from tidemill.common.archive.manifest import Manifest
from tidemill.common.archive.writer import write_segments, writing
from tidemill.common.config import ArchiveConfig
from tidemill.common.history import StreamName
from tidemill.common.process.programs import run_main
from tidemill.common.streams import entry_id_of
from tidemill.common.wire import codec
from tidemill.common.wire.messages import (
    Commit,
    Message,
    SamplingParams,
    Score,
    ScoreStatus,
    Ticket,
    Trajectory,
)

GROUP, GROUPS_PER_STEP, PROMPT_TOKENS, TOKENS = 8, 64, 24, 64
WORDS = ("so", "then", "the", "sum", "is", "therefore", "we", "add", "carry", "check", "again", "thus")
RARE = "xylophone"
"""A word that one completion near the end holds."""
STARTED_AT = 1_770_000_000.0
REPEATS = 5

QUESTIONS = {
    "start of a process, nothing asked": "pass",
    "trajectories(ticket)": "assert len(await h.trajectories(ticket)) == 8",
    "scores(ticket)": "assert len(await h.scores(ticket)) == 8",
    "commit_of_ticket(ticket)": "assert ticket in (await h.commit_of_ticket(ticket)).groups",
    "all of the above, as `trace` asks": (
        "await h.ticket(ticket); await h.trajectories(ticket); await h.scores(ticket); "
        "await h.commit_of_ticket(ticket)"
    ),
    "one entry by its id": (
        "r = [r async for r in h.scan(T, Selection(first_id=entry, last_id=entry))]; assert len(r) == 1"
    ),
    "newest trajectory": "await anext(h.scan(T, newest_first=True))",
    "first hit of a common word": "await anext(h.scan(T, Selection(pattern='carry')))",
    "first hit of a regular expression": "await anext(h.scan(T, Selection(pattern=r'carr(y|ies)\\b')))",
    "only hit, near the end": f"await anext(h.scan(T, Selection(pattern='{RARE}')))",
    "no hit at all, a regular expression": (
        "assert not [r async for r in h.scan(T, Selection(pattern=r'zz\\w+top'))]"
    ),
    "summary of all streams": "await h.summary()",
}
ASK = """
import asyncio, sys
from pathlib import Path
from tidemill.common.history import History, Selection, StreamName
async def main(folder, ticket, entry):
    T, h = StreamName.TRAJECTORIES, History(Path(folder).name, Path(folder), None)
    {question}
asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
"""


@dataclass
class Written:
    """What came of archiving, by stream."""

    entries: dict[StreamName, int] = field(default_factory=dict)
    seconds: dict[StreamName, float] = field(default_factory=dict)
    num_bytes: dict[StreamName, int] = field(default_factory=dict)
    payload_bytes: dict[StreamName, int] = field(default_factory=dict)

    def per_s(self, stream: StreamName) -> float:
        """Entries a second."""
        return self.entries[stream] / self.seconds[stream]

    def summary(self) -> dict[str, int | float]:
        """For programs."""
        stream = StreamName.TRAJECTORIES
        return {
            "trajectories_per_s": round(self.per_s(stream)),
            "bytes_per_trajectory": round(self.num_bytes[stream] / self.entries[stream], 1),
            "payload_bytes_per_trajectory": round(self.payload_bytes[stream] / self.entries[stream], 1),
        }

    def rows(self) -> list[tuple[str, ...]]:
        """For people."""
        return [
            (
                stream,
                f"{self.entries[stream]:,}",
                f"{self.per_s(stream):,.0f}",
                f"{self.payload_bytes[stream] / MIB:,.1f} MiB",
                f"{self.num_bytes[stream] / MIB:,.1f} MiB",
            )
            for stream in self.entries
        ]


def main(
    trajectories: Annotated[int, typer.Option(min=10_000, help="how many to archive")] = 1_000_000,
    keep: Annotated[
        Path | None, typer.Option(help="leave the archive in this folder; one that is there is asked again")
    ] = None,
) -> None:
    """Archive made-up streams, then ask."""
    home = keep or Path(tempfile.mkdtemp(prefix="tidemill-archive-"))
    run_dir = home / f"archive-{trajectories}"
    result: dict[str, Any] = {"trajectories": trajectories}
    try:
        if not has_archive(run_dir):
            written = _write(run_dir, trajectories)
            columns = ("stream", "entries", "entries/s", "payload", "on disk")
            print_table(f"archiving ({machine()})", columns, written.rows())
            result |= written.summary()
        answers = _ask(run_dir, trajectories)
    finally:
        if keep is None:
            shutil.rmtree(home, ignore_errors=True)
    rows = [(question, f"{wall_s:.2f} s", f"{cpu_s:.2f} s") for question, (wall_s, cpu_s) in answers.items()]
    columns = ("question", "fresh process", "of that, processor")
    print_table(f"asked of {trajectories:,} archived trajectories", columns, rows)
    result["latency_s"] = {question: round(wall_s, 3) for question, (wall_s, _) in answers.items()}
    result["processor_s"] = {question: round(cpu_s, 3) for question, (_, cpu_s) in answers.items()}
    print_result(result)


def _write(run_dir: Path, num_trajectories: int) -> Written:
    """Archive every stream of a made-up run, one after the other."""
    written = Written()
    num_groups = num_trajectories // GROUP
    sources = {
        StreamName.PROMPTS: _tickets(num_groups),
        StreamName.TRAJECTORIES: _trajectories(num_groups),
        StreamName.SCORES: _scores(num_groups),
        StreamName.COMMITS: _commits(num_groups),
    }
    for stream, source in sources.items():
        entries = _encoded(source, spent := [0.0])
        started = time.perf_counter()
        with writing(run_dir):
            count = run_main(
                write_segments(
                    run_dir,
                    stream,
                    lambda _, entries=entries: entries,
                    segment_bytes=int(ArchiveConfig().segment_mb * MIB),
                    is_last=True,
                )
            )
        manifest = Manifest.load(stream_folder(run_dir, stream))
        written.entries[stream] = count
        written.seconds[stream] = time.perf_counter() - started - spent[0]
        written.num_bytes[stream] = manifest.num_bytes
        written.payload_bytes[stream] = sum(segment.payload_bytes for segment in manifest.segments)
    return written


async def _encoded(source: Iterator[tuple[str, Message]], spent: list[float]) -> AsyncIterator[RawEntry]:
    """Entries as Redis would send them; the time that making them up takes is counted apart."""
    while True:
        started = time.perf_counter()
        found = next(source, None)
        if found is None:
            return
        entry = found[0], codec.encode(found[1])
        spent[0] += time.perf_counter() - started
        yield entry


def _tickets(num_groups: int) -> Iterator[tuple[str, Message]]:
    rng = np.random.default_rng(0)
    for ticket in range(num_groups):
        prompt_ids = rng.integers(0, 32_000, PROMPT_TOKENS, dtype=np.int32)
        yield (
            entry_id_of(ticket),
            Ticket(
                prompt_ids=prompt_ids,
                prompt_text=_prompt(ticket),
                ground_truth=str(ticket),
                data_source="made up",
                ticket=ticket,
                step=ticket // GROUPS_PER_STEP,
                min_version=max(0, ticket // GROUPS_PER_STEP - 1),
                group_size=GROUP,
                sampling=SamplingParams(max_tokens=TOKENS),
                issued_at=STARTED_AT + ticket,
            ),
        )


def _trajectories(num_groups: int) -> Iterator[tuple[str, Message]]:
    """Groups finish a little out of order, as they do."""
    numbers, words = np.random.default_rng(1), random.Random(1)
    prompts = np.random.default_rng(0)
    for first in range(0, num_groups, GROUPS_PER_STEP):
        tickets = range(first, min(first + GROUPS_PER_STEP, num_groups))
        ids = {ticket: prompts.integers(0, 32_000, PROMPT_TOKENS, dtype=np.int32) for ticket in tickets}
        samples = [(ticket, index) for ticket in tickets for index in range(GROUP)]
        words.shuffle(samples)
        for place, (ticket, index) in enumerate(samples):
            at = STARTED_AT + first + place / 16
            text = " ".join(words.choices(WORDS, k=48))
            if ticket == num_groups - GROUPS_PER_STEP // 2 and index == 0:
                text += f" {RARE}"
            trajectory = Trajectory(
                prompt_ids=ids[ticket],
                prompt_text=_prompt(ticket),
                ground_truth=str(ticket),
                data_source="made up",
                ticket=ticket,
                index=index,
                step=ticket // GROUPS_PER_STEP,
                group_size=GROUP,
                completion_ids=numbers.integers(0, 32_000, TOKENS, dtype=np.int32),
                logprobs=-numbers.exponential(0.5, TOKENS).astype(np.float32),
                spans=((max(0, ticket // GROUPS_PER_STEP - 1), 0),),
                text=text,
                worker=f"rollout-{place % 4}",
                started_at=at - 4.0,
                finished_at=at,
            )
            yield f"{int(at * 1000)}-{place % 16}", trajectory


def _scores(num_groups: int) -> Iterator[tuple[str, Message]]:
    values = random.Random(2)
    for number in range(num_groups * GROUP):
        at = STARTED_AT + number / GROUP + 5.0
        value = float(values.random() < 0.5)
        score = Score(
            ticket=number // GROUP,
            index=number % GROUP,
            status=ScoreStatus.OK,
            value=value,
            components={"correct": value, "format": 1.0},
            worker=f"reward-{number % 4}",
            latency_s=values.random(),
            scored_at=at,
        )
        yield f"{int(at * 1000)}-0", score


def _commits(num_groups: int) -> Iterator[tuple[str, Message]]:
    for step in range(num_groups // GROUPS_PER_STEP):
        tickets = tuple(range(step * GROUPS_PER_STEP, (step + 1) * GROUPS_PER_STEP))
        keys = [(ticket, index) for ticket in tickets for index in range(GROUP)]
        commit = Commit(
            step=step,
            version=step + 1,
            mini_batches=(tuple(tuple(keys[i : i + 32]) for i in range(0, len(keys), 32)),),
            groups=tickets,
            advantages={str(ticket): [0.5] * GROUP for ticket in tickets},
            metrics={f"metric/{number}": number / 7 for number in range(60)},
            finished_at=STARTED_AT + (step + 1) * GROUPS_PER_STEP,
        )
        yield entry_id_of(step), commit


def _prompt(ticket: int) -> str:
    return f"What is {ticket * 7919 % 10007} plus {ticket * 104729 % 10009}? Think step by step."


def _ask(run_dir: Path, num_trajectories: int) -> dict[str, tuple[float, float]]:
    """Ask each question of fresh processes, about other tickets each time: medians, wall and processor."""
    rng, answers = random.Random(3), {}
    manifest = Manifest.load(stream_folder(run_dir, StreamName.TRAJECTORIES))
    num_asked = num_trajectories // GROUP // GROUPS_PER_STEP * GROUPS_PER_STEP
    for question, code in QUESTIONS.items():
        program, times = ASK.format(question=code), []
        for _ in range(REPEATS):
            ticket = rng.randrange(num_asked)
            entry = manifest.segments[rng.randrange(len(manifest.segments))].first_id
            command = [sys.executable, "-c", program, str(run_dir), str(ticket), entry]
            started, spent_s = time.perf_counter(), _children_s()
            subprocess.run(command, check=True)
            times.append((time.perf_counter() - started, _children_s() - spent_s))
        walls, processors = zip(*times, strict=True)
        answers[question] = statistics.median(walls), statistics.median(processors)
    return answers


def _children_s() -> float:
    """Processor time of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
