"""A session turn by turn, for people: what was said, which tokens that is, and what each side took."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidemill.common.history.sessions import (
    SessionFacts,
    TurnRecord,
    calls_of,
    num_completion_tokens,
    read_session,
    session_facts,
    text_of,
)
from tidemill.common.wire.messages import Trajectory
from tidemill.services.console.text.formats import NOTHING, number, plural, printable, printable_block, took
from tidemill.services.console.text.tables import Line, jsonable, listing, print_lines

TEXT_CHARACTERS = 1200
"""Of one message, unless all of it is asked for."""
NAME_CHARACTERS = 40
STYLES = {"assistant": "bold", "tool": "cyan"}


def print_session(console: Console, made: Trajectory, is_full: bool) -> None:
    """The session's numbers, its turns side by side, its forks, and what was said."""
    session, facts, record = made.session, session_facts(made), read_session(made)
    if session is None or facts is None:
        return
    console.print(Text("\nsession", "bold"))
    print_lines(console, _session_lines(made, facts))
    console.print(_turns_table(record.turns))
    for place, fork in enumerate(made.forks, 1):
        trained = int(fork.mask.sum())
        words = f"{len(fork.prompt_ids):,} tokens of prompt, {len(fork.completion_ids):,} after it"
        console.print(Text(f"  fork {place}: {words}, {trained:,} of them trained"), soft_wrap=True)
    if record.unplaced and record.turns and record.turns[0].said is None:
        console.print(Text("  which turn said which message is not known", "dim"), soft_wrap=True)
    for message in record.unplaced:
        _print_message(console, message, is_full)
    for turn in record.turns:
        if turn.said is None:
            continue
        console.print(Text(f"\nturn {turn.number}", "bold"))
        for message in (turn.said, *turn.answers):
            _print_message(console, message, is_full)


def _session_lines(made: Trajectory, facts: SessionFacts) -> Iterator[Line]:
    session = made.session
    assert session is not None
    trained, others = num_completion_tokens(made)
    yield "environment", printable(session.environment, 80)
    end = "ended by itself" if session.end == "done" else f"truncated by {session.end}"
    forks = f", {plural(len(made.forks), 'fork')}" if made.forks else ""
    yield "turns", f"{len(facts.turns)}{forks}, {end}"
    yield "tokens", f"{trained:,} of the model, {others:,} of the environment"
    yield "time", f"{took(facts.engine_s)} in the engine, {took(facts.environment_s)} in the environment"
    if session.reward is not None:
        yield "reward", f"{number(session.reward)} from the environment"
    if session.num_faults:
        yield "faults", f"{plural(session.num_faults, 'try')} before this one ended in an environment's fault"
    if session.histories:
        yield "histories", _listed(session.histories)
    if session.metrics:
        yield "metrics", _listed(session.metrics)


def _listed(values: Mapping[str, float]) -> str:
    return "  ".join(f"{printable(name, NAME_CHARACTERS)} {number(value)}" for name, value in values.items())


def _turns_table(turns: tuple[TurnRecord, ...]) -> Table:
    titles = (
        "turn",
        "segment",
        "version",
        "tokens",
        "end",
        "before it",
        "cached",
        "engine",
        "calls",
        "answer",
    )
    others = ("environment", "reward")
    table = listing([*titles, *others], [*titles, *others])
    for record in turns:
        turn = record.turn
        wrong = f", {turn.num_wrong_calls} wrong" if turn.num_wrong_calls else ""
        table.add_row(
            str(record.number),
            str(record.segment),
            " → ".join(map(str, record.versions)) or NOTHING,
            f"{turn.num_tokens:,}",
            turn.finish,
            f"{turn.num_prompt_tokens:,}",
            f"{turn.num_cached_tokens:,}" if turn.num_cached_tokens >= 0 else NOTHING,
            took(turn.engine_s),
            f"{turn.num_calls}{wrong}" if turn.num_calls else NOTHING,
            f"{record.num_answer_tokens:,}" if record.num_answer_tokens else NOTHING,
            took(turn.environment_s) if turn.environment_s else NOTHING,
            number(turn.reward),
        )
    return table


def _print_message(console: Console, message: Mapping[str, Any], is_full: bool) -> None:
    role = str(message.get("role", "?"))
    limit = 0 if is_full else TEXT_CHARACTERS
    name = f" {printable(str(message['name']), NAME_CHARACTERS)}" if message.get("name") else ""
    head = {"assistant": "model"}.get(role, printable(role, NAME_CHARACTERS)) + name
    thought, said = text_of(message.get("reasoning_content")), text_of(message.get("content"))
    calls = calls_of(message)
    for what, text in ((f"{head} thinks", thought), (head, said)):
        if text or (what == head and not calls and not thought):
            shown = printable_block(text, limit) or "(empty)"
            console.print(Text.assemble((f"  {what}: ", STYLES.get(role, "dim")), shown), soft_wrap=True)
    for called, arguments in calls:
        words = f"{printable(called, NAME_CHARACTERS)}({printable(arguments, limit)})"
        console.print(Text.assemble((f"  {head} calls: ", "magenta"), words), soft_wrap=True)


def turn_trees(made: Trajectory | None) -> list[dict[str, Any]]:
    return [jsonable(_tree(turn)) for turn in read_session(made).turns] if made else []


def _tree(record: TurnRecord) -> dict[str, Any]:
    return {**asdict(record), "turn": record.turn.model_dump()}
