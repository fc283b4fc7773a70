"""From the records of a stretch to its trace.

One process for each queue, rollout worker and reward worker, and for the trainer; what they do at once lies
in lanes. What no record tells is not drawn: within a step, only its waiting for the first group and its
writing of weights have times of their own; the shares of the others are among the arguments of the step.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.text import Text

from tidemill.common.errors import ConfigError
from tidemill.common.files import aside_file, publish_file
from tidemill.common.history import History, Selection, StreamName
from tidemill.common.history.groups import WHOLE_GROUP, tickets_of
from tidemill.common.history.records import SampleFacts, StepRecord, read_samples
from tidemill.common.process.programs import run_main
from tidemill.common.wire.messages import Commit, Lane, TrajectoryKey, WeightManifest
from tidemill.services.console.options import TimelineOptions
from tidemill.services.console.records.trace_events import Process, Slice, TraceEvents, Track
from tidemill.services.console.run.folder import nearest
from tidemill.services.console.run.history import open_history
from tidemill.services.console.text.tables import terminal

IN_FLIGHT_STEPS = 2
"""Tickets are issued so many steps ahead of the one that is trained, where the run's config is not known."""


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

    @property
    def end_s(self) -> float:
        """The last commit."""
        return self.commits[-1].finished_at

    def steps(self) -> Iterator[StepRecord]:
        """The steps, each with the samples of the tickets that its commit names."""
        by_ticket: dict[int, dict[TrajectoryKey, SampleFacts]] = defaultdict(dict)
        for key, sample in self.samples.items():
            by_ticket[key[0]][key] = sample
        for commit in self.commits:
            samples = (by_ticket[ticket] for ticket in tickets_of(commit))
            yield StepRecord(commit, {key: sample for group in samples for key, sample in group.items()})


async def read_stretch(history: History, first: int, last: int, max_staleness: int | None) -> Stretch:
    """Read steps `first` to `last`.

    Raises:
        ConfigError: the run has none of them.
    """
    commits = history.messages(StreamName.COMMITS, Commit, Selection(steps=(first, last)))
    stretch = Stretch([commit async for commit in commits])
    if not stretch.commits:
        raise ConfigError(
            f"run {history.run_id} has no commit of steps {first} to {last}. `tidemill streams tail commits` "
            "shows the newest; steps are counted from 0."
        )
    stretch.commits.sort(key=lambda commit: commit.step)
    tickets = [ticket for commit in stretch.commits for ticket in tickets_of(commit)]
    num_groups = max(len(commit.groups) for commit in stretch.commits)
    ahead = IN_FLIGHT_STEPS if max_staleness is None else max_staleness + 1
    under_way = Selection(tickets=(min(tickets), max(tickets) + ahead * num_groups))
    stretch.samples = await read_samples(history, under_way)
    window = (stretch.begin_s, stretch.end_s)
    stretch.evaluated = await read_samples(history, Selection(times=window), Lane.EVAL)
    manifests = history.messages(StreamName.WEIGHTS, WeightManifest, Selection(times=window))
    stretch.manifests = [manifest async for manifest in manifests]
    return stretch


MAX_POINTS = 4000
"""Points of a curve."""
Links = dict[tuple[int, int], list[tuple[Process, Slice]]]
"""The slices that a sample went through."""


def build(stretch: Stretch) -> TraceEvents:
    """The whole trace of a stretch."""
    trace = TraceEvents(stretch.begin_s)
    tracks = _Tracks(trace)
    links: Links = defaultdict(list)
    group_slices = _draw_waiting_tickets(tracks, stretch)
    for key, sample in sorted(stretch.samples.items()):
        if key[0] in group_slices:
            links[key].append((tracks.prompts.process, group_slices[key[0]]))
        links[key] += _draw_sample(tracks, sample)
    for sample in stretch.evaluated.values():
        _draw_sample(tracks, sample, "evaluation ")
    for step in stretch.steps():
        _draw_step(tracks, step, links)
    for manifest in stretch.manifests:
        trace.instant(tracks.steps, f"version {manifest.version} announced", manifest.announced_at)
    for (ticket, index), steps in links.items():
        trace.flow(f"{ticket}.{index}", steps)
    _draw_idle(tracks, stretch)
    _draw_curves(trace, stretch)
    return trace


class _Tracks:
    """The tracks of a trace, in the order in which messages flow."""

    def __init__(self, trace: TraceEvents) -> None:
        self.trace = trace
        self.prompts = trace.process("queue: tickets").track("tickets")
        self.workers: dict[str, Track] = {}
        self.to_score = trace.process("queue: to be scored").track("samples")
        self.scorers: dict[str, Track] = {}
        self.to_train = trace.process("queue: to be trained").track("groups")
        self.steps = trace.process("trainer").track("steps")
        self.groups = trace.process("trainer").track("groups")

    def worker(self, name: str) -> Track:
        """Where a rollout worker generates."""
        return self._of(self.workers, f"rollout {name or '(no name)'}")

    def scorer(self, name: str) -> Track:
        """Where a reward worker scores."""
        return self._of(self.scorers, f"reward {name or '(no name)'}")

    def _of(self, known: dict[str, Track], name: str) -> Track:
        if name not in known:
            known[name] = self.trace.process(name).track("samples")
        return known[name]


