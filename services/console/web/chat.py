"""Prompts and sessions as a chat: who said what, which tools were called with what, and what was trained."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tidemill.common.history.records import SampleRecord
from tidemill.common.history.sessions import TurnRecord, calls_of, text_of
from tidemill.common.run.dataset import PROMPT
from tidemill.common.wire.messages import PromptFields

MARKS = (
    re.compile(r"<\|im_start\|>(?P<role>\w+)\n(?P<text>.*?)(?:<\|im_end\|>\n?|$)", re.DOTALL),
    re.compile(
        r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n\n(?P<text>.*?)(?:<\|eot_id\|>|$)", re.DOTALL
    ),
    re.compile(r"<start_of_turn>(?P<role>\w+)\n(?P<text>.*?)(?:<end_of_turn>\n?|$)", re.DOTALL),
    re.compile(
        r"<\|(?P<role>system|user|assistant)\|>\n(?P<text>.*?)(?=<\|(?:system|user|assistant)\|>|$)",
        re.DOTALL,
    ),
)
"""How ChatML (Qwen), Llama 3, Gemma and Zephyr mark a message in a rendered prompt."""
SPECIAL = re.compile(r"<[^<>\s]{1,40}>")
"""Tokens such as that of the beginning; other text between messages means that these are not the marks."""
ROLES = {"model": "assistant", "developer": "system", "ipython": "tool", "function": "tool"}
"""Other names of the four roles."""
KNOWN_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message, ready to be shown."""

    role: str
    text: str
    kind: str = "other"
    """The role where it is one of the four: it chooses the colour."""
    name: str = ""
    """Of the tool that answers."""
    thoughts: str = ""
    calls: tuple[tuple[str, str], ...] = field(default=())
    """Tools with their arguments, as indented JSON where they are JSON."""


def message_of(said: Mapping[str, Any]) -> ChatMessage:
    role = str(said.get("role", "?"))
    calls = tuple((name, _indented(arguments)) for name, arguments in calls_of(said))
    name, thoughts = text_of(said.get("name")), text_of(said.get("reasoning_content"))
    return ChatMessage(role, text_of(said.get("content")), _kind(role), name, thoughts, calls)


def prompt_messages(source: PromptFields) -> list[ChatMessage]:
    """The messages of a prompt: as its template marks them, else as the row has them; empty for plain text.

    The last one is left out where it only opens the model's answer.
    """
    for marks in MARKS:
        found = [
            ChatMessage(m["role"], m["text"], _kind(m["role"])) for m in marks.finditer(source.prompt_text)
        ]
        if found and not SPECIAL.sub("", marks.sub("", source.prompt_text)).strip():
            return found[:-1] if found[-1].kind == "assistant" and not found[-1].text.strip() else found
    said = source.extra.get(PROMPT)
    if isinstance(said, Sequence) and not isinstance(said, str):
        return [message_of(item) for item in said if isinstance(item, Mapping)]
    return []


def _kind(role: str) -> str:
    role = ROLES.get(role, role)
    return role if role in KNOWN_ROLES else "other"


def _indented(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), indent=1, ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments


@dataclass(frozen=True, slots=True)
class Training:
    """How much of something that the model said was trained."""

    num_tokens: int
    num_trained: int
    why_not: str = ""
    """In words; empty where a step has trained it."""


def training_of(sample: SampleRecord, why_not: str, turn: TurnRecord | None = None) -> Training:
    """Of a turn, or of the whole of a sample. `why_not`: why its group was not trained; empty if it was."""
    made = sample.trajectory
    if made is None:
        return Training(0, 0)
    if turn is None:
        masks = [segment.mask for segment in made.segments]
    else:
        masks = [made.segments[turn.segment].mask[turn.turn.first : turn.turn.end]]
    num_tokens = sum(len(mask) for mask in masks)
    num_trained = sum(int(np.count_nonzero(mask)) for mask in masks)
    if made.is_greedy:
        why_not = "a baseline"
    elif sample.left_out:
        why_not = f"left out: {sample.left_out}"
    return Training(num_tokens, num_trained, why_not)
