"""TRL's environments, unchanged: `reset(**row)`, public methods as tools, and perhaps `get_reward()`.

`use` names the class, a factory without arguments, or a dict of them, of which the row's column `environment`
chooses one. Other than in TRL, every session has an object of its own, and `close` is called at its end
and is no tool.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from tidemill.common.errors import ConfigError, EnvironmentFaultError
from tidemill.services.rollout.environments.environment import Act, Closing, Kind, Opening, Row
from tidemill.services.rollout.environments.tools import ToolBox, bound, is_coroutine, schema_of
from tidemill.services.rollout.environments.users_code import (
    call_reset,
    contained,
    finished,
    metrics_of,
    number_of,
    opening_of,
)

NO_TOOLS = frozenset({"reset", "get_reward", "close", "get_metrics"})
CHOICE = "environment"
"""The column that chooses among several."""


class TrlEnvironment:
    """One object of a class in TRL's style, for one session."""

    def __init__(self, factory: Callable[[], Any], name: str) -> None:
        self._name = name
        with contained(f"making {name}", "start"):
            self._object = factory()
        self._tools = ToolBox({tool: getattr(self._object, tool) for tool in tools_of(type(self._object))})

    async def reset(self, row: Row) -> Opening:
        """Call `reset` with the row's columns."""
        where = f"{self._name}.reset"
        with contained(where, "reset"):
            returned = await finished(call_reset(self._object.reset, row))
        return opening_of(returned, where)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Act:
        return await self._tools.call(name, arguments)

    async def step(self, text: str) -> Act:
        """Without a call the model is done."""
        return Act(is_done=True)

    async def finish(self) -> Closing:
        """Its own reward, where it has one, and its metrics."""
        reward, found = None, {}
        if callable(get_reward := getattr(self._object, "get_reward", None)):
            where = f"{self._name}.get_reward"
            with contained(where, "reward"):
                reward = number_of(await finished(get_reward()), f"{where} returned", "reward")
        if callable(get_metrics := getattr(self._object, "get_metrics", None)):
            with contained(f"{self._name}.get_metrics", "reward"):
                found = metrics_of(await finished(get_metrics()))
        return Closing(reward, found)

    async def close(self) -> None:
        if callable(close := getattr(self._object, "close", None)):
            with contained(f"{self._name}.close", "close"):
                await finished(close())


class TrlDesign:
    """One class or factory, or several by name."""

    def __init__(self, factories: Mapping[str, Callable[[], Any]], classes: Mapping[str, type]) -> None:
        self._factories, self._classes = factories, classes
        for name, found in classes.items():
            check_reset(found, name)
        methods = [
            getattr(found, name)
            for found in classes.values()
            for name in {*tools_of(found), *NO_TOOLS}
            if hasattr(found, name)
        ]
        self.is_async = all(is_coroutine(method) for method in methods)

    @cached_property
    def _kinds(self) -> dict[str, Kind]:
        return {
            name: Kind(
                name,
                [schema_of(bound(getattr(found, tool)), tool, f"{name}.{tool}") for tool in tools_of(found)],
            )
            for name, found in self._classes.items()
        }

    def kind_of(self, row: Row) -> Kind:
        """The methods of the one that the row chooses."""
        return self._kinds[self._chosen(row)]

    def kinds(self) -> Sequence[Kind]:
        """All of them. Raises ConfigError: a method has no types or no docstring."""
        return list(self._kinds.values())

    def make(self, row: Row) -> TrlEnvironment:
        """An object for one session."""
        name = self._chosen(row)
        return TrlEnvironment(self._factories[name], name)

    def _chosen(self, row: Row) -> str:
        if len(self._factories) == 1:
            return next(iter(self._factories))
        name = row.get(CHOICE)
        if name not in self._factories:
            raise EnvironmentFaultError(
                f"the row's column {CHOICE!r} is {name!r}; expected one of {', '.join(self._factories)}",
                "start",
            )
        return str(name)


def tools_of(found: type) -> list[str]:
    """The names of a class's tools: functions without an underscore, inherited ones too."""
    functions = inspect.getmembers(found, predicate=inspect.isfunction)
    return [name for name, _ in functions if not name.startswith("_") and name not in NO_TOOLS]


def check_reset(found: type, name: str) -> None:
    """Raises ConfigError: the class has no `reset`, or it is no method."""
    if not callable(getattr(found, "reset", None)):
        raise ConfigError(
            f"rollout.environment.use {name}: {found.__name__} has no reset; expected a class with "
            "reset(self, **row) and public methods as tools (TRL's), or with step(self, text)"
        )
