"""Questions and answers in one form, whichever API a client uses.

Messages are kept in the form of OpenAI's chat, with text as a string; where there are pictures, as a list of
parts (`sessions/picture_parts.py`). They are compared by `identity`, which does not depend on what clients do
to a history that they send back: text as a list of parts, null for no text, new ids of calls, arguments
written as other JSON, dropped reasoning.

Answers are sampled freely, by `rollout.sampling`, as they are trained. A client that wishes a form validates
the answer and asks again, so wishes are counted and not obeyed, or refused if the config says so.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from xxhash import xxh3_128, xxh3_128_digest

from tidemill.common.data.image_columns import IMAGE_PART, TEXT_PART
from tidemill.common.wire.codec import sendable
from tidemill.services.rollout.sessions.chat import call_of
from tidemill.services.rollout.sessions.picture_parts import has_picture, joined_parts

Message = dict[str, Any]
Tool = dict[str, Any]
Identity = tuple[str, str, tuple[tuple[str, str], ...]]
"""Role, text, and the name and arguments of each call."""

FinishReason = Literal["stop", "length", "tool_calls"]
SESSION_LIMIT = "session_limit"
"""Code of the error for a session that has reached a limit."""
Body = Mapping[str, Any]
"""Body of a request."""
GUIDED = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend"),
    *("structured_outputs", "output_format"),
)
"""Fields by which vLLM and older clients of Anthropic ask for a form."""
READ = frozenset(
    [
        *("model", "messages", "tools", "tool_choice", "stream", "stream_options", "n", "stop", "functions"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "stop_sequences", "response_format"),
        *("prompt", "best_of", "echo", "suffix", "continue_final_message", "add_generation_prompt"),
        *("input", "instructions", "previous_response_id", "conversation", "background", "text", "system"),
        *("output_config", "logprobs"),
        *GUIDED,
    ]
)
"""Fields that are obeyed, refused, or counted as wishes."""
PICTURE_ROLES = ("user", "tool")
"""Roles whose messages may have pictures."""
IMAGE_KINDS = ("image_url", "input_image", "image")
"""Parts that are pictures: of OpenAI's chat, of its Responses, and of Anthropic."""
ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}


