"""Users' objects and functions as environments, unchanged: with `step(text)`, or TRL's with methods as tools.

    class Guess:
        def reset(self, row): ...       # optional: None, text for the end of the prompt, or a whole chat
        def step(self, text): ...       # (observation, reward, done), or a dict with these names
        def close(self): ...            # optional
        def get_reward(self): ...       # optional: of the session, in place of the sum of turns
        def get_metrics(self): ...      # optional: numbers by name
        resumable = True                # optional: with mark(self) and restore(self, mark), or `repeatable`

Each may be `async`. SkyRL-gym's `BaseTextEnv` has `init(messages)` in place of `reset`, and is made with
`env_config` and `extras`. TRL's have `reset(**row)`, and public methods that the model calls in place of
`step`; `use` names a class, a factory without arguments, or a dict of them, of which the row's column
`environment` chooses one. Unlike in TRL, every session has an object of its own, and `close` is called at
its end and is no tool.

Functions are tools with `use: tools`, where `tools` names them: typed, with a docstring that says what each
argument means, as transformers' chat templates want it. What the model gives is held to the types; wrong
arguments, and whatever the function raises, are returned to the model as errors.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

from tidemill.common.config.environment import TOOLS, EnvironmentConfig
from tidemill.common.data.dataset import PROMPT
from tidemill.common.errors import ConfigError, EnvironmentFaultError
from tidemill.common.process.shortage import find_shortage, is_machine_fault
from tidemill.common.process.users_code import load_users
from tidemill.common.wire.codec import pack, unpack
from tidemill.services.rollout.environments.environment import (
    Act,
    Closing,
    Design,
    Environment,
    Kind,
    Opening,
    Resumes,
    Row,
    chat_of,
    invalid_call,
)
from tidemill.services.rollout.environments.users_code import (
    act_of,
    call_reset,
    complaint,
    contained,
    described,
    finished,
    metrics_of,
    number_of,
    opening_of,
    result_of,
)

Function = Callable[..., Any]


class ToolBox(Environment):
    """An environment of functions that the model may call, by name."""

    def __init__(self, functions: Mapping[str, Function]) -> None:
        self._functions = {name: _checking(function) for name, function in functions.items()}

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Act:
        """Call one. Whatever it raises is an observation, unless the machine is short of something: a model
        must not read, and train on, that a process could not be started."""
        from pydantic import ValidationError

        try:
            result = result_of(await finished(self._functions[name](**arguments)), name)
        except EnvironmentFaultError:  # of a picture that is none: the model did not make it
            raise
        except ValidationError as error:
            wrong = "; ".join(
                f"{'.'.join(map(str, problem['loc'])) or 'arguments'}: {problem['msg']}"
                for problem in error.errors()[:5]
            )
            return invalid_call(f"{name}: {wrong}")
        except (Exception, SystemExit) as error:  # a tool must not end the worker that it runs in
            if is_machine_fault(error) and find_shortage() is not None:
                raise EnvironmentFaultError(f"the tool {name} raised {described(error)}", "step") from error
            return invalid_call(complaint(error))
        return Act([{"content": result}])


def tools_design(config: EnvironmentConfig) -> Design:
    """The functions that `tools` names. Raises ConfigError: one does not exist, or is no function."""
    functions: dict[str, Function] = {}
    for reference in config.tools:
        function = load_users("rollout.environment.tools", reference)
        if not callable(function) or inspect.isclass(function):
            raise ConfigError(
                f"rollout.environment.tools {reference} is no function; a class goes to "
                "rollout.environment.use"
            )
        name = reference.rpartition(":")[2].rpartition(".")[2]
        if name in functions:
            raise ConfigError(f"rollout.environment.tools has two functions of the name {name!r}")
        functions[name] = function

    def describe(kind: str) -> Kind:
        schemas = [schema_of(function, name, name) for name, function in functions.items()]
        return Kind(kind, schemas, is_stateless=True, resumes="restore")

    is_async = all(map(is_coroutine, functions.values()))
    return Design({TOOLS: lambda row: ToolBox(functions)}, describe, is_async)


def schema_of(function: Function, name: str, where: str) -> dict[str, Any]:
    """The schema that goes into the prompt.

    Raises:
        ConfigError: types or docstring do not say enough.
    """
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, ValueError, TypeError) as error:
        raise ConfigError(
            f"rollout.environment: the tool {where} cannot be described to the model: "
            f"{' '.join(str(error).split())}. Expected are a type for each argument and a docstring such as "
            "'Search the index.', then 'Args:' with a line 'query: What to look for.' for each argument"
        ) from None
    schema["function"]["name"] = name
    schema["function"].pop("return", None)
    return schema


def bound(function: Function) -> Function:
    """A method as if it were bound: without its `self`, and without making an object."""
    return MethodType(function, object())


def is_coroutine(function: Function) -> bool:
    """Whether calling it gives something to await, and blocks nothing."""
    return inspect.iscoroutinefunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 -- an object with `async def __call__`
    )


def _checking(function: Function) -> Function:
    """The function with its arguments held to its types: "3" becomes 3 where a number is wanted."""
    from pydantic import ConfigDict, validate_call
    from pydantic.errors import PydanticUserError

    try:
        return validate_call(config=ConfigDict(arbitrary_types_allowed=True))(function)
    except (PydanticUserError, NameError, TypeError):  # types that pydantic does not know are not checked
        return function


FIELD = "rollout.environment.use"
EXPECTED = (
    "expected a class with step(self, text), one with reset(self, **row) and public methods as tools "
    "(TRL's), SkyRL-gym's BaseTextEnv, or a function without arguments that makes such an object"
)
NO_TOOLS = frozenset({"reset", "get_reward", "close", "get_metrics"})

Maker = Callable[[Row], Any]


class ObjectEnvironment(Environment):
    """One object of users' code, for one session."""

    def __init__(self, make: Maker, name: str, takes_text: bool, row: Row) -> None:
        """With `takes_text` it has `step`; else its public methods are tools."""
        self._name = name
        self._takes_text = takes_text
        with contained(f"making {name}", "start"):
            self._object = make(row)
        self._is_resumable = _resumes(type(self._object)) == "restore"
        tools = [] if takes_text else tools_of(type(self._object))
        self._tools = ToolBox({tool: getattr(self._object, tool) for tool in tools})

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Act:
        return replace(await self._tools.call(name, arguments), mark=await self._mark())

    async def restore(self, mark: Any) -> None:
        with contained(f"{self._name}.restore", "reset"):
            await finished(self._object.restore(mark))

    async def _mark(self) -> Any:
        """The state for `restore`, if the object is resumable."""
        if not self._is_resumable:
            return None
        with contained(f"{self._name}.mark", "step"):
            mark = await finished(self._object.mark())
            unpack(pack(mark))  # checked here, where an error can name the place
        return mark

    async def reset(self, row: Row) -> Opening:
        init = getattr(self._object, "init", None) if self._takes_text else None
        where = f"{self._name}.{'init' if callable(init) else 'reset'}"
        returned = None
        with contained(where, "reset"):
            if callable(init):
                chat = chat_of(row[PROMPT])
                returned = await finished(init([dict(message) for message in chat]))
                # A chat that it returns unchanged is rendered as the ticket has it.
                if isinstance(returned, tuple) and returned and returned[0] == chat:
                    returned = None
            elif callable(reset := getattr(self._object, "reset", None)):
                returned = await finished(call_reset(reset, row))
        return replace(opening_of(returned, where), mark=await self._mark())

    async def step(self, text: str) -> Act:
        if not self._takes_text:
            return await super().step(text)
        where = f"{self._name}.step"
        with contained(where, "step"):
            returned = await finished(self._object.step(text))
        return replace(act_of(returned, where), mark=await self._mark())

    async def finish(self) -> Closing:
        reward = number_of(await self._ask("get_reward"), f"{self._name}.get_reward returned", "reward")
        return Closing(reward, metrics_of(await self._ask("get_metrics")))

    async def close(self) -> None:
        await self._ask("close", "close")

    async def _ask(self, method: str, kind: str = "reward") -> Any:
        with contained(f"{self._name}.{method}", kind):
            function = getattr(self._object, method, None)
            return await finished(function()) if callable(function) else None


