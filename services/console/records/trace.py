"""What became of a ticket, and of one of its samples, for people. Pure functions of what was gathered."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidemill.common.errors import ConfigError
from tidemill.common.history import History, StreamName
from tidemill.common.history.records import GroupRecord, Place, SampleRecord, ends, read_group
from tidemill.common.history.sessions import num_completion_tokens, session_facts
from tidemill.common.process.programs import run_main
from tidemill.common.streams.selection import texts_in
from tidemill.common.wire.arrays import Float64
from tidemill.common.wire.messages import Lane, Message, Score, Ticket, Trajectory
from tidemill.services.console.options import ViewOptions
from tidemill.services.console.records.selection import parse_lane, parse_sample
from tidemill.services.console.records.session import print_session, turn_trees
from tidemill.services.console.records.tables import brief
from tidemill.services.console.run.history import open_history
from tidemill.services.console.text.formats import NOTHING, number, printable, printable_block, took, when
from tidemill.services.console.text.tables import (
    Line,
    jsonable,
    listing,
    plain_fields,
    print_lines,
    terminal,
)

TEXT_CHARACTERS = 4000
CELL_CHARACTERS = 48
REASON_CHARACTERS = 300


def print_ticket(console: Console, trace: GroupRecord, is_full: bool) -> None:
    """The ticket, its samples side by side, and what came of them."""
    console.print(Text(f"ticket {trace.number}  {outcome(trace)}", "bold"), soft_wrap=True)
    print_lines(console, _ticket_lines(trace, is_full))
    if trace.samples:
        console.print(_samples_table(trace, is_full))
    print_lines(console, _outcome_lines(trace))


def print_sample(console: Console, trace: GroupRecord, sample: SampleRecord, is_full: bool) -> None:
    """One sample from its ticket to the version that it made."""
    console.print(
        Text(f"sample {trace.number}.{sample.index}  {outcome(trace, sample)}", "bold"), soft_wrap=True
    )
    print_lines(console, _ticket_lines(trace, is_full))
    if sample.trajectory is not None:
        console.print(Text("\ngeneration", "bold"))
        print_lines(console, _generation_lines(trace.ticket, sample))
        session = sample.trajectory.session
        print_session(console, sample.trajectory, is_full)
        if session is None or not session.messages:
            text = printable_block(sample.trajectory.text, 0 if is_full else TEXT_CHARACTERS)
            console.print(Text("\ncompletion", "bold"))
            console.print(Text(text or "(empty)"), soft_wrap=True)
    if sample.score is not None:
        console.print(Text("\nreward", "bold"))
        print_lines(console, _score_lines(sample.trajectory, sample.score, is_full))
    for score in sample.later_scores:
        words = f"a later score, not counted: {number(score.value)} from {printable(score.worker, 24)}"
        console.print(Text(f"  {words}", "yellow"), soft_wrap=True)
    console.print(Text("\ntraining", "bold"))
    print_lines(console, _training_lines(trace, sample))
    print_lines(console, _outcome_lines(trace))


def outcome(trace: GroupRecord, sample: SampleRecord | None = None) -> str:
    """In a few words, what became of it."""
    commit = trace.commit
    if commit is not None and sample is not None and sample.left_out:
        return f"left out of step {commit.step}: {sample.left_out}"
    if commit is not None and trace.is_trained:
        return f"trained in step {commit.step}, which made version {commit.version}"
    if commit is not None and trace.dropped_as:
        return f"dropped before step {commit.step}: {trace.dropped_as}"
    num_made = sum(1 for item in trace.samples if item.trajectory)
    num_scored = sum(1 for item in trace.samples if item.score)
    words = f"{num_made} of {trace.group_size} samples generated, {num_scored} scored"
    return f"evaluation: {words}" if trace.lane == "eval" else f"no step has trained on it: {words}"


def _ticket_lines(trace: GroupRecord, is_full: bool) -> Iterator[Line]:
    if (source := trace.prompt_source) is not None:
        yield "prompt", printable_block(source.prompt_text, 0 if is_full else TEXT_CHARACTERS)
        of = f"source {source.source}, " if source.source else ""
        named = printable(source.data_source, 60) or NOTHING
        yield "", f"{len(source.prompt_ids)} tokens, {of}data source {named}"
        if source.ground_truth is not None:
            yield "ground truth", brief(source.ground_truth, is_full)
    if trace.ticket is None:
        yield "issued", "the ticket itself is gone from the streams"
        return
    ticket = trace.ticket
    words = f"{when(ticket.issued_at)}, meant for step {ticket.step}, needs version {ticket.min_version}"
    yield "issued", words + (f", row {ticket.row} of the data" if ticket.row >= 0 else "")
    if ticket.replaces >= 0:
        yield "replaces", f"ticket {ticket.replaces}"


def _samples_table(trace: GroupRecord, is_full: bool) -> Table:
    titles = [
        "sample",
        "reward",
        "advantage",
        "score",
        "tries",
        "version",
        "turns",
        "tokens",
        "generated",
        "took",
        "scored",
    ]
    has_sessions = any(sample.trajectory and sample.trajectory.session for sample in trace.samples)
    if not has_sessions:
        titles.remove("turns")
    numbers = ("reward", "advantage", "tries", "turns", "tokens", "took")
    table = listing([*titles, "trained in", "completion"], numbers, ("completion",))
    for sample in trace.samples:
        made, score = sample.trajectory, sample.score
        table.add_row(
            f"{trace.number}.{sample.index}",
            number(sample.reward),
            number(sample.advantage),
            Text(
                score.status.value if score else NOTHING, "" if score and score.value is not None else "red"
            ),
            str(score.attempts) if score else NOTHING,
            " → ".join(str(version) for version, _, _ in sample.spans) or NOTHING,
            *([_num_turns(made)] if has_sessions else []),
            str(sum(num_completion_tokens(made))) if made else NOTHING,
            Text(printable(made.worker, 16) if made else NOTHING),
            took(made.finished_at - made.started_at if made else None),
            Text(f"{printable(score.worker, 16)}, {took(score.latency_s)}" if score else NOTHING),
            Text(sample.left_out or _places(sample.places)),
            Text(printable(made.text if made else "", 0 if is_full else CELL_CHARACTERS)),
        )
    return table


def _num_turns(made: Trajectory | None) -> str:
    facts = session_facts(made) if made else None
    return NOTHING if facts is None else str(len(facts.turns))


def _generation_lines(ticket: Ticket | None, sample: SampleRecord) -> Iterator[Line]:
    made = sample.trajectory
    assert made is not None
    waited_s = made.started_at - ticket.issued_at if ticket and made.started_at else None
    yield "worker", printable(made.worker, 60) or NOTHING
    yield "queued", f"{took(waited_s)} from the ticket to the start of its group"
    yield "took", f"{took(made.finished_at - made.started_at)}, finished {when(made.finished_at)}"
    trained = "" if made.loss_mask is None else f", {int(made.mask.sum())} of them trained"
    yield "tokens", f"{made.num_tokens}{trained}, ended by {made.finish}"
    for version, first, last in sample.spans:
        yield (
            "version",
            f"{version} made tokens {first} to {last}" if last >= first else f"{version}, no token",
        )
    if len(sampled := made.logprobs[made.mask]):
        yield "logprobs", f"mean {float(sampled.mean()):.4g}, least {float(sampled.min()):.4g}"
    for later in sample.later_trajectories:
        yield "again", f"by {printable(later.worker, 40)}, {when(later.finished_at)}: not counted"


def _score_lines(made: Trajectory | None, score: Score, is_full: bool) -> Iterator[Line]:
    yield "reward", number(score.value) if score.value is not None else f"none: {score.status}"
    if score.error:
        yield "error", printable(score.error, 0 if is_full else REASON_CHARACTERS)
    if score.on_failure:
        yield "asks for", score.on_failure
    for name, value in score.components.items():
        yield "component", f"{printable(name, 60)}  {number(value)}"
    if (gaps := teacher_gaps(made, score)) is not None and len(gaps):
        words = f"mean {number(float(gaps.mean()))}, most {number(float(gaps.max()))} nats a token"
        yield "teacher", f"logprob - teacher's: {words}"
    after_s = score.scored_at - made.finished_at if made and made.finished_at else None
    yield "worker", printable(score.worker, 60) or NOTHING
    yield "scored", f"{when(score.scored_at)}, {took(after_s)} after the completion"
    yield "latency", f"{took(score.latency_s)} in {score.attempts} attempt{'s' * (score.attempts > 1)}"
    for place, (name, took_s, paused_s, error) in enumerate(score.tries, 1):
        pause = f", after a pause of {took(paused_s)}" if place > 1 and paused_s else ""
        reason = printable(error, 0 if is_full else REASON_CHARACTERS) or "answered"
        yield f"attempt {place}", f"{printable(name, 40)}: {took(took_s)}{pause}: {reason}"
    for path, text in texts_in("", score.detail):
        yield (
            printable(path.removeprefix("."), 32),
            printable_block(text, 0 if is_full else REASON_CHARACTERS),
        )


def teacher_gaps(made: Trajectory | None, score: Score) -> Float64 | None:
    """Logprob of the policy less that of its teacher, of each token that it sampled; None where they are not
    known, or not of the same tokens."""
    if made is None or score.teacher_logprobs is None:
        return None
    sampled = np.concatenate([segment.logprobs[segment.mask] for segment in made.segments])
    if len(sampled) != len(score.teacher_logprobs):
        return None
    return sampled.astype(np.float64) - score.teacher_logprobs


def _training_lines(trace: GroupRecord, sample: SampleRecord) -> Iterator[Line]:
    if trace.lane == "eval":
        yield "", "samples of evaluation are not trained"
    elif sample.left_out:
        yield "left out", sample.left_out
    elif not trace.is_trained:
        yield "", f"not trained: {trace.dropped_as}" if trace.dropped_as else "not yet"
    else:
        rewards = [s.reward for s in trace.samples if s.reward is not None]
        yield "group", f"rewards {'  '.join(map(number, rewards))}"
        yield "advantage", number(sample.advantage)
        yield "trained in", _places(sample.places)


def _outcome_lines(trace: GroupRecord) -> Iterator[Line]:
    commit = trace.commit
    if commit is not None and trace.is_trained:
        began, ended = when(commit.started_at), took(commit.finished_at - commit.started_at)
        yield "step", f"{commit.step}, begun {began}, {ended}; more: tidemill step {commit.step}"
        announced = f", announced {when(trace.manifest.announced_at)}" if trace.manifest else ""
        yield "made", f"version {commit.version}, digest {commit.digest}{announced}"
    elif commit is not None and trace.dropped_as:
        yield "dropped", f"{trace.dropped_as}; recorded by the commit of step {commit.step}"
    if trace.replaced_by is not None:
        yield "replaced by", f"ticket {trace.replaced_by}"
    for _, letter in trace.letters:
        sample = f"{letter.ticket}.{letter.index}" if letter.index >= 0 else str(letter.ticket)
        source = f"{printable(letter.origin, 24)} {sample} by {printable(letter.worker, 24)}"
        reason = printable(letter.error, REASON_CHARACTERS)
        yield "dead letter", f"{when(letter.died_at)}  {source}: {reason}"


def _places(places: list[Place]) -> str:
    if not places:
        return NOTHING
    found = [f"mini {place.mini_batch}, micro {place.micro_batch}" for place in places]
    return "; ".join(dict.fromkeys(found))


def group_tree(group: GroupRecord, index: int | None = None) -> dict[str, Any]:
    """For programs: all of it, or with one of the samples only."""
    commit = group.commit
    made = commit if group.is_trained else None
    return {
        "ticket": group.number,
        "lane": group.lane.value,
        "issued": _tree(group.ticket),
        "samples": [_sample_tree(sample) for sample in group.samples if index in (None, sample.index)],
        "step": commit.step if commit else None,
        "is_trained": group.is_trained,
        "dropped_as": group.dropped_as,
        "replaced_by": group.replaced_by,
        "version": made.version if made else None,
        "digest": made.digest if made else None,
        "weights": _tree(group.manifest),
        "dead_letters": [_tree(letter) for _, letter in group.letters],
    }


def _sample_tree(sample: SampleRecord) -> dict[str, Any]:
    names = ("version", "first_token", "last_token")
    return {
        "index": sample.index,
        "trajectory": _tree(sample.trajectory),
        "turns": turn_trees(sample.trajectory),
        "versions": [dict(zip(names, span, strict=True)) for span in sample.spans],
        "score": _tree(sample.score),
        "advantage": sample.advantage,
        "trained_in": [asdict(place) for place in sample.places],
        "left_out": sample.left_out,
        "later_trajectories": [_tree(item) for item in sample.later_trajectories],
        "later_scores": [_tree(item) for item in sample.later_scores],
    }


def _tree(message: Message | None) -> Any:
    return None if message is None else jsonable(plain_fields(message))


def show_trace(view: ViewOptions, what: str, lane: str) -> None:
    """Everything that became of `TICKET` or `TICKET.INDEX`.

    Raises:
        ConfigError: it is neither, or the run has no such ticket or sample.
    """
    number, index = parse_sample(what)
    wanted_lane = parse_lane(lane)

    async def look() -> None:
        async with open_history(view.run_id, view.runs_dir) as access:
            trace = await read_group(access.history, number, wanted_lane)
            if not (trace.ticket or trace.samples or trace.letters or trace.commit):
                raise ConfigError(await _absence(access.history, number, wanted_lane))
        sample = next((sample for sample in trace.samples if sample.index == index), None)
        if index is not None and sample is None:
            made = ", ".join(str(sample.index) for sample in trace.samples) or "none"
            raise ConfigError(f"ticket {number} has no sample {index} in the streams; it has {made}.")
        if view.as_json:
            print(json.dumps(group_tree(trace, index)))
        elif sample is not None:
            print_sample(terminal(), trace, sample, view.is_full)
        else:
            print_ticket(terminal(), trace, view.is_full)

    run_main(look())


async def _absence(history: History, number: int, lane: Lane) -> str:
    name = StreamName.PROMPTS.of(lane)
    known = [message.ticket for message in await ends(history, name) if isinstance(message, Ticket)]
    there = f"{name} has tickets {known[0]} to {known[-1]}" if known else f"{name} is empty"
    return (
        f"run {history.run_id} knows no ticket {number} of the lane {lane}: {there}. Where older ones were "
        "trimmed without an archive, they are gone."
    )
