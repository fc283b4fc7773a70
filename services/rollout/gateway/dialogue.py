"""What a client asks and what it gets, whichever API it speaks.

Messages are kept in one form, that of OpenAI's chat with text as a string. What two messages have in common
is compared by `identity`, which survives what clients do to a history that they send back: text as a list of
parts, null for no text, new ids of calls, arguments written as other JSON, dropped reasoning.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from xxhash import xxh3_128_digest

from tidemill.common.wire.codec import sendable

Message = dict[str, Any]
Tool = dict[str, Any]
Identity = tuple[str, str, tuple[tuple[str, str], ...]]
"""Role, text, and the name and arguments of each call."""

FinishReason = Literal["stop", "length", "tool_calls"]
SESSION_LIMIT = "session_limit"
"""The code of the error that says that a session has reached a limit."""


class RequestError(Exception):
    """A request that is answered by an error: what is wrong, and what to do."""

    def __init__(self, message: str, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(message)
        self.message, self.code, self.status = message, code, status


@dataclass(frozen=True)
class Question:
    """One request to the model: the whole history as the client has it."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    """As the client wrote it: a word, or JSON that names tools."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    prompt: str | list[int] | None = None
    """Text or ids in place of messages."""
    has_logprobs: bool = False
    """Whether the client wants the logprob of each token of the answer."""

    @property
    def key(self) -> bytes:
        """Equal where the same is asked again, within the same limits; no longer than that: each question
        has the whole history in it."""
        within = (self.tool_choice, self.max_tokens, self.stop, self.has_logprobs)
        asked = repr((self.prompt, sorted(self.tool_keys), self.identities, within))
        return xxh3_128_digest(asked.encode())

    @cached_property
    def tool_keys(self) -> frozenset[str]:
        return frozenset(json.dumps(tool, sort_keys=True, default=str) for tool in self.tools)

    @property
    def num_characters(self) -> int:
        """Of texts and calls: about what rendering them takes."""
        parts = (message.get(name) for message in self.messages for name in ("content", "tool_calls"))
        return len(self.prompt or "") + sum(len(str(part)) for part in parts if part)

    @property
    def prefill(self) -> str | None:
        """The beginning of the answer, where the client has written it."""
        last = self.messages[-1] if self.messages else {}
        is_prefill = last.get("role") == "assistant" and not last.get("tool_calls")
        return str(last["content"]) if is_prefill else None

    @cached_property
    def identities(self) -> tuple[Identity, ...]:
        return tuple(identity(message) for message in self.messages)


@dataclass(frozen=True, slots=True)
class Answer:
    id: str
    message: Message
    finish: FinishReason
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int = 0
    tokens: tuple[tuple[str, float], ...] = ()
    """Text and logprob of each token, where they are asked for."""

    @property
    def text(self) -> str:
        """Its text; empty where it only called tools."""
        return str(self.message["content"])

    @property
    def calls(self) -> list[dict[str, Any]]:
        return list(self.message.get("tool_calls", ()))


def call_of(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in a message; its arguments are JSON."""
    function = {"name": sendable(name), "arguments": sendable(arguments)}
    return {"id": sendable(call_id), "type": "function", "function": function}


def identity(message: Mapping[str, Any]) -> Identity:
    """What stays of a message, whatever a client does to its form."""
    calls = (call.get("function", {}) for call in message.get("tool_calls") or ())
    named = tuple((str(call.get("name")), _same_json(call.get("arguments"))) for call in calls)
    return str(message["role"]), str(message.get("content") or "").strip(), named


def _same_json(arguments: Any) -> str:
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        return json.dumps(arguments if arguments is not None else {}, sort_keys=True)
    except (ValueError, RecursionError):
        return str(arguments)
