"""Rows that a user's Python code gives: `my_env.py:MyEnv.rows`."""

import runpy
import sys
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

from tidemill.common.data.row_file import Located, in_words
from tidemill.common.errors import ConfigError
from tidemill.common.files import did_you_mean


def read_users_rows(reference: str) -> Iterator[Located]:
    """The rows of `file.py:name`, which is a list of them, or a function that returns them. Raises
    ConfigError: there is no such file, it cannot be run, or a row is no dict."""
    file, _, name = reference.rpartition(":")
    if not Path(file).is_file():
        raise ConfigError(
            f"dataset {reference}: the file {file} does not exist.{did_you_mean(Path(file))} "
            "Relative paths in a config start at the config's folder."
        )
    try:
        folder = str(Path(file).resolve().parent)
        if folder not in sys.path:
            sys.path.append(folder)  # modules beside it can be imported, but never hide installed ones
        rows = attrgetter(name)(SimpleNamespace(**runpy.run_path(file)))
        rows = rows() if callable(rows) else rows
        if not isinstance(rows, Iterable) or isinstance(rows, str | Mapping):
            raise TypeError(f"{name} gives {type(rows).__name__}; expected dicts, one a row")
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise TypeError(f"row {number} is {in_words(row)}; expected a dict with columns")
            yield f"{reference} row {number}", dict(row)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"dataset {reference} cannot be read: {type(error).__name__}: {error}.") from error
