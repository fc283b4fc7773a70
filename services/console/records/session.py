"""A session turn by turn, for people: what was said, which tokens that is, and what each side took."""

from collections.abc import Iterator, Mapping
from typing import Any

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
from tidemill.services.console.text.formats import number, plural, took
from tidemill.services.console.text.tree import Node, note, part, table

STYLES = {"assistant": "bold", "tool": "cyan"}


def session_parts(made: Trajectory) -> Iterator[Node]:
    """Its numbers, its turns side by side, its forks, and what was said; nothing of a single turn."""
    facts, record = session_facts(made), read_session(made)
    if facts is None:
        return
    turns = table(map(_turn_row, record.turns), {"engine": "s", "environment": "s"})
    yield part("session", _session_lines(made, facts), turns, _fork_lines(made))
    if record.unplaced and record.turns and record.turns[0].said is None:
        yield note("which turn said which message is not known", "dim")
    for message in record.unplaced:
        yield from _message_lines(message)
    for turn in record.turns:
        if turn.said is not None:
            messages = (turn.said, *turn.answers)
            yield part(f"turn {turn.number}", *(_message_lines(message) for message in messages))


def _session_lines(made: Trajectory, facts: SessionFacts) -> Iterator[Node]:
    session = made.session
    assert session is not None
    trained, others = num_completion_tokens(made)
    yield Node("environment", session.environment)
    end = "ended by itself" if session.end == "done" else f"truncated by {session.end}"
    forks = f", {plural(len(made.forks), 'fork')}" if made.forks else ""
    yield Node("turns", f"{len(facts.turns)}{forks}, {end}")
    yield Node("tokens", f"{trained:,} of the model, {others:,} of the environment")
    engine, environment = took(facts.engine_s), took(facts.environment_s)
    yield Node("time", f"{engine} in the engine, {environment} in the environment")
    if session.reward is not None:
        yield Node("reward", f"{number(session.reward)} from the environment")
    if session.num_faults:
        tries = plural(session.num_faults, "attempt")
        yield Node("faults", f"{tries} before this one ended in an environment's fault")
    for label, values in (("histories", session.histories), ("metrics", session.metrics)):
        if values:
            yield Node(label, "  ".join(f"{name} {number(value)}" for name, value in values.items()))


def _fork_lines(made: Trajectory) -> Iterator[Node]:
    for place, fork in enumerate(made.forks, 1):
        tokens = f"{len(fork.prompt_ids):,} tokens of prompt, {len(fork.completion_ids):,} after it"
        yield note(f"fork {place}: {tokens}, {int(fork.mask.sum()):,} of them trained")


def _turn_row(record: TurnRecord) -> dict[str, Any]:
    turn = record.turn
    wrong = f", {turn.num_wrong_calls} wrong" if turn.num_wrong_calls else ""
    return {
        "turn": record.number,
        "segment": record.segment,
        "version": " → ".join(map(str, record.versions)),
        "tokens": turn.num_tokens,
        "end": turn.finish,
        "before it": turn.num_prompt_tokens,
        "cached": turn.num_cached_tokens if turn.num_cached_tokens >= 0 else None,
        "engine": turn.engine_s,
        "calls": f"{turn.num_calls}{wrong}" if turn.num_calls else None,
        "answer": record.num_answer_tokens or None,
        "environment": turn.environment_s or None,
        "reward": turn.reward,
    }


def _message_lines(message: Mapping[str, Any]) -> Iterator[Node]:
    role = str(message.get("role", "?"))
    name = f" {message['name']}" if message.get("name") else ""
    head = {"assistant": "model"}.get(role, role) + name
    thought, said = text_of(message.get("reasoning_content")), text_of(message.get("content"))
    calls = calls_of(message)
    if thought:
        yield Node(f"{head} thinks", thought, "text", style="dim")
    if said or not (calls or thought):
        yield Node(head, said or "(empty)", "text", style=STYLES.get(role, ""))
    for called, arguments in calls:
        yield Node(f"{head} calls", f"{called}({arguments})", "text", style="magenta")
