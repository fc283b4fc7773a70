"""Words in place of a tokenizer, for sessions with the simulated engine."""

import zlib
from collections.abc import Sequence

from tidemill.services.rollout.sessions.chat import ChatMessage, Parsed, Tools


class SimulatedChat:
    """Each word is a token, whose id is a hash; tokens are the words `t17`. There are no calls."""

    has_template = False

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def render(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> list[int]:
        """The ids of all words; never none, for an engine needs a prompt."""
        words = " ".join(str(message.get("content") or "") for message in messages).split() or ["."]
        return [zlib.crc32(word.encode()) % self._vocab_size for word in words]

    def extend(
        self, turn_ids: Sequence[int], is_stopped: bool, messages: Sequence[ChatMessage], tools: Tools = ()
    ) -> list[int]:
        """The ids of the messages' words."""
        return self.render(messages)

    def encode(self, text: str) -> list[int]:
        """The ids of the words."""
        return self.render([{"content": text}])

    def parse(self, turn_ids: Sequence[int], tools: Tools = (), is_cut: bool = False) -> Parsed:
        return Parsed({"role": "assistant", "content": " ".join(f"t{token}" for token in turn_ids)})

    def shorten(self, text: str, max_tokens: int) -> str:
        return " ".join(text.split()[:max_tokens])
