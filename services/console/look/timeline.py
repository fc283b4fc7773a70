"""A stretch of a run as a trace for Perfetto (https://ui.perfetto.dev): JSON of Chrome's trace events.

One process for each queue, rollout worker and reward worker, and for the trainer. What a process does at once
lies in lanes, a thread each, so that slices of one thread nest or do not overlap; arrows follow each sample,
and go forward in time. What no record tells is not drawn: within a step, only its waiting for the first group
and its writing of weights have times of their own; the other shares are among the arguments of the step.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.text import Text

from tidemill.common.errors import ConfigError
from tidemill.common.files import aside_file, publish_file
from tidemill.common.history import History, Selection, StreamName
from tidemill.common.history.groups import WHOLE_GROUP
from tidemill.common.streams.selection import tickets_of
from tidemill.common.wire.messages import Commit, Lane, TrajectoryKey, WeightManifest
from tidemill.services.console.commands import StepOptions
from tidemill.services.console.look.joins import SampleFacts, StepRecord, ranges_of, read_samples
from tidemill.services.console.look.selection import span_of
from tidemill.services.console.run.folder import nearest
from tidemill.services.console.run.history import RunAccess, read_run
from tidemill.services.console.text.formats import sample_name, size
from tidemill.services.console.text.tree import terminal

IN_FLIGHT_STEPS = 2
"""How many steps ahead of training tickets are issued, where the run's config is not known."""


@dataclass(slots=True)
class Stretch:
    """Steps `first` to `last`, and what went on from the first of their tickets to the last commit."""

    commits: list[Commit]
    samples: dict[TrajectoryKey, SampleFacts] = field(default_factory=dict)
    evaluated: dict[TrajectoryKey, SampleFacts] = field(default_factory=dict)
    manifests: list[WeightManifest] = field(default_factory=list)

    @property
    def begin_s(self) -> float:
        """When the first ticket was issued, or the first step begun."""
        issued = [s.issued_at or s.started_at for s in self.samples.values()]
        return min(at for at in (self.commits[0].started_at, *issued) if at)

    def steps(self) -> Iterator[StepRecord]:
        """The steps, each with the samples of the tickets that its commit names."""
        by_ticket: dict[int, dict[TrajectoryKey, SampleFacts]] = defaultdict(dict)
        for key, sample in self.samples.items():
            by_ticket[key[0]][key] = sample
        for commit in self.commits:
            samples = (by_ticket[ticket] for ticket in tickets_of(commit))
            yield StepRecord(commit, {key: sample for group in samples for key, sample in group.items()})


async def read_stretch(history: History, first: int, last: int, max_staleness: int | None) -> Stretch:
    commits = history.messages(StreamName.COMMITS, Commit, Selection(steps=(first, last)))
    stretch = Stretch([commit async for commit in commits])
    if not stretch.commits:
        there = await span_of(history, StreamName.COMMITS, "step")
        raise ConfigError(
            f"run {history.run_id} has no commit of steps {first} to {last}: {there}, counted from 0."
        )
    stretch.commits.sort(key=lambda commit: commit.step)
    tickets = [ticket for commit in stretch.commits for ticket in tickets_of(commit)]
    num_groups = max(len(commit.groups) for commit in stretch.commits)
    ahead = IN_FLIGHT_STEPS if max_staleness is None else max_staleness + 1
    for lowest, highest in ranges_of(tickets):
        under_way = Selection(tickets=(lowest, highest + ahead * num_groups))
        stretch.samples |= await read_samples(history, under_way)
    window = (stretch.begin_s, stretch.commits[-1].finished_at)
    stretch.evaluated = await read_samples(history, Selection(times=window), Lane.EVAL)
    manifests = history.messages(StreamName.WEIGHTS, WeightManifest, Selection(times=window))
    stretch.manifests = [manifest async for manifest in manifests]
    return stretch


Event = dict[str, Any]
Track = tuple[str, str]
"""A process, and the name of a track in it."""
TICKETS = ("queue: tickets", "tickets")
TO_SCORE = ("queue: to be scored", "samples")
TO_TRAIN = ("queue: to be trained", "groups")
STEPS = ("trainer", "steps")
GROUPS = ("trainer", "groups")


