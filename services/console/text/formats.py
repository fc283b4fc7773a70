"""Shows text of unknown origin on a terminal so that nothing in it has an effect.

What a model, a judge or a broken process has written may hold anything. Markup is never interpreted (callers
wrap what they get in `rich.text.Text`), and characters that a terminal would act on, or that change the order
of reading, are shown as escapes.
"""

import math
import time
from collections.abc import Mapping


def printable(value: str, limit: int = 0) -> str:
    """Text in one line with everything but printable characters as escapes; cut off at `limit` with an
    ellipsis."""
    text = "".join(_visible(char) for char in (value[: 4 * limit] if limit else value))
    return text[: limit - 1] + "…" if limit and len(text) > limit else text


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
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def number(value: float | None) -> str:
    """A number with few digits; a dash where there is none."""
    return NOTHING if value is None else f"{value:.4g}"


def share(value: float | None) -> str:
    """A part of a whole with three digits, at most three of them decimals: 60%, 1.4%, 0.125%."""
    return NOTHING if value is None or not math.isfinite(value) else f"{round(100 * value, 3):.3g}%"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def sample_name(ticket: int, index: int) -> str:
    """`TICKET.INDEX`, `TICKET`, or a dash; -1 is what is not known."""
    if ticket < 0:
        return NOTHING
    return f"{ticket}.{index}" if index >= 0 else str(ticket)


def when(seconds: float | None) -> str:
    """Local date and time; a dash for what is no time."""
    try:
        local_time = time.localtime(seconds) if seconds and seconds > 0 else None
    except (OverflowError, OSError, ValueError):
        local_time = None
    return time.strftime("%Y-%m-%d %H:%M:%S", local_time) if local_time else NOTHING


def took(seconds: float | None) -> str:
    """A duration in the unit that suits it, from a fraction of a millisecond on."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if abs(seconds) < 1:
        return f"{1000 * seconds:.{0 if abs(seconds) >= 0.01 else 2}f} ms"
    if abs(seconds) < 120:
        return f"{seconds:.1f} s"
    return ("-" if seconds < 0 else "") + duration(abs(seconds))


def duration(seconds: float) -> str:
    """Whole seconds as people say them: 42 s, 3 min 05 s, 2 h 07 min."""
    whole, remainder = divmod(round(seconds), 60)
    if whole < 60:
        return f"{whole} min {remainder:02} s" if whole else f"{remainder} s"
    return f"{whole // 60} h {whole % 60:02} min"


def in_columns(steps: Mapping[str, str], width: int) -> list[str]:
    """Commands and what they do: side by side, or where that is too wide, each command below its text."""
    longest = max(map(len, steps))
    lines = [f"  {command:{longest}}  {text}" for command, text in steps.items()]
    if max(map(len, lines)) <= width:
        return lines
    return [line for command, text in steps.items() for line in (f"  {text}:", f"    {command}")]
