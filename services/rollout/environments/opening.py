"""How a session begins: the row that an environment is given, and the prompt that the model reads.

The ids of the ticket stay as they are, unless there are tools to describe or the environment adds something:
then the chat of the row is rendered once more, with the same system prompt and suffix.
"""

from typing import Any

from tidemill.common.config.data import DataConfig
from tidemill.common.run.dataset import PROMPT
from tidemill.common.wire.messages import Ticket
from tidemill.services.rollout.environments.environment import Opening
from tidemill.services.rollout.sessions.chat import ChatFormat, ChatMessage, Tools
from tidemill.services.rollout.sessions.template_chat import content_text


def row_of(ticket: Ticket) -> dict[str, Any]:
    """The columns of the ticket's row. Datasets for TRL call the ground truth `solution`, SkyRL's and verl's
    have it in a map."""
    truth = ticket.ground_truth
    known = {"data_source": ticket.data_source, "ground_truth": truth}
    return {**known, **ticket.extra, PROMPT: _prompt_of(ticket)}


def _prompt_of(ticket: Ticket) -> str | list[ChatMessage]:
    chat = ticket.extra.get(PROMPT)
    return chat if isinstance(chat, list) else ticket.own_text or ticket.prompt_text


def prompt_ids(
    ticket: Ticket, opening: Opening, tools: Tools, chat: ChatFormat, data: DataConfig
) -> list[int]:
    """The ids with which the model's first turn begins.

    Raises:
        ValueError: the chat template refuses the chat with what the environment added.
    """
    ids: list[int] = ticket.prompt_ids.tolist()
    if not opening.added and opening.messages is None and not (tools and chat.has_template):
        return ids
    if not chat.has_template:
        if opening.messages is not None:
            return chat.render(opening.messages)
        return ids + chat.extend([], True, [{"role": "user", "content": opening.added}])
    return chat.render(_with(opening, _asked(ticket, data)), tools)


def _asked(ticket: Ticket, data: DataConfig) -> list[ChatMessage]:
    """The row's chat as the trainer renders it: with the run's system prompt and suffix."""
    prompt = _prompt_of(ticket)
    messages: list[ChatMessage] = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    )
    messages = _appended(messages, data.prompt_suffix)
    if data.system_prompt and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    return messages


def _with(opening: Opening, messages: list[ChatMessage]) -> list[ChatMessage]:
    messages = messages if opening.messages is None else list(opening.messages)
    return _appended(messages, opening.added)


def _appended(messages: list[ChatMessage], text: str) -> list[ChatMessage]:
    """With the text at the end of the last user message, without a separator, as TRL does it."""
    if not text:
        return messages
    users = [place for place, message in enumerate(messages) if message.get("role") == "user"]
    if not users:
        return [*messages, {"role": "user", "content": text}]
    last = messages[users[-1]]
    changed = {**last, "content": content_text(last.get("content")) + text}
    return [*messages[: users[-1]], changed, *messages[users[-1] + 1 :]]