@dataclass(slots=True, eq=False, repr=False)
class Trace:
    """A trace under construction. Times are given in seconds since 1970, and kept in whole microseconds."""

    begin_s: float
    slices: dict[Track, list[Event]] = field(default_factory=lambda: defaultdict(list))
    """Slices of a track may overlap."""
    moments: list[Event] = field(default_factory=list)
    """Events without duration, on the track of the steps."""
    paths: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    """The slices that a sample goes through, by its name."""

    def us(self, at_s: float) -> int:
        return max(0, round((at_s - self.begin_s) * 1e6))

    def slice(self, track: Track, name: str, begin_s: float, end_s: float, **args: Any) -> Event:
        """Add an event with a duration, which is 0 where the event would end before it begins."""
        begin_us = self.us(begin_s)
        item = _complete(name, begin_us, max(begin_us, self.us(end_s)), args)
        self.slices[track].append(item)
        return item

    def child(self, parent: Event, name: str, begin_s: float, end_s: float, **args: Any) -> None:
        """Add a part of a slice, cut to the parent and to the time after the part before it."""
        parts = parent["parts"]
        end_us = parent["ts"] + parent["dur"]
        least = parts[-1]["ts"] + parts[-1]["dur"] if parts else parent["ts"]
        begin_us = min(max(self.us(begin_s), least), end_us)
        parts.append(_complete(name, begin_us, min(max(self.us(end_s), begin_us), end_us), args))

    def moment(self, name: str, at_s: float, **args: Any) -> None:
        """Add an event without duration."""
        self.moments.append({"ph": "i", "s": "t", "name": name, "ts": self.us(at_s), "args": args})

    def events(self) -> Iterator[Event]:
        pids: dict[str, int] = {}
        num_threads: Counter[int] = Counter()
        for process, track in self.slices:
            pid = pids.setdefault(process, len(pids) + 1)
            if not num_threads[pid]:
                yield _metadata("process_name", pid, 0, {"name": process})
                yield _metadata("process_sort_index", pid, 0, {"sort_index": pid})
            items = self.slices[process, track]
            tid = num_threads[pid] + 1
            num_lanes = _lay_out(items, pid, tid)
            num_threads[pid] += num_lanes
            for lane in range(num_lanes):
                name = track if num_lanes == 1 else f"{track}, lane {lane + 1}"
                yield _metadata("thread_name", pid, tid + lane, {"name": name})
            for item in items:
                where = {"pid": pid, "tid": item["tid"]}
                for slice_event in (item, *item["parts"]):
                    yield {name: value for name, value in slice_event.items() if name != "parts"} | where
            if (process, track) == STEPS:
                yield from (event | {"pid": pid, "tid": tid} for event in self.moments)
        for number, (name, items) in enumerate(self.paths.items(), 1):
            yield from _arrows(number, name, items)


def _complete(name: str, begin_us: int, end_us: int, args: dict[str, Any]) -> Event:
    # JSON has no numbers that are not finite.
    kept = {k: v for k, v in args.items() if not isinstance(v, float) or math.isfinite(v)}
    return {"ph": "X", "name": name, "ts": begin_us, "dur": end_us - begin_us, "args": kept, "parts": []}


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _lay_out(items: list[Event], pid: int, first_thread: int) -> int:
    """Give each slice the first lane that is free; returns how many lanes there are."""
    ends: list[int] = []
    for item in sorted(items, key=lambda s: (s["ts"], s["dur"])):
        lane = next((n for n, end_us in enumerate(ends) if end_us <= item["ts"]), len(ends))
        ends[lane : lane + 1] = [item["ts"] + item["dur"]]
        item |= {"pid": pid, "tid": first_thread + lane}
    return max(1, len(ends))


def _arrows(number: int, name: str, items: list[Event]) -> Iterator[Event]:
    """Arrows through slices: a point is as early in its slice as those before it allow, else it is left out.

    Clocks of two machines differ: then a slice may seem to end before the one that it follows.
    """
    points: list[Event] = []
    for item in items:
        at_us = max(item["ts"], points[-1]["ts"] if points else 0)
        if at_us <= item["ts"] + item["dur"]:
            points.append({"pid": item["pid"], "tid": item["tid"], "ts": at_us})
    for position, point in enumerate(points if len(points) > 1 else ()):
        phase = "t"
        if position == 0:
            phase = "s"
        elif position == len(points) - 1:
            phase = "f"
        end = {"bp": "e"} if phase == "f" else {}
        yield {"ph": phase, "name": name, "cat": "sample", "id": number} | point | end


def build(stretch: Stretch) -> Trace:
    trace = Trace(stretch.begin_s)
    begun: dict[int, SampleFacts] = {}
    for sample in sorted(stretch.samples.values(), key=lambda s: s.started_at):
        if sample.issued_at and sample.started_at:
            begun.setdefault(sample.key[0], sample)
    tickets = {  # from their issue until a worker begins them
        ticket: trace.slice(
            TICKETS, f"ticket {ticket}", first.issued_at, first.started_at, taken_by=first.worker
        )
        for ticket, first in begun.items()
    }
    for key, sample in sorted(stretch.samples.items()):
        if key[0] in tickets:
            trace.paths[sample_name(*key)].append(tickets[key[0]])
        trace.paths[sample_name(*key)] += _draw_sample(trace, sample)
    for sample in stretch.evaluated.values():
        list(_draw_sample(trace, sample, "evaluation "))
    for step in stretch.steps():
        _draw_step(trace, step)
    for manifest in stretch.manifests:
        trace.moment(f"version {manifest.version} announced", manifest.announced_at)
    return trace


