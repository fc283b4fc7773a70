"""The `reward` section: how trajectories are scored, and what a failure means.

`function` is the short way to one reward; `rewards` names several, of any kind. Either way `named` has them
all, complete.
"""

from typing import Any

from pydantic import Field, field_validator, model_validator

from common.config.named_reward import FunctionConfig, NamedRewardConfig, RewardCacheConfig, RewardLimits

DEFAULT_FUNCTION = "gsm8k"


class RewardConfig(RewardLimits, FunctionConfig):
    """How the reward service turns trajectories into scores."""

    function: str | None = None
    """A built-in (`gsm8k`, the default, `math`, `exact_match`), `path.py:name`, or `package.module:name`."""
    rewards: dict[str, NamedRewardConfig] = Field(default_factory=dict, max_length=64)
    """Several rewards by name, in place of `function`; the reward is their weighted sum."""
    group: str | None = None
    """What is done to the rewards of a training group when all are there: `rank`, `normalise`,
    `replace_failures_by_mean`, or `path.py:name`."""
    group_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the group function."""
    cache: RewardCacheConfig = RewardCacheConfig()
    """Bounds of the cache in Redis."""
    workers: int = Field(1, ge=0, le=1024)
    """Reward processes that `tidemill up` starts on this machine."""
    max_in_flight: int = Field(256, ge=1, le=65536)
    """Trajectories one worker scores at once; a published score frees a slot."""
    processes: int = Field(2, ge=1, le=256)
    """Processes that run plain (not async) functions, so that they never block the loop."""
    threads: int = Field(16, ge=1, le=256)
    """Most calls that each of them runs at once, in threads, where the function is measured to wait more than
    it computes; 1 runs one at a time."""
    min_group_size: int = Field(2, ge=1, le=4096)
    """With `drop_sample`: a group with fewer scored samples is replaced."""
    drain_s: float = Field(8.0, ge=0.0, le=3600.0)
    """Grace period of a stopping worker, in seconds; what is not scored by then is handed back."""
    delay_s: tuple[float, float] | None = None
    """Benchmarks only: sleep uniformly between these seconds before scoring."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """Port of /metrics and /healthz; 0 takes a free one."""

    @property
    def named(self) -> dict[str, NamedRewardConfig]:
        """Every reward of the run by name; `function` goes by its own name, under this section's limits."""
        if self.rewards:
            return self.rewards
        shared = {
            name: getattr(self, name)
            for name in NamedRewardConfig.model_fields
            if name in RewardConfig.model_fields and name != "cache"
        }
        assert self.function is not None  # `_fill` sees to it
        return {self.function.rpartition(":")[2]: NamedRewardConfig(**shared)}

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, tree: Any) -> Any:
        """The default function where none is named, and this section's limits where a reward has none."""
        if not isinstance(tree, dict):
            return tree
        rewards = tree.get("rewards")
        if not rewards:
            return tree if tree.get("function") else {**tree, "function": DEFAULT_FUNCTION}
        if not isinstance(rewards, dict):
            return tree
        limits = {name: tree[name] for name in RewardLimits.model_fields if name in tree}
        return {**tree, "rewards": {name: _with_limits(reward, limits) for name, reward in rewards.items()}}

    @field_validator("rewards")
    @classmethod
    def _names_are_short(cls, rewards: dict[str, NamedRewardConfig]) -> dict[str, NamedRewardConfig]:
        for name in rewards:
            if not name.replace("_", "").replace("-", "").isalnum() or len(name) > 64:
                raise ValueError(
                    f"a reward is called {name!r}; expected at most 64 letters, digits, '_' and '-'"
                )
        return rewards

    @model_validator(mode="after")
    def _is_one_way(self) -> "RewardConfig":
        if self.rewards and self.function:
            raise ValueError("give either function, for one reward, or rewards, for several by name")
        if self.rewards:
            for name in FunctionConfig.model_fields:
                if getattr(self, name) != FunctionConfig.model_fields[name].get_default(
                    call_default_factory=True
                ):
                    raise ValueError(f"{name} belongs to one of the rewards: rewards.<name>.{name}")
        for lane, what in (("train", "training"), ("eval", "evaluation")):
            if not any(lane in reward.lanes for reward in self.rewards.values()) and self.rewards:
                raise ValueError(f"no reward is for {what}: give one of them lanes with {lane} in it")
        if self.group_kwargs and not self.group:
            raise ValueError("group_kwargs are given, but no group function")
        return self

    @field_validator("delay_s")
    @classmethod
    def _delay_is_a_range(cls, delay_s: tuple[float, float] | None) -> tuple[float, float] | None:
        if delay_s is not None and not 0.0 <= delay_s[0] <= delay_s[1] <= 3600.0:
            raise ValueError("delay_s must be two numbers [shortest, longest] from 0 to 3600")
        return delay_s


def _with_limits(reward: Any, limits: dict[str, Any]) -> Any:
    if not isinstance(reward, dict):
        return reward
    if "on_failure" in reward or "failure_value" in reward:
        limits = {name: value for name, value in limits.items() if "fail" not in name}
    return {**limits, **reward}
