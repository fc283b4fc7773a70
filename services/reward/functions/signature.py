"""Recognises the calling convention of a reward function, and which arguments it takes.

| style | signature |
|---|---|
| `verl` | `compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)` |
| `verl_batch` | `compute_score(data_sources, solution_strs, ground_truths, extra_infos)`, lists in and out |
| `trl` | `reward(prompts, completions, completion_ids, **columns)`, a list in, a list out |
| `verifiers` | `reward(prompt, completion, answer, info, state, **kwargs)` of a rubric |
| `class` | a class with `compute_score` as in verl, and perhaps `post_process_scores(scores)` |

Each may be plain or async, is called by keyword, and needs to take only the arguments it uses. A function
that fits no convention is refused, with a line that would adapt it where one can be guessed.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tidemill.common.errors import ConfigError

SAMPLE_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info", "is_evaluation")
SOLUTION_NAMES = ("solution_str", "predict_str", "model_output")
"""Names of the completion in verl's own functions."""
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
ROUTER = "reward_router_address"
TOKENIZER = "reward_model_tokenizer"
TRL_LISTS = ("completions", "completion_ids", "prompts")
TRL_ARGUMENTS = (*TRL_LISTS, "trainer_state", "log_extra", "log_metric")
RUBRIC_ARGUMENTS = ("prompt", "completion", "answer", "info", "task", "state")
EXPECTED = (
    "compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) as in verl, or "
    "reward(prompts, completions, completion_ids, **columns) as in TRL, or reward(completion, answer, "
    "**kwargs) of a verifiers rubric, plain or async"
)
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


class Style(StrEnum):
    VERL = "verl"
    VERL_BATCH = "verl_batch"
    TRL = "trl"
    VERIFIERS = "verifiers"
    CLASS = "class"


OWN_ARGUMENTS = {
    Style.VERL: (*SAMPLE_ARGUMENTS, *SOLUTION_NAMES, ROUTER, TOKENIZER),
    Style.CLASS: (*SAMPLE_ARGUMENTS, *SOLUTION_NAMES, ROUTER, TOKENIZER),
    Style.VERL_BATCH: BATCH_ARGUMENTS,
    Style.TRL: TRL_ARGUMENTS,
    Style.VERIFIERS: RUBRIC_ARGUMENTS,
}
"""Arguments that every call passes; `reward.kwargs` must not have them."""
COMPLETION_ARGUMENTS = {
    Style.VERL: SOLUTION_NAMES,
    Style.CLASS: SOLUTION_NAMES,
    Style.VERL_BATCH: ("solution_strs",),
    Style.TRL: TRL_LISTS,
    Style.VERIFIERS: ("completion",),
}
"""Arguments of which a function must take at least one."""
PICTURE_ARGUMENTS = ("images", "image")
"""The pictures of a prompt, and its only one, for functions that name them: in runs with pictures. Those that
take any argument do not get them unasked, as reading and decoding them takes time."""


@dataclass(frozen=True, slots=True)
class CallConvention:
    """How to call a function.

    Example: `async def reward(completions, *, level=1, **columns)` has style TRL, `is_async`, `names`
    completions and level, `takes_any`, and `required` completions.
    """

    style: Style
    is_async: bool
    names: frozenset[str]
    """Arguments that it takes by keyword."""
    takes_any: bool = False
    """Whether it takes any others too."""
    required: frozenset[str] = frozenset()
    """Arguments without a default."""
    picture_names: tuple[str, ...] = ()
    """Those of `PICTURE_ARGUMENTS` that it is given."""

    def takes(self, name: str) -> bool:
        return self.takes_any or name in self.names

    def taken(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        """The offered arguments that the function takes."""
        if self.takes_any:
            return dict(offered)
        return {name: value for name, value in offered.items() if name in self.names}


def recognise(
    function: Callable[..., Any],
    kwargs: Mapping[str, Any],
    name: str,
    style: str = "auto",
    has_pictures: bool = False,
) -> CallConvention:
    """How `function` is to be called with the further arguments `kwargs`, in a run whose prompts may have
    pictures (`has_pictures`) or not.

    Raises:
        ConfigError: it does not fit; the message names the function, what it takes and what is expected.
    """
    if _is(function, inspect.isasyncgenfunction) or _is(function, inspect.isgeneratorfunction):
        raise ConfigError(f"reward.function {name} yields; expected a function that returns its rewards")
    signature = signature_of(function, name)
    parameters = signature.parameters.values()
    names = frozenset(p.name for p in parameters if p.kind in _BY_KEYWORD)
    call = CallConvention(
        style=_style_of(signature) if style == "auto" else Style(style),
        is_async=is_async(function),
        names=names,
        takes_any=any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters),
        required=frozenset(p.name for p in parameters if p.default is p.empty and p.kind not in _VARIADIC),
        picture_names=tuple(each for each in PICTURE_ARGUMENTS if has_pictures and each in names),
    )
    _check_given(call, signature, kwargs, name)
    _check_kwargs(call, signature, kwargs, name)
    return call


