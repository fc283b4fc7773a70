"""The `reward` section: how trajectories are scored, and what a failure means.

`function` is the short way to one reward; `rewards` names several, of any kind. Either way `named` has them
all, complete.
"""

from collections.abc import Iterator
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from tidemill.common.config.section import PathText, Rules, Section, later

if TYPE_CHECKING:
    from tidemill.common.config.reward_kinds import (
        JudgeConfig,
        RewardModelConfig,
        SandboxConfig,
        TeacherConfig,
    )
else:
    JudgeConfig = later("reward_kinds:JudgeConfig")
    RewardModelConfig = later("reward_kinds:RewardModelConfig")
    SandboxConfig = later("reward_kinds:SandboxConfig")
    TeacherConfig = later("reward_kinds:TeacherConfig")

KINDS = ("function", "judge", "model", "sandbox", "environment", "teacher")


class RewardLimits(Section):
    """How often and how long a reward is tried, and what happens when all attempts have failed."""

    timeout_s: float = Field(60.0, gt=0.0, le=86_400.0)
    """Longest attempt."""
    max_attempts: int = Field(3, ge=1, le=100)
    """Attempts before a score has failed."""
    backoff_s: float = Field(0.5, ge=0.0, le=600.0)
    """First pause between attempts; doubles, with jitter. Retry-After is respected."""
    on_failure: Literal["drop_sample", "drop_group"] | float = "drop_sample"
    """A failed reward: leave the sample out, replace its group, or this number as its reward."""

    @property
    def failure_value(self) -> float | None:
        """The reward of a failed sample; None where it has none."""
        return self.on_failure if isinstance(self.on_failure, float) else None


class FunctionConfig(Section):
    """How a reward function is called."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the function, or of a class's constructor."""
    style: Literal["auto", "verl", "verl_batch", "trl", "verifiers", "class"] = "auto"
    """Whose conventions the function follows; `auto` looks at its signature."""
    per: Literal["sample", "group"] = "sample"
    """What a function that takes lists gets in one call: one sample, or a whole group."""
    tokenizer: PathText = ""
    """Folder or hub name of the tokenizer for the argument `reward_model_tokenizer`."""
    router: str = ""
    """Name of the servers behind the argument `reward_router_address`."""


