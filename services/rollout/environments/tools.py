"""Functions as tools: `use: tools`, with `tools` naming them.

A function is typed, and its docstring says what each argument means, as transformers' chat templates want it.
What the model gives is held to the types; wrong arguments, and whatever the function raises, are told to the
model, for they may be its own doing.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MethodType
from typing import Any

from tidemill.common.errors import ConfigError
from tidemill.services.rollout.environments.environment import Act, Closing, Kind, Opening, Row
from tidemill.services.rollout.environments.users_code import complaint, finished, result_text

Function = Callable[..., Any]


class ToolBox:
    """Functions that the model may call, by name."""

    def __init__(self, functions: Mapping[str, Function]) -> None:
        self._functions = {name: _checking(function) for name, function in functions.items()}

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Act:
        """Call one. Whatever it raises is an observation."""
        from pydantic import ValidationError

        try:
            returned = await finished(self._functions[name](**arguments))
        except asyncio.CancelledError:
            raise
        except ValidationError as error:
            wrong = "; ".join(
                f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}" for one in error.errors()[:5]
            )
            return Act([{"content": f"error: {name}: {wrong}"}], is_wrong=True)
        except (Exception, SystemExit) as error:
            return Act([{"content": complaint(error)}], is_wrong=True)
        return Act([{"content": result_text(returned)}])


class Tools(ToolBox):
    """An environment that is nothing but functions."""

    async def reset(self, row: Row) -> Opening:
        return Opening()

    async def step(self, text: str) -> Act:
        """Without a call the model is done."""
        return Act(is_done=True)

    async def finish(self) -> Closing:
        return Closing()

    async def close(self) -> None:
        """Nothing is held."""


class ToolsDesign:
    def __init__(self, functions: Mapping[str, Function]) -> None:
        self._functions = functions
        self.is_async = all(is_coroutine(function) for function in functions.values())

    @cached_property
    def _kind(self) -> Kind:
        schemas = [schema_of(function, name, name) for name, function in self._functions.items()]
        return Kind("tools", schemas, is_stateless=True)

    def kind_of(self, row: Row) -> Kind:
        """The functions' schemas. Raises ConfigError: one has no types or no docstring."""
        return self._kind

    def kinds(self) -> Sequence[Kind]:
        return [self._kind]

    def make(self, row: Row) -> Tools:
        return Tools(self._functions)


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
