"""How single tokens read, for people. Nothing here is ever tokenized.

A token may be part of a character; then its text comes with the token that completes it.
"""

from collections.abc import Sequence
from pathlib import Path

import structlog
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

TOKENIZER_FILE = "tokenizer.json"
CONTEXT_TOKENS = 16
"""Tokens before a part that are decoded with it: they may hold the first bytes of its first character."""
MAX_PIECE_CHARACTERS = 2000

log = structlog.get_logger(__name__)


class TokenTexts:
    """The texts of a run's tokens; none where its tokenizer is not on this machine."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, model_folder: Path | None) -> "TokenTexts":
        """Read `tokenizer.json` of a model's folder, if it is there and this release understands it."""
        path = model_folder / TOKENIZER_FILE if model_folder else None
        if path is None or not path.is_file():
            return cls(None)
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises nothing narrower
            log.warning("tokenizer cannot be read", path=str(path), error=str(error))
            return cls(None)

    @property
    def is_known(self) -> bool:
        """Whether tokens have texts."""
        return self._tokenizer is not None

    def pieces(self, ids: Sequence[int], start: int, stop: int) -> list[str] | None:
        """Texts of tokens `start` to `stop`, "" where a text comes with a later token; None: not known."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return None
        first = max(0, start - CONTEXT_TOKENS)
        stream = DecodeStream(skip_special_tokens=False)
        pieces = [self._step(tokenizer, stream, int(token)) for token in ids[first:stop]]
        return pieces[start - first :]

    def _step(self, tokenizer: Tokenizer, stream: DecodeStream, token: int) -> str:
        if token < 0 or tokenizer.id_to_token(token) is None:
            return f"<{token}?>"
        return (stream.step(tokenizer, token) or "")[:MAX_PIECE_CHARACTERS]
