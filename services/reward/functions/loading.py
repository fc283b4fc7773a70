"""From a name in the config to something that can be called with a sample.

`reward.function` is a built-in's name, `path/to/file.py:name`, or `package.module:name`. Everything that can
be wrong with it is found by `load_function`, before the first sample, and said in plain words.
"""

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from tidemill.common.errors import ConfigError
from tidemill.common.process.programs import import_from_here
from tidemill.services.reward.builtin import BUILTINS
from tidemill.services.reward.functions.reward_function import RewardFunction
from tidemill.services.reward.functions.signature import EXPECTED, Style, recognise, signature_of
from tidemill.services.reward.outcome import AttemptError, users_own

T = TypeVar("T")


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
    if inspect.isclass(function):
        return _object(_made(function, reference, kwargs), reference, kwargs, style, tokenizer)
    if style == "class":
        return _object(function, reference, kwargs, style, tokenizer)
    if _is_factory(function, reference):
        made = _made(function, reference, kwargs)
        return _called(made, reference, kwargs, style, tokenizer)
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


def _made(maker: Callable[..., Any], reference: str, kwargs: Mapping[str, Any]) -> Any:
    """What a class or a factory makes of `kwargs`: once in each process."""
    if inspect.isclass(maker):
        _check_class(maker, reference)
    try:
        inspect.signature(maker).bind(**kwargs)
    except TypeError as error:
        raise ConfigError(f"reward.kwargs does not fit the constructor of {reference}: {error}") from None
    return _importing(lambda: maker(**kwargs), f"the object of {reference}", reference)


def _check_class(found: type, reference: str) -> None:
    has_method = callable(getattr(found, "compute_score", None))
    calls = next((vars(base)["__call__"] for base in found.__mro__ if "__call__" in vars(base)), None)
    takes_tensors = calls is not None and "data" in signature_of(calls, reference).parameters
    if not has_method and (hasattr(found, "run_single") or takes_tensors):
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


def _object(
    found: Any, reference: str, kwargs: Mapping[str, Any], style: str, tokenizer: str
) -> RewardFunction:
    """An object with `compute_score`, or one that is called itself."""
    method = getattr(found, "compute_score", None)
    if not callable(method):
        if style == "class":
            raise ConfigError(f"reward.function {reference} has no compute_score, which style: class needs")
        return _called(found, reference, kwargs, style, tokenizer)
    how = replace(recognise(method, {}, f"{reference}.compute_score", "verl"), style=Style.CLASS)
    post_process = getattr(found, "post_process_scores", None)
    return RewardFunction(reference, method, how, kwargs, is_made=True, post_process=post_process)


def _called(
    made: Any, reference: str, kwargs: Mapping[str, Any], style: str, tokenizer: str
) -> RewardFunction:
    if not callable(made):
        raise ConfigError(f"reward.function {reference} made {type(made).__name__}, which cannot be called")
    how = recognise(made, {}, reference, style)
    return RewardFunction(reference, made, how, kwargs, tokenizer=tokenizer, is_made=True)


def _is_factory(function: Callable[..., Any], reference: str) -> bool:
    """Whether it says of itself that it returns a function, as TRL's `get_soft_overlong_punishment` does."""
    return "Callable" in str(signature_of(function, reference).return_annotation)


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
        with users_own():
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
