"""Recognises how a reward function wants to be called.

One style is known, verl's `compute_score(data_source, solution_str, ground_truth, extra_info=None,
**kwargs)`, plain or async, called by keyword. A further style is a further member of `Style` and a branch in
`recognise`; what calls functions asks the `Call` and nothing else.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from common.errors import ConfigError

REQUIRED = ("data_source", "solution_str", "ground_truth")
OPTIONAL = "extra_info"
EXPECTED = "compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)"


class Style(StrEnum):
    """Whose conventions a function follows."""

    VERL = "verl"


@dataclass(frozen=True, slots=True)
class Call:
    """How to call a function: `is_async` awaits it, `takes_extra` gives it `extra_info`."""

    style: Style
    is_async: bool
    takes_extra: bool


def recognise(function: Callable[..., Any], kwargs: Mapping[str, Any], name: str) -> Call:
    """How `function` is to be called with the further arguments `kwargs`.

    Raises:
        ConfigError: it does not fit; the message names the function, what it takes and what is expected.
    """
    if inspect.isclass(function):
        raise ConfigError(f"reward.function {name} is a class; expected a function {EXPECTED}")
    if _is(function, inspect.isasyncgenfunction) or _is(function, inspect.isgeneratorfunction):
        raise ConfigError(f"reward.function {name} yields; expected a function that returns one number")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise ConfigError(
            f"reward.function {name} does not say what it takes; wrap it in a Python function {EXPECTED}"
        ) from None
    parameters = signature.parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    takes_extra = takes_any or OPTIONAL in parameters
    given = [*REQUIRED, OPTIONAL] if takes_extra else [*REQUIRED]
    _check_fits(signature, given, name)
    _check_kwargs(signature, kwargs, takes_any, name)
    _check_complete(signature, {*given, *kwargs}, name)
    return Call(Style.VERL, _is(function, inspect.iscoroutinefunction), takes_extra)


def _check_fits(signature: inspect.Signature, given: list[str], name: str) -> None:
    """Every argument of ours has to be taken by keyword."""
    try:
        signature.bind_partial(**dict.fromkeys(given))
    except TypeError:
        hint = _TRL if "completions" in signature.parameters else ""
        raise ConfigError(
            f"reward.function {name} takes {_shown(signature)}{hint}; expected {EXPECTED}, plain or async. "
            "The arguments are passed by keyword, so the names matter."
        ) from None


def _check_kwargs(
    signature: inspect.Signature, kwargs: Mapping[str, Any], takes_any: bool, name: str
) -> None:
    """Everything in `reward.kwargs` has to be taken too, and must not stand in for the sample."""
    if reserved := sorted({*REQUIRED, OPTIONAL} & set(kwargs)):
        raise ConfigError(f"reward.kwargs must not set {', '.join(reserved)}: each sample brings its own")
    named = [p.name for p in signature.parameters.values() if p.kind in _BY_KEYWORD]
    unknown = [] if takes_any else [key for key in kwargs if key not in named]
    if unknown:
        own = [parameter for parameter in named if parameter not in (*REQUIRED, OPTIONAL)]
        close = difflib.get_close_matches(unknown[0], own, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(own) or 'no others'}"
        raise ConfigError(f"reward.kwargs has {unknown[0]!r}, which {name} does not take; {hint}")


def _check_complete(signature: inspect.Signature, given: set[str], name: str) -> None:
    """No parameter without a default may be left over."""
    missing = [
        p.name
        for p in signature.parameters.values()
        if p.default is p.empty and p.name not in given and p.kind not in _VARIADIC
    ]
    if missing:
        hint = _TRL if "completions" in missing else ""
        raise ConfigError(
            f"reward.function {name} takes {_shown(signature)}, but nothing gives {', '.join(missing)}"
            f"{hint}; expected {EXPECTED}, plain or async, with further arguments from reward.kwargs"
        )


def _is(function: Callable[..., Any], question: Callable[[Any], bool]) -> bool:
    """Ask about a function, what a partial wraps, or an object's `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    return question(function) or (not inspect.isroutine(function) and question(type(function).__call__))


def _shown(signature: inspect.Signature) -> str:
    return f"({', '.join(signature.parameters)})"


_TRL = " (TRL's signature is not supported)"
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
