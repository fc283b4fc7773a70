"""Whether the prompts of a run are those that its config and its commits give."""

from collections.abc import Sequence

from tidemill.common.config import RunConfig
from tidemill.common.wire.messages import Commit, Ticket
from tidemill.services.trainer.batch.prompt_plan import PromptPlan
from tidemill.services.trainer.batch.prompts import load_tokenizer, load_training_prompts


def other_prompts(config: RunConfig, tickets: Sequence[Ticket], commits: Sequence[Commit]) -> list[str]:
    """What is wrong with the prompts of the tickets; nothing where the run is undisturbed or was resumed.

    Redis may have lost tickets that were trained, which nobody issues again: then nothing can be said.
    """
    if sorted(ticket.ticket for ticket in tickets) != list(range(len(tickets))):
        return []
    sources = load_training_prompts(config.data, load_tokenizer(config.model.path), config.seed)
    plan = PromptPlan(sources, config)
    for commit in commits:
        plan.take_commit(commit)
    problems = []
    for ticket in sorted(tickets, key=lambda ticket: ticket.ticket):
        fields = plan.fields(ticket.ticket, ticket.min_version)
        expected, found = (fields["source"], fields["row"]), (ticket.source, ticket.row)
        if expected != found:
            problems.append(f"prompts: ticket {ticket.ticket} has {found}, and the commits give {expected}")
    return problems
