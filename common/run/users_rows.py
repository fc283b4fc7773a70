"""Rows that Python code has: `my_env.py:MyEnv.rows` names a list of them, or a function that returns them.

So an environment may own its data.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tidemill.common.errors import ConfigError
from tidemill.common.process.users_code import load_users

_REFERENCE = re.compile(r"\.py:[A-Za-z_][\w.]*$")


def is_users_rows(path: str) -> bool:
    """Whether it names something in a Python file, and no file of rows."""
    return _REFERENCE.search(path) is not None


def read_users_rows(reference: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each row stands, and its columns.

    Raises:
        ConfigError: it does not exist, cannot be imported, fails, or gives something else.
    """
    found = load_users("data", reference, "rows")
    try:
        rows = found() if callable(found) else found
        if not isinstance(rows, Iterable) or isinstance(rows, str | Mapping):
            raise ConfigError(f"data {reference} is {type(rows).__name__}; expected dicts, one a row.")
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise ConfigError(f"{reference} row {number} is {type(row).__name__}; expected a dict.")
            yield f"{reference} row {number}", dict(row)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"data {reference} failed: {type(error).__name__}: {error}") from error
