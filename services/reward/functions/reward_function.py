"""Loads functions that a config names, and makes their arguments as verl, TRL or verifiers would.

`reward.function` and `reward.group` are a built-in's name, `path/to/file.py:name` or `package.module:name`.
`load_function` and `load_group_function` find what is wrong with one before the first sample.
"""

import asyncio
import copy
import difflib
import importlib
import importlib.util
import inspect
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from tidemill.common.data.dataset import PROMPT
from tidemill.common.errors import ConfigError
from tidemill.common.process.programs import run_main
from tidemill.common.process.users_code import defined_at, load_users
from tidemill.services.reward.builtin import BUILTINS
from tidemill.services.reward.builtin.groups import GROUP_FUNCTIONS
from tidemill.services.reward.functions.request import Callee, Request
from tidemill.services.reward.functions.signature import (
    BATCH_ARGUMENTS,
    EXPECTED,
    ROUTER,
    SOLUTION_NAMES,
    TOKENIZER,
    TRL_ARGUMENTS,
    CallConvention,
    Style,
    as_written,
    is_async,
    recognise,
    signature_of,
)
from tidemill.services.reward.outcome import (
    AttemptError,
    RewardOutcome,
    interpret,
    interpret_batch,
    interpret_list,
    users_own,
)
from tidemill.services.reward.sample import ChatMessages, RewardSample

