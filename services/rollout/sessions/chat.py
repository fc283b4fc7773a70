"""A model's chat format: from messages to token ids, and back from what the model wrote."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tidemill.common.wire.codec import sendable

ChatMessage = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
"""Schemas of the tools that the model may call."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call as the model wrote it. `error` says why it cannot be made, if it cannot.

    Example: `name` "search", `arguments` {"query": "tides"}.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def call_of(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in a message; its arguments are JSON."""
    function = {"name": sendable(name), "arguments": sendable(arguments)}
    return {"id": sendable(call_id), "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Parsed:
    """What the model said in one turn: the message for a history, and its calls in order.

    Example: `message` {"role": "assistant", "content": "", "tool_calls": [...]}, `calls` (Call("search",
    ...),).
    """

    message: dict[str, Any]
    calls: tuple[Call, ...] = ()


class ChatFormat(Protocol):
    """How one model reads and writes chats. All of it works on ids; nothing that was sampled is rendered."""

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template; without one, only text goes between the turns."""

    def render(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> list[int]:
        """The ids of a whole history, ending where the model speaks: for the first turn of a segment only."""

    def extend(
        self, turn_ids: Sequence[int], is_stopped: bool, messages: Sequence[ChatMessage], tools: Tools = ()
    ) -> list[int]:
        """The ids between the model's turn `turn_ids` and its next one, with `messages` as the answer to it:
        what closes the turn, if the model did not close it, and the rendered messages.

        Raises:
            ValueError: the template cannot render these messages there.
        """

    def encode(self, text: str) -> list[int]:
        """The ids of a text that follows other ids."""

    def parse(self, turn_ids: Sequence[int], tools: Tools = (), is_cut: bool = False) -> Parsed:
        """The message and the calls in what the model sampled. If the turn was cut off (`is_cut`), a call
        without its end gets an error."""

    def shorten(self, text: str, max_tokens: int) -> str:
        """The text with about `max_tokens` tokens at most: a longer one loses its middle, and says so."""


class SimulatedChat:
    """Chat format of the simulated engine, without a tokenizer: each word is a token, whose id is a hash;
    token 17 is read as the word `t17`. There are no calls."""

    has_template = False

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def render(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> list[int]:
        """The ids of all words; never empty, because an engine needs a prompt."""
        words = " ".join(str(message.get("content") or "") for message in messages).split() or ["."]
        return [zlib.crc32(word.encode()) % self._vocab_size for word in words]

    def extend(
        self, turn_ids: Sequence[int], is_stopped: bool, messages: Sequence[ChatMessage], tools: Tools = ()
    ) -> list[int]:
        return self.render(messages)

    def encode(self, text: str) -> list[int]:
        return self.render([{"content": text}])

    def parse(self, turn_ids: Sequence[int], tools: Tools = (), is_cut: bool = False) -> Parsed:
        return Parsed({"role": "assistant", "content": " ".join(f"t{token}" for token in turn_ids)})

    def shorten(self, text: str, max_tokens: int) -> str:
        return " ".join(text.split()[:max_tokens])


def num_shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Number of items that both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
