"""The interface of an environment, which answers the model in one session.

It is the same on the worker's loop and in a process of its own. A `Stage` makes an environment for each
session. An environment answers with an `Act` of plain values, which can be sent between processes: everything
that users' code returns is checked before it becomes one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

from tidemill.common.data.dataset import PROMPT
from tidemill.common.errors import EnvironmentFaultError
from tidemill.common.wire.messages import Ticket

Row = Mapping[str, Any]
"""The columns of a dataset row, `prompt` among them."""
CHOICE = "environment"
"""The row's column that chooses among several kinds of environments."""


def row_of(ticket: Ticket) -> dict[str, Any]:
    """The columns of the ticket's row, `ground_truth` among them wherever its dataset has it.

    Datasets for TRL call it `solution`; SkyRL's and verl's have it in a map.
    """
    chat = ticket.extra.get(PROMPT)
    text = ticket.own_text or ticket.prompt_text
    prompt = chat if isinstance(chat, list) else text
    fields = {"data_source": ticket.data_source, "ground_truth": ticket.ground_truth}
    # The row's own columns win over what the run calls by the same names.
    return {**fields, **ticket.extra, PROMPT: prompt}


def chat_of(prompt: str | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A row's prompt as a chat."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


Resumes = Literal["", "restore", "repeat"]
"""How another worker continues a session.

* `restore`: it gives the environment its last mark.
* `repeat`: it plays the recorded actions, which must get the same answers.
* empty: it begins the session again.
"""


@dataclass(frozen=True, slots=True)
class Opening:
    """What an environment adds when a session begins."""

    added: str = ""
    """Goes to the end of the last user message."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """The whole chat, in place of the row's."""
    mark: Any = None
    """State of a `resumable` environment after this, for `restore`."""


@dataclass(frozen=True, slots=True)
class Act:
    """An environment's answer to one turn of the model, or to one tool call."""

    messages: Sequence[Mapping[str, Any]] = ()
    reward: float | None = None
    is_done: bool = False
    is_wrong: bool = False
    """Invalid tool call; the error is returned to the model."""
    mark: Any = None
    """Like `Opening.mark`."""


@dataclass(frozen=True, slots=True)
class Closing:
    """Result of an environment, or of an agent's program, when a session has ended."""

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_truncated: bool = False
    """Whether an error of the program ended it; the session is scored by what is there."""
    is_late: bool = False
    """Whether the time of an agent was over: its program's own limit, or that of the session."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Properties of an environment that are known before it is made for a session."""

    name: str
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of the tools that the model may call."""
    takes_text: bool = False
    """Whether it answers text, not only calls."""
    is_stateless: bool = False
    """Whether a new one may replace one that hangs in a call, in the middle of a session."""
    resumes: Resumes = ""


class Environment:
    """Answers the model in one session. Every method may raise EnvironmentFaultError."""

    async def reset(self, row: Row) -> Opening:
        """Begin the session."""
        return Opening()

    async def restore(self, mark: Any) -> None:
        """In place of `reset`: continue the session from the state in `mark`."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Act:
        """Execute a tool call of the model. An environment whose `Kind.tools` are empty gets none."""
        # Not abstract: most environments have no tools, and write no such method.
        raise NotImplementedError(f"{type(self).__name__} has tools, and no method `call`")

    async def step(self, text: str) -> Act:
        """Answer what the model said; an environment that does not answer text ends the session."""
        return Act(is_done=True)

    async def finish(self) -> Closing:
        """Called when the session has ended, before `close`."""
        return Closing()

    async def close(self) -> None:
        """Release what it holds. Called once, however the session ended."""


class Stage(Protocol):
    """Sets up environments for sessions; one in each worker."""

    def kind_of(self, row: Row) -> Kind:
        """The kind of environment for this row. Raises EnvironmentFaultError: the row names none."""

    async def open(self, row: Row) -> Environment:
        """Make one. Raises EnvironmentFaultError: it cannot be made."""

    async def close(self) -> None:
        """End all that was started."""


class Design:
    """Makes environments from users' code. Loaded in the worker, and again in each process that runs them."""

    def __init__(
        self,
        makers: Mapping[str, Callable[[Row], Environment]],
        describe: Callable[[str], Kind],
        is_async: bool,
    ) -> None:
        """`makers`: name of the kind -> function that makes one; with `is_async` none of them blocks.

        `describe` is called late: schemas of tools need transformers, which only the worker imports.
        """
        self._makers = makers
        self._describe = describe
        self.is_async = is_async

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        """All kinds, by name. Raises ConfigError: a tool cannot be described."""
        return {name: self._describe(name) for name in self._makers}

    def kind_of(self, row: Row) -> Kind:
        """The kind for this row. Raises EnvironmentFaultError: the row names none."""
        return self.kinds[self._chosen(row)]

    def make(self, row: Row) -> Environment:
        """Make one. Raises EnvironmentFaultError: it cannot be made."""
        return self._makers[self._chosen(row)](row)

    def _chosen(self, row: Row) -> str:
        # Where there is only one kind, rows need not name it.
        is_only = len(self._makers) == 1
        name = next(iter(self._makers)) if is_only else row.get(CHOICE)
        if name in self._makers:
            return str(name)
        expected = ", ".join(self._makers)
        raise EnvironmentFaultError(
            f"the row's column {CHOICE!r} is {name!r}; expected one of {expected}", "start"
        )


def invalid_call(error: str) -> Act:
    """An answer that tells the model what was wrong with its call."""
    return Act([{"content": f"error: {error}"}], is_wrong=True)
