"""One session's environment as its player sees it, wherever it runs: on the worker's loop or in a process.

A `Stage` sets one up for each session. An `Act` is what it answers, in plain values that can cross the border
of a process: everything that users' code returns is checked before it becomes one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Row = Mapping[str, Any]
"""The columns of a dataset row, `prompt` among them."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What an environment adds when a session begins."""

    added: str = ""
    """Goes to the end of the last user message."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """The whole chat, in place of the row's."""


@dataclass(frozen=True, slots=True)
class Act:
    """What an environment answers to one turn of the model, or to one call of a tool."""

    messages: Sequence[Mapping[str, Any]] = ()
    reward: float | None = None
    is_done: bool = False
    is_wrong: bool = False
    """The model called wrongly, and is told so."""


@dataclass(frozen=True, slots=True)
class Closing:
    """What an environment says when a session has ended."""

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Kind:
    """What is known of an environment before it is made for a session."""

    name: str
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of what the model may call."""
    takes_text: bool = False
    """It answers whatever the model says, not only calls."""
    is_async: bool = False
    """Nothing in it blocks, so it runs on the worker's loop."""
    is_stateless: bool = False
    """A new one is as good: one that hangs in a call may be replaced in the middle of a session."""


class Environment(Protocol):
    """What answers the model in one session. Every method may raise EnvironmentFaultError."""

    async def reset(self, row: Row) -> Opening:
        """The session begins."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Act:
        """The model calls a tool."""

    async def step(self, text: str) -> Act:
        """The model said something."""

    async def finish(self) -> Closing:
        """The session has ended; still before `close`."""

    async def close(self) -> None:
        """Let go of what it holds. Called once, however the session ended; never raises."""


class Stage(Protocol):
    """Sets up environments for sessions; one in each worker."""

    def kind_of(self, row: Row) -> Kind:
        """What plays with this row. Raises EnvironmentFaultError: the row names no environment there is."""

    async def open(self, row: Row) -> Environment:
        """Make one. Raises EnvironmentFaultError: it cannot be made."""

    async def close(self) -> None:
        """End all that was started."""
