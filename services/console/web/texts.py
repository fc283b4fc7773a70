"""How numbers, text, tokens and chats read on a page. Numbers may be None, or not finite."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
from markupsafe import Markup, escape
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tidemill.common.data.dataset import PROMPT
from tidemill.common.data.prompt_lengths import TOKENIZER_FILE
from tidemill.common.digits import few_digits
from tidemill.common.wire.messages import PromptFields
from tidemill.services.console.text.formats import NOTHING

log = structlog.get_logger(__name__)


def number(value: float | None, digits: int = 4) -> str:
    """A number with at least this many significant digits; whole numbers as they are."""
    if value is None or not math.isfinite(value):
        return NOTHING if value is None else str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        text = f"{int(value):,}"
    else:
        text = few_digits(value, digits)
    return text.replace(",", "\u202f").replace("-", "−")


def signed(value: float | None) -> str:
    return ("+" if value is not None and 0 < value < math.inf else "") + number(value, 3)


def span(first: float | None, last: float | None) -> str:
    """One number, or from the first to the last."""
    return number(first) if first == last else f"{number(first)}–{number(last)}"


UNSEEN = re.compile(
    "(?:[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f])+"
)
"""Controls but tab and line feed, marks of direction, spaces without width, tags, lone surrogates."""
NAMES = (
    "NUL", "SOH", "STX", "ETX", "EOT", "ENQ", "ACK", "BEL", "BS", "HT", "LF",
    "VT", "FF", "CR", "SO", "SI", "DLE", "DC1", "DC2", "DC3", "DC4", "NAK",
    "SYN", "ETB", "CAN", "EM", "SUB", "ESC", "FS", "GS", "RS", "US",
)  # fmt: skip
"""Names of ASCII's control characters, by code."""
MARKS = dict(enumerate(NAMES)) | {0x7F: "DEL"}
COUNTED_LIMIT = 600
"""With a limit of at least this, text that is cut off says how many characters are left out."""


def visible(text: object, limit: int = 0) -> Markup:
    """Escaped text, cut off at `limit`, unseen characters in `<span class="ctl">`; neighbours share one."""
    whole = "" if text is None else str(text)
    head = whole[:limit] if limit else whole
    parts = [Markup()]
    position = 0
    for match in UNSEEN.finditer(head):
        marks = " ".join(MARKS.get(ord(char), f"U+{ord(char):04X}") for char in match[0])
        parts += [
            escape(head[position : match.start()]),
            Markup('<span class="ctl">{}</span>').format(marks),
        ]
        position = match.end()
    parts.append(escape(head[position:]))
    left_out = len(whole) - len(head)
    if left_out:
        parts.append(escape("…"))
        if limit >= COUNTED_LIMIT:
            parts.append(Markup('<span class="hint">{}</span>').format(f" {left_out:,} more characters"))
    return Markup("").join(parts)


def sendable(text: str) -> str:
    """Text that JSON in UTF-8 can carry: lone surrogates are replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")


CONTEXT_TOKENS = 16
"""Tokens before a part that are decoded with it: they may hold the first bytes of its first character."""
MAX_PIECE_CHARACTERS = 2000


class TokenTexts:
    """The texts of a run's tokens; none where its tokenizer is not on this machine."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folders: Iterable[Path]) -> "TokenTexts":
        """Read the `tokenizer.json` of the first of these folders that has one which this release
        understands."""
        for path in (folder / TOKENIZER_FILE for folder in folders):
            if not path.is_file():
                continue
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
        pieces = []
        for token in map(int, ids[first:stop]):
            is_known = token >= 0 and tokenizer.id_to_token(token) is not None
            pieces.append((stream.step(tokenizer, token) or "") if is_known else f"<{token}?>")
        return [piece[:MAX_PIECE_CHARACTERS] for piece in pieces[start - first :]]


def prompt_messages(source: PromptFields) -> Sequence[Mapping[str, Any]]:
    """The messages of a prompt as its row has them; empty for plain text."""
    said = source.extra.get(PROMPT)
    if not isinstance(said, Sequence) or isinstance(said, str):
        return []
    return [item for item in said if isinstance(item, Mapping)]
