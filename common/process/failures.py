"""What fails in a process and why: users' code, servers, environments.

Each attempt that fails is counted by what failed and by its cause, with the reason of the last one.
Heartbeats carry these counts, so that whoever watches a run sees a reason within seconds, wherever the
process runs.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

MAX_CAUSES = 16
"""Most causes that a process keeps; later ones count for `OTHER`."""
MAX_REASON_CHARS = 300
MAX_CAUSE_CHARS = 80
OTHER = "other causes"
POST_PROCESSING = "post-processing of the group"
"""What failed where a group's scores could not be changed; it begins the errors of these scores."""

_LINE = re.compile(r"\(([^()]+, line \d+)\)")
"""`(my_reward.py, line 4)`, anywhere in a reason."""
_LAST_LINE = re.compile(r" \([^()]+, line \d+\)$")
"""The same at its end, where an exception's line stands."""
_EXCEPTION = re.compile(r"\s*([A-Za-z_][\w.]*):")
"""`KeyError:`, at the beginning of a reason."""


@dataclass(slots=True)
class Failure:
    """How often something failed for one cause.

    Example: what "reward compute_score", kind "error", reason "KeyError: 'score' (my_reward.py, line 4)",
    count 12.
    """

    what: str
    kind: str
    """Kind of the failure: one of a small fixed set, such as error, timeout or rate_limited."""
    reason: str
    """The reason of the last one, in words."""
    count: int = 0
    cause: str = ""
    """What its reasons have in common: failures of one cause are counted together."""

    @property
    def in_words(self) -> str:
        """`reward compute_score failed 12 times (error): KeyError: 'score' (my_reward.py, line 4)`."""
        if self.count == 1:
            return f"{self.what} failed once ({self.kind}): {self.reason}"
        return f"{self.what} failed {self.count:,} times ({self.kind}): {self.reason}"


class FailureLog:
    """Counts the failed attempts of one process."""

    def __init__(self) -> None:
        self._failures: dict[tuple[str, str, str], Failure] = {}

    def note(self, subject: str, kind: str, reason: str, count: int = 1) -> None:
        cause = cause_of(reason)
        key = (subject, kind, cause)
        if key not in self._failures and len(self._failures) >= MAX_CAUSES:
            cause = OTHER
            key = (subject, kind, cause)
        failure = self._failures.setdefault(key, Failure(subject, kind, "", cause=cause))
        failure.reason = shorten(reason, MAX_REASON_CHARS)
        failure.count += count

    @property
    def failures(self) -> list[Failure]:
        return list(self._failures.values())


def shorten(reason: str, limit: int) -> str:
    """A reason in one line of at most `limit` characters. The line of code at its end stays.

    Of 35 characters: `ValueError: no digi… (f.py, line 4)`.
    """
    text = " ".join(reason.split())
    if len(text) <= limit:
        return text
    last_line = _LAST_LINE.search(text)
    end = "…" if last_line is None else f"…{last_line[0]}"
    return text[: max(0, limit - len(end))] + end[:limit]


def cause_of(reason: str) -> str:
    """What reasons of one cause have in common: the exception's type and its line, else the line alone, else
    the words without their numbers.

    | reason | cause |
    |---|---|
    | `KeyError: 'a' (f.py, line 4)` | `KeyError (f.py, line 4)` |
    | `SyntaxError: bad (<string>, line 1) (f.py, line 4)` | `SyntaxError (f.py, line 4)` |
    | `no number was returned (f.py, line 4)` | `f.py, line 4` |
    | `HTTP 503 after 20 s` | `HTTP # after # s` |
    """
    lines = _LINE.findall(reason)
    exception = _EXCEPTION.match(reason)
    if lines and exception is not None:
        # The last one is where it was raised: a line before it is a part of the exception's text.
        return f"{exception[1]} ({lines[-1]})"
    if lines:
        # The first one is the user's: what that calls, and where it waits, is another one each time.
        return str(lines[0])
    return re.sub(r"\d+", "#", reason)[:MAX_CAUSE_CHARS]


def added_up(failures: Iterable[Failure]) -> list[Failure]:
    """The failures of several processes, each cause once, the most frequent first."""
    sums: dict[tuple[str, str, str], Failure] = {}
    for failure in failures:
        key = (failure.what, failure.kind, failure.cause)
        earlier = sums.get(key)
        num_earlier = 0 if earlier is None else earlier.count
        sums[key] = replace(failure, count=num_earlier + failure.count)
    return sorted(sums.values(), key=lambda failure: -failure.count)


def doubling(count: int) -> int:
    """The largest power of two that is at most `count`: 4 for 4, 5, 6 and 7.

    It changes for the 1st, the 2nd, the 4th, the 8th failure, and so on: callers log these alone.
    """
    return 1 << (count.bit_length() - 1) if count > 0 else 0


def is_logged(count: int) -> bool:
    """Whether the failure of this number is logged: the 1st, the 2nd, the 4th, and so on, so that what fails
    again and again does not fill the log."""
    return count > 0 and doubling(count) == count
