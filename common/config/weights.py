"""The `weights` section: how versions are written, and where workers find them."""

from typing import Literal

from pydantic import Field

from tidemill.common.config.section import Section


class WeightsConfig(Section):
    """A version is full, or a delta to the one before it. float32 models are always written in full."""

    delta: Literal["auto", "off"] = "auto"
    """`auto` writes deltas wherever one pays; `off` writes every version in full."""
    base_every: int = Field(50, ge=1, le=100_000)
    """Versions from one full one to the next, at most: a worker that joins reads so many deltas."""
    max_share_changed: float = Field(0.3, ge=0.0, le=1.0)
    """A version in which a greater share of the values changed is written in full: a delta would not pay."""
    max_chain_share: float = Field(0.5, gt=0.0, le=10.0)
    """When the deltas since the last full version have grown beyond this share of its bytes, the next is
    full."""
    url: str = Field("", pattern=r"^((https?|s3|gs|az)://[^\s?#]+)?$")
    """Where rollout workers read versions: empty, in the run's folder, which all machines share;
    `http://head:8200`, from `python -m tidemill.services.trainer.weight_server` there; `s3://bucket/folder`,
    from an object store to which the trainer publishes (`pip install 'tidemill[objects]'`; keys and endpoint
    in AWS_... variables). The environment's TIDEMILL_WEIGHTS_URL wins."""
