"""Shows text of unknown origin on a terminal so that nothing in it has an effect.

What a model, a judge or a broken process has written may hold anything. Markup is never interpreted (callers
wrap what they get in `rich.text.Text`), and characters that a terminal would act on, or that change the order
of reading, are shown as escapes.
"""

import math
import time
from collections.abc import Mapping

from tidemill.common.digits import few_digits


def printable(value: str, limit: int = 0) -> str:
    """Text in one line with everything but printable characters as escapes; cut off at `limit` with an
    ellipsis."""
    # A character becomes one or more: the first `limit` + 1 say whether anything is cut off.
    head = value[: limit + 1] if limit else value
    text = "".join(map(_visible, head))
    is_too_long = limit > 0 and len(text) > limit
    return text[: limit - 1] + "…" if is_too_long else text


def printable_block(value: str, limit: int = 0) -> str:
    """Like `printable`, with line breaks kept; a last line counts what is cut off at `limit` characters."""
    head = value[:limit] if limit else value
    lines = "\n".join("".join(map(_visible, line)) for line in head.split("\n"))
    left_out = len(value) - len(head)
    return f"{lines}\n… {left_out:,} more characters; --full shows all" if left_out else lines


def _visible(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()


NOTHING = "–"


def size(num_bytes: float) -> str:
    """Bytes: 512 B, 9.5 kB, 1.2 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        # In three digits, 999.6 kB is 1 MB.
        if num_bytes < 999.5:
            return f"{few_digits(num_bytes)} {unit}"
        num_bytes /= 1000
    return f"{few_digits(num_bytes)} TB"


def number(value: float | None) -> str:
    """A number with few digits; a dash where there is none."""
    return NOTHING if value is None else few_digits(value, 4)


def share(value: float | None) -> str:
    """A part of a whole with three digits, at most three of them decimals: 60%, 1.4%, 0.125%."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{few_digits(round(100 * value, 3))}%"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def sample_name(ticket: int, index: int) -> str:
    """`TICKET.INDEX`, `TICKET`, or a dash; -1 is what is not known."""
    if ticket < 0:
        return NOTHING
    return f"{ticket}.{index}" if index >= 0 else str(ticket)


def when(seconds: float | None) -> str:
    """Local date and time; a dash for what is no time."""
    if seconds is None or not seconds > 0:
        return NOTHING
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, OSError, ValueError):
        return NOTHING


def took(seconds: float | None) -> str:
    """A duration in the unit that suits it, from a fraction of a millisecond on."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    size_s = abs(seconds)
    if size_s < 0.01:
        return f"{1000 * seconds:.2f} ms"
    if size_s < 1:
        return f"{1000 * seconds:.0f} ms"
    if size_s < 120:
        return f"{seconds:.1f} s"
    sign = "-" if seconds < 0 else ""
    return sign + duration(size_s)


def duration(seconds: float) -> str:
    """Whole seconds as people say them: 42 s, 3 min 05 s, 2 h 07 min."""
    minutes, rest_s = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest_s} s"
    if minutes < 60:
        return f"{minutes} min {rest_s:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def in_columns(steps: Mapping[str, str], width: int) -> list[str]:
    """Commands and what they do: side by side, or where that is too wide, each command below its text."""
    longest = max(map(len, steps))
    side_by_side = [f"  {command:{longest}}  {text}" for command, text in steps.items()]
    if max(map(len, side_by_side)) <= width:
        return side_by_side
    lines = []
    for command, text in steps.items():
        lines += [f"  {text}:", f"    {command}"]
    return lines
