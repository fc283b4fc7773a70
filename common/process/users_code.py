"""Loads users' code by name: `path/to/file.py:name` or `package.module:name`."""

import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tidemill.common.errors import ConfigError, text_of
from tidemill.common.files import did_you_mean
from tidemill.common.process.programs import import_from_here


def _installed_folders() -> tuple[str, ...]:
    """Folders of code that is not the user's: Python's own, installed packages, and this package."""
    ours = Path(__file__).parents[1]
    folders = {str(ours), str(ours.resolve()), str(ours.parent / "services")}
    folders.add(str(ours.resolve().parent / "services"))
    folders |= {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(f"{folder}{os.sep}" for folder in folders)


INSTALLED_FOLDERS = _installed_folders()


def raised_at(error: BaseException) -> str:
    """The last line of the user's code on the way to where the exception was raised, as `file.py, line 3`.
    Where no line is the user's, the line that raised it; empty without a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    return line_of([frame for frame in frames if is_users_file(frame.filename)] or frames)


def line_of(frames: "list[traceback.FrameSummary] | traceback.StackSummary") -> str:
    """The last of the frames, as `file.py, line 3`."""
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}"


def is_users_file(filename: str) -> bool:
    return not filename.startswith(("<", *INSTALLED_FOLDERS))


def defined_at(function: Callable[..., Any]) -> str:
    """Where a function, what a partial wraps, or an object's `__call__` is defined, as `file.py, line 3`;
    empty where it has no source."""
    while isinstance(function, functools.partial):
        function = function.func
    unwrapped = inspect.unwrap(function)
    code = getattr(unwrapped, "__code__", None) or getattr(type(unwrapped).__call__, "__code__", None)
    return f"{Path(code.co_filename).name}, line {code.co_firstlineno}" if code is not None else ""


def load_users(field: str, reference: str, kind: str = "") -> Any:
    """The object that `reference` names; `field` (of the config) and `kind` (of object) are for messages.

    Raises:
        ConfigError: it does not exist or cannot be imported.
    """
    where = f"{field} {reference}"
    origin, _, name = reference.rpartition(":")
    if not origin or not name:
        raise ConfigError(f"{where}: expected path/to/file.py:name or package.module:name")
    try:
        import_from_here()
        target: Any = _load_file(where, origin) if origin.endswith(".py") else importlib.import_module(origin)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        problem = text_of(error)[:500]
        line = raised_at(error)
        if isinstance(error, SyntaxError):
            problem = error.msg  # the text of the error names the line, too
            file = Path(error.filename or origin)
            if error.lineno is None:
                line = ""
            elif file.is_file():  # else it is a text that `eval` or the like was given
                line = f"{file.name}, line {error.lineno}"
        # Of a module that there is not, the line is Python's own.
        named_line = f" ({line})" if line and not line.startswith("<") else ""
        raise ConfigError(
            f"{where}: importing it failed: {type(error).__name__}: {problem}{named_line}. "
            f"It must be importable by {sys.executable} on every machine that runs it"
        ) from error
    noun = f"{kind} " if kind else ""
    for attribute in name.split("."):
        if not hasattr(target, attribute):
            hint = _hint_at_names(target, attribute)
            raise ConfigError(f"{where}: {origin} has no {noun}{attribute!r}; {hint}")
        target = getattr(target, attribute)
    return target


def _hint_at_names(target: Any, attribute: str) -> str:
    """What a module or class has in place of the attribute: one with a similar name, else its functions."""
    names = [name for name in getattr(target, "__dict__", ()) if not name.startswith("_")]
    close = difflib.get_close_matches(attribute, names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    functions = [name for name in names if callable(getattr(target, name))]
    return f"its functions: {', '.join(functions[:10]) or 'none'}"


def _load_file(where: str, file: str) -> ModuleType:
    path = Path(file)
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        hint = did_you_mean(path.absolute())
        raise ConfigError(
            f"{where}: the file {path.absolute()} {problem} on this machine.{hint} Relative paths start "
            "at the config's folder; other machines need the file at the same path"
        )
    # Modules beside the file can be imported, but never hide installed ones.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    name = f"tidemill_users_{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded  # several names of one file share its state
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
