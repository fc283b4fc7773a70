"""Result of one attempt at a reward: an outcome with a finite value or none, or an error in plain words.

Invariant: users' code always ends in one of the two. `contained` and `users_own` turn whatever it raises into
an `AttemptError`.
"""

import asyncio
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from types import TracebackType
from typing import Any

from tidemill.common.errors import MachineFaultError, RewardError, text_of
from tidemill.common.process.shortage import NO_THREAD, fault_in, is_machine_fault
from tidemill.common.process.users_code import is_users_file, raised_at
from tidemill.common.wire.codec import sendable
from tidemill.common.wire.messages import OnFailure, ScoreStatus, Try
from tidemill.services.reward.sample import RewardSample

MAX_ERROR_CHARS = 500
MAX_DETAIL_CHARS = 10_000
"""Longest text kept of one value in `detail`."""
MAX_KEYS = 256
"""Most keys of a returned dict, at any depth."""
MAX_DEPTH = 8
MAX_ITEMS = 1 << 16
"""Most elements of all lists and dicts in one `detail`. Readers refuse a message with more than 2**20."""

EXPECTED = "expected a finite number, or a dict with such a number under 'score'"

OUTAGES = (OSError, MemoryError)
"""Errors of connections, servers, disks and memory: they pass, and say nothing of the code."""
AWAIT_IT = (
    "await it in a function declared with `async def`: `return await ...`, or "
    "`return await asyncio.gather(*...)` for several"
)
"""Remedy where a coroutine was returned: by a plain function, or by an async one that calls another one."""
NETWORK_MODULES = frozenset(
    (
        "asyncio",
        "concurrent",
        "ftplib",
        "http",
        "imaplib",
        "multiprocessing",
        "smtplib",
        "socket",
        "ssl",
        "urllib",
        "xmlrpc",
    )
)
"""Modules of Python whose errors are outages too."""

Detail = dict[str, Any]
MAX_TRY_CHARS = 200
"""Longest reason kept of each of several attempts."""


class AttemptError(RewardError):
    """One attempt that gave no value.

    `is_timeout` says that the time limit was reached, `is_final` that a retry cannot help. `kind` is the kind
    of failure, for counts: one of a small fixed set. `retry_after_s` is the pause that a server asked for:
    the next attempt waits at least that long. `is_code_error` says that the user's own code is wrong, or a
    ground truth of the data, and not a server, a limit of rate or the machine, which recover.
    `may_be_machines` says that users' code raised it as if the machine were short of something: whoever runs
    the code finds out. `tries` has all attempts, if this is the last of several.
    """

    def __init__(
        self,
        message: str,
        *,
        is_timeout: bool = False,
        is_final: bool = False,
        kind: str = "",
        retry_after_s: float = 0.0,
        is_code_error: bool = False,
        may_be_machines: bool = False,
    ) -> None:
        super().__init__(sendable(message))
        self.is_timeout = is_timeout
        self.is_final = is_final
        self.kind = kind or ("timeout" if is_timeout else "error")
        self.retry_after_s = retry_after_s
        self.is_code_error = is_code_error
        self.may_be_machines = may_be_machines
        self.tries: list[Try] = []


def truth_error(message: str, kind: str = "") -> AttemptError:
    """What a reward of ours raises for a ground truth that it cannot compare with: no retry helps, and a run
    all of whose ground truths are so has to end, as with an error of users' code."""
    return AttemptError(message, is_final=True, kind=kind, is_code_error=True)


