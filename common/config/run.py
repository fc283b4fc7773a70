"""One YAML file per run: its sections, and the checks that span them."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, StringConstraints, field_validator, model_validator

from tidemill.common.config.data import DataConfig
from tidemill.common.config.reward import RewardConfig, failure_value_warnings
from tidemill.common.config.rollout import RolloutConfig, SamplingConfig
from tidemill.common.config.section import PathText, Rules, Section, later, listed
from tidemill.common.config.trainer import TrainerConfig, learning_rate_warnings
from tidemill.common.config.weights import WeightsConfig

if TYPE_CHECKING:
    from tidemill.common.config.images import ImagesConfig
    from tidemill.common.config.servers import ServersConfig
    from tidemill.common.config.sources import SourceConfig
else:
    ImagesConfig = later("images:ImagesConfig")
    ServersConfig = later("servers:ServersConfig")


def is_path(model: str) -> bool:
    """Whether `model.path` can only mean a folder: a hub name is `name` or `owner/name`."""
    return Path(model).is_absolute() or model.startswith((".", "~")) or model.count("/") > 1


class ModelConfig(Section):
    """The starting model: version 0 of the run."""

    path: PathText
    """Folder or hub name of a Hugging Face causal language model with tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the forward pass, in trainer and engine. Master weights are float32."""
    max_model_len: int = Field(2048, ge=8, le=1 << 20)
    """Prompt plus completion, in tokens. Chooses between LongRoPE's short and long positions."""
    special_tokens: Literal["auto", "shown", "hidden", "parted"] = "auto"
    """What rewards see of special tokens in a completion: `shown`, `hidden`, or `parted` into thought and
    answer. `auto`: parted with known marks of a thought, shown where the chat template has others, else
    hidden."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields of the model's config.json to replace, also in exports: `{max_position_embeddings: 32768}`."""

    @field_validator("path")
    @classmethod
    def _weights_are_no_gguf(cls, path: str) -> str:
        if path.lower().endswith(".gguf"):
            raise ValueError(
                "a GGUF file must be converted first: transformers reads it with from_pretrained(FOLDER, "
                "gguf_file=NAME), and save_pretrained of model and tokenizer writes a folder to name here; "
                "examples/instruct/prepare.py does so"
            )
        return path

    @field_validator("overrides")
    @classmethod
    def _overrides_leave_the_model(cls, overrides: dict[str, Any]) -> dict[str, Any]:
        for name in ("model_type", "architectures", "dtype", "torch_dtype"):
            if name in overrides:
                why = "it is model.dtype" if "dtype" in name else "the weights are of the model as it is"
                raise ValueError(f"{name} cannot be overridden: {why}")
        return overrides


class ArchiveConfig(Section):
    """Stream entries become Parquet files in the run's folder before they are trimmed."""

    enabled: bool = True
    """Off, trimmed entries are gone."""
    segment_mb: float = Field(32.0, ge=0.001, le=1024.0)
    """Payload of one file; Redis keeps as much of each stream."""
    keep_gb: float | None = Field(None, ge=0.001, le=1e6)
    """Above this the oldest files are removed; null keeps all."""
    keep_days: float | None = Field(None, ge=0.001, le=1e5)
    """Older files are removed; null keeps all."""
    keep_choices: bool = True
    """Keep what the engine chose beside tokens; off, steps before the oldest checkpoint cannot be
    replayed."""


class StreamsConfig(Section):
    """How messages are leased, retried, trimmed and archived."""

    lease_s: float = Field(30.0, ge=0.2, le=3600.0)
    """A message whose holder is silent so long is taken over; renewed at a third of it."""
    drain_s: float = Field(20.0, ge=0.0, le=3600.0)
    """How long a stopping service works on; it hands the rest back."""
    max_attempts: int = Field(5, ge=1, le=100)
    """Deliveries of a message before it is dead-lettered; a trajectory only if it was alone in its worker at
    last."""
    max_message_mb: int = Field(64, ge=1, le=512)
    """Larger messages are refused undecoded."""
    claim_check_bytes: int = Field(0, ge=0, le=2**40)
    """Training trajectories of so many bytes go to files in the run's folder, or to `claim_check_url`; the
    stream gets pointer, size and digest. 0 is off."""
    claim_check_url: str = Field("", pattern=r"^((s3|gs|az)://[^\s?#]+)?$")
    """An object store: `s3://bucket/folder`."""
    trim: bool = True
    """Trim what is archived and not in flight; without an archive, what no kept checkpoint needs."""
    archive: ArchiveConfig = ArchiveConfig()
    """Parquet files with the entries of the streams."""

    @property
    def trims_commits(self) -> bool:
        """Whether commits leave Redis for the journal alone, at a checkpoint."""
        return self.trim and not self.archive.enabled


