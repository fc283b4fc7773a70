"""Texts at which a generation ends, looked for while it grows.

What was sampled is never changed: the generation ends with the token that completes a text. Who asked cuts.
"""

from collections.abc import Callable, Sequence

MARGIN_TOKENS = 8
"""Tokens before the first that may be of the text: decoders treat the first of all in a way of its own."""


class StopTexts:
    """Of one generation, whose ids it is shown as they grow."""

    def __init__(self, texts: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._texts, self._decode = tuple(texts), decode
        # A token has at least a byte, so a text has no more tokens than bytes.
        self._most_tokens = max((len(text.encode()) for text in texts), default=0) + MARGIN_TOKENS
        self._num_seen = 0
        self.is_reached = False

    def reach(self, token_ids: Sequence[int]) -> bool:
        """Whether one of the texts is in what has been generated, now for the first time."""
        if self.is_reached or not self._texts:
            return False
        text = self._decode(token_ids[max(0, self._num_seen - self._most_tokens) :])
        self._num_seen = len(token_ids)
        self.is_reached = any(stop in text for stop in self._texts)
        return self.is_reached
