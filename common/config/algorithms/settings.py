"""The settings that the file of an algorithm adds to `trainer.algorithm`."""

from typing import Any, Self

from tidemill.common.config.section import Section


class Settings(Section):
    """Base of such settings: its fields become fields of `trainer.algorithm`.

    Example: `GaeSettings` has `gae_lambda`, so a config may say `trainer.algorithm.gae_lambda: 0.95`, and
    `GaeSettings.of(algorithm).gae_lambda` is 0.95.
    """

    @classmethod
    def of(cls, algorithm: Any) -> Self:
        """The section of the run, which has these fields among its own."""
        assert isinstance(algorithm, cls), f"{cls.__name__} is in no file of {__package__}"
        return algorithm