class EnvConfig(dict[str, Any]):
    """Settings by key and by attribute, as SkyRL-gym's environments read them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def object_design(config: EnvironmentConfig) -> Design:
    """Import what `use` names, and look at it: a class with `step` answers text, one with `init` too is
    SkyRL-gym's, one with `reset` and other public methods is TRL's.

    Raises:
        ConfigError: it does not exist, cannot be imported, or is no environment.
    """
    named = load_users(FIELD, config.use)
    is_dict = isinstance(named, Mapping)
    factories = named if is_dict else {config.use.rpartition(":")[2]: named}
    classes = {str(name): _class_of(factory, config) for name, factory in factories.items()}
    takes_text = not is_dict and all(
        callable(getattr(environment_class, "step", None)) for environment_class in classes.values()
    )
    makers = {}
    methods = []
    for (name, environment_class), factory in zip(classes.items(), factories.values(), strict=True):
        if takes_text:
            _check_step(environment_class, name)
        elif not callable(getattr(environment_class, "reset", None)):
            raise ConfigError(f"{FIELD} {name}: {environment_class.__name__} has no reset; {EXPECTED}")
        is_skyrl = takes_text and callable(getattr(environment_class, "init", None))
        make = (_skyrl_maker if is_skyrl else _maker)(factory, config)
        makers[name] = partial(ObjectEnvironment, make, name, takes_text)
        _resumes(environment_class)  # a class that is `resumable` without the methods for it is refused now
        called = (*NO_TOOLS, *(("init", "step") if takes_text else tools_of(environment_class)))
        methods += [
            getattr(environment_class, method) for method in called if hasattr(environment_class, method)
        ]

    def describe(name: str) -> Kind:
        environment_class = classes[name]
        tools = [] if takes_text else tools_of(environment_class)
        schemas = [
            schema_of(bound(getattr(environment_class, tool)), tool, f"{name}.{tool}") for tool in tools
        ]
        return Kind(name, schemas, takes_text, resumes=_resumes(environment_class))

    return Design(makers, describe, all(map(is_coroutine, methods)))


def tools_of(environment_class: type) -> list[str]:
    """The names of a class's tools: its methods without a leading underscore, inherited ones too."""
    functions = inspect.getmembers(environment_class, predicate=inspect.isfunction)
    no_tools = NO_TOOLS | {"mark", "restore"} if _resumes(environment_class) == "restore" else NO_TOOLS
    return [name for name, _ in functions if not name.startswith("_") and name not in no_tools]


