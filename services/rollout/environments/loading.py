"""From a name in the config to something that makes environments.

What `rollout.environment.use` names is looked at, not asked: a class with `step` answers text, one with
`init` too is SkyRL-gym's, one with `reset` and other public methods is TRL's. Everything that is wrong with
it is found here, before the first session.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tidemill.common.config.environment import TOOLS, EnvironmentConfig
from tidemill.common.errors import ConfigError
from tidemill.common.process.users_code import load_users
from tidemill.services.rollout.environments.environment import Environment, Kind, Row
from tidemill.services.rollout.environments.steps import StepDesign, skyrl_maker
from tidemill.services.rollout.environments.tools import ToolsDesign
from tidemill.services.rollout.environments.trl import TrlDesign

FIELD = "rollout.environment.use"
EXPECTED = (
    "expected a class with step(self, text), one with reset(self, **row) and public methods as tools "
    "(TRL's), SkyRL-gym's BaseTextEnv, or a function without arguments that makes such an object"
)


class Design(Protocol):
    """What makes environments. Loaded in the worker, and again in each process that runs them."""

    @property
    def is_async(self) -> bool:
        """Whether nothing in it blocks."""

    def kind_of(self, row: Row) -> Kind:
        """What plays with this row. Raises EnvironmentFaultError: the row names none."""

    def kinds(self) -> Sequence[Kind]:
        """All there are. Raises ConfigError: a tool cannot be described."""

    def make(self, row: Row) -> Environment:
        """Make one. Raises EnvironmentFaultError: it cannot be made."""


def load_design(config: EnvironmentConfig) -> Design:
    """Import what the section names.

    Raises:
        ConfigError: it does not exist, cannot be imported, or is no environment.
    """
    if config.use == TOOLS:
        found = [load_users("rollout.environment.tools", reference) for reference in config.tools]
        functions = {}
        for reference, function in zip(config.tools, found, strict=True):
            if not callable(function) or inspect.isclass(function):
                raise ConfigError(
                    f"rollout.environment.tools {reference} is no function; a class goes to {FIELD}"
                )
            name = reference.rpartition(":")[2].rpartition(".")[2]
            if name in functions:
                raise ConfigError(f"rollout.environment.tools has two functions of the name {name!r}")
            functions[name] = function
        return ToolsDesign(functions)
    named = load_users(FIELD, config.use)
    if isinstance(named, Mapping):
        factories = {str(name): _factory(one, config) for name, one in named.items()}
        return TrlDesign(factories, {name: _class_of(one, config) for name, one in named.items()})
    found_class = _class_of(named, config)
    name = config.use.rpartition(":")[2]
    if callable(getattr(found_class, "step", None)):
        if callable(getattr(found_class, "init", None)):
            return StepDesign(skyrl_maker(named, config.options, config.max_turns), found_class, name)
        factory = _factory(named, config)
        return StepDesign(lambda row: factory(), found_class, name)
    return TrlDesign({name: _factory(named, config)}, {name: found_class})


def _factory(named: Any, config: EnvironmentConfig) -> Callable[[], Any]:
    if not callable(named):
        raise ConfigError(f"{FIELD} {config.use} is {type(named).__name__}; {EXPECTED}")
    try:
        inspect.signature(named).bind(**config.options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{FIELD} {config.use} cannot be made with rollout.environment.options {config.options}: {error}"
        ) from None
    return lambda: named(**config.options)


def _class_of(named: Any, config: EnvironmentConfig) -> type:
    """The class itself, or that of what a factory makes: one object is made to see it, as TRL does."""
    if inspect.isclass(named):
        found = named
    else:
        made = _made(_factory(named, config), config)
        found = type(made)
        if callable(close := getattr(made, "close", None)) and not inspect.iscoroutinefunction(close):
            close()
    if not callable(getattr(found, "step", None)) and not callable(getattr(found, "reset", None)):
        raise ConfigError(f"{FIELD} {config.use}: {found.__name__} has neither step nor reset; {EXPECTED}")
    return found


def _made(factory: Callable[[], Any], config: EnvironmentConfig) -> Any:
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{FIELD} {config.use} raised {type(error).__name__}: {error}") from error