class NamedRewardConfig(RewardLimits, FunctionConfig):
    """Exactly one of `function`, `judge`, `model`, `sandbox`, `environment` and `teacher` is given."""

    weight: float = Field(1.0, ge=-1e6, le=1e6)
    """Factor in the sum; 0 only logs it. For a teacher: coefficient of its reverse KL."""
    applies_to: list[str] = Field(default_factory=list)
    """Values of `data_source` that it scores; empty means all."""
    sources: list[str] = Field(default_factory=list)
    """Sources of `data.train`, and evaluation sets; empty means all."""
    lanes: list[Literal["train", "eval"]] = Field(default=["train", "eval"], min_length=1)
    """Training, evaluation or both."""
    max_concurrent: int | None = Field(None, ge=1, le=65536)
    """Most calls at once, in each worker and lane."""
    cache: bool | None = None
    """Keep results in Redis; null: those of judges, models and teachers."""
    function: PathText | None = None
    """A built-in, `path.py:name`, or `package.module:name`."""
    judge: JudgeConfig | None = None
    """A language model that judges."""
    model: RewardModelConfig | None = None
    """A reward model that scores."""
    sandbox: SandboxConfig | None = None
    """Runs code that the model wrote."""
    environment: Literal[True] | None = None
    """The environment's reward of the session, else the sum of its turns."""
    teacher: TeacherConfig | None = None
    """A model whose logprobs are learned from; adds nothing to the sum."""

    @property
    def kind(self) -> str:
        """`function`, `judge`, `model`, `sandbox`, `environment` or `teacher`."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def servers(self) -> str:
        """Name of the servers that it asks itself; empty where it asks none."""
        asking = self.judge or self.model or self.teacher
        return asking.servers if asking is not None else ""

    def scores_source(self, data_source: str, source: str = "") -> bool:
        """Whether it scores samples of this data source, and of this source of `data.train`."""
        is_of_source = not self.sources or source in self.sources
        return is_of_source and (not self.applies_to or data_source in self.applies_to)

    @property
    def is_cached(self) -> bool:
        """Whether its results are kept in Redis."""
        return self.kind in ("judge", "model", "teacher") if self.cache is None else self.cache

    def rules(self) -> Rules:
        kinds = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            yield f"a reward needs exactly one of {', '.join(KINDS)}; got {' and '.join(kinds) or 'none'}"
        if self.teacher and self.failure_value is not None:
            yield "on_failure: a number cannot stand for a teacher's logprobs; take drop_sample or drop_group"
        if self.teacher and self.weight < 0:
            yield f"the weight of a teacher is at least 0, got {self.weight:g}; 0 only measures it"


DEFAULT_FUNCTION = "gsm8k"
RewardName = Annotated[str, StringConstraints(pattern=r"^[\w-]{1,64}$")]
Delay = Annotated[float, Field(ge=0.0, le=3600.0)]


class RewardConfig(RewardLimits, FunctionConfig):
    """How trajectories are scored."""

    function: PathText | None = None
    """`gsm8k` (the default), `math`, `exact_match`, `path.py:name`, or `package.module:name`."""
    rewards: dict[RewardName, NamedRewardConfig] = Field(default_factory=dict, max_length=64)
    """Several rewards by name, in place of `function`; their weighted sum is the reward."""
    group: PathText | None = None
    """Changes the rewards of a training group: `rank`, `normalise`, `replace_failures_by_mean`, or
    `path.py:name`."""
    group_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the group function."""
    cache_mb: int = Field(256, ge=1, le=1_048_576)
    """Memory in Redis for kept results; the least recently used go first."""
    workers: int = Field(1, ge=0, le=1024)
    """Processes that `tidemill up` starts on this machine."""
    max_in_flight: int = Field(256, ge=1, le=65536)
    """Trajectories that a worker scores at once."""
    processes: int = Field(2, ge=1, le=256)
    """Processes of a worker for plain (not async) functions."""
    threads: int = Field(16, ge=1, le=256)
    """Most calls at once in each process, for functions that mostly wait."""
    min_group_size: int = Field(2, ge=1, le=4096)
    """With `drop_sample`: groups with fewer scored samples are replaced."""
    delay_s: tuple[Delay, Delay] | None = None
    """Benchmarks only: range of a random delay before scoring, in seconds."""

    @property
    def named(self) -> dict[str, NamedRewardConfig]:
        """Every reward of the run by name; `function` goes by its own name, under this section's limits."""
        if self.rewards:
            return self.rewards
        assert self.function is not None  # `_fill` sees to it
        name = self.function.rpartition(":")[2]
        shared_fields = NamedRewardConfig.model_fields.keys() & RewardConfig.model_fields.keys()
        fields = {field: getattr(self, field) for field in shared_fields}
        return {name: NamedRewardConfig(**fields)}

    @property
    def teachers(self) -> dict[str, NamedRewardConfig]:
        """The rewards that are teachers of training, by name."""
        return {name: r for name, r in self.rewards.items() if r.teacher and "train" in r.lanes}

    @property
    def distils_alone(self) -> bool:
        """Whether only teachers count in training."""
        counted = [reward for reward in self.rewards.values() if "train" in reward.lanes and reward.weight]
        return bool(counted) and all(reward.teacher for reward in counted)

    def asking(self, servers: str) -> dict[str, NamedRewardConfig]:
        """The rewards that ask these servers, by name."""
        return {name: reward for name, reward in self.named.items() if reward.servers == servers}

    def teacher_of(self, data_source: str, source: str = "") -> tuple[str, NamedRewardConfig] | None:
        """Name and config of the teacher of a data source in training; None where it has none."""
        for name, teacher in self.teachers.items():
            if teacher.scores_source(data_source, source):
                return name, teacher
        return None

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
        filled = {}
        for name, reward in rewards.items():
            # What is no section is refused later, by name.
            filled[name] = {**limits, **reward} if isinstance(reward, dict) else reward
        return {**tree, "rewards": filled}

    def rules(self) -> Rules:
        if self.rewards and self.function:
            yield "give either function, for one reward, or rewards, for several by name"
        default = FunctionConfig()
        for name in FunctionConfig.model_fields:
            if self.rewards and getattr(self, name) != getattr(default, name):
                yield f"{name} belongs to one of the rewards: rewards.<name>.{name}"
        for lane, purpose in (("train", "training"), ("eval", "evaluation")):
            if self.rewards and not any(lane in reward.lanes for reward in self.rewards.values()):
                yield f"no reward is for {purpose}: give one of them lanes with {lane} in it"
        for (name, teacher), (second_name, second) in combinations(self.teachers.items(), 2):
            shared = set(teacher.applies_to) & set(second.applies_to)
            if shared or not teacher.applies_to or not second.applies_to:
                yield (
                    f"rewards.{name} and rewards.{second_name} are both teachers of "
                    f"{', '.join(sorted(shared)) or 'all data sources'}, and a sample has one teacher: give "
                    "each data sources of its own in applies_to"
                )
        if self.group_kwargs and not self.group:
            yield "group_kwargs are given, but no group function"


def failure_value_warnings(config: RewardConfig) -> Iterator[str]:
    """What a number as `on_failure` does to a run, for each reward of training that has one."""
    for name, reward in config.named.items():
        value = reward.failure_value
        if value is None or "train" not in reward.lanes or not reward.weight:
            continue
        field = f"reward.rewards.{name}.on_failure" if config.rewards else "reward.on_failure"
        yield (
            f"{field} is {value:g}: a sample whose reward fails is trained as if it had earned {value:g}, "
            "also where a timeout or an outage hits a right answer. The model learns to avoid what fails. "
            "drop_sample leaves it out, drop_group replaces its group (docs/rewards.md)"
        )