def _draw_waiting_tickets(tracks: _Tracks, stretch: Stretch) -> dict[int, Slice]:
    """Each ticket from its issue until a worker begins it."""
    begun: dict[int, SampleFacts] = {}
    for (ticket, _), sample in stretch.samples.items():
        if sample.issued_at and sample.started_at:
            known = begun.get(ticket)
            begun[ticket] = sample if known is None or sample.started_at < known.started_at else known
    return {
        ticket: tracks.trace.slice(
            tracks.prompts, f"ticket {ticket}", sample.issued_at, sample.started_at, taken_by=sample.worker
        )
        for ticket, sample in begun.items()
    }


def _draw_sample(tracks: _Tracks, sample: SampleFacts, what: str = "") -> Iterator[tuple[Process, Slice]]:
    """A sample through generation, waiting and reward; yields the slices."""
    trace, name = tracks.trace, f"{what}{sample.key[0]}.{sample.key[1]}"
    if sample.started_at:
        track = tracks.worker(sample.worker)
        oldest, newest = sample.versions
        version = str(newest) if oldest == newest else f"{oldest} to {newest}"
        made = trace.slice(
            track, name, sample.started_at, sample.finished_at, version=version, tokens=sample.num_tokens
        )
        _draw_turns(trace, made, sample)
        yield track.process, made
    if not sample.scored_at:
        return
    yield (
        tracks.to_score.process,
        trace.slice(tracks.to_score, name, sample.finished_at or sample.asked_at, sample.asked_at),
    )
    track = tracks.scorer(sample.scorer)
    outcome = {"reward": sample.reward} if sample.reward is not None else {"error": sample.error}
    scored = trace.slice(track, name, sample.asked_at, sample.scored_at, attempts=sample.attempts, **outcome)
    if len({reward for reward, *_ in sample.tries}) == 1:  # those of several rewards run side by side
        at_s = sample.asked_at
        for place, (reward, took_s, paused_s, error) in enumerate(sample.tries, 1):
            at_s += paused_s
            trace.child(scored, f"{reward}, attempt {place}", at_s, at_s + took_s, error=error)
            at_s += took_s
    yield track.process, scored


def _draw_turns(trace: TraceEvents, made: Slice, sample: SampleFacts) -> None:
    """Generation and environment in turn. A turn has lengths and no time of day, so they are drawn one after
    the other from the session's beginning: what lay between them is missing at the end."""
    at_s = sample.started_at
    for number, turn in enumerate(sample.session.turns if sample.session else ()):
        trace.child(
            made, f"turn {number}: generation", at_s, at_s + turn.engine_s,
            tokens=turn.num_tokens, prompt_tokens=turn.num_prompt_tokens, calls=turn.num_calls,
        )  # fmt: skip
        at_s += turn.engine_s
        if turn.environment_s:
            trace.child(made, f"turn {number}: environment", at_s, at_s + turn.environment_s)
            at_s += turn.environment_s


def _draw_step(tracks: _Tracks, record: StepRecord, links: Links) -> None:
    """A step, the groups it trained and those it dropped."""
    trace, commit, metrics = tracks.trace, record.commit, record.commit.metrics
    spent = {name: round(value, 6) for name, value in metrics.items() if name.startswith("time/")}
    numbers = {name: metrics[name] for name in ("reward", "loss", "grad_norm") if name in metrics}
    step = trace.slice(
        tracks.steps, f"step {commit.step}", commit.started_at, commit.finished_at,
        groups=len(commit.groups), version=commit.version, digest=commit.digest, **numbers, **spent,
    )  # fmt: skip
    complete = {ticket: record.complete_at(ticket) for ticket in commit.groups}
    known = [at for at in complete.values() if at]
    if known and min(known) > commit.started_at:
        trace.child(step, "waits for the first group", commit.started_at, min(known))
    if weights_s := metrics.get("time/weights_s", 0.0):
        trace.child(step, "writes the weights", commit.finished_at - weights_s, commit.finished_at)
    trained = set(commit.trained_keys)
    for ticket in commit.groups:
        ready_s = complete[ticket] or commit.started_at
        begin_s = min(max(ready_s, commit.started_at), commit.finished_at)
        waiting = trace.slice(tracks.to_train, f"ticket {ticket}", min(ready_s, begin_s), begin_s)
        training = trace.slice(
            tracks.groups, f"ticket {ticket}", begin_s, commit.finished_at, step=commit.step
        )
        for sample in record.group(ticket):
            if sample.key in trained:
                steps = [(tracks.to_train.process, waiting), (tracks.groups.process, training)]
                links[sample.key] += [*steps, (tracks.steps.process, step)]
    for ticket, index, reason in commit.dropped:
        name = f"ticket {ticket}" if index == WHOLE_GROUP else f"{ticket}.{index}"
        at_s = record.complete_at(ticket) or commit.finished_at
        trace.instant(tracks.steps, f"{name} dropped: {reason}", at_s, step=commit.step)