class RequestError(Exception):
    """A request that is answered by an error: what is wrong, and what to do."""

    def __init__(self, message: str, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status


@dataclass(frozen=True)
class Question:
    """One request to the model: the whole history as the client has it."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    """The client's tool choice: a word, or JSON that names tools."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    prompt: str | list[int] | None = None
    """Text or ids in place of messages."""
    has_logprobs: bool = False
    """Whether the client wants the logprob of each token of the answer."""
    is_streamed: bool = False
    """Whether the client wants the answer as a stream, of which it may take a beginning as the whole."""

    @property
    def key(self) -> bytes:
        """Digest that is equal if the same is asked again, within the same limits."""
        within = (self.tool_choice, self.max_tokens, self.stop, self.has_logprobs)
        return xxh3_128_digest(self.request_key + repr(within).encode())

    @cached_property
    def request_key(self) -> bytes:
        """Digest that is equal if the same is asked, within whatever limits: who did not get an answer may
        ask again without a stream, or for fewer tokens."""
        asked = (self.prompt, sorted(self.tool_keys), self.digests[-1:])
        return xxh3_128_digest(repr(asked).encode())

    @cached_property
    def digests(self) -> list[bytes]:
        """A digest for each message. Kept, as the identities are: of a long history each pass takes time."""
        return digests_of(self.identities)

    @cached_property
    def tool_keys(self) -> frozenset[str]:
        return frozenset(json.dumps(tool, sort_keys=True, default=str) for tool in self.tools)

    @property
    def num_characters(self) -> int:
        """Characters of texts and calls: an estimate of the time to render them."""
        parts = (message.get(name) for message in self.messages for name in ("content", "tool_calls"))
        return len(self.prompt or "") + sum(len(str(piece)) for piece in parts if piece)

    @property
    def prefill(self) -> str | None:
        """The beginning of the answer that the client has written; None without one."""
        last = self.messages[-1] if self.messages else {}
        is_prefill = last.get("role") == "assistant" and not last.get("tool_calls")
        return str(last["content"]) if is_prefill else None

    @cached_property
    def identities(self) -> tuple[Identity, ...]:
        return tuple(identity(message) for message in self.messages)


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's answer to one request of a client.

    Example: `message` {"role": "assistant", "content": "4"}, `finish` "stop", `num_prompt_tokens` 4,
    `num_completion_tokens` 2.
    """

    id: str
    message: Message
    finish: FinishReason
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int = 0
    tokens: tuple[tuple[str, float], ...] = ()
    """Text and logprob of each token, where they are asked for."""
    stop_sequence: str = ""
    """The client's stop sequence at which it was cut; empty: at none."""

    @property
    def text(self) -> str:
        """Its text; empty where it only called tools."""
        return str(self.message["content"])

    @property
    def calls(self) -> list[dict[str, Any]]:
        return list(self.message.get("tool_calls", ()))


def identity(message: Mapping[str, Any]) -> Identity:
    """The parts of a message that clients do not change, whatever they do to its form."""
    calls = (call.get("function", {}) for call in message.get("tool_calls") or ())
    named = tuple((str(call.get("name")), _same_json(call.get("arguments"))) for call in calls)
    return str(message["role"]), _content_key(message.get("content")).strip(), named


def _content_key(content: Any) -> str:
    """The text of a message, with digests in the places of its pictures."""
    # No text has a null character here: a client cannot write what stands for a picture.
    if not isinstance(content, list):
        return str(content or "").replace("\0", "")
    return "".join(
        item["text"].replace("\0", "") if item["type"] == TEXT_PART else f"\0{item['digest']}\0"
        for item in content
    )


def digests_of(identities: Iterable[Identity]) -> list[bytes]:
    """A digest for each message: of a history that ends with it."""
    history = xxh3_128()
    digests = []
    for message in identities:
        history.update(repr(message).encode())
        digests.append(history.digest())
    return digests


def _same_json(arguments: Any) -> str:
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        return json.dumps(arguments if arguments is not None else {}, sort_keys=True)
    except (ValueError, RecursionError):
        return str(arguments)


def wishes_in(body: Body) -> list[str]:
    """The fields by which the request asks for a form of the answer, or for a call."""
    forms = {
        "response_format": object_in(body, "response_format"),
        "text.format": object_in(object_in(body, "text"), "format"),
        "output_config.format": object_in(object_in(body, "output_config"), "format"),
    }
    wishes = [name for name, form in forms.items() if form.get("type", "text") != "text"]
    wishes += [name for name in GUIDED if body.get(name)]
    return wishes + (["tool_choice"] if _tool_choice_word(body) not in ("auto", "none") else [])


def ignored_in(body: Body) -> list[str]:
    """The fields that have no effect here."""
    return sorted(name for name in body.keys() - READ if body[name] is not None)


def messages_of(entries: Iterable[tuple[str, Mapping[str, Any]]]) -> tuple[Message, ...]:
    """Messages in the form that is kept, from `Located` ones. Results of tools get the tool's name, which
    some chat templates need."""
    messages: list[Message] = []
    names: dict[str, str] = {}
    for where, message in entries:
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise RequestError(f"{where} has role {role!r}; expected system, user, assistant or tool")
        plain: Message = {"role": ROLES[role], "content": content_of(message.get("content"), where)}
        if role not in PICTURE_ROLES and has_picture(plain["content"]):
            raise RequestError(
                f"{where} has a picture, and its role is {role}; pictures may be in messages of the user and "
                "in results of tools"
            )
        calls = objects(message, "tool_calls")
        if calls:
            plain["tool_calls"] = [_call(call, where) for call in calls]
            names |= {call["id"]: call["function"]["name"] for call in plain["tool_calls"]}
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning:
            plain["reasoning_content"] = text_of(reasoning, where)
        plain |= {name: str(message[name]) for name in ("tool_call_id", "name") if message.get(name)}
        if role == "tool" and (name := names.get(plain.get("tool_call_id", ""))):
            plain.setdefault("name", name)
        messages.append(plain)
    return tuple(messages)


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} has a call without a function's name")
    raw = function.get("arguments")  # as JSON; some clients send the object itself
    arguments = raw if isinstance(raw, str) and raw else json.dumps(raw or {})
    return call_of(str(call.get("id") or ""), function["name"], arguments)


