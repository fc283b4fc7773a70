"""Recognises whose conventions a reward function follows, and which arguments it takes.

| style | signature |
|---|---|
| `verl` | `compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)` |
| `trl` | `reward(prompts, completions, completion_ids, **columns)`, a list in, a list out |
| `class` | a class with `compute_score` as in verl, and perhaps `post_process_scores(scores)` |

Each may be plain or async, is called by keyword, and needs to take only the arguments it uses.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from common.errors import ConfigError

SAMPLE_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info", "is_evaluation")
ROUTER, TOKENIZER = "reward_router_address", "reward_model_tokenizer"
TRL_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
EXPECTED = (
    "compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) as in verl, or "
    "reward(prompts, completions, completion_ids, **columns) as in TRL, plain or async"
)
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


class Style(StrEnum):
    """Whose conventions a function follows."""

    VERL = "verl"
    TRL = "trl"
    CLASS = "class"


@dataclass(frozen=True, slots=True)
class Call:
    """How to call a function: it takes the arguments `names`, with `takes_any` any others too."""

    style: Style
    is_async: bool
    names: frozenset[str]
    takes_any: bool = False
    required: frozenset[str] = frozenset()

    def takes(self, name: str) -> bool:
        """Whether an argument of this name can be passed."""
        return self.takes_any or name in self.names


def recognise(
    function: Callable[..., Any], kwargs: Mapping[str, Any], name: str, style: str = "auto"
) -> Call:
    """How `function` is to be called with the further arguments `kwargs`.

    Raises:
        ConfigError: it does not fit; the message names the function, what it takes and what is expected.
    """
    if _is(function, inspect.isasyncgenfunction) or _is(function, inspect.isgeneratorfunction):
        raise ConfigError(f"reward.function {name} yields; expected a function that returns its rewards")
    signature = signature_of(function, name)
    if style == "auto":
        style = Style.TRL if "completions" in signature.parameters else Style.VERL
    call = _call(function, signature, Style(style))
    if call.style is Style.TRL:
        _check_trl(call, signature, name)
    else:
        _check_verl(call, signature, kwargs, name)
    _check_kwargs(call, signature, kwargs, name)
    return call


def signature_of(function: Callable[..., Any], name: str) -> inspect.Signature:
    """The function's signature.

    Raises:
        ConfigError: it has none, as some functions written in C.
    """
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        raise ConfigError(
            f"reward.function {name} does not say what it takes; wrap it in a Python function {EXPECTED}"
        ) from None


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await."""
    return _is(function, inspect.iscoroutinefunction)


def _call(function: Callable[..., Any], signature: inspect.Signature, style: Style) -> Call:
    parameters = signature.parameters.values()
    names = {p.name for p in parameters if p.kind in _BY_KEYWORD}
    required = {p.name for p in parameters if p.default is p.empty and p.kind not in _VARIADIC}
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return Call(style, is_async(function), frozenset(names), takes_any, frozenset(required))


def _check_verl(call: Call, signature: inspect.Signature, kwargs: Mapping[str, Any], name: str) -> None:
    if not call.takes("solution_str"):
        positional = " The arguments are passed by keyword, so the names matter."
        raise ConfigError(
            f"reward.function {name} takes {_shown(signature)}; expected {EXPECTED}.{positional}"
        )
    known = {*SAMPLE_ARGUMENTS, TOKENIZER, ROUTER, *kwargs}
    if missing := [p for p in signature.parameters if p in call.required - known]:
        raise ConfigError(
            f"reward.function {name} takes {_shown(signature)}, but nothing gives {', '.join(missing)}; "
            f"expected {EXPECTED}, with further arguments from reward.kwargs"
        )
    _check_by_keyword(call, signature, name)


def _check_trl(call: Call, signature: inspect.Signature, name: str) -> None:
    """Which columns the dataset has shows with the first sample; the rest can be checked now."""
    if not call.takes("completions"):
        raise ConfigError(f"reward.function {name} takes {_shown(signature)}; expected {EXPECTED}")
    _check_by_keyword(call, signature, name)


def _check_by_keyword(call: Call, signature: inspect.Signature, name: str) -> None:
    if unnamed := sorted(call.required - call.names):
        raise ConfigError(
            f"reward.function {name} takes {_shown(signature)}, where {', '.join(unnamed)} cannot be "
            f"passed by keyword; expected {EXPECTED}"
        )


def _check_kwargs(call: Call, signature: inspect.Signature, kwargs: Mapping[str, Any], name: str) -> None:
    """Everything in `reward.kwargs` has to be taken, and must not stand in for the sample."""
    own = (*TRL_ARGUMENTS,) if call.style is Style.TRL else (*SAMPLE_ARGUMENTS, ROUTER, TOKENIZER)
    if reserved := sorted(set(own) & set(kwargs)):
        raise ConfigError(f"reward.kwargs must not set {', '.join(reserved)}: each sample brings its own")
    unknown = [key for key in kwargs if not call.takes(key)]
    if unknown:
        others = [p for p in signature.parameters if p in call.names and p not in own]
        close = difflib.get_close_matches(unknown[0], others, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(others) or 'no others'}"
        raise ConfigError(f"reward.kwargs has {unknown[0]!r}, which {name} does not take; {hint}")


def _is(function: Callable[..., Any], question: Callable[[Any], bool]) -> bool:
    """Ask about a function, what a partial wraps, or an object's `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    return question(function) or (not inspect.isroutine(function) and question(type(function).__call__))


def _shown(signature: inspect.Signature) -> str:
    return f"({', '.join(signature.parameters)})"
