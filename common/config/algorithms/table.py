"""Algorithms by name, each read when its name is asked for.

A file in `advantages/` or `losses/` has the algorithm of its own name, and is in the table because it is
there. Those with settings of their own are in `with_settings/`: as every config has these settings, every
process reads these files. The config's checks, the trainer and docs/algorithms.md read the table. `PRESETS`
and `CORRECTIONS` are defaults by the names of published algorithms.
"""

import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from tidemill.common.config.algorithms import advantages, losses, with_settings
from tidemill.common.config.algorithms.advantage import Advantage
from tidemill.common.config.algorithms.loss import Loss
from tidemill.common.config.algorithms.settings import Algorithm, Settings
from tidemill.common.config.section import read_table

T = TypeVar("T", bound=Algorithm)


class ByName(Mapping[str, T], Generic[T]):
    """The algorithms of a folder, and `read`, those that were read already.

    Example: `LOSSES["cispo"]` reads `losses/cispo.py`, and `"gspo" in LOSSES` reads nothing.
    """

    def __init__(self, folder: ModuleType, read: Iterable[T]) -> None:
        self._folder = folder
        self._read = {algorithm.name: algorithm for algorithm in read}
        self._names = sorted([*_names(folder), *self._read])

    def __getitem__(self, name: str) -> T:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._read:
            for algorithm in _algorithms(self._folder, name):
                self._read[algorithm.name] = algorithm
            assert name in self._read, f"{self._folder.__name__}.{name} has another name for its algorithm"
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _names(folder: ModuleType) -> list[str]:
    """The names of the folder's files, sorted."""
    return sorted(file.name for file in pkgutil.iter_modules(folder.__path__))


def _algorithms(folder: ModuleType, name: str) -> tuple[Any, ...]:
    """The advantages or losses in a file."""
    file = importlib.import_module(f"{folder.__name__}.{name}")
    return (*getattr(file, "ADVANTAGES", ()), *getattr(file, "LOSSES", ()))


def _with_settings() -> list[Any]:
    """The advantages and losses of `with_settings/`, in order."""
    algorithms: list[Any] = []
    for name in _names(with_settings):
        algorithms += _algorithms(with_settings, name)
    return algorithms


_READ = _with_settings()
ADVANTAGES = ByName[Advantage](advantages, [item for item in _READ if isinstance(item, Advantage)])
LOSSES = ByName[Loss](losses, [item for item in _READ if isinstance(item, Loss)])


def _settings() -> tuple[type[Settings], ...]:
    """The settings of all of them, each once."""
    classes: dict[type[Settings], None] = {}
    # Those of advantages first: the order of settings in recorded configs follows from it.
    for algorithm in sorted(_READ, key=lambda algorithm: isinstance(algorithm, Loss)):
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
