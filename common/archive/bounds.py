"""Between which tickets, steps, versions and times the entries of a segment lie: what it is searched by."""

from collections.abc import Mapping, MutableMapping, Sequence

from common.archive.columns import bounds_of
from common.history.selection import time_of
from common.messages import Commit, Message, Trajectory


def widen(bounds: MutableMapping[str, tuple[float, float]], messages: Sequence[Message]) -> None:
    """Let the bounds hold these messages too."""
    for name, values in _measures(messages).items():
        known = bounds.get(name, (None, None))
        if (wider := bounds_of([*values, *known])) is not None:
            bounds[name] = wider


def _measures(messages: Sequence[Message]) -> Mapping[str, list[float | None]]:
    """What segments are searched by, over some messages of one type."""
    found: dict[str, list[float | None]] = {"ticket": [], "step": [], "version": [], "time": []}
    for message in messages:
        found["time"].append(time_of(message))
        found["step"].append(getattr(message, "step", None))
        if isinstance(message, Trajectory):
            found["version"] += [version for version, _ in message.spans]
        else:
            found["version"].append(getattr(message, "version", None))
        if isinstance(message, Commit):
            found["ticket"] += [*message.groups, *(ticket for ticket, _, _ in message.dropped)]
        else:
            found["ticket"].append(getattr(message, "ticket", None))
    return found
