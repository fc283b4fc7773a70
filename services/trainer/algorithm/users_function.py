"""Functions of the user's own: `path/to/file.py:name` or `package.module:name`, loaded and called.

Whatever such code raises becomes a ConfigError that names it: `contained` is the only place of this service
where a broad `except` stands for it. A mistake is found when the trainer starts, by a call with made-up
numbers, and not after the first hour of rollouts.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from common.errors import ConfigError
from common.process.programs import import_from_here


@contextmanager
def contained(field: str) -> Iterator[None]:
    """Turn whatever the block raises into a ConfigError about `field`."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        where = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
        raise ConfigError(f"{field}: {type(error).__name__}: {str(error)[:500]}{where}") from error


def load_users_function(field: str, reference: str, known: Collection[str]) -> Callable[..., Any]:
    """The function that `reference` names; `field` is the config's field, for messages.

    It is called by keyword with those of the `known` arguments that it takes.

    Raises:
        ConfigError: it does not exist, cannot be imported, or takes other arguments.
    """
    field = f"{field} {reference}"
    origin, _, name = reference.rpartition(":")
    with contained(field):
        import_from_here()
        module = _load_file(field, origin) if origin.endswith(".py") else importlib.import_module(origin)
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"{field}: {module.__name__} has no function {name!r}")
    taken = _arguments(field, function, known)

    def call(**arguments: Any) -> Any:
        with contained(field):
            return function(**{key: value for key, value in arguments.items() if key in taken})

    call.__dict__["taken"] = taken
    return call


def taken_by(function: Callable[..., Any]) -> frozenset[str]:
    """The arguments that a loaded function takes."""
    return frozenset(function.__dict__["taken"])


def _arguments(field: str, function: Callable[..., Any], known: Collection[str]) -> frozenset[str]:
    """Names among `known` that the function takes; the first of them is required."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return frozenset(known)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    unknown = [p.name for p in parameters if p.name not in known and p.default is p.empty]
    if unknown or next(iter(known)) not in names:
        raise ConfigError(
            f"{field} takes ({', '.join(p.name for p in parameters)}); expected arguments among "
            f"({', '.join(known)}), the first of them always. They are passed by keyword, so the names matter"
        )
    return frozenset(names & set(known))


def _load_file(field: str, file: str) -> ModuleType:
    path = Path(file)
    if not path.is_file():
        raise ConfigError(
            f"{field}: the file {path.absolute()} does not exist on this machine. Relative paths start at "
            "the config's folder; the trainer's machine needs the file at the same path"
        )
    # Modules beside the file can be imported, but never hide installed ones.
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)
    name = f"tidemill_algorithm_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module
