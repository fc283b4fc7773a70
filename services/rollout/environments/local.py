"""Environments that are held to limits of time, and those on the worker's own loop: all methods are async."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

import structlog

from tidemill.common.errors import EnvironmentFaultError
from tidemill.services.rollout.environments.environment import (
    Act,
    Closing,
    Design,
    Environment,
    Kind,
    Opening,
    Row,
    invalid_call,
)

log = structlog.get_logger(__name__)

T = TypeVar("T")


class LimitedEnvironment(ABC):
    """An environment whose calls end in time, wherever it runs."""

    def __init__(self, call_timeout_s: float) -> None:
        self.call_timeout_s = call_timeout_s

    async def reset(self, row: Row) -> Opening:
        return await self.operate(Opening, "reset", dict(row))

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Act:
        """The model calls a tool. Where it is late and the session can go on, the model reads that."""
        try:
            return await self.operate(Act, "call", name, dict(arguments))
        except EnvironmentFaultError as fault:
            if fault.kind != "timeout" or not await self.recover():
                raise
        return invalid_call(f"{name} took longer than {self.call_timeout_s:g} s and was stopped")

    async def step(self, text: str) -> Act:
        return await self.operate(Act, "step", text)

    async def finish(self) -> Closing:
        return await self.operate(Closing, "finish")

    async def close(self) -> None:
        """Never raises."""
        try:
            await self.operate(type(None), "close")
        except EnvironmentFaultError as fault:
            if fault.kind != "died":
                log.warning("an environment could not be closed", error=str(fault))

    @abstractmethod
    async def operate(self, kind: type[T], op: str, *arguments: Any) -> T:
        """Call its method `op` that returns a `kind`. Raises EnvironmentFaultError: it fails, or is late."""

    @abstractmethod
    async def recover(self) -> bool:
        """Whether the session can go on after a call that was late."""

    def late(self, op: str) -> EnvironmentFaultError:
        """The fault of a call that took too long."""
        limit = f"{self.call_timeout_s:g} s (rollout.environment.call_timeout_s)"
        return EnvironmentFaultError(f"{op} took longer than {limit}", "timeout")


class LocalStage:
    """Makes them on the worker's loop, where a call that is late is cancelled."""

    def __init__(self, design: Design, call_timeout_s: float) -> None:
        self._design, self._timeout_s = design, call_timeout_s

    def kind_of(self, row: Row) -> Kind:
        """What plays with this row."""
        return self._design.kind_of(row)

    async def open(self, row: Row) -> Environment:
        return LocalEnvironment(self._design.make(row), self._timeout_s)

    async def close(self) -> None:
        """Nothing was started."""


class LocalEnvironment(LimitedEnvironment):
    """One on the loop."""

    def __init__(self, inner: Environment, call_timeout_s: float) -> None:
        super().__init__(call_timeout_s)
        self._inner = inner

    async def operate(self, kind: type[T], op: str, *arguments: Any) -> T:
        try:
            async with asyncio.timeout(self.call_timeout_s):
                returned: T = await getattr(self._inner, op)(*arguments)
        except TimeoutError:
            raise self.late(op) from None
        return returned

    async def recover(self) -> bool:
        """The call was cancelled, and nothing else has happened."""
        return True
