"""What the options of `tidemill streams` and `trace` select: ranges, streams, lanes and samples as text."""

import re
import time
from collections.abc import Callable
from datetime import datetime

from tidemill.common.errors import ConfigError
from tidemill.common.history import Selection, StreamName
from tidemill.common.streams.selection import Range
from tidemill.common.wire.messages import Lane
from tidemill.services.console.options import SelectionOptions

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*(s|sec|m|min|h|d|w)\w*\s+ago", re.IGNORECASE)
_UNIT_S = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_WITHOUT_LANES = ("weights", "commits", "dead")
_CARRIERS: dict[str, tuple[str, ...]] = {
    "ticket": ("prompts", "trajectories", "scores", "commits", "dead"),
    "step": ("prompts", "trajectories", "scores", "commits"),
    "reward": ("trajectories", "scores"),
    "version": ("trajectories", "scores", "weights", "commits"),
    "worker": ("trajectories", "scores", "dead"),
}
"""Which streams can be selected by what: their messages carry it, or those they belong to."""


def check_fits(options: SelectionOptions, stream: StreamName) -> None:
    """Refuse what no message of the stream can be selected by.

    Raises:
        ConfigError: such an option is given.
    """
    base = stream.removesuffix(":eval")
    for name, carriers in _CARRIERS.items():
        if getattr(options, name) and base not in carriers:
            fitting = ", ".join(carriers)
            raise ConfigError(f"--{name} does not apply to the stream {stream}; it does to {fitting}.")


def selection_of(options: SelectionOptions) -> Selection:
    """What they select.

    Raises:
        ConfigError: one of them cannot be read; the message says which, and what it should look like.
    """
    return Selection(
        tickets=_range("ticket", options.ticket, _count),
        steps=_range("step", options.step, _count),
        versions=_range("version", options.version, _count),
        rewards=_range("reward", options.reward, float),
        times=_times(options.time),
        worker=options.worker,
    )


def _range(name: str, text: str, parse: Callable[[str], float]) -> Range | None:
    """The range that an option gives; None of an empty text.

    Raises:
        ConfigError: it is none, or it holds nothing.
    """
    try:
        found = parse_range(text, parse)
    except ValueError:
        raise ConfigError(
            f"--{name} {text!r} is not understood. Give A..B with both its ends, A.., ..B, or one number."
        ) from None
    low, high = found or (None, None)
    if low is not None and high is not None and low > high:
        first, _, last = text.partition("..")
        raise ConfigError(f"--{name} {text} holds nothing: {first.strip()} is greater than {last.strip()}.")
    return found


def parse_range(text: str, parse: Callable[[str], float] = float) -> Range | None:
    """`A..B`, `A..`, `..B` or `A`; None where neither end is given.

    Raises:
        ValueError: an end cannot be parsed.
    """
    first, dots, last = text.partition("..")
    low = parse(first.strip()) if first.strip() else None
    high = (parse(last.strip()) if last.strip() else None) if dots else low
    return None if low is None and high is None else (low, high)


def parse_stream(text: str, lane: str = "") -> StreamName:
    """A stream by its name, `trajectories:eval` or `trajectories` with the lane.

    Raises:
        ConfigError: there is no such stream or lane.
    """
    parse_lane(lane or Lane.TRAIN)
    name = text.strip().lower()
    if lane == Lane.EVAL and name not in _WITHOUT_LANES and not name.endswith(":eval"):
        name += ":eval"
    try:
        found = StreamName(name)
    except ValueError:
        raise ConfigError(f"there is no stream {text!r}. There are {', '.join(StreamName)}.") from None
    if lane == Lane.TRAIN and found.lane is Lane.EVAL:
        raise ConfigError(f"the stream {found} is of the lane eval, but --lane train was given.")
    return found


def parse_lane(text: str) -> Lane:
    """A lane by its name.

    Raises:
        ConfigError: there is no such lane.
    """
    try:
        return Lane(text)
    except ValueError:
        raise ConfigError(f"--lane {text!r}: there are the lanes train and eval.") from None


def parse_sample(text: str) -> tuple[int, int | None]:
    """`TICKET` or `TICKET.INDEX`.

    Raises:
        ConfigError: it is neither.
    """
    ticket, dot, index = text.partition(".")
    if not _is_number(ticket) or (dot and not _is_number(index)):
        raise ConfigError(
            f"{text!r} is no ticket: give its number, such as 412, or that of one of its samples, as 412.3."
        )
    return int(ticket), int(index) if dot else None


def _is_number(text: str) -> bool:
    return text.isdecimal() and text.isascii()


def _count(text: str) -> float:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def _times(text: str) -> Range | None:
    if text and ".." not in text:
        text += ".."
    now = time.time()
    try:
        return _range("time", text, lambda part: _moment(part, now))
    except ConfigError as error:
        if "holds nothing" in str(error):
            raise
        raise ConfigError(
            f"--time {text.removesuffix('..')!r} is not understood. Give a time such as 2026-01-31T12:00 or "
            "'10m ago', or two of them as A..B."
        ) from None


def _moment(text: str, now: float) -> float:
    if text.lower() == "now":
        return now
    if match := _AGE.fullmatch(text):
        return now - float(match[1]) * _UNIT_S[match[2].lower()]
    return datetime.fromisoformat(text).timestamp()
