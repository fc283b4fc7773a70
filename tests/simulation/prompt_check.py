"""Whether the prompts of a run are those that its config and its commits give."""

from collections.abc import Sequence

from tests.simulation.history import History, Record
from tests.simulation.install import known_tokenizer
from tidemill.common.config import RunConfig
from tidemill.common.wire.messages import Commit, Ticket
from tidemill.services.trainer.batch.prompt_plan import PromptPlan
from tidemill.services.trainer.batch.prompts import load_training_prompts


def other_prompts(config: RunConfig, history: History, commits: Sequence[Commit]) -> list[str]:
    """What is wrong with the prompts of the tickets; nothing where the run is undisturbed or was resumed.

    Redis may have lost tickets that were trained, which are not issued again: then nothing is checked. Nor is
    a ticket that is older than a commit it depends on: that came in place of one that Redis has lost.
    """
    tickets = [record for record in history.of("prompts") if not record.is_foreign]
    tickets.sort(key=lambda record: record.message.ticket)
    if [record.message.ticket for record in tickets] != list(range(len(tickets))):
        return []
    sources = load_training_prompts(config.data, known_tokenizer(config.model.path), config.seed)
    plan = PromptPlan(sources, config)
    for commit in commits:
        plan.take_commit(commit)
    first = _first_written(history)
    committed = [first["commits", _bytes(record)] for record in _records_of(history, commits)]
    problems = []
    newest = -1
    horizon = 0
    for record in tickets:
        ticket = record.message
        fields = plan.fields(ticket.ticket, ticket.min_version)
        newest = max([newest, *committed[horizon : ticket.min_version]])
        horizon = max(horizon, ticket.min_version)
        expected = (fields["source"], fields["row"])
        actual = (ticket.source, ticket.row)
        if expected != actual and newest < first["prompts", _bytes(record)]:
            problems.append(f"prompts: ticket {ticket.ticket} has {actual}, and the commits give {expected}")
    return problems


def missing_tickets(tickets: Sequence[Ticket]) -> list[str]:
    """Numbers that were passed over: nobody is given their prompts."""
    numbers = {ticket.ticket for ticket in tickets}
    missing = sorted(set(range(max(numbers, default=-1) + 1)) - numbers)
    return [f"prompts: ticket {missing[0]} was never issued"] if missing else []


def _first_written(history: History) -> dict[tuple[str, bytes], int]:
    """Index of the first record of each ticket and commit: lost ones are appended again."""
    first: dict[tuple[str, bytes], int] = {}
    for index, record in enumerate(history.records):
        if record.stream in ("prompts", "commits"):
            first.setdefault((record.stream, _bytes(record)), index)
    return first


def _records_of(history: History, commits: Sequence[Commit]) -> list[Record]:
    by_message = {id(r.message): r for r in history.records if r.stream == "commits"}
    return [by_message[id(commit)] for commit in commits]


def _bytes(record: Record) -> bytes:
    return record.fields.get(b"p", b"")  # what a stranger writes may have none
