"""Reward functions: from a name in the config to something that can be called with a sample.

`reward.function` is a built-in's name, `path/to/file.py:name`, or `package.module:name`. Everything that can
be wrong with it is found by `load_function`, before the first sample, and said in plain words.
"""

import asyncio
import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from common.errors import ConfigError
from common.own_modules import import_from_here
from services.reward.arguments import TrlLog, trl_arguments, verl_arguments
from services.reward.builtin import BUILTINS
from services.reward.outcome import AttemptError, Outcome, contained, interpret, interpret_list
from services.reward.request import Request
from services.reward.sample import Sample
from services.reward.signature import EXPECTED, TOKENIZER, Call, Style, recognise

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function with its further arguments, or the object of a class with its two methods."""

    name: str
    function: Callable[..., Any]
    how: Call
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_cheap: bool = False
    tokenizer: str = ""
    post_process: Callable[..., Any] | None = None
    """`post_process_scores` of a class: from the scores of a group to new ones."""
    tokenizers: list[Any] = field(default_factory=list)
    """The tokenizer, once it has been loaded."""

    @property
    def is_async(self) -> bool:
        """Whether it is awaited."""
        return self.how.is_async

    def spec(self) -> dict[str, Any]:
        """What another process needs to load the same function."""
        kwargs, style = dict(self.kwargs), self.how.style.value
        return {"reference": self.name, "kwargs": kwargs, "style": style, "tokenizer": self.tokenizer}

    def call(self, request: Request) -> list[Outcome]:
        """Call a plain function.

        Raises:
            AttemptError: it raised, or returned no finite number for a sample.
        """
        with contained():
            if request.scores is not None:
                return self._post_processed(request)
            if self.how.style is Style.TRL:
                log = TrlLog()
                returned = self.function(**trl_arguments(self.how, request.samples, log, self.kwargs))
                return interpret_list(returned, len(request.samples), log.metrics, log.extra)
            return [
                interpret(self.function(**self._arguments(sample, request)), self._takes_tuples)
                for sample in request.samples
            ]

    async def call_async(self, request: Request) -> list[Outcome]:
        """Call an async function; raises as `call` does."""
        with contained():
            if request.scores is not None:  # often plain beside an async compute_score
                return await asyncio.to_thread(self._post_processed, request)
            if self.how.style is Style.TRL:
                log = TrlLog()
                returned = await self.function(**trl_arguments(self.how, request.samples, log, self.kwargs))
                return interpret_list(returned, len(request.samples), log.metrics, log.extra)
            return [
                interpret(await self.function(**self._arguments(sample, request)), self._takes_tuples)
                for sample in request.samples
            ]

    @property
    def _takes_tuples(self) -> bool:
        return self.how.style is Style.CLASS

    def _arguments(self, sample: Sample, request: Request) -> dict[str, Any]:
        given = dict(request.given)
        if self.tokenizer:
            given[TOKENIZER] = self._tokenizer()
        kwargs = {} if self.how.style is Style.CLASS else self.kwargs
        return verl_arguments(self.how, sample, given, kwargs)

    def _tokenizer(self) -> Any:
        if not self.tokenizers:
            from transformers import AutoTokenizer

            self.tokenizers.append(AutoTokenizer.from_pretrained(self.tokenizer))
        return self.tokenizers[0]

    def _post_processed(self, request: Request) -> list[Outcome]:
        """The class sees the scores that there are; what failed stays as it is."""
        assert self.post_process is not None
        assert request.scores is not None
        known = [score for score in request.scores if score is not None]
        if not known:
            return [Outcome(None) for _ in request.scores]
        new = iter(interpret_list(self.post_process(known), len(known)))
        return [Outcome(None) if score is None else next(new) for score in request.scores]


def load_function(
    reference: str, kwargs: Mapping[str, Any], style: str = "auto", tokenizer: str = ""
) -> RewardFunction:
    """Import the function that `reward.function` names, and check that it can be called.

    Raises:
        ConfigError: it does not exist, cannot be imported, or takes other arguments.
    """
    if builtin := BUILTINS.get(reference):
        _require(reference, builtin.needs)
        how = recognise(builtin.function, kwargs, reference)
        return RewardFunction(reference, builtin.function, how, kwargs, builtin.is_cheap)
    function = import_function(reference, "reward.function", tuple(BUILTINS))
    if inspect.isclass(function) or style == "class":
        return _object(function, reference, kwargs)
    how = recognise(function, kwargs, reference, style)
    return RewardFunction(reference, function, how, kwargs, tokenizer=tokenizer)


def import_function(reference: str, field_name: str, builtins: tuple[str, ...]) -> Callable[..., Any]:
    """What `path.py:name` or `package.module:name` names.

    Raises:
        ConfigError: it does not exist or cannot be imported. The message begins with `field_name`.
    """
    origin, colon, name = reference.rpartition(":")
    if not colon or not origin or not name:
        named = f"one of {', '.join(builtins)}, " if builtins else ""
        forms = f"{named}path/to/file.py:name, or package.module:name"
        problem = _form_problem(reference, builtins)
        raise ConfigError(f"{field_name} {reference!r} {problem}; expected {forms}")
    load = _load_file if origin.endswith(".py") else _load_module
    return _find(load(origin, reference), name, reference)


def _object(found: Any, reference: str, kwargs: Mapping[str, Any]) -> RewardFunction:
    """An object of a reward class: made once in each process, with `kwargs` for its constructor."""
    if inspect.isclass(found):
        if not callable(getattr(found, "compute_score", None)):
            raise ConfigError(
                f"reward.function {reference} is a class without compute_score; expected a class with that "
                f"method, or a function {EXPECTED}"
            )
        try:
            inspect.signature(found).bind(**kwargs)
        except TypeError as error:
            raise ConfigError(f"reward.kwargs does not fit the constructor of {reference}: {error}") from None
        found = _importing(lambda: found(**kwargs), f"the object of {reference}", reference)
    method = getattr(found, "compute_score", None)
    if not callable(method):
        raise ConfigError(f"reward.function {reference} has no compute_score, which style: class needs")
    how = replace(recognise(method, {}, f"{reference}.compute_score", "verl"), style=Style.CLASS)
    return RewardFunction(
        reference, method, how, kwargs, post_process=getattr(found, "post_process_scores", None)
    )


def _require(reference: str, modules: tuple[str, ...]) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"reward.function {reference} needs the module {module}, which is not installed: "
                "pip install 'tidemill[reward]'"
            )


def _form_problem(reference: str, builtins: tuple[str, ...]) -> str:
    if reference.endswith(".py"):
        return f"names no function in the file (write {reference}:compute_score)"
    if ":" in reference:
        return "is incomplete"
    if not builtins:
        return "names no function"
    close = difflib.get_close_matches(reference, builtins, n=1)
    return f"is no built-in reward; did you mean {close[0]!r}?" if close else "is no built-in reward"


def _load_file(file: str, reference: str) -> ModuleType:
    path = Path(file)
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(
            f"reward.function {reference}: the file {path.absolute()} {problem} on this machine. Relative "
            "paths start at the config's folder; workers on other machines need the file at the same path."
        )
    # Modules beside the file can be imported, but never hide installed ones.
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)
    module_name = f"tidemill_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up by name
    _importing(lambda: spec.loader.exec_module(module), str(path), reference)  # type: ignore[union-attr]
    return module


def _load_module(module_name: str, reference: str) -> ModuleType:
    import_from_here()
    return _importing(lambda: importlib.import_module(module_name), f"the module {module_name}", reference)


def _importing(run: Callable[[], T], what: str, reference: str) -> T:
    try:
        with contained():
            return run()
    except AttemptError as error:
        cause = error.__cause__
        where = f" (line {cause.lineno})" if isinstance(cause, SyntaxError) else ""
        raise ConfigError(
            f"reward.function {reference}: importing {what} failed: {error}{where}. It must be importable by "
            f"{sys.executable} on every machine with reward workers."
        ) from None


def _find(module: ModuleType, name: str, reference: str) -> Callable[..., Any]:
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            defined = [key for key, value in vars(module).items() if callable(value) and key[:1] != "_"]
            close = difflib.get_close_matches(part, defined, n=1) or defined[:10]
            hint = f"it has {', '.join(close)}" if close else "it defines no functions"
            raise ConfigError(
                f"reward.function {reference}: {module.__file__ or module.__name__} has no {part!r}; {hint}"
            ) from None
    if not callable(found):
        raise ConfigError(
            f"reward.function {reference}: {name} is a value of type {type(found).__name__}, not a function"
        )
    return found  # type: ignore[no-any-return]