OF_EVERY_ROW = ("data_source", "ground_truth")
THOUGHT = "thought"
"""The argument with what the model thought, where the run parts that from the answer; else a column."""
_NOT_COLUMNS = frozenset((PROMPT, "prompts", "completion", "completions", "completion_ids"))
GROUP_FIELD = "reward.group"
EXPECTED_OF_GROUPS = "function(scores, samples, **kwargs) -> list, plain or async"
Kwargs = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TrlLog:
    """What a TRL function logs: by `log_metric(name, value)` one number for the call, a component of every
    sample; by `log_extra(column, values)` one value for each sample, a component if a number, else detail.

    Example: `metrics` {"length": 7.0}, `extra` {"answer": ["4", "5"]}: of two samples both have the component
    `length`, and the second has the detail `answer` "5".
    """

    metrics: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Iterable[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardFunction(Callee):
    """A function with its further arguments, or a method of the object that a class made of them.

    Example: `reward.function: exact.py:score` with `reward.kwargs: {strict: true}`: `name` ends with
    "exact.py:score", `how` is verl's style, `kwargs` {"strict": True}.
    """

    name: str
    function: Callable[..., Any]
    how: CallConvention
    kwargs: Kwargs = field(default_factory=dict)
    is_cheap: bool = False
    tokenizer: str = ""
    is_made: bool = False
    """Whether a class or factory made it of `kwargs`, so that calls get none."""
    post_process: Callable[..., Any] | None = None
    """`post_process_scores` of a class: from the scores of a group to new ones."""
    tokenizers: list[Any] = field(default_factory=list)
    """The tokenizer, once it has been loaded."""

    @property
    def is_async(self) -> bool:  # type: ignore[override]
        return self.how.is_async

    def spec(self) -> dict[str, Any]:
        return {
            "maker": f"{__name__}:load_function",
            "reference": self.name,
            "kwargs": dict(self.kwargs),
            "style": self.how.style.value,
            "tokenizer": self.tokenizer,
            "has_pictures": self.takes_pictures,
        }

    @property
    def takes_pictures(self) -> bool:
        return bool(self.how.picture_names)

    def prepare(self) -> None:
        builtin = BUILTINS.get(self.name)
        if builtin is not None:
            builtin.warm_up()
        if self.takes_pictures:
            importlib.import_module("PIL.PngImagePlugin")

    async def call(self, request: Request) -> list[RewardOutcome]:
        with users_own():
            if request.scores is not None:
                return await self._post_processed(request.scores)
            if self.how.style in (Style.TRL, Style.VERL_BATCH):
                return await self._call_with_lists(request)
            kwargs = {} if self.is_made else self.kwargs
            further = self._further_arguments(request)
            returned = []
            for sample in request.samples:
                if self.how.style is Style.VERIFIERS:
                    arguments = rubric_arguments(self.how, sample, kwargs)
                else:
                    arguments = verl_arguments(self.how, sample, further, kwargs)
                value = self.function(**arguments)
                returned.append(await value if self.is_async else value)
            try:
                return [interpret(value) for value in returned]
            except AttemptError as error:
                raise returned_error(self.function, error) from None

    async def _call_with_lists(self, request: Request) -> list[RewardOutcome]:
        """Call a function once for all samples."""
        kwargs = {} if self.is_made else self.kwargs
        num_samples = len(request.samples)
        log = TrlLog()
        if self.how.style is Style.TRL:
            arguments = trl_arguments(self.how, request.samples, log, kwargs)
        else:
            arguments = batch_arguments(self.how, request.samples, kwargs)
        value = self.function(**arguments)
        returned = await value if self.is_async else value
        try:
            if self.how.style is Style.TRL:
                return interpret_list(returned, num_samples, log.metrics, log.extra)
            return interpret_batch(returned, num_samples)
        except AttemptError as error:
            raise returned_error(self.function, error) from None

    def _further_arguments(self, request: Request) -> Kwargs:
        """The router's address and the tokenizer, where they are configured."""
        if not self.tokenizer:
            return request.arguments
        if not self.tokenizers:
            from transformers import AutoTokenizer

            self.tokenizers.append(AutoTokenizer.from_pretrained(self.tokenizer))
        return {**request.arguments, TOKENIZER: self.tokenizers[0]}

    async def _post_processed(self, scores: list[float | None]) -> list[RewardOutcome]:
        """A group's scores after the class's `post_process`, which may replace None, a failure, by a value.

        If it raises TypeError because of None, it gets the other scores alone, and failures stay failures.
        """
        values = [score for score in scores if score is not None]
        if not values:
            return [RewardOutcome(None) for _ in scores]
        try:
            return await self._call_post_process(list(scores))
        except TypeError:
            if len(values) == len(scores):
                raise
        new = iter(await self._call_post_process(list(values)))
        return [RewardOutcome(None) if score is None else next(new) for score in scores]

    async def _call_post_process(self, scores: list[Any]) -> list[RewardOutcome]:
        """What `post_process` makes of the scores. It may be plain while `compute_score` is async (then it
        runs in a thread), or the reverse."""
        assert self.post_process is not None
        returned: Any
        if is_async(self.post_process):
            work = self.post_process(scores)
            returned = await work if self.is_async else run_main(work)
        elif self.is_async:
            returned = await asyncio.to_thread(self.post_process, scores)
        else:
            returned = self.post_process(scores)
        try:
            return interpret_list(returned, len(scores))
        except AttemptError as error:
            raise returned_error(self.post_process, error) from None


def returned_error(function: Callable[..., Any], error: AttemptError) -> AttemptError:
    """What an error says about a function's result is the function's error: add where it is defined."""
    where = defined_at(function)
    problem = f"{error} ({where})" if where else str(error)
    return AttemptError(problem, is_code_error=True)


def verl_arguments(
    how: CallConvention, sample: RewardSample, further: Kwargs, kwargs: Kwargs
) -> dict[str, Any]:
    """`data_source`, `solution_str`, `ground_truth` and `extra_info`, as far as the function takes them.

    `further` has router and tokenizer, where they are configured. A function that requires the tokenizer gets
    None if none is configured, as in verl.
    """
    offered = sample.fields()
    solution = next((name for name in SOLUTION_NAMES if name in how.names), SOLUTION_NAMES[0])
    offered[solution] = offered.pop("solution_str")
    arguments = how.taken(offered)
    if "is_evaluation" in how.names:
        arguments["is_evaluation"] = sample.is_evaluation
    for name in (ROUTER, TOKENIZER):
        is_passed = name in further and how.takes(name)
        if is_passed or name in how.required:
            arguments[name] = further.get(name)
    arguments.update(picture_arguments(how, sample))
    arguments.update(kwargs)
    return arguments


def batch_arguments(how: CallConvention, samples: Sequence[RewardSample], kwargs: Kwargs) -> dict[str, Any]:
    """Lists with one element for each sample, as verl's batch manager passes them."""
    rows = [sample.fields() for sample in samples]
    offered = {}
    for name in BATCH_ARGUMENTS:
        of_sample = name.removesuffix("s")
        offered[name] = [row[of_sample] for row in rows]
    return how.taken(offered) | picture_lists(how, samples) | dict(kwargs)


def rubric_arguments(how: CallConvention, sample: RewardSample, kwargs: Kwargs) -> dict[str, Any]:
    """Arguments that a rubric of `verifiers` passes: the row, the completion, and both again as `state`.

    Completion and prompt are chats where the dataset's prompt is one, otherwise text.
    """
    offered: dict[str, Any] = {
        "prompt": sample.messages or sample.prompt,
        "completion": _completion(sample),
        "answer": sample.trajectory.ground_truth,
        "info": {**sample.trajectory.extra, **sample.of_thought},
        "task": sample.trajectory.data_source,
    }
    return how.taken({**offered, "state": dict(offered)}) | picture_arguments(how, sample) | dict(kwargs)


def trl_arguments(
    how: CallConvention, samples: Sequence[RewardSample], log: TrlLog, kwargs: Kwargs
) -> dict[str, Any]:
    """Lists with one element for each sample: prompts, completions, token ids, and the row's columns.

    If the dataset's prompt is a chat, prompts and completions are lists of messages, with the tool calls and
    results of a session; otherwise text. Where the run parts thoughts from answers, these are the answers,
    and `thought` is a list, too; messages have the thought as `reasoning_content`. TRL's `environments` are
    not passed: rollout workers have them.

    Raises:
        AttemptError: the function requires a column that no row has.
    """
    columns = [_columns(sample) for sample in samples]
    names = dict.fromkeys(name for row in columns for name in row)
    offered: dict[str, Any] = {}
    for name in names:
        offered[name] = [row.get(name) for row in columns]
    offered |= {
        "prompts": [sample.messages or sample.prompt for sample in samples],
        "completions": [_completion(sample) for sample in samples],
        "completion_ids": [list(map(int, sample.last.completion_ids)) for sample in samples],
        "trainer_state": SimpleNamespace(global_step=samples[0].trajectory.step, max_steps=None),
        "log_extra": log.extra.__setitem__,
        "log_metric": log.metrics.__setitem__,
    }
    if samples[0].of_thought:
        offered[THOUGHT] = [sample.trajectory.thought or "" for sample in samples]
    if "is_evaluation" in how.names:
        offered["is_evaluation"] = samples[0].is_evaluation  # one lane a call; a list would always be true
    missing = sorted(how.required - offered.keys() - kwargs.keys() - {*how.picture_names})
    if missing:
        raise AttemptError(
            f"takes {', '.join(missing)}, which is no column of its row; it has {', '.join(names)}",
            is_final=True,
        )
    return how.taken(offered) | picture_lists(how, samples) | dict(kwargs)


def required_columns(how: CallConvention, kwargs: Kwargs) -> list[str]:
    """The dataset's columns that a function in TRL's style requires: its arguments without a default that
    neither every call nor `kwargs` passes. Where the run parts thoughts, `THOUGHT` is passed, too."""
    passed = {*TRL_ARGUMENTS, *OF_EVERY_ROW, "is_evaluation", *how.picture_names, *kwargs}
    return sorted(how.required - passed)


def picture_arguments(how: CallConvention, sample: RewardSample) -> dict[str, Any]:
    """`images`, the list of a sample's pictures, and `image`, its only one or None, as far as the function
    names them; each is a `PIL.Image.Image` of its own, which the function may change.

    Raises:
        AttemptError: it takes `image`, and the sample has several.
    """
    if not how.picture_names:
        return {}
    images = open_pictures(sample)
    arguments: dict[str, Any] = {"images": images} if "images" in how.picture_names else {}
    if "image" in how.picture_names:
        if len(images) > 1:
            raise AttemptError(
                f"takes image, and the prompt has {len(images)} pictures; take images, the list of them",
                is_final=True,
                is_code_error=True,
            )
        arguments["image"] = images[0] if images else None
    return arguments


def picture_lists(how: CallConvention, samples: Sequence[RewardSample]) -> dict[str, list[Any]]:
    """The `picture_arguments` of all samples, as lists with one element for each. Raises AttemptError: as
    there."""
    of_samples = [picture_arguments(how, sample) for sample in samples]
    lists: dict[str, list[Any]] = {}
    for name in how.picture_names:
        lists[name] = [arguments[name] for arguments in of_samples]
    return lists


def open_pictures(sample: RewardSample) -> list[Any]:
    """The pictures of a sample as PIL's images."""
    if not sample.pictures:
        return []
    from PIL import Image

    return [Image.open(io.BytesIO(png)) for png in sample.pictures]


def _completion(sample: RewardSample) -> str | ChatMessages:
    return sample.trajectory.text if sample.messages is None else copy.deepcopy(sample.said)


def _columns(sample: RewardSample) -> dict[str, Any]:
    row = {name: value for name, value in sample.trajectory.extra.items() if name not in _NOT_COLUMNS}
    return {
        "data_source": sample.trajectory.data_source,
        "ground_truth": sample.trajectory.ground_truth,
    } | row


@dataclass(frozen=True, slots=True)
class GroupFunction(Callee):
    """A function over all rewards of a group, with its further arguments.

        def function(scores, samples, **kwargs) -> list: ...

    `scores` has a number or None (it failed) for each sample. `samples`, which may be left out, has a dict
    for each, with `index`, `solution_str`, `ground_truth`, `data_source`, `extra_info`, `prompt`, `score`,
    `status`, `error` and `components`. In a run with pictures a parameter `images` gets a list for each
    sample, with its pictures as PIL's images. The returned list has a number for each sample, or None for no
    reward.

    Example: `name` "my.py:centred", `takes_samples` False; for the scores [1.0, None, 0.0] it returns
    [0.5, None, -0.5].
    """

    name: str
    function: Callable[..., Any]
    is_async: bool
    takes_samples: bool
    is_cheap: bool = False
    kwargs: Kwargs = field(default_factory=dict)
    takes_pictures: bool = False

    def spec(self) -> dict[str, Any]:
        return {
            "maker": f"{__name__}:load_group_function",
            "reference": self.name,
            "kwargs": dict(self.kwargs),
            "has_pictures": self.takes_pictures,
        }

    async def call(self, request: Request) -> list[RewardOutcome]:
        arguments: dict[str, Any] = {"scores": list(request.scores or []), **self.kwargs}
        if self.takes_samples:
            pairs = zip(request.samples, request.notes or [], strict=True)
            arguments["samples"] = [
                {**sample.fields(), "index": sample.key[1], "prompt": sample.prompt, **notes}
                for sample, notes in pairs
            ]
        if self.takes_pictures:
            arguments["images"] = [open_pictures(sample) for sample in request.samples]
        with users_own():
            returned = self.function(**arguments)
            values = await returned if self.is_async else returned
            try:
                return interpret_list(values, len(request.samples))
            except AttemptError as error:
                raise returned_error(self.function, error) from None


def load_group_function(reference: str, kwargs: Kwargs, has_pictures: bool = False) -> GroupFunction:
    """Import the function that `reward.group` names, and check that it can be called, in a run whose prompts
    may have pictures or not.

    Raises:
        ConfigError: it does not exist, cannot be imported, or takes other arguments.
    """
    builtin = GROUP_FUNCTIONS.get(reference)
    function = builtin or import_function(reference, GROUP_FIELD, tuple(GROUP_FUNCTIONS))
    if inspect.isclass(function):
        raise ConfigError(f"{GROUP_FIELD} {reference} is a class; expected {EXPECTED_OF_GROUPS}")
    signature = signature_of(function, reference, GROUP_FIELD, EXPECTED_OF_GROUPS)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    takes_samples = takes_any or "samples" in signature.parameters
    passed = {"scores": None, **kwargs}
    if takes_samples:
        passed["samples"] = None
    takes_pictures = has_pictures and "images" in signature.parameters
    if takes_pictures:
        passed["images"] = None
    try:
        signature.bind(**passed)
    except TypeError as error:
        parameters = ", ".join(map(as_written, signature.parameters.values()))
        raise ConfigError(
            f"{GROUP_FIELD} {reference} takes ({parameters}): {error}; expected "
            f"{EXPECTED_OF_GROUPS}, with further arguments from reward.group_kwargs"
        ) from None
    return GroupFunction(
        reference,
        function,
        is_async(function),
        takes_samples,
        builtin is not None,
        dict(kwargs),
        takes_pictures,
    )


def load_function(
    reference: str, kwargs: Kwargs, style: str = "auto", tokenizer: str = "", has_pictures: bool = False
) -> RewardFunction:
    """Import the function that `reward.function` names, and check that it can be called, in a run whose
    prompts may have pictures (`has_pictures`) or not.

    Raises:
        ConfigError: it does not exist, cannot be imported, or takes other arguments.
    """
    if reference in BUILTINS:
        return _load_builtin(reference, kwargs)
    imported = import_function(reference, "reward.function", tuple(BUILTINS))
    is_made = inspect.isclass(imported) or (style != "class" and _is_factory(imported, reference))
    function = _make(imported, reference, kwargs) if is_made else imported
    method = getattr(function, "compute_score", None)
    if style == "class" and not callable(method):
        raise ConfigError(f"reward.function {reference} has no compute_score, which style: class needs")
    if callable(method) and (style == "class" or is_made):
        called = recognise(method, {}, f"{reference}.compute_score", "verl", has_pictures)
        how = replace(called, style=Style.CLASS)
        post_process = getattr(function, "post_process_scores", None)
        return RewardFunction(
            reference, method, how, kwargs, tokenizer=tokenizer, is_made=True, post_process=post_process
        )
    if not callable(function):
        made_type = type(function).__name__
        raise ConfigError(f"reward.function {reference} made {made_type}, which cannot be called")
    how = recognise(function, {} if is_made else kwargs, reference, style, has_pictures)
    return RewardFunction(reference, function, how, kwargs, tokenizer=tokenizer, is_made=is_made)


def _load_builtin(name: str, kwargs: Kwargs) -> RewardFunction:
    builtin = BUILTINS[name]
    for module in builtin.needs:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"reward.function {name} needs the module {module}, which is not installed: "
                "pip install 'tidemill[reward]'"
            )
    how = recognise(builtin.function, kwargs, name)
    return RewardFunction(name, builtin.function, how, kwargs, builtin.is_cheap)


