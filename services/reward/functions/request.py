"""Calls of a function: to score samples, or to post-process the scores of a group.

Imported by scoring processes too, so it stays light. `to_wire` and `from_wire` convert what crosses the
socket in frames (`common/process/children.py`).
"""

import os
import traceback
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TypeVar

from tidemill.common.wire.messages import Lane
from tidemill.services.reward.outcome import AttemptError, RewardOutcome, users_own
from tidemill.services.reward.sample import RewardSample

T = TypeVar("T")

RAISE_LIMIT = "raise timeout_s of the reward if its calls need longer"
"""Remedy of a call that is late."""
LANES = {lane.value: lane for lane in Lane}


@dataclass(frozen=True, slots=True)
class Request:
    """One call. With `scores`, the samples of a group are post-processed; without, they are scored.

    Example: `samples` the one of ticket 7, index 1, `arguments` {"reward_router_address": "10.0.0.5:80"}. On
    the wire: `{"lane": "train", "samples": [{"ticket": 7, ...}], "arguments": {...}}`.
    """

    samples: list[RewardSample]
    """All of one lane."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments that are known only while the worker runs, such as a router's address."""
    scores: list[float | None] | None = None
    notes: list[dict[str, Any]] | None = None
    """For each score: the score, its status, error and components."""

    @property
    def lane(self) -> Lane:
        return self.samples[0].lane

    def to_wire(self) -> dict[str, Any]:
        """Plain values for a frame, without what is not there."""
        tree: dict[str, Any] = {
            "lane": self.lane.value,
            "samples": [sample.to_wire() for sample in self.samples],
        }
        if self.arguments:
            tree["arguments"] = dict(self.arguments)
        if self.scores is not None:
            tree["scores"] = self.scores
            tree["notes"] = self.notes
        return tree

    @classmethod
    def from_wire(cls, tree: dict[str, Any]) -> "Request":
        lane = LANES[tree.pop("lane")]
        samples = [RewardSample.from_wire(sample, lane) for sample in tree.pop("samples")]
        return cls(samples, **tree)


class LongCall(NamedTuple):
    """A call that takes long: in which line of the user's it is, and what it did with its seconds.

    Example: `where` "judge (my.py, line 4)", `elapsed_s` 12.0, `ran_s` 0.1, `waited_s` 0.0: it waits.
    """

    where: str
    elapsed_s: float
    ran_s: float
    """On a core."""
    waited_s: float
    """For a core, which others had."""

    @property
    def is_computing(self) -> bool:
        """Whether it wanted a core for most of its time: it loops, or has much to do. Others wait for a
        server, say."""
        return self.ran_s + self.waited_s > 0.5 * self.elapsed_s

    @property
    def is_hopeless(self) -> bool:
        """Whether it had a core for nearly all of its time: with more attempts it gets no further."""
        return self.ran_s > 0.8 * self.elapsed_s


class Callee(ABC):
    """A function of a user or a built-in one, with all that is needed to call it."""

    name: str
    """Its name in the config."""
    is_async: bool
    is_cheap: bool
    """Whether it takes microseconds, so that it may run on the event loop."""

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """How another process loads the same function: `maker`, the `module:function` that makes it, and the
        arguments of `maker`; `reference` is the name."""

    def prepare(self) -> None:  # noqa: B027 (most need none)
        """Do what a first call would spend its time on. Called in a scoring process, before any call."""

    @abstractmethod
    async def call(self, request: Request) -> list[RewardOutcome]:
        """One outcome for each sample. For a plain function this never suspends: see `run_through`.

        Raises:
            AttemptError: it failed, or gave no number.
        """


def run_through(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, without a loop: it may use signals, or a loop of its own."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("it waited")


async def answer_to(function: Callee, call: dict[str, Any]) -> dict[str, Any]:
    """Run a call that came over the socket. Returns its outcomes, or its failure, as plain values.

    A child that the function has forked, and that comes back from it, ends here: it must not answer for its
    parent.

    Example: `{"outcomes": [{"value": 1.0}]}`, or `{"failure": {"status": "timeout", "error": "no result"}}`.
    """
    pid = os.getpid()
    try:
        with users_own():
            outcomes = await function.call(Request.from_wire(call))
    except AttemptError as error:
        if os.getpid() != pid:
            _end_fork(error.__cause__)
        return failure_to_wire(error)
    if os.getpid() != pid:
        _end_fork(None)
    return {"outcomes": [outcome.to_wire() for outcome in outcomes]}


def _end_fork(error: BaseException | None) -> NoReturn:
    """End a child of a fork, with the exit code that Python gives such a program: its parent may read it."""
    code = 0
    if isinstance(error, SystemExit):
        is_text = error.code is not None and not isinstance(error.code, int)
        code = 1 if is_text else int(error.code or 0)
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    os._exit(code & 0xFF)


def failure_to_wire(error: AttemptError) -> dict[str, Any]:
    return {"failure": RewardOutcome.failed(error).to_wire()}


def failure_of(answer: dict[str, Any]) -> RewardOutcome | None:
    """The failed outcome in what `answer_to` or `failure_to_wire` returned, if it is one."""
    failure = answer.get("failure")
    return None if failure is None else RewardOutcome.from_wire(failure)


def outcomes_of(answer: dict[str, Any]) -> list[RewardOutcome]:
    """The outcomes in what `answer_to` returned."""
    return [RewardOutcome.from_wire(tree) for tree in answer["outcomes"]]