class ExpectConfig(Section):
    """Conditions at the end of the run; where one fails, `tidemill up` exits with 1."""

    eval_gain: float | None = Field(None, ge=-1e6, le=1e6)
    """Least gain from the first to the last evaluation."""


ServersName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class RunConfig(Section):
    """A whole run. `--set section.field=value` overrides any field."""

    run_id: str = Field("", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$|^$")
    """Name of the run; empty: the file's folder and the time."""
    seed: int = Field(0, ge=0, le=2**31 - 1)
    """Seeds data order and sampling."""
    model: ModelConfig
    data: DataConfig
    images: ImagesConfig | None = None
    """Pictures in prompts; null: a run of text."""
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    servers: dict[ServersName, ServersConfig] = Field(default_factory=dict, max_length=64)
    """Models behind HTTP, by name."""
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()
    streams: StreamsConfig = StreamsConfig()
    expect: ExpectConfig = ExpectConfig()

    def rules(self) -> Rules:
        yield from self._size_rules()
        yield from self._group_rules()
        for rules in SPANNING_RULES:
            if rules.applies(self):
                yield from rules.of(self)

    @model_validator(mode="after")
    def _spare_truth(self) -> "RunConfig":
        if all(reward.environment for reward in self.reward.named.values()):
            # Frozen sections cannot be given a field: `data` keeps a private note of its own.
            self.data.without_truth()
        return self

    @model_validator(mode="after")
    def _take_images(self) -> "RunConfig":
        if self.images is not None:
            self.data.with_images()  # a private note of `data`, as above
        return self

    @property
    def max_completion_tokens(self) -> int:
        """Most tokens of a completion: of a session all that follows its prompt."""
        environment = self.rollout.environment
        if environment.is_single_turn:
            return self.rollout.sampling.max_tokens
        return environment.max_tokens or self.model.max_model_len

    def group_size(self, source: str) -> int:
        group_size = next((item.group_size for item in self.data.sources if item.name == source), None)
        return group_size or self.trainer.group_size

    @property
    def warnings(self) -> list[str]:
        """Settings that are allowed and may spoil what the run learns, in words."""
        of_rewards = failure_value_warnings(self.reward) if self.generates else ()
        return [*of_rewards, *learning_rate_warnings(self.trainer)]

    @property
    def generates(self) -> bool:
        """Whether completions are sampled and scored; not where there are demonstrations alone, and no
        evaluation."""
        return bool(self.data.prompt_sources or self.data.eval or not self.data.sources)

    @property
    def largest_group_size(self) -> int:
        return max(self._group_sizes().values(), default=1)

    def sampling_of(self, source: "SourceConfig") -> SamplingConfig:
        return SamplingConfig.model_validate(self.rollout.sampling.model_dump() | source.sampling)

    def turn_reward_weight(self, data_source: str, source: str = "") -> float:
        """Weight of the environment's rewards of single turns in training: the sum of the weights of those of
        its rewards that score the source."""
        return sum(
            reward.weight
            for reward in self.reward.named.values()
            if reward.environment and "train" in reward.lanes and reward.scores_source(data_source, source)
        )

    @property
    def shared_turn_s(self) -> float | None:
        """Longest time, in seconds, that an engine keeps GPUs which others share; None without such GPUs."""
        is_shared = self.rollout.trainer_gpus == "turns" or self._shares_gpus()
        return self.rollout.gpu_turn_s if is_shared else None

    def _shares_gpus(self) -> bool:
        return any(server.local and server.local.shares_rollout_gpus for server in self.servers.values())

    def _group_sizes(self) -> dict[str, int]:
        """All group sizes of the run, by the field that sets them."""
        sources = self.data.prompt_sources
        of_sources = {
            f"group_size of source {source.name!r}": source.group_size
            for source in sources
            if source.group_size
        }
        # Not where each source has a size of its own, nor where there are demonstrations alone.
        needs_common = not self.data.sources or len(of_sources) < len(sources)
        return of_sources | ({"trainer.group_size": self.trainer.group_size} if needs_common else {})

    def _size_rules(self) -> Rules:
        prompt = self.data.max_prompt_tokens
        completion = self.rollout.sampling.max_tokens
        if self.generates and prompt + completion > self.model.max_model_len:
            yield (
                f"data.max_prompt_tokens ({prompt}) + rollout.sampling.max_tokens ({completion}) = "
                f"{prompt + completion} exceeds model.max_model_len ({self.model.max_model_len}); lower one "
                "or raise the other"
            )
        trainer = self.trainer
        rollout = self.rollout
        if trainer.groups_per_step % trainer.mini_batches:
            yield (
                f"trainer.mini_batches ({trainer.mini_batches}) must divide trainer.groups_per_step "
                f"({trainer.groups_per_step}): every update takes the same number of groups"
            )
        # With `epochs` in place of `steps`, the number of steps depends on the rows of the data.
        is_length_known = trainer.epochs is None or "steps" in trainer.model_fields_set
        if is_length_known and trainer.optimizer.warmup_steps >= trainer.steps > 1:
            yield (
                f"trainer.optimizer.warmup_steps ({trainer.optimizer.warmup_steps}) must be below "
                f"trainer.steps ({trainer.steps}), or the learning rate never reaches its peak"
            )
        size = rollout.vllm.tensor_parallel_size
        if rollout.gpus and len(rollout.gpus) != rollout.workers * size:
            yield (
                f"rollout.gpus names {len(rollout.gpus)} GPUs, and rollout.workers ({rollout.workers}) times "
                f"rollout.vllm.tensor_parallel_size ({size}) are {rollout.workers * size}"
            )
        if self._shares_gpus() and not rollout.engine_traits.leaves_gpu:
            yield "shares_rollout_gpus needs an engine that sleeps: rollout.engine vllm, on a GPU"
        # Of "held_out/score" it is "held_out", of "score" "".
        dataset = trainer.evaluation.keep_best.rpartition("/")[0]
        if dataset and dataset not in self.data.eval:
            yield (
                f"trainer.evaluation.keep_best names the dataset {dataset!r}; data.eval has "
                f"{listed(self.data.eval)}"
            )

    def _group_rules(self) -> Rules:
        algorithm = self.trainer.algorithm
        traits = algorithm.advantage_traits
        for field, size in self._group_sizes().items():
            if self.reward.min_group_size > size:
                yield (
                    f"reward.min_group_size ({self.reward.min_group_size}) exceeds {field} ({size}): no "
                    "group could ever be trained"
                )
            if size < 2 and algorithm.filter_zero_variance:
                yield f"filter_zero_variance needs {field} of at least 2"
            if size < 2 and traits.compares_siblings and not self.reward.distils_alone:
                yield (
                    f"trainer.algorithm.advantage: {algorithm.advantage} compares completions of a group, "
                    f"and {field} is {size}: every advantage would be 0. Take at least 2, or gae"
                )
            if traits.set_size is not None:
                setting, set_size = traits.set_size(algorithm)
                if set_size > size:
                    yield (
                        f"trainer.algorithm.{setting} ({set_size}) exceeds {field} ({size}): a group holds "
                        "no set of that many completions"
                    )

    @property
    def is_sampling_filtered(self) -> bool:
        """Whether sampling leaves ids out, in some source at least."""
        of_sources = [self.sampling_of(source) for source in self.data.sources]
        return any(sampling.is_filtered for sampling in (self.rollout.sampling, *of_sources))

    @property
    def masked_sources(self) -> frozenset[str]:
        """Sources of `data.train`, "" where it lists none, whose samples come with sampling masks."""
        sampling = {source.name: self.sampling_of(source) for source in self.data.sources}
        by_source = sampling or {"": self.rollout.sampling}
        return frozenset(
            name
            for name, of_source in by_source.items()
            if self.rollout.sampling_masks and of_source.is_filtered
        )


class SpanningRules(NamedTuple):
    """Checks that span sections, for what a run may have: `find_problems` in `rules/<file>.py`, which is read
    where `applies`.

    Example: `teachers` applies where a reward of training is a teacher.
    """

    file: str
    applies: Callable[[RunConfig], bool]

    def of(self, run: RunConfig) -> Rules:
        rules: Rules = importlib.import_module(f"tidemill.common.config.rules.{self.file}").find_problems(run)
        return rules


def _chooses_by_source(run: RunConfig) -> bool:
    return bool(run.data.sources) or any(reward.sources for reward in run.reward.rewards.values())


def _has_environment(run: RunConfig) -> bool:
    rewards = run.reward.named.values()
    return not run.rollout.environment.is_single_turn or any(reward.environment for reward in rewards)


def _has_servers(run: RunConfig) -> bool:
    rewards = run.reward.named.values()
    return bool(run.servers) or any(reward.servers or reward.router for reward in rewards)


SPANNING_RULES = (
    SpanningRules("sources", _chooses_by_source),
    SpanningRules("demonstrations", lambda run: bool(run.data.demonstrations)),
    SpanningRules("environments", _has_environment),
    SpanningRules("comparison", lambda run: run.trainer.algorithm.advantage_traits.compares_rewards),
    SpanningRules("teachers", lambda run: bool(run.reward.teachers)),
    SpanningRules("filters", lambda run: run.is_sampling_filtered),
    SpanningRules("pictures", lambda run: run.images is not None or run.trainer.train_tower),
    SpanningRules("servers", _has_servers),
)
"""In the order in which the first problem is shown."""