@dataclass(slots=True)
class RewardOutcome:
    """Value of a reward for one sample, with the numbers and notes that came with it.

    An attempt, a reward after its attempts, and the sum of all rewards have this one form, and with `to_wire`
    one form in the reply of a function's process and in the cache; results of groups have all its fields.
    Only `ok` may have a value; `ok` without one means that the reward does not apply to the sample, which is
    no failure.

    Example: `value` 0.5, `components` {"exact": 1.0, "format": 0.0}, `detail` {"verdict": "half right"}. One
    that failed: `status` timeout, `error` "no result within 30 s", `kind` "timeout", no value.
    """

    value: float | None = None
    components: dict[str, float | None] = field(default_factory=dict)
    detail: Detail = field(default_factory=dict)
    teacher_logprobs: bytes | None = None
    """A teacher's logprobs of the tokens that the model sampled, little-endian float32; it has no value."""
    status: ScoreStatus = ScoreStatus.OK
    error: str = ""
    kind: str = ""
    """Kind of the failure, for counts: `timeout`, `error`, `rate_limited`, ..."""
    tries: list[Try] = field(default_factory=list)
    """All attempts of the rewards that needed several."""
    on_failure: OnFailure = ""
    """For a sum that failed: the strictest policy among the failed rewards; empty: the section's policy."""
    is_code_error: bool = False
    """Whether it failed because the user's own code, or a ground truth, is wrong."""
    is_final: bool = False
    """For an attempt that failed, as the next two: whether a retry cannot help."""
    retry_after_s: float = 0.0
    may_be_machines: bool = False

    def __post_init__(self) -> None:
        if type(self.status) is str:  # plain text when it was received
            self.status = ScoreStatus(self.status)

    @property
    def is_ok(self) -> bool:
        return self.status is ScoreStatus.OK

    @classmethod
    def failed(cls, error: AttemptError) -> "RewardOutcome":
        """The outcome of a reward whose last attempt failed."""
        return cls(
            status=ScoreStatus.TIMEOUT if error.is_timeout else ScoreStatus.FAILED,
            error=str(error),
            kind=error.kind,
            tries=error.tries,
            is_code_error=error.is_code_error,
            is_final=error.is_final,
            retry_after_s=error.retry_after_s,
            may_be_machines=error.may_be_machines,
        )

    def to_error(self) -> AttemptError:
        """What `failed` was made of, without its tries."""
        return AttemptError(
            self.error,
            is_timeout=self.status is ScoreStatus.TIMEOUT,
            is_final=self.is_final,
            kind=self.kind,
            retry_after_s=self.retry_after_s,
            is_code_error=self.is_code_error,
            may_be_machines=self.may_be_machines,
        )

    def to_wire(self) -> dict[str, Any]:
        """The fields that do not have their default, as plain values.

        Example: `{"value": 0.5, "components": {"exact": 1.0}}`.
        """
        tree: dict[str, Any] = {}
        for name, default in _DEFAULTS:
            value = getattr(self, name)
            if value != default:
                tree[name] = value
        return tree

    @classmethod
    def from_wire(cls, tree: dict[str, Any]) -> "RewardOutcome":
        return cls(**tree)


_DEFAULTS: tuple[tuple[str, Any], ...] = tuple(
    (name, getattr(RewardOutcome(), name)) for name in RewardOutcome.__slots__
)
"""Fields of an outcome and their defaults."""


OnEnd = Callable[[RewardOutcome | None], None]
"""Called when an attempt that `Reward.begin` has begun ends, with its outcome; None where it failed."""
BreakOff = Callable[[], None]
"""Cancels such an attempt."""