def _is_factory(function: Callable[..., Any], reference: str) -> bool:
    """Whether its annotation says that it returns a Callable, as those of TRL's factories."""
    return "Callable" in str(signature_of(function, reference).return_annotation)


def import_function(reference: str, field_name: str, builtins: Sequence[str] = ()) -> Callable[..., Any]:
    """Import the function or class that `path.py:name` or `package.module:name` names.

    Raises:
        ConfigError: it does not exist or cannot be imported. The message begins with `field_name`.
    """
    origin, _, name = reference.rpartition(":")
    if not origin or not name:
        problem = "is no built-in function" if builtins else "names no function"
        if reference.endswith(".py"):
            usual_name = "compute_score" if field_name == "reward.function" else "name"
            problem = f"names no function in the file (write {reference}:{usual_name})"
        elif ":" in reference:
            problem = "is incomplete"
        elif close := difflib.get_close_matches(reference, builtins, n=1):
            problem += f"; did you mean {close[0]!r}?"
        named = f"one of {', '.join(builtins)}, " if builtins else ""
        raise ConfigError(
            f"{field_name} {reference!r} {problem}; expected {named}path/to/file.py:name, or "
            "package.module:name"
        )
    function: Any = load_users(field_name, reference)
    if not callable(function):
        raise ConfigError(
            f"{field_name} {reference}: {name} is a value of type {type(function).__name__}, not a function"
        )
    return function  # type: ignore[no-any-return]


