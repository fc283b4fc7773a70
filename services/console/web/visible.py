"""Text that a model, a judge or a user's function wrote, made safe to look at.

Characters that nobody sees, or that change the order of reading, are shown as marks. Everything is escaped.
"""

import re

from markupsafe import Markup, escape

UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Controls but tab and line feed, marks of direction, spaces without width, tags, halves of characters."""

NAMES = (
    "NUL", "SOH", "STX", "ETX", "EOT", "ENQ", "ACK", "BEL", "BS", "HT", "LF",
    "VT", "FF", "CR", "SO", "SI", "DLE", "DC1", "DC2", "DC3", "DC4", "NAK",
    "SYN", "ETB", "CAN", "EM", "SUB", "ESC", "FS", "GS", "RS", "US",
)  # fmt: skip
"""Of the control characters of ASCII, by code."""


def mark_of(character: str) -> str:
    """How an unseen character is shown."""
    code = ord(character)
    if code < len(NAMES):
        return NAMES[code]
    return "DEL" if code == 0x7F else f"U+{code:04X}"


def visible(text: object, limit: int = 0) -> Markup:
    """Escaped text with unseen characters as `<span class="ctl">` marks, cut off at `limit`."""
    plain = "" if text is None else str(text)
    cut = limit and len(plain) > limit
    parts: list[str] = []
    position = 0
    plain = plain[:limit] if cut else plain
    for match in UNSEEN.finditer(plain):
        parts.append(escape(plain[position : match.start()]))
        parts.append(
            Markup('<span class="ctl" title="U+{:04X}">{}</span>').format(ord(match[0]), mark_of(match[0]))
        )
        position = match.end()
    parts.append(escape(plain[position:]))
    if cut:
        parts.append("…")
    return Markup("").join(parts)


def sendable(text: str) -> str:
    """Text that JSON in UTF-8 can carry: halves of characters are replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")
