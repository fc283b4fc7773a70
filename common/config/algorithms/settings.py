"""What advantages and losses have in common: a name, a row of the docs, settings of their own."""

from dataclasses import dataclass
from typing import Any, Self

from tidemill.common.config.section import Section


class Settings(Section):
    """Base of the settings that the file of an algorithm adds: its fields become fields of
    `trainer.algorithm`.

    Example: `GaeSettings` has `gae_lambda`, so a config may say `trainer.algorithm.gae_lambda: 0.95`, and
    `GaeSettings.of(algorithm).gae_lambda` is 0.95.
    """

    @classmethod
    def of(cls, algorithm: Any) -> Self:
        """The section of the run, which has these fields among its own."""
        assert isinstance(algorithm, cls), f"{cls.__name__} is in no file of {__package__}"
        return algorithm


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """What the table of algorithms has of each, beside its function and traits."""

    name: str
    """How `trainer.algorithm.advantage` or `loss` names it."""
    summary: str
    """What it computes: its row in docs/algorithms.md."""
    settings: type[Settings] | None = None
    """Settings that nothing else reads, except others of its file."""
