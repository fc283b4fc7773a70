"""Reward functions: from a name in the config to something that can be called with a sample.

`reward.function` is a built-in's name, `path/to/file.py:name`, or `package.module:name`. Everything that can
be wrong with it is found by `load_function`, before the first sample, and said in plain words.
"""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from common.errors import ConfigError
from services.reward.builtin import BUILTINS
from services.reward.outcome import AttemptError, Outcome, contained, interpret
from services.reward.sample import Sample
from services.reward.signature import Call, recognise

FORMS = f"one of {', '.join(BUILTINS)}, path/to/file.py:name, or package.module:name"


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function with its further arguments. `is_cheap`: it takes microseconds and may run on the loop."""

    name: str
    function: Callable[..., Any]
    call: Call
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_cheap: bool = False

    def score(self, sample: Sample) -> Outcome:
        """Call a plain function.

        Raises:
            AttemptError: it raised, or returned no finite number.
        """
        with contained():
            return interpret(self.function(**self._arguments(sample)))

    async def score_async(self, sample: Sample) -> Outcome:
        """Call an async function; raises as `score` does."""
        with contained():
            return interpret(await self.function(**self._arguments(sample)))

    def _arguments(self, sample: Sample) -> dict[str, Any]:
        arguments = sample.fields()
        if not self.call.takes_extra:
            del arguments["extra_info"]
        return arguments | dict(self.kwargs)


def load_function(reference: str, kwargs: Mapping[str, Any]) -> RewardFunction:
    """Import the function that `reward.function` names, and check that it can be called.

    Raises:
        ConfigError: it does not exist, cannot be imported, or takes other arguments.
    """
    if builtin := BUILTINS.get(reference):
        _require(reference, builtin.needs)
        call = recognise(builtin.function, kwargs, reference)
        return RewardFunction(reference, builtin.function, call, kwargs, builtin.is_cheap)
    origin, colon, name = reference.rpartition(":")
    if not colon or not origin or not name:
        raise ConfigError(f"reward.function {reference!r} {_form_problem(reference)}; expected {FORMS}")
    load = _load_file if origin.endswith(".py") else _load_module
    module = load(origin, reference)
    function = _find(module, name, reference)
    return RewardFunction(reference, function, recognise(function, kwargs, reference), kwargs)


def import_function(reference: str, field_name: str) -> Callable[..., Any]:
    """What `path.py:name` or `package.module:name` names.

    Raises:
        ConfigError: it does not exist or cannot be imported.
    """
    origin, colon, name = reference.rpartition(":")
    if not colon or not origin or not name:
        raise ConfigError(
            f"{field_name} {reference!r} is incomplete; expected path/to/file.py:name or package.module:name"
        )
    load = _load_file if origin.endswith(".py") else _load_module
    return _find(load(origin, reference), name, reference)


def _require(reference: str, modules: tuple[str, ...]) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"reward.function {reference} needs the module {module}, which is not installed: "
                "pip install 'tidemill[reward]'"
            )


def _form_problem(reference: str) -> str:
    if reference.endswith(".py"):
        return f"names no function in the file (write {reference}:compute_score)"
    if ":" in reference:
        return "is incomplete"
    close = difflib.get_close_matches(reference, BUILTINS, n=1)
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
