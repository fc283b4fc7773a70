"""The `reward` section: how trajectories are scored, and what a failure means."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from common.config.section import Section


class RewardConfig(Section):
    """How the reward service turns trajectories into scores."""

    function: str = "gsm8k"
    """A built-in (`gsm8k`, `math`, `exact_match`) or `path.py:name`, or `package.module:name`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the function."""
    workers: int = Field(1, ge=0, le=1024)
    """Reward processes that `tidemill up` starts on this machine."""
    max_in_flight: int = Field(256, ge=1, le=65536)
    """Trajectories one worker scores at once; a published score frees a slot."""
    processes: int = Field(2, ge=1, le=256)
    """Processes that run plain (not async) functions, so that they never block the loop."""
    timeout_s: float = Field(60.0, gt=0.0, le=86_400.0)
    """Longest time for one attempt, in seconds."""
    max_attempts: int = Field(3, ge=1, le=100)
    """Attempts before a score counts as failed; backoff in between."""
    backoff_s: float = Field(0.5, ge=0.0, le=600.0)
    """First pause between attempts, in seconds; doubles, with jitter."""
    on_failure: Literal["drop_sample", "drop_group", "value"] = "drop_sample"
    """What a failed score means to its group. Never a silent zero."""
    failure_value: float | None = None
    """The reward of a failed sample where `on_failure` is `value`."""
    min_group_size: int = Field(2, ge=1, le=4096)
    """With `drop_sample`: a group with fewer scored samples is replaced."""
    drain_s: float = Field(8.0, ge=0.0, le=3600.0)
    """Grace period of a stopping worker, in seconds; what is not scored by then is handed back."""
    delay_s: tuple[float, float] | None = None
    """Benchmarks only: sleep uniformly between these seconds before scoring."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """Port of /metrics and /healthz; 0 takes a free one."""

    @field_validator("delay_s")
    @classmethod
    def _delay_is_a_range(cls, delay_s: tuple[float, float] | None) -> tuple[float, float] | None:
        if delay_s is not None and not 0.0 <= delay_s[0] <= delay_s[1] <= 3600.0:
            raise ValueError("delay_s must be two numbers [shortest, longest] from 0 to 3600")
        return delay_s

    @model_validator(mode="after")
    def _failure_value_fits(self) -> "RewardConfig":
        if (self.on_failure == "value") != (self.failure_value is not None):
            raise ValueError(
                "failure_value and on_failure: value belong together; give both, or neither "
                f"(on_failure is {self.on_failure}, failure_value is {self.failure_value})"
            )
        return self