def _make(maker: Callable[..., Any], reference: str, kwargs: Kwargs) -> Any:
    """The object that a class or a factory makes of `kwargs`, once in each process."""
    if inspect.isclass(maker):
        _check_class(maker, reference)
    try:
        inspect.signature(maker).bind(**kwargs)
    except TypeError as error:
        raise ConfigError(f"reward.kwargs does not fit the constructor of {reference}: {error}") from None
    try:
        with users_own():
            return maker(**kwargs)
    except AttemptError as error:
        raise ConfigError(f"reward.function {reference}: making its object failed: {error}") from None


def _check_class(reward_class: type, reference: str) -> None:
    has_method = callable(getattr(reward_class, "compute_score", None))
    calls = next((vars(base)["__call__"] for base in reward_class.__mro__ if "__call__" in vars(base)), None)
    takes_tensors = calls is not None and "data" in signature_of(calls, reference).parameters
    if not has_method and (hasattr(reward_class, "run_single") or takes_tensors):
        raise ConfigError(
            f"reward.function {reference} is a reward manager, as verl registers them: it takes batches of "
            "tensors, which no reward sees here. Name the function that it calls (path.py:compute_score), or "
            "give the class a method compute_score; what managers do around it are settings: see 'Reward "
            "managers' in services/reward/README.md"
        )
    if not has_method and calls is None:
        raise ConfigError(
            f"reward.function {reference} is a class without compute_score; expected a class with that "
            f"method, or a function {EXPECTED}"
        )