def content_of(content: Any, where: str) -> str | list[dict[str, Any]]:
    """The content of a message: its text, or its parts where a picture is among them, which is not taken in
    yet."""
    if not isinstance(content, list):
        return text_of(content, where)
    parts: list[dict[str, Any]] = []
    for block in content:
        if isinstance(block, dict) and block.get("type") in IMAGE_KINDS:
            parts.append({"type": IMAGE_PART, "picture": _picture_in(block, where), "where": where})
        else:
            parts.append({"type": TEXT_PART, "text": text_of([block], where)})
    return joined_parts(parts, between="\n")


def _picture_in(block: Mapping[str, Any], where: str) -> str:
    """The picture of a part as a `data:` URL, or the address that the client has sent in its place."""
    source = block.get("source")
    if isinstance(source, dict) and source.get("type") == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    address = source.get("url") if isinstance(source, dict) else block.get("image_url")
    if isinstance(address, dict):
        address = address.get("url")
    if not isinstance(address, str):
        raise RequestError(
            f"{where} has a part of type {block.get('type')!r} without a picture; send it as base64, in a "
            "data: URL or a source: no files are stored here"
        )
    return address


def text_of(content: Any, where: str) -> str:
    """The text of a message: a string, nothing, or a list of parts that are text."""
    if content is None or isinstance(content, str):
        return sendable(content or "")
    if not isinstance(content, list):
        raise RequestError(f"{where} must be text or a list of parts, got {type(content).__name__}")
    texts = []
    for block in content:
        text = block.get("text", block.get("refusal")) if isinstance(block, dict) else block
        if not isinstance(text, str):
            kind = block.get("type") if isinstance(block, dict) else type(block).__name__
            raise RequestError(f"{where} has a part of type {kind!r}; this model reads text only")
        texts.append(text)
    return sendable("\n".join(texts))


def tool_of(name: Any, description: Any, parameters: Any) -> Tool:
    """A tool in OpenAI's form."""
    if not isinstance(name, str) or not isinstance(parameters or {}, dict):
        raise RequestError(f"a tool needs a name, and an object as its parameters; got {name!r}")
    function: dict[str, Any] = {"name": name, "description": str(description or "")}
    return {"type": "function", "function": function | {"parameters": parameters or {"type": "object"}}}


def tool_choice_of(body: Body) -> str:
    """`auto`, `none`, or any other tool choice as JSON."""
    choice = _tool_choice_word(body)
    return choice if choice in ("auto", "none") else json.dumps(body["tool_choice"], sort_keys=True)


def _tool_choice_word(body: Body) -> str:
    """Word, mode or type of the tool choice; `auto` without one."""
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        choice = choice.get("mode") or choice.get("type")
    if not isinstance(choice, str | None):
        raise RequestError(f"tool_choice must be a word or an object with a type, got {choice!r}")
    return choice or "auto"


def object_in(body: Body, name: str) -> Mapping[str, Any]:
    """The object in a field of a request; empty where the field is absent."""
    value = body.get(name) or {}
    if not isinstance(value, dict):
        raise RequestError(f"`{name}` must be an object, got {type(value).__name__}")
    return value


def objects(body: Body, name: str) -> Sequence[Mapping[str, Any]]:
    """The list of objects in a field of a request; empty where the field is absent."""
    value = body.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RequestError(f"`{name}` must be a list of objects")
    return value


def wants_usage(body: Body) -> bool:
    """Whether the client wants the numbers of tokens at the end of a stream."""
    return bool(object_in(body, "stream_options").get("include_usage"))


def limit_of(body: Body, *names: str) -> int | None:
    """The client's limit of tokens, under the first of the names that is there."""
    for name in names:
        value = body.get(name)
        if value is not None:
            # By `type`: true is an instance of int.
            if type(value) is not int or value < 1:
                raise RequestError(f"`{name}` must be a whole number from 1, got {value!r}")
            return value
    return None


def stops_of(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise RequestError("stop sequences must be text, or a list of texts")
    return tuple(stop for stop in stops if stop)
