"""Functions as tools: `use: tools`, with `tools` naming them.

A function is typed, and its docstring says what each argument means, as transformers' chat templates want it.
What the model gives is held to the types; wrong arguments, and whatever the function raises, are returned to
the model as errors, for they may be its own doing.
"""

import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from tidemill.common.config.environment import TOOLS, EnvironmentConfig
from tidemill.common.errors import ConfigError
from tidemill.common.process.users_code import load_users
from tidemill.services.rollout.environments.environment import Act, Design, Environment, Kind, invalid_call
from tidemill.services.rollout.environments.users_code import complaint, finished, result_text

Function = Callable[..., Any]


class ToolBox(Environment):
    """Functions that the model may call, by name. As an environment, nothing but these."""

    def __init__(self, functions: Mapping[str, Function]) -> None:
        self._functions = {name: _checking(function) for name, function in functions.items()}

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Act:
        """Call one. Whatever it raises is an observation."""
        from pydantic import ValidationError

        try:
            returned = await finished(self._functions[name](**arguments))
        except ValidationError as error:
            wrong = "; ".join(
                f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}" for one in error.errors()[:5]
            )
            return invalid_call(f"{name}: {wrong}")
        except (Exception, SystemExit) as error:  # a tool must not end the worker that it runs in
            return invalid_call(complaint(error))
        return Act([{"content": result_text(returned)}])


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
        return Kind(kind, schemas, is_stateless=True)

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
    except (PydanticUserError, NameError, TypeError):  # types that it does not know: as Python checks them
        return function
