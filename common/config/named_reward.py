"""One named reward of a run: its kind, its weight, its limits, and what its failure means."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from common.config.judge import JudgeConfig
from common.config.remote import LocalReplicasConfig, RemoteConfig, RoutingConfig
from common.config.reward_model import RewardModelConfig
from common.config.sandbox import SandboxConfig
from common.config.section import Section

KINDS = ("function", "judge", "model", "sandbox")


class RewardLimits(Section):
    """How often and how long a reward is tried, and what it means when all attempts have failed."""

    timeout_s: float = Field(60.0, gt=0.0, le=86_400.0)
    """Longest time for one attempt, in seconds."""
    max_attempts: int = Field(3, ge=1, le=100)
    """Attempts before a score counts as failed; backoff in between."""
    backoff_s: float = Field(0.5, ge=0.0, le=600.0)
    """First pause between attempts, in seconds; doubles, with jitter. A server's Retry-After is respected."""
    on_failure: Literal["drop_sample", "drop_group", "value"] = "drop_sample"
    """What a failed reward means: leave the sample out, replace its group, or `failure_value`."""
    failure_value: float | None = None
    """The reward of a failed sample where `on_failure` is `value`."""

    @model_validator(mode="after")
    def _failure_value_fits(self) -> Self:
        if (self.on_failure == "value") != (self.failure_value is not None):
            raise ValueError(
                "failure_value and on_failure: value belong together; give both, or neither "
                f"(on_failure is {self.on_failure}, failure_value is {self.failure_value})"
            )
        return self


class FunctionConfig(Section):
    """What says how a reward function is called."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the function; of a class, those of its constructor."""
    style: Literal["auto", "verl", "verl_batch", "trl", "verifiers", "class"] = "auto"
    """Whose conventions the function follows; `auto` recognises them by its signature."""
    per: Literal["sample", "group"] = "sample"
    """Whether a function that takes lists (TRL's style, verl's batch manager) is given one sample at a time
    or a whole group at once."""
    tokenizer: str = ""
    """Folder or hub name of what a function is given as `reward_model_tokenizer`."""
    router: str = ""
    """Name of the judge whose router's address a function is given as `reward_router_address`."""


class NamedRewardConfig(RewardLimits, FunctionConfig):
    """One of several rewards; exactly one of `function`, `judge`, `model` and `sandbox` is given.

    Limits and failure policy that are not given are those of the `reward` section.
    """

    weight: float = Field(1.0, ge=-1e6, le=1e6)
    """Its factor in the sum; 0 only logs it."""
    applies_to: list[str] = Field(default_factory=list)
    """Data sources it scores; empty means all. Elsewhere it is left out of the sum."""
    lanes: list[Literal["train", "eval"]] = Field(default=["train", "eval"], min_length=1)
    """Where it scores: `train` (training), `eval` (evaluation) or both; elsewhere the sum is without it."""
    max_concurrent: int | None = Field(None, ge=1, le=65536)
    """Most calls at once, in each worker and each lane: evaluation has as many of its own."""
    cache: bool | None = None
    """Keep results in Redis, so that nothing is paid for twice; null: for judges and models."""
    function: str | None = None
    """A built-in, `path.py:name`, or `package.module:name`."""
    judge: JudgeConfig | None = None
    """A language model that judges."""
    model: RewardModelConfig | None = None
    """A reward model that scores."""
    sandbox: SandboxConfig | None = None
    """Code that is run apart from everything else."""

    @property
    def kind(self) -> str:
        """`function`, `judge`, `model` or `sandbox`."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def local_replicas(self) -> LocalReplicasConfig | None:
        """The servers that `tidemill up` starts for it."""
        return self.remote.local_replicas if self.remote is not None else None

    @property
    def routing(self) -> RoutingConfig | None:
        """How its requests find its servers; None where it has none."""
        return self.remote.routing if self.remote is not None else None

    @property
    def remote(self) -> RemoteConfig | None:
        """What it has in common with others that ask servers."""
        return self.judge or self.model

    @property
    def is_cached(self) -> bool:
        """Whether its results are kept in Redis."""
        return self.kind in ("judge", "model") if self.cache is None else self.cache

    @model_validator(mode="after")
    def _has_one_kind(self) -> Self:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(
                f"a reward needs exactly one of {', '.join(KINDS)}; got {' and '.join(given) or 'none'}"
            )
        return self


class RewardCacheConfig(Section):
    """How much of what rewards returned is kept in Redis; what was not used for longest goes first."""

    max_entries: int = Field(200_000, ge=1, le=100_000_000)
    """Most results kept."""
    max_mb: int = Field(256, ge=1, le=1_048_576)
    """Most memory for them in Redis, in MiB."""