def _draw_sample(trace: Trace, sample: SampleFacts, prefix: str = "") -> Iterator[Event]:
    """A sample through generation, waiting and reward; yields the slices."""
    name = prefix + sample_name(*sample.key)
    if sample.started_at:
        oldest, newest = sample.versions
        version = str(newest) if oldest == newest else f"{oldest} to {newest}"
        track = (f"rollout {sample.worker or '(no name)'}", "samples")
        generation = trace.slice(
            track, name, sample.started_at, sample.finished_at, version=version, tokens=sample.num_tokens
        )
        _draw_turns(trace, generation, sample)
        yield generation
    if not sample.scored_at:
        return
    yield trace.slice(TO_SCORE, name, sample.finished_at or sample.asked_at, sample.asked_at)
    track = (f"reward {sample.scorer or '(no name)'}", "samples")
    outcome = {"reward": sample.reward} if sample.reward is not None else {"error": sample.error}
    scored = trace.slice(track, name, sample.asked_at, sample.scored_at, attempts=sample.attempts, **outcome)
    if len({reward for reward, *_ in sample.tries}) == 1:  # attempts of several rewards run side by side
        at_s = sample.asked_at
        for number, (reward, took_s, paused_s, error) in enumerate(sample.tries, 1):
            at_s += paused_s
            trace.child(scored, f"{reward}, attempt {number}", at_s, at_s + took_s, error=error)
            at_s += took_s
    yield scored


def _draw_turns(trace: Trace, generation: Event, sample: SampleFacts) -> None:
    """Generation and environment in turn. A turn has lengths and no time of day, so they are drawn one after
    the other from the session's beginning: what lay between them is missing at the end."""
    at_s = sample.started_at
    for number, turn in enumerate(sample.session.turns if sample.session else ()):
        trace.child(
            generation, f"turn {number}: generation", at_s, at_s + turn.engine_s,
            tokens=turn.num_tokens, prompt_tokens=turn.num_prompt_tokens, calls=turn.num_calls,
        )  # fmt: skip
        at_s += turn.engine_s
        if turn.environment_s:
            trace.child(generation, f"turn {number}: environment", at_s, at_s + turn.environment_s)
            at_s += turn.environment_s


def _draw_step(trace: Trace, record: StepRecord) -> None:
    commit = record.commit
    metrics = record.commit.metrics
    spent = {name: round(value, 6) for name, value in metrics.items() if name.startswith("time/")}
    numbers = {name: metrics[name] for name in ("reward", "loss", "grad_norm") if name in metrics}
    step = trace.slice(
        STEPS, f"step {commit.step}", commit.started_at, commit.finished_at,
        groups=len(commit.groups), version=commit.version, digest=commit.digest, **numbers, **spent,
    )  # fmt: skip
    complete = {ticket: record.complete_at(ticket) for ticket in commit.groups}
    completed_at = [at for at in complete.values() if at]
    if completed_at and min(completed_at) > commit.started_at:
        trace.child(step, "waits for the first group", commit.started_at, min(completed_at))
    weights_s = metrics.get("time/weights_s", 0.0)
    if weights_s:
        trace.child(step, "writes the weights", commit.finished_at - weights_s, commit.finished_at)
    trained = set(commit.trained_keys)
    for ticket in commit.groups:
        ready_s = complete[ticket] or commit.started_at
        begin_s = min(max(ready_s, commit.started_at), commit.finished_at)
        waiting = trace.slice(TO_TRAIN, f"ticket {ticket}", min(ready_s, begin_s), begin_s)
        training = trace.slice(GROUPS, f"ticket {ticket}", begin_s, commit.finished_at, step=commit.step)
        for sample in record.group(ticket):
            if sample.key in trained:
                trace.paths[sample_name(*sample.key)] += [waiting, training, step]
    for ticket, index, reason in commit.dropped:
        name = f"ticket {ticket}" if index == WHOLE_GROUP else sample_name(ticket, index)
        at_s = record.complete_at(ticket) or commit.finished_at
        trace.moment(f"{name} dropped: {reason}", at_s, step=commit.step)


def write_timeline(options: StepOptions, output: Path, first: int, last: int) -> None:
    if output.is_dir() or not output.parent.is_dir():
        raise ConfigError(f"{output} cannot be written: give the name of a file in a folder that exists.")

    async def read(access: RunAccess) -> tuple[Trace, str]:
        max_staleness = access.config.trainer.max_staleness if access.config else None
        stretch = await read_stretch(access.history, first, last, max_staleness)
        steps = f"steps {stretch.commits[0].step} to {stretch.commits[-1].step}"
        return build(stretch), f"{steps} of run {access.run_id}"

    trace, words = read_run(options, read)
    events = list(trace.events())
    with aside_file(output, "the timeline") as aside:
        aside.write_text(json.dumps({"traceEvents": events}, separators=(",", ":"), allow_nan=False))
        publish_file(aside, output)
    console = terminal()
    written = f"{len(events):,} events, {size(output.stat().st_size)}"
    console.print(Text(f"{nearest(output.resolve())}: {words}, {written}"), soft_wrap=True)
    console.print(Text("open it at https://ui.perfetto.dev", "dim"), soft_wrap=True)
