"""Rows that Python code has: `my_env.py:MyEnv.rows` names a list of them, or a function that returns them.

So an environment may own its data.
"""

import re
import runpy
import sys
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tidemill.common.errors import ConfigError

_REFERENCE = re.compile(r"\.py:[A-Za-z_][\w.]*$")


def is_users_rows(path: str) -> bool:
    """Whether it names something in a Python file, and no file of rows."""
    return _REFERENCE.search(path) is not None


def read_users_rows(reference: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each row stands, and its columns.

    Raises:
        ConfigError: it does not exist, cannot be imported, fails, or gives something else.
    """
    file, _, name = reference.rpartition(":")
    if not Path(file).is_file():
        raise ConfigError(
            f"dataset {reference}: the file {file} does not exist. Relative paths in a config "
            "start at the config's folder."
        )
    try:
        rows = _found(file, name)
        if not isinstance(rows, Iterable) or isinstance(rows, str | Mapping):
            raise TypeError(f"{name} gives {type(rows).__name__}; expected dicts, one a row")
        for number, row in enumerate(rows):
            yield f"{reference} row {number}", dict(row)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"dataset {reference} cannot be read: {type(error).__name__}: {error}.") from error


def _found(file: str, name: str) -> Any:
    """What the name stands for in the file, called if it can be."""
    if (folder := str(Path(file).resolve().parent)) not in sys.path:
        sys.path.append(folder)  # modules beside the file can be imported, but never hide installed ones
    found = attrgetter(name)(SimpleNamespace(**runpy.run_path(file)))
    return found() if callable(found) else found
