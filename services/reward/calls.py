"""Calls of functions that run in scoring processes, and what can happen to several of them at once."""

import asyncio
from dataclasses import dataclass

from services.reward.outcome import AttemptError
from services.reward.request import Request


@dataclass(eq=False, slots=True)
class Call:
    """One call, from its first try until it has a result."""

    request: Request
    timeout_s: float
    is_abandoned: bool = False
    """Nobody waits for it any more."""


@dataclass(eq=False, slots=True)
class Death:
    """The end of a process in the middle of its calls.

    `culprit` is the one that is known to have caused it. Where nobody is known, each of several is suspect.
    """

    reason: str
    calls: list[Call]
    is_timeout: bool = False
    culprit: Call | None = None
    clearing: "asyncio.Task[None] | None" = None
    """The search for it, once somebody has begun one."""

    def error(self) -> AttemptError:
        """What the culprit is told."""
        return AttemptError(self.reason, is_timeout=self.is_timeout)


class ProcessLostError(Exception):
    """The process that ran a call is gone; it says nothing about this call yet."""

    def __init__(self, death: Death) -> None:
        super().__init__(death.reason)
        self.death = death


class MainThreadError(Exception):
    """The call ran beside others, and wanted what only the main thread can do; it has to be made again."""
