"""How numbers and times read on a page. Every function takes None and numbers that are not finite."""

import math
import time

NOTHING = "–"


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


def percent(value: float | None) -> str:
    """A share."""
    return NOTHING if value is None or not math.isfinite(value) else f"{100 * value:.0f}\u202f%"


def moment(seconds: float | None) -> str:
    """A time of this machine's clock, to the second."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else NOTHING
    except (OverflowError, OSError, ValueError):
        return NOTHING


def duration(seconds: float | None) -> str:
    """A length of time."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    size = abs(seconds)
    if size < 0.9995:
        return f"{1000 * seconds:.3g}\u202fms"
    if size < 90:
        return f"{seconds:.3g}\u202fs"
    minutes, rest = divmod(round(size), 60)
    if minutes < 90:
        return f"{minutes}\u202fmin {rest:02d}\u202fs"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}\u202fh {minutes:02d}\u202fmin"


def counted(value: int, noun: str) -> str:
    """So many of something."""
    return f"{number(value)} {noun}{'' if value == 1 else 's'}"


def span(first: float | None, last: float | None) -> str:
    """One number, or from the first to the last."""
    return number(first) if first == last else f"{number(first)}–{number(last)}"
