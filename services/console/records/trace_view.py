"""What became of a ticket, and of one of its samples, for people. Pure functions of what was gathered."""

import json
from collections.abc import Iterable, Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.errors import ConfigError
from common.process.programs import run_main
from common.wire.messages import Score, Ticket, Trajectory
from services.console.cli.options import parse_lane, parse_sample
from services.console.records.record_table import number
from services.console.records.search import texts_in
from services.console.records.step_trace import trace_step
from services.console.records.step_view import print_step
from services.console.records.streams import View, terminal
from services.console.records.ticket_trace import Place, SampleTrace, TicketTrace, trace_ticket
from services.console.records.values import brief
from services.console.run.history import open_history
from services.console.text.untrusted import NOTHING, printable, printable_block, took, when

TEXT_CHARACTERS = 4000
CELL_CHARACTERS = 48
REASON_CHARACTERS = 300

Line = tuple[str, str]


def print_ticket(console: Console, trace: TicketTrace, is_full: bool) -> None:
    """The ticket, its samples side by side, and what came of them."""
    console.print(Text(f"ticket {trace.number}  {fate(trace)}", "bold"), soft_wrap=True)
    print_lines(console, _ticket_lines(trace, is_full))
    if trace.samples:
        console.print(_samples_table(trace, is_full))
    print_lines(console, _outcome_lines(trace))


def print_sample(console: Console, trace: TicketTrace, sample: SampleTrace, is_full: bool) -> None:
    """One sample from its ticket to the version that it made."""
    console.print(
        Text(f"sample {trace.number}.{sample.index}  {fate(trace, sample)}", "bold"), soft_wrap=True
    )
    print_lines(console, _ticket_lines(trace, is_full))
    if sample.trajectory is not None:
        console.print(Text("\ngeneration", "bold"))
        print_lines(console, _generation_lines(trace.ticket, sample))
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


def print_lines(console: Console, lines: Iterable[Line]) -> None:
    """Names and values, one a line."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in lines:
        table.add_row(name, Text(value))
    console.print(table)


def fate(trace: TicketTrace, sample: SampleTrace | None = None) -> str:
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


def _ticket_lines(trace: TicketTrace, is_full: bool) -> Iterator[Line]:
    source = trace.ticket or next((s.trajectory for s in trace.samples if s.trajectory), None)
    if source is not None:
        yield "prompt", printable_block(source.prompt_text, 0 if is_full else TEXT_CHARACTERS)
        yield (
            "",
            f"{len(source.prompt_ids)} tokens, data source {printable(source.data_source, 60) or NOTHING}",
        )
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


def _samples_table(trace: TicketTrace, is_full: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    titles = ("sample", "reward", "advantage", "score", "tries", "version", "tokens", "generated", "took")
    for title in titles:
        is_number = title in ("reward", "advantage", "tries", "tokens", "took")
        table.add_column(title, justify="right" if is_number else "left", no_wrap=True)
    table.add_column("scored", no_wrap=True)
    table.add_column("trained in", no_wrap=True)
    table.add_column("completion", overflow="fold")
    for sample in trace.samples:
        made, score = sample.trajectory, sample.score
        table.add_row(
            f"{trace.number}.{sample.index}",
            number(score.value if score else None),
            number(sample.advantage),
            Text(
                score.status.value if score else NOTHING, "" if score and score.value is not None else "red"
            ),
            str(score.attempts) if score else NOTHING,
            " → ".join(str(version) for version, _, _ in sample.spans) or NOTHING,
            str(made.num_tokens) if made else NOTHING,
            Text(printable(made.worker, 16) if made else NOTHING),
            took(made.finished_at - made.started_at if made else None),
            Text(f"{printable(score.worker, 16)}, {took(score.latency_s)}" if score else NOTHING),
            Text(sample.left_out or _places(sample.places)),
            Text(printable(made.text if made else "", 0 if is_full else CELL_CHARACTERS)),
        )
    return table


def _generation_lines(ticket: Ticket | None, sample: SampleTrace) -> Iterator[Line]:
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
    if made.num_tokens:
        yield "logprobs", f"mean {float(made.logprobs.mean()):.4g}, least {float(made.logprobs.min()):.4g}"
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


def _training_lines(trace: TicketTrace, sample: SampleTrace) -> Iterator[Line]:
    if trace.lane == "eval":
        yield "", "samples of evaluation are not trained"
    elif sample.left_out:
        yield "left out", sample.left_out
    elif not trace.is_trained:
        yield "", f"not trained: {trace.dropped_as}" if trace.dropped_as else "not yet"
    else:
        rewards = [s.score.value for s in trace.samples if s.score and s.score.value is not None]
        yield "group", f"rewards {'  '.join(map(number, rewards))}"
        yield "advantage", number(sample.advantage)
        yield "trained in", _places(sample.places)


def _outcome_lines(trace: TicketTrace) -> Iterator[Line]:
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
    for letter in trace.letters:
        sample = f"{letter.ticket}.{letter.index}" if letter.index >= 0 else str(letter.ticket)
        source = f"{printable(letter.origin, 24)} {sample} by {printable(letter.worker, 24)}"
        reason = printable(letter.error, REASON_CHARACTERS)
        yield "dead letter", f"{when(letter.died_at)}  {source}: {reason}"


def _places(places: list[Place]) -> str:
    if not places:
        return NOTHING
    found = [f"mini {place.mini_batch}, micro {place.micro_batch}" for place in places]
    return "; ".join(dict.fromkeys(found))


def show_trace(view: View, what: str, lane: str) -> None:
    """Everything that became of `TICKET` or `TICKET.INDEX`.

    Raises:
        ConfigError: it is neither, or the run has no such ticket or sample.
    """
    number, index = parse_sample(what)
    wanted_lane = parse_lane(lane)

    async def look() -> None:
        async with open_history(view.run, view.runs_dir) as access:
            trace = await trace_ticket(access.history, number, wanted_lane)
        sample = next((sample for sample in trace.samples if sample.index == index), None)
        if index is not None and sample is None:
            made = ", ".join(str(sample.index) for sample in trace.samples) or "none"
            raise ConfigError(f"ticket {number} has no sample {index} in the streams; it has {made}.")
        if view.as_json:
            print(json.dumps(trace.as_tree(index)))
        elif sample is not None:
            print_sample(terminal(), trace, sample, view.is_full)
        else:
            print_ticket(terminal(), trace, view.is_full)

    run_main(look())


def show_step(view: View, step: int) -> None:
    """What went into a step, where its time went, and what came out.

    Raises:
        ConfigError: the run has no commit of it.
    """

    async def look() -> None:
        async with open_history(view.run, view.runs_dir) as access:
            trace = await trace_step(access.history, step)
        if view.as_json:
            print(json.dumps(trace.as_tree()))
        else:
            print_step(terminal(), trace, view.is_full)

    run_main(look())