class Reward(ABC):
    slots: int | None = None
    """Samples it makes sense to hold at once; None where only memory sets a limit."""
    is_queueing: bool = False
    """Whether samples beyond `reward.max_in_flight` wait where it runs, until others end."""

    @abstractmethod
    async def score(self, sample: RewardSample) -> RewardOutcome:
        """Make one attempt, within the reward's own time limit. The caller decides on retries.

        Raises:
            AttemptError: it gave no value. The caller treats any other exception as one.
            MachineFaultError: this machine is short of something: no attempt was made.
        """

    def begin(self, sample: RewardSample, on_end: OnEnd) -> BreakOff | None:
        """Begin an attempt for which no task has to wait, where that is possible at once.

        `on_end` gets the outcome; None where it failed: then `score`, of a sample with the same trajectory,
        raises the failure in place of another attempt. Returns what cancels the attempt; `on_end` is not
        called then. None where no attempt was begun.
        """
        return None

    async def start(self) -> None:  # noqa: B027 (most need nothing)
        """Start what it needs, so that the first sample does not wait for it. A failure shows with that."""

    async def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Release its resources."""


class contained:  # a context manager, named like a function
    """Turn whatever the block raises, `sys.exit` included, into an `AttemptError`.

    Raises:
        MachineFaultError: this machine is short of something, which says nothing of the sample.
    """

    # Classes and not generators: these run for each score, at a third of the cost.
    __slots__ = ()

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, AttemptError | MachineFaultError):
            return
        if not isinstance(error, Exception | SystemExit):
            return
        fault = fault_in(error, "a reward could not be computed")
        if fault is not None:
            raise fault from error
        raise AttemptError(describe(error)) from error


class users_own:  # as above
    """Like `contained`, for users' code: KeyboardInterrupt and CancelledError become an `AttemptError` too.

    Only a requested cancellation of this task is raised on.
    """

    __slots__ = ()

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, AttemptError):
            return
        if isinstance(error, asyncio.CancelledError):
            with suppress(RuntimeError):  # no loop runs in this thread
                task = asyncio.current_task()
                if task is not None and task.cancelling() > 0:
                    return
        raise AttemptError(
            describe(error), is_code_error=is_code_error(error), may_be_machines=is_machine_fault(error)
        ) from error


def is_code_error(error: BaseException) -> bool:
    """Whether an exception of users' code says that the code is wrong: one of Python's own, or of the user's
    modules, that is no outage. What other packages raise may come from a server: it does not count."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_code_error, error.exceptions))
    if isinstance(error, OUTAGES) or (isinstance(error, RuntimeError) and NO_THREAD in text_of(error)):
        return False
    module = type(error).__module__
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names:
        return root not in NETWORK_MODULES
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and is_users_file(file)


def interpret(returned: Any, where: str = "") -> RewardOutcome:
    """Read what a reward function returned for one sample.

    The reward is the number, a dict's `score` or a tuple's first element. Other numbers of a dict become
    components; its other values, and the rest of a tuple, become detail. `where` is a prefix for errors.

    Raises:
        AttemptError: there is no finite number where the reward should be. It is never read as 0.
    """
    # First what nearly all functions return.
    if type(returned) is float and math.isfinite(returned):
        return RewardOutcome(returned)
    if isinstance(returned, tuple) and returned:
        _, detail = _sort_out({"notes": returned[1:]})
        return RewardOutcome(_finite(returned[0], f"{where}the first element is"), detail=detail)
    if not isinstance(returned, dict):
        return RewardOutcome(_finite(returned, f"{where}returned"))
    if "score" not in returned:
        keys = ", ".join(repr(key) for key in list(returned)[:8]) or "no keys"
        raise AttemptError(f"{where}returned a dict without 'score' ({keys}); {EXPECTED}")
    components, detail = _sort_out({key: item for key, item in returned.items() if key != "score"})
    return RewardOutcome(_finite(returned["score"], f"{where}'score' is"), components, detail)


def interpret_batch(returned: Any, count: int) -> list[RewardOutcome]:
    """Read what a function of verl's batch manager returned, with `interpret` for each sample.

    Raises:
        AttemptError: it is no list of that length, or there is no finite number in one of its elements.
    """
    elements = _elements(returned, count)
    return [interpret(element, f"element {index}: ") for index, element in enumerate(elements)]


def interpret_list(
    returned: Any,
    count: int,
    metrics: Mapping[str, Any] | None = None,
    extra: Mapping[str, Iterable[Any]] | None = None,
) -> list[RewardOutcome]:
    """Read what a function returned for a list of `count` samples; None means not applicable, as in TRL.

    `metrics` (of TRL's `log_metric`) hold for each of them, `extra` (of its `log_extra`) has one value for
    each.

    Raises:
        AttemptError: it is no list of that length, an element is neither a finite number nor None, or an
            `extra` is no list.
    """
    values = _elements(returned, count)
    components, _ = _sort_out(dict(metrics or {}))
    columns = {name: _logged_list(name, items) for name, items in (extra or {}).items()}
    outcomes = []
    for index, value in enumerate(values):
        number = None if value is None else _finite(value, f"element {index} is")
        notes = {name: items[index] for name, items in columns.items() if index < len(items)}
        numbers, detail = _sort_out(notes)
        outcomes.append(RewardOutcome(number, components | numbers, detail))
    return outcomes


