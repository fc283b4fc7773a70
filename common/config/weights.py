"""The `weights` section: how versions are written, and where workers find them."""

from pydantic import Field

from tidemill.common.config.section import Section


class WeightsConfig(Section):
    """A version is full, or a delta to the one before it. float32 models are always written in full."""

    base_every: int = Field(50, ge=1, le=100_000)
    """Versions from one full one to the next, at most: a worker that joins reads so many deltas. 1 writes
    every version in full. So is one when the deltas since the last full one exceed half of its bytes."""
    max_share_changed: float = Field(0.3, ge=0.0, le=1.0)
    """A version in which a greater share of the values changed is written in full: a delta would not pay."""
    url: str = Field("", pattern=r"^((https?|s3|gs|az)://[^\s?#]+)?$")
    """Where rollout workers read versions: empty, in the run's folder, which all machines share;
    `http://head:8200`, from `python -m tidemill.services.trainer.weight_server` there; `s3://bucket/folder`,
    from an object store to which the trainer publishes (`pip install 'tidemill[objects]'`; keys and endpoint
    in AWS_... variables). The environment's TIDEMILL_WEIGHTS_URL wins."""
