"""Environments on the worker's own loop: those in which nothing blocks: all methods are async."""

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import structlog

from tidemill.common.errors import EnvironmentFaultError
from tidemill.services.rollout.environments.environment import Act, Closing, Environment, Kind, Opening, Row
from tidemill.services.rollout.environments.loading import Design

log = structlog.get_logger(__name__)

T = TypeVar("T")


class LocalStage:
    """Makes them, and holds each call to its limit of time."""

    def __init__(self, design: Design, call_timeout_s: float) -> None:
        self._design, self._timeout_s = design, call_timeout_s

    def kind_of(self, row: Row) -> Kind:
        """What plays with this row."""
        return self._design.kind_of(row)

    async def open(self, row: Row) -> Environment:
        return TimedEnvironment(self._design.make(row), self._timeout_s)

    async def close(self) -> None:
        """Nothing was started."""


class TimedEnvironment:
    """An environment whose calls end in time; what is late is cancelled."""

    def __init__(self, inner: Environment, timeout_s: float) -> None:
        self._inner, self._timeout_s = inner, timeout_s

    async def reset(self, row: Row) -> Opening:
        return await self._within("reset", self._inner.reset(row))

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Act:
        """A tool that is late is cancelled, and the model is told so."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._inner.call(name, arguments)
        except TimeoutError:
            return late_call(name, self._timeout_s)

    async def step(self, text: str) -> Act:
        return await self._within("step", self._inner.step(text))

    async def finish(self) -> Closing:
        return await self._within("get_reward", self._inner.finish())

    async def close(self) -> None:
        try:
            await self._within("close", self._inner.close())
        except EnvironmentFaultError as fault:
            log.warning("an environment could not be closed", error=str(fault))

    async def _within(self, what: str, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work
        except TimeoutError:
            raise late(what, self._timeout_s) from None


def late(what: str, timeout_s: float) -> EnvironmentFaultError:
    """A call of an environment took too long."""
    return EnvironmentFaultError(
        f"{what} took longer than {timeout_s:g} s (rollout.environment.call_timeout_s)", "timeout"
    )


def late_call(name: str, timeout_s: float) -> Act:
    """A tool took too long: the model may do without it."""
    return Act(
        [{"content": f"error: {name} took longer than {timeout_s:g} s and was stopped"}], is_wrong=True
    )