def _draw_idle(tracks: _Tracks, stretch: Stretch) -> None:
    """When a worker or the trainer had nothing, within the stretch."""
    trace = tracks.trace
    begin_us, end_us = trace.us(stretch.begin_s), trace.us(stretch.end_s)
    busy = [*tracks.workers.values(), *tracks.scorers.values(), tracks.steps]
    for track in busy:
        idle = track.process.track("idle")
        for first, last in gaps(((s.begin_us, s.end_us) for s in track.slices), begin_us, end_us):
            idle.add(Slice("between steps" if track is tracks.steps else "idle", first, last))


def gaps(spans: Iterable[tuple[int, int]], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """What of `begin` to `end` none of the spans covers."""
    covered = begin
    for first, last in sorted(spans):
        if first >= end:
            break
        if first > covered:
            yield covered, first
        covered = max(covered, last)
    if covered < end:
        yield covered, end


def _draw_curves(trace: TraceEvents, stretch: Stretch) -> None:
    """How many samples are where, and how stale what was trained is."""
    changes: list[tuple[float, str, int]] = []
    for sample in (*stretch.samples.values(), *stretch.evaluated.values()):
        if sample.started_at:
            changes += [(sample.started_at, "generating", 1), (sample.finished_at, "generating", -1)]
        if sample.scored_at:
            waits = sample.finished_at or sample.asked_at
            changes += [(waits, "to be scored", 1), (max(waits, sample.asked_at), "to be scored", -1)]
            changes += [(sample.asked_at, "being scored", 1), (sample.scored_at, "being scored", -1)]
    changes.sort()
    now = dict.fromkeys(("generating", "to be scored", "being scored"), 0)
    every = max(1, len(changes) // MAX_POINTS)
    for place, (at_s, name, change) in enumerate(changes):
        now[name] += change
        if place % every == 0 or place == len(changes) - 1:
            trace.counter("samples in flight", at_s, dict(now))
    for commit in stretch.commits:
        ages = {name: commit.metrics.get(f"staleness/{name}") for name in ("mean", "max")}
        trace.counter("staleness of trained tokens", commit.finished_at, _known(ages))
        trace.counter("version", commit.finished_at, {"version": commit.version})


def _known(values: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


MANY_EVENTS = 2_000_000
"""More than a browser shows without trouble."""


def write_timeline(options: TimelineOptions) -> None:
    """Write steps `first` to `last` of a run into a file, which is replaced as a whole.

    Raises:
        ConfigError: the run has none of these steps, or the file cannot be where it should.
    """
    first, last, output = options.first, options.last, options.output
    if last < first:
        raise ConfigError(f"--from-step {first} is after --to-step {last}.")
    if output.is_dir() or not output.parent.is_dir():
        raise ConfigError(f"{output} cannot be written: give the name of a file in a folder that exists.")

    async def look() -> tuple[TraceEvents, str]:
        async with open_history(options.run_id, options.runs_dir) as access:
            max_staleness = access.config.trainer.max_staleness if access.config else None
            stretch = await read_stretch(access.history, first, last, max_staleness)
            steps = f"steps {stretch.commits[0].step} to {stretch.commits[-1].step}"
            return build(stretch), f"{steps} of run {access.run_id}"

    trace, words = run_main(look())
    with aside_file(output, "the timeline") as aside:
        num_events = _write(aside, trace, {"run": words})
        publish_file(aside, output)
    console = terminal()
    size = f"{num_events:,} events, {output.stat().st_size / 1e6:,.1f} MB"
    console.print(Text(f"{nearest(output.resolve())}: {words}, {size}"), soft_wrap=True)
    console.print(Text("open it at https://ui.perfetto.dev, or in chrome://tracing", "dim"), soft_wrap=True)
    if num_events > MANY_EVENTS:
        console.print(Text("that is much for a browser: give fewer steps if it is slow", "yellow"))


def _write(path: Path, trace: TraceEvents, notes: dict[str, Any]) -> int:
    """One event a line; returns how many."""
    num_events = 0
    head = {"displayTimeUnit": "ms", "otherData": notes | {"begin_s": trace.begin_s}}
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        for event in trace.events():
            line = json.dumps(_finite(event), separators=(",", ":"), allow_nan=False)
            file.write((",\n" if num_events else "") + line)
            num_events += 1
        file.write("\n]}\n")
    return num_events


def _finite(event: dict[str, Any]) -> dict[str, Any]:
    """The event with what JSON cannot say left out of its arguments."""
    args = event.get("args") or {}
    finite = {k: v for k, v in args.items() if not isinstance(v, float) or abs(v) < float("inf")}
    return event if len(finite) == len(args) else event | {"args": finite}