def _logged_list(name: Any, items: Any) -> list[Any]:
    try:
        # The letters of a text, and the keys of a map, are the values of no completion.
        values = None if isinstance(items, str | bytes | Mapping) else iter(items)
    except TypeError:
        values = None
    if values is None:
        problem = f"logged {_kind(items)} by log_extra({_text(name)!r}, ...)"
        raise AttemptError(f"{problem}; expected a list with one value for each completion")
    return list(values)


def _elements(returned: Any, count: int) -> Sequence[Any]:
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, list | tuple):
        raise AttemptError(f"returned {_kind(returned)}; expected a list of {count} rewards")
    if len(values) != count:
        raise AttemptError(f"returned {len(values)} rewards; expected {count}, one for each completion")
    return values


def describe(error: BaseException) -> str:
    """An exception in one line, with the user's line that led to it. An exception group lists its members."""
    where = raised_at(error)
    return _named(error, MAX_DEPTH)[:MAX_ERROR_CHARS] + (f" ({where})" if where else "")


def _named(error: BaseException, depth: int) -> str:
    text = " ".join(text_of(error).split())
    named = type(error).__name__
    if text:
        named += f": {text}"
    if isinstance(error, BaseExceptionGroup) and depth:
        members = [_named(member, depth - 1) for member in error.exceptions[:MAX_DEPTH]]
        named += f": {'; '.join(members)}"
    return named


def _finite(returned: Any, verb: str) -> float:
    number = _number(returned)
    if number is None:
        raise AttemptError(f"{verb} {_kind(returned)}; {EXPECTED}")
    if not math.isfinite(number):
        raise AttemptError(f"{verb} {number}; {EXPECTED}")
    return number


def _number(value: Any) -> float | None:
    """The value as a float, or None if it is not a single number. Booleans count as 0 and 1."""
    if isinstance(value, Decimal):
        return math.nan if value.is_nan() else float(value)  # a signalling NaN is no float
    if not isinstance(value, Real) and getattr(value, "shape", None) == () and hasattr(value, "item"):
        # A scalar of numpy or torch; the item of a masked one is 0.
        value = math.nan if getattr(value, "mask", False) else value.item()
    if not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        # An integer that is too large for a float: `_finite` refuses infinity.
        return math.inf


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    if getattr(value, "shape", None) is not None:
        return f"an array of shape {tuple(value.shape)}"
    if hasattr(value, "__await__"):
        return f"a {type(value).__name__}, which nothing awaits: {AWAIT_IT}"
    article = "an" if type(value).__name__[:1].lower() in "aeiou" else "a"
    return f"{article} {type(value).__name__}"


def _sort_out(extra: dict[Any, Any]) -> tuple[dict[str, float | None], Detail]:
    """Split further keys into numbers (None, also for NaN and infinity: not applicable) and the rest."""
    components: dict[str, float | None] = {}
    detail: Detail = {}
    room = iter(range(MAX_ITEMS))
    for key, value in list(extra.items())[:MAX_KEYS]:
        number = _number(value)
        if number is not None or value is None:
            components[_text(key)] = number if number is not None and math.isfinite(number) else None
        else:
            detail[_text(key)] = _plain(value, MAX_DEPTH, room)
    return components, detail


def _plain(value: Any, depth: int, room: Iterator[int]) -> Any:
    """The value as numbers, text, lists and maps with text keys, cut to a bounded size. Each element of a
    list or map takes an item of `room`."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        # Within int64, which every msgpack library reads as an integer.
        return value if -(2**63) <= value < 2**63 else str(value)
    if isinstance(value, dict) and depth:
        pairs = zip(list(value.items())[:MAX_KEYS], room, strict=False)
        return {_text(key): _plain(item, depth - 1, room) for (key, item), _ in pairs}
    if isinstance(value, list | tuple) and depth:
        return [_plain(item, depth - 1, room) for item, _ in zip(value[:MAX_KEYS], room, strict=False)]
    return _text(value)


def _text(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else repr(value)
    except BaseException:  # too deep, or a `__repr__` that raises; the score beside it counts
        text = f"{type(value).__name__}, which cannot be shown"
    return sendable(text[:MAX_DETAIL_CHARS])
