"""What a client asks and what it gets, whichever API it speaks.

Messages are kept in one form, that of OpenAI's chat with text as a string. What two messages have in common
is compared by `identity`, which survives what clients do to a history that they send back: text as a list of
parts, null for no text, new ids of calls, arguments written as other JSON, dropped reasoning.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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


Body = Mapping[str, Any]
"""A request."""
Event = dict[str, Any]
"""An answer, or a part of one in a stream."""


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

    @property
    def allows_calls(self) -> bool:
        """Whether calls of tools are handed to the client as such."""
        return self.tool_choice != "none"

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
        return (
            str(last["content"]) if last.get("role") == "assistant" and not last.get("tool_calls") else None
        )

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
    def calls(self) -> "tuple[ToolCall, ...]":
        """Its calls of tools, in order."""
        return tuple(ToolCall.of(call) for call in self.message.get("tool_calls", ()))


@dataclass(frozen=True, slots=True)
class Api:
    """How the requests of one API are read, and its answers written for a model of a name."""

    question_of: Callable[[Body], Question]
    """Raises RequestError: it cannot be answered."""
    answer_of: Callable[[Answer, str, Body], Event]
    events_of: Callable[[Answer, str, Body], Iterable[Event | str]]
    """The same as a stream."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: `arguments` is JSON."""

    id: str
    name: str
    arguments: str = field(repr=False)

    @classmethod
    def of(cls, call: Mapping[str, Any]) -> "ToolCall":
        function = call["function"]
        return cls(call["id"], function["name"], function["arguments"])

    def to_message(self) -> dict[str, Any]:
        function = {"name": sendable(self.name), "arguments": sendable(self.arguments)}
        return {"id": sendable(self.id), "type": "function", "function": function}


def identity(message: Mapping[str, Any]) -> Identity:
    """What stays of a message, whatever a client does to its form."""
    calls = (call.get("function", {}) for call in message.get("tool_calls") or ())
    named = tuple((str(call.get("name")), _same_json(call.get("arguments"))) for call in calls)
    return str(message["role"]), str(message.get("content") or "").strip(), named


def named_results(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages, where results of tools say which tool it was: some chat templates need it."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool" and (name := names.get(message.get("tool_call_id", ""))):
            message.setdefault("name", name)
    return tuple(messages)


def text_of(content: Any, where: str) -> str:
    """The text of a message: a string, nothing, or a list of parts that are text.

    Raises:
        RequestError: there is something else in it.
    """
    if content is None or isinstance(content, str):
        return sendable(content or "")
    if not isinstance(content, list):
        raise RequestError(f"{where} must be text or a list of parts, got {type(content).__name__}")
    texts = []
    for part in content:
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(f"{where} has a part of type {kind!r}; this model reads text only")
        texts.append(text)
    return sendable("\n".join(texts))


def tool_of(name: Any, description: Any, parameters: Any) -> Tool:
    """A tool in OpenAI's form. Raises RequestError: its fields are not what they should be."""
    if not isinstance(name, str) or not isinstance(parameters or {}, dict):
        raise RequestError(f"a tool needs a name, and an object as its parameters; got {name!r}")
    function: dict[str, Any] = {"name": name, "description": str(description or "")}
    return {"type": "function", "function": function | {"parameters": parameters or {"type": "object"}}}


def arguments_of(given: Any) -> str:
    """The arguments of a call as JSON. Some clients send the object itself."""
    return given if isinstance(given, str) and given else json.dumps(given or {})


def tool_choice_of(body: Mapping[str, Any]) -> str:
    """Whether the model may call, need not, or should: `auto`, `none`, or the word for the rest."""
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        choice = choice.get("mode") or choice.get("type")
    if not isinstance(choice, str | None):
        raise RequestError(f"tool_choice must be a word or an object with a type, got {choice!r}")
    return choice or "auto"


def whole_tool_choice_of(body: Mapping[str, Any]) -> str:
    """The same, and which tools, where the client names some."""
    choice = tool_choice_of(body)
    return choice if choice in ("auto", "none") else json.dumps(body["tool_choice"], sort_keys=True)


def object_in(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object in a field of a request; empty where the field is absent."""
    value = body.get(name) or {}
    if not isinstance(value, dict):
        raise RequestError(f"`{name}` must be an object, got {type(value).__name__}")
    return value


def has_usage(body: Body) -> bool:
    """Whether a stream ends with what the answer used."""
    return bool(object_in(body, "stream_options").get("include_usage"))


def objects(body: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    """The list of objects in a field of a request; empty where the field is absent."""
    value = body.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RequestError(f"`{name}` must be a list of objects")
    return value


def limit_of(body: Mapping[str, Any], *names: str) -> int | None:
    """The client's limit of tokens, under the first of the names that is there."""
    for name in names:
        if (value := body.get(name)) is not None:
            if type(value) is not int or value < 1:
                raise RequestError(f"`{name}` must be a whole number from 1, got {value!r}")
            return value
    return None


def stops_of(value: Any) -> tuple[str, ...]:
    """Texts at which an answer is cut."""
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise RequestError("stop sequences must be text, or a list of texts")
    return tuple(stop for stop in stops if stop)


def _same_json(arguments: Any) -> str:
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        return json.dumps(arguments if arguments is not None else {}, sort_keys=True)
    except (ValueError, RecursionError):
        return str(arguments)
