"""A simulated process: a group of tasks that runs, is frozen, or was killed."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class KilledError(BaseException):
    """Ends a function on a thread of a process that has just been killed. No code catches it."""


@dataclass(eq=False)
class Process:
    """What the loop and the fault injectors know of a process.

    Killed means: nothing of it ever runs again, not even what stands in `finally`. Its locks are free then,
    and its connections closed.
    """

    name: str
    role: str
    pid: int
    wall_offset_s: float = 0.0
    """How far its host's clock is from the true time."""
    started_at: float = 0.0
    disturbed_at: float = 0.0
    """When it was last frozen, or one of its commands failed."""
    woken_at: float = 0.0
    """When it last went on after it was frozen."""
    is_dead: bool = False
    code: int | None = None
    """Exit code, once it has ended."""
    is_asked_to_leave: bool = False
    """Whether it has got a signal."""
    is_frozen: bool = False
    is_queued: bool = False
    ready: deque[asyncio.Handle] = field(default_factory=deque)
    tasks: list[Any] = field(default_factory=list)
    signals: dict[int, tuple[Callable[..., Any], tuple[Any, ...], Any]] = field(default_factory=dict)
    on_end: Callable[["Process", int, BaseException | None], None] | None = None
    trap: str = ""
    """Where it dies next: `unsent`, `applied` (commands), `file` (file operations) or `claimed` (behind a
    payload, before its entry); empty for nowhere."""
    num_until_trap: int = 0
    num_steps: int = 0

    def springs(self, kind: str) -> bool:
        """Whether the process dies at this step of the kind."""
        if self.trap != kind:
            return False
        self.num_until_trap -= 1
        return self.num_until_trap < 0
