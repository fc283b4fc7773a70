"""The `weights` section: how versions are written, and where workers find them."""

import os

from pydantic import Field

from tidemill.common.config.section import Section

URL_VARIABLE = "TIDEMILL_WEIGHTS_URL"
"""Variable with an address that wins over `url`."""


class WeightsConfig(Section):
    """A version is full, or a delta to the one before it. float32 models are always written in full."""

    base_every: int = Field(50, ge=1, le=100_000)
    """Most versions between full ones; 1: all are full. A version after deltas of half of the full bytes is
    full, too."""
    max_share_changed: float = Field(0.3, ge=0.0, le=1.0)
    """A version with a larger share of changed values is written in full."""
    url: str = Field("", pattern=r"^((https?|s3|gs|az)://[^\s?#]+)?$")
    """Where rollout workers read versions; empty: the run's folder; `http://head:8200`, from
    `python -m tidemill.services.trainer.weight_server`; `s3://bucket/folder`. TIDEMILL_WEIGHTS_URL wins."""

    @property
    def address(self) -> str:
        """That of the environment, else `url`."""
        return os.environ.get(URL_VARIABLE) or self.url