def signature_of(
    function: Callable[..., Any], name: str, field_name: str = "reward.function", expected: str = EXPECTED
) -> inspect.Signature:
    """The signature of the function that this field of the config names. Raises ConfigError: it has none, as
    some functions written in C; the message says what is `expected`."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{field_name} {name} does not say what it takes; wrap it in a Python function {expected}"
        ) from None


def as_written(parameter: inspect.Parameter) -> str:
    """A parameter as in the function's head: `text`, `*args`, `**kwargs`."""
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return f"*{parameter.name}"
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    return parameter.name


def is_async(function: Callable[..., Any]) -> bool:
    return _is(function, inspect.iscoroutinefunction)


def _style_of(signature: inspect.Signature) -> Style:
    names = signature.parameters.keys()
    if "solution_strs" in names:
        return Style.VERL_BATCH
    if "completions" in names:
        return Style.TRL
    # The other lists have names that a function in verl's style may have too.
    if names & set(TRL_LISTS) and not names & set(SOLUTION_NAMES):
        return Style.TRL
    if "completion" in names and "solution_str" not in names:
        return Style.VERIFIERS
    return Style.VERL


def _check_given(
    call: CallConvention, signature: inspect.Signature, kwargs: Mapping[str, Any], name: str
) -> None:
    """Check that it takes the completion, and that all it requires is passed, and can be passed by keyword.

    For TRL's style, the dataset's columns are known only with the first sample, so nothing is missing yet.
    """
    passed = (*OWN_ARGUMENTS[call.style], *call.picture_names)
    takes_completion = any(call.takes(argument) for argument in COMPLETION_ARGUMENTS[call.style])
    not_passed = call.required - {*passed, *kwargs}
    missing = [p for p in signature.parameters if p in not_passed]
    unnamed = sorted(call.required - call.names)
    problem = ""
    hint = ""
    if not takes_completion:
        hint = ". The arguments are passed by keyword, so the names matter."
    elif missing and call.style is not Style.TRL:
        problem = f", but nothing gives {', '.join(missing)}"
        hint = ", with further ones from reward.kwargs."
    elif unnamed:
        problem = f", where {', '.join(unnamed)} cannot be passed by keyword"
    else:
        return
    adapter = _adapter(call, signature, name, passed) if hint else ""
    parameters = ", ".join(map(as_written, signature.parameters.values()))
    raise ConfigError(
        f"reward.function {name} takes ({parameters}){problem}; expected {EXPECTED}{hint}{adapter}"
    )


def _adapter(call: CallConvention, signature: inspect.Signature, name: str, passed: Collection[str]) -> str:
    """A hint with a line that adapts a function with other names; empty if none can be guessed.

    `passed` are the arguments that every call passes. Examples of lines, for `judge(text, truth)` and for
    `judge(solution_str, level)`, where `level` is for the user to fill in:

        def compute_score(solution_str, ground_truth, **_): return judge(solution_str, ground_truth)
        def compute_score(solution_str, **_): return judge(solution_str=solution_str, level=level)
    """
    function = name.rpartition(":")[2]
    required = [p for p in signature.parameters if p in call.required]
    usable = [p for p in required if p in passed]
    if usable:
        parameters = ", ".join(usable)
        arguments = ", ".join(f"{p}={p}" for p in required)
    elif 1 <= len(required) <= 2:
        # A guess by position: the completion first, then the truth.
        parameters = ", ".join(("solution_str", "ground_truth")[: len(required)])
        arguments = parameters
    else:
        return ""
    adapter = "compute_score" if function != "compute_score" else "reward"
    line = f"def {adapter}({parameters}, **_): return {function}({arguments})"
    return f" Write beside it: {line}, and name that one."


def _check_kwargs(
    call: CallConvention, signature: inspect.Signature, kwargs: Mapping[str, Any], name: str
) -> None:
    """Check that the function takes all of `reward.kwargs`, and that these replace nothing of the sample."""
    passed = (*OWN_ARGUMENTS[call.style], *call.picture_names)
    replaced = sorted(set(passed) & set(kwargs))
    if replaced:
        raise ConfigError(f"reward.kwargs must not set {', '.join(replaced)}: each sample brings its own")
    unknown = [key for key in kwargs if not call.takes(key)]
    if unknown:
        others = [p for p in signature.parameters if p in call.names and p not in passed]
        close = difflib.get_close_matches(unknown[0], others, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(others) or 'no others'}"
        raise ConfigError(f"reward.kwargs has {unknown[0]!r}, which {name} does not take; {hint}")


def _is(function: Callable[..., Any], question: Callable[[Any], bool]) -> bool:
    """Apply `question` to a function, to what a partial wraps, or to an object's `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    return question(function) or (not inspect.isroutine(function) and question(type(function).__call__))
