"""Loads users' code by name: `path/to/file.py:name` or `package.module:name`."""

import difflib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from tidemill.common.errors import ConfigError
from tidemill.common.process.programs import import_from_here


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
        found: Any = _load_file(where, origin) if origin.endswith(".py") else importlib.import_module(origin)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        place, line = Path(frames[-1].filename).name, frames[-1].lineno
        if isinstance(error, SyntaxError):
            place, line = Path(error.filename or origin).name, error.lineno
        raise ConfigError(
            f"{where}: importing it failed: {type(error).__name__}: {str(error)[:500]} "
            f"({place}, line {line}). It must be importable by {sys.executable} on every machine that runs it"
        ) from error
    what = f"{kind} " if kind else ""
    for part in name.split("."):
        if not hasattr(found, part):
            defined = [key for key in vars(found) if key[:1] != "_"] if hasattr(found, "__dict__") else []
            close = difflib.get_close_matches(part, defined, n=1)
            known = ", ".join([name for name in defined if callable(getattr(found, name))][:10]) or "none"
            hint = f"did you mean {close[0]!r}?" if close else f"its functions: {known}"
            raise ConfigError(f"{where}: {origin} has no {what}{part!r}; {hint}")
        found = getattr(found, part)
    return found


def _load_file(where: str, file: str) -> ModuleType:
    path = Path(file)
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(
            f"{where}: the file {path.absolute()} {problem} on this machine. Relative paths start "
            "at the config's folder; other machines need the file at the same path"
        )
    # Modules beside the file can be imported, but never hide installed ones.
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)
    name = f"tidemill_users_{path.stem}"
    if (loaded := sys.modules.get(name)) is not None and loaded.__file__ == str(path):
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
