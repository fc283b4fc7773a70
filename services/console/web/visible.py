"""Text that a model, a judge or a user's function wrote, made safe to look at.

Characters that nobody sees, or that change the order of reading, are shown as marks. Everything is escaped.
"""

import re

from markupsafe import Markup, escape

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
