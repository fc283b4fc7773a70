"""Algorithms by name. A file in `advantages/` or `losses/` is in the table because it is there.

The config's checks, the trainer and docs/algorithms.md read it. `PRESETS` and `CORRECTIONS` are defaults by
the names of published algorithms.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from tidemill.common.config.algorithms import advantages, losses
from tidemill.common.config.algorithms.advantage import Advantage
from tidemill.common.config.algorithms.loss import Loss
from tidemill.common.config.algorithms.settings import Algorithm, Settings
from tidemill.common.config.section import read_table


def _modules(folder: ModuleType) -> Iterator[ModuleType]:
    """The files of a folder, by name."""
    # Sorted: the order of settings in recorded configs, and of rows in the docs, follows from it.
    for file in sorted(pkgutil.iter_modules(folder.__path__), key=lambda file: file.name):
        yield importlib.import_module(f"{folder.__name__}.{file.name}")


def _advantages() -> dict[str, Advantage]:
    return {advantage.name: advantage for file in _modules(advantages) for advantage in file.ADVANTAGES}


def _losses() -> dict[str, Loss]:
    return {loss.name: loss for file in _modules(losses) for loss in file.LOSSES}


ADVANTAGES = _advantages()
LOSSES = _losses()


def _settings() -> tuple[type[Settings], ...]:
    """The settings of all of them, each once, in order."""
    classes: dict[type[Settings], None] = {}
    algorithms: list[Algorithm] = [*ADVANTAGES.values(), *LOSSES.values()]
    for algorithm in algorithms:
        if algorithm.settings is not None:
            classes[algorithm.settings] = None
    return tuple(classes)


SETTINGS = _settings()

PRESETS: dict[str, dict[str, Any]] = read_table("presets")
"""Defaults of published algorithms for the fields of `trainer.algorithm`."""
CORRECTIONS: dict[str, dict[str, Any]] = read_table("corrections")
"""Defaults by the names of verl's rollout correction, for the fields about ratios."""

# A `Literal` of names that are only known when the files are read: mypy checks them as text, pydantic each.
if TYPE_CHECKING:
    Preset = str
    Correction = str
else:
    Preset = Literal[tuple(PRESETS)]
    Correction = Literal[tuple(CORRECTIONS)]
