"""Libraries that few tests use and that take a second to import.

Every process of a parallel run reads every file of tests, and most of them run none of those tests.
"""

import importlib
from importlib.util import find_spec
from typing import Any

import pytest


class Late:
    """A module that is imported when something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # pytest looks for wrapped fixtures in all that a module has
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def late(name: str, reason: str = "") -> Any:
    """Call it in the head of a module of tests; they are skipped where the library is not installed."""
    if find_spec(name) is None:
        pytest.skip(reason or f"{name} is not installed", allow_module_level=True)
    return Late(name)