def _maker(named: Any, config: EnvironmentConfig) -> Maker:
    if not callable(named):
        raise ConfigError(f"{FIELD} {config.use} is {type(named).__name__}; {EXPECTED}")
    try:
        inspect.signature(named).bind(**config.options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{FIELD} {config.use} cannot be made with rollout.environment.options {config.options}: {error}"
        ) from None
    return lambda row: named(**config.options)


def _skyrl_maker(factory: Callable[..., Any], config: EnvironmentConfig) -> Maker:
    """Makes SkyRL-gym's objects, which are given their row when they are made."""

    def make(row: Row) -> Any:
        truth = {"method": "rule", "ground_truth": row.get("ground_truth")}
        extras = {"reward_spec": truth, "reward_model": truth, "max_turns": config.max_turns, **row}
        return factory(env_config=EnvConfig(config.options), extras=extras)

    return make


def _class_of(named: Any, config: EnvironmentConfig) -> type:
    """The class itself, or that of what a factory makes: one object is made to see it, as TRL does."""
    if inspect.isclass(named):
        environment_class = named
    else:
        make = _maker(named, config)
        try:
            environment = make({})
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{FIELD} {config.use} raised {type(error).__name__}: {error}") from error
        environment_class = type(environment)
        # One that is async has no loop to run on here.
        close = getattr(environment, "close", None)
        if callable(close) and not inspect.iscoroutinefunction(close):
            close()
    if not callable(getattr(environment_class, "step", None)) and not callable(
        getattr(environment_class, "reset", None)
    ):
        raise ConfigError(
            f"{FIELD} {config.use}: {environment_class.__name__} has neither step nor reset; {EXPECTED}"
        )
    return environment_class


def _resumes(environment_class: type) -> Resumes:
    """How sessions of a class resume. Raises ConfigError: it is `resumable` and cannot be restored."""
    if getattr(environment_class, "resumable", False) is True:
        missing = [
            name for name in ("mark", "restore") if not callable(getattr(environment_class, name, None))
        ]
        if missing:
            raise ConfigError(
                f"{FIELD}: {environment_class.__name__} is resumable and has no {missing[0]}; give it "
                "mark(self), whose value another worker gives to restore(self, mark)"
            )
        return "restore"
    return "repeat" if getattr(environment_class, "repeatable", False) is True else ""


def _check_step(environment_class: Any, name: str) -> None:
    """Raises ConfigError: `step` does not take the text."""
    try:
        inspect.signature(bound(environment_class.step)).bind("text")
    except (TypeError, ValueError):
        raise ConfigError(
            f"{FIELD} {name}: step{inspect.signature(environment_class.step)} cannot be called with what "
            "the model said; expected step(self, text)"
        ) from None
