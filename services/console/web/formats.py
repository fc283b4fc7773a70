"""How numbers, tokens and text read on a page. Numbers may be None, or not finite."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import structlog
from markupsafe import Markup, escape
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tidemill.services.console.text.formats import NOTHING


def number(value: float | None, digits: int = 4) -> str:
    """A number with so many significant digits at least; whole numbers as they are."""
    if value is None or not math.isfinite(value):
        return NOTHING if value is None else str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}".replace(",", "\u202f").replace("-", "−")
    return f"{value:.{digits}g}".replace("-", "−")


def signed(value: float | None) -> str:
    """A number with its sign."""
    text = number(value, 3)
    return "+" + text if value is not None and math.isfinite(value) and value > 0 else text


def span(first: float | None, last: float | None) -> str:
    """One number, or from the first to the last."""
    return number(first) if first == last else f"{number(first)}–{number(last)}"


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


UNSEEN = re.compile(
    "(?:[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f])+"
)
"""Controls but tab and line feed, marks of direction, spaces without width, tags, halves of characters."""

NAMES = (
    "NUL", "SOH", "STX", "ETX", "EOT", "ENQ", "ACK", "BEL", "BS", "HT", "LF",
    "VT", "FF", "CR", "SO", "SI", "DLE", "DC1", "DC2", "DC3", "DC4", "NAK",
    "SYN", "ETB", "CAN", "EM", "SUB", "ESC", "FS", "GS", "RS", "US",
)  # fmt: skip
"""Of the control characters of ASCII, by code."""
COUNTED_LIMIT = 600
"""What is cut off at so many characters or more says how many are left."""


def mark_of(character: str) -> str:
    """How an unseen character is shown."""
    code = ord(character)
    if code < len(NAMES):
        return NAMES[code]
    return "DEL" if code == 0x7F else f"U+{code:04X}"


def visible(text: object, limit: int = 0) -> Markup:
    """Escaped text, cut off at `limit`, unseen characters in `<span class="ctl">`; neighbours share one."""
    whole = "" if text is None else str(text)
    shown = whole[:limit] if limit else whole
    parts: list[str] = []
    position = 0
    for match in UNSEEN.finditer(shown):
        marks = " ".join(map(mark_of, match[0]))
        parts += [
            escape(shown[position : match.start()]),
            Markup('<span class="ctl">{}</span>').format(marks),
        ]
        position = match.end()
    parts.append(escape(shown[position:]))
    if len(shown) < len(whole):
        parts.append("…")
    if limit >= COUNTED_LIMIT and len(shown) < len(whole):
        left_out = f" {len(whole) - len(shown):,} more characters"
        parts.append(Markup('<span class="hint">{}</span>').format(left_out))
    return Markup("").join(parts)


def sendable(text: str) -> str:
    """Text that JSON in UTF-8 can carry: halves of characters are replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")
