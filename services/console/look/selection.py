"""What the options of `tidemill streams` and `trace` select: ranges, streams, lanes and samples as text."""

import re
import time
from collections.abc import Callable
from datetime import datetime

from tidemill.common.errors import ConfigError
from tidemill.common.history import History, Selection, StreamName
from tidemill.common.streams import id_order
from tidemill.common.streams.selection import Range
from tidemill.common.wire.messages import Lane
from tidemill.services.console.commands import SelectionOptions

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])\w*\s+ago", re.IGNORECASE)
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_CARRIERS: dict[str, tuple[str, ...]] = {
    "ticket": ("prompts", "trajectories", "scores", "commits", "dead"),
    "step": ("prompts", "trajectories", "scores", "commits"),
    "reward": ("trajectories", "scores"),
    "version": ("trajectories", "scores", "weights", "commits"),
    "worker": ("trajectories", "scores", "dead"),
}
"""The streams that each option applies to: their messages have the value, or refer to messages that do."""
_A_RANGE = "A..B with both its ends, A.., ..B, or one number"
_A_TIME = "a time such as 2026-01-31T12:00 or '10m ago', or two of them as A..B"


def selection_of(options: SelectionOptions, *streams: StreamName) -> Selection:
    for stream in streams:
        for name, carriers in _CARRIERS.items():
            if getattr(options, name) and stream.of(Lane.TRAIN) not in carriers:
                fitting = ", ".join(carriers)
                raise ConfigError(f"--{name} does not apply to the stream {stream}; it does to {fitting}.")
    now = time.time()
    return Selection(
        tickets=_range("ticket", options.ticket, _count),
        steps=_range("step", options.step, _count),
        versions=_range("version", options.version, _count),
        rewards=_range("reward", options.reward, float),
        times=_range("time", options.time, lambda text: _moment(text, now), is_open=True),
        worker=options.worker,
    )


def _range(name: str, text: str, parse: Callable[[str], float], is_open: bool = False) -> Range | None:
    """The range that an option gives; None of an empty text. `is_open`: `A` alone means `A..`."""
    try:
        limits = parse_range(text, parse, is_open)
    except ValueError:
        expected = _A_TIME if name == "time" else _A_RANGE
        raise ConfigError(f"--{name} {text!r} is not understood. Give {expected}.") from None
    if limits is None:
        return None
    low, high = limits
    if low is not None and high is not None and low > high:
        first, _, last = text.partition("..")
        raise ConfigError(f"--{name} {text} holds nothing: {first.strip()} is greater than {last.strip()}.")
    return limits


def parse_range(text: str, parse: Callable[[str], float] = float, is_open: bool = False) -> Range | None:
    """`A..B`, `A..`, `..B` or `A`; None where neither end is given.

    Raises:
        ValueError: an end cannot be parsed.
    """
    first, dots, last = map(str.strip, text.partition(".."))
    low = parse(first) if first else None
    high = parse(last) if last else None
    if not dots and not is_open:
        high = low
    return None if low is None and high is None else (low, high)


def parse_stream(text: str, lane: str | None = None, hint: str = "") -> StreamName:
    """A stream by its name, `trajectories:eval` or `trajectories` with the lane. `hint` follows the message
    where there is none of that name."""
    try:
        stream = StreamName(text.strip().lower())
    except ValueError:
        raise ConfigError(f"there is no stream {text!r}. There are {', '.join(StreamName)}.{hint}") from None
    if lane == Lane.EVAL and stream in (StreamName.PROMPTS, StreamName.TRAJECTORIES, StreamName.SCORES):
        return stream.of(Lane.EVAL)
    if lane == Lane.TRAIN and stream.lane is Lane.EVAL:
        raise ConfigError(f"the stream {stream} is of the lane eval, but --lane train was given.")
    return stream


def parse_steps(text: str) -> tuple[int, int]:
    """First and last step of `N` or `A..B`."""
    first, dots, last = text.strip().partition("..")
    if not first.isdecimal() or (dots and not last.isdecimal()) or int(last or first) < int(first):
        raise ConfigError(f"{text!r} names no steps: give a number such as 41, or a range such as 40..45.")
    return int(first), int(last or first)


def parse_sample(text: str) -> tuple[int, int | None]:
    """`TICKET` or `TICKET.INDEX`."""
    match = re.fullmatch(r"([0-9]+)(?:\.([0-9]+))?", text)
    if match is None:
        raise ConfigError(
            f"{text!r} is no ticket: give its number, such as 412, or that of one of its samples, as 412.3."
        )
    return int(match[1]), int(match[2]) if match[2] else None


async def span_of(history: History, stream: StreamName, number: str) -> str:
    """The first and last number of a stream whose entry ids are numbers, in words; `number` names them."""
    (summary,) = await history.summary([stream])
    if not summary.entries:
        return f"{stream} is empty"
    first = id_order(summary.first_id)[0] - 1
    last = id_order(summary.last_id)[0] - 1
    return f"{stream} has {number}s {first} to {last}"


def _count(text: str) -> float:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def _moment(text: str, now: float) -> float:
    if text.lower() == "now":
        return now
    match = _AGE.fullmatch(text)
    if match:
        return now - float(match[1]) * _UNIT_S[match[2].lower()]
    return datetime.fromisoformat(text).timestamp()
