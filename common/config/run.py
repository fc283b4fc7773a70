"""One YAML file per run: its sections, and the checks that span them."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from common.config.reward import RewardConfig
from common.config.rollout import RolloutConfig
from common.config.section import Section
from common.config.trainer import TrainerConfig


def is_path(model: str) -> bool:
    """Whether `model.path` can only mean a folder: a hub name is `name` or `owner/name`."""
    return Path(model).is_absolute() or model.startswith((".", "~")) or model.count("/") > 1


class ModelConfig(Section):
    """The starting model: version 0 of the run."""

    path: str
    """Folder of a Hugging Face causal language model with its tokenizer (or a hub name)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the forward pass, in the trainer and in the engine. Master weights are float32."""
    max_model_len: int = Field(2048, ge=8, le=1 << 20)
    """Prompt plus completion, in tokens; at most the model's context."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields of the model's config.json that this run replaces, such as `{rope_scaling: {rope_type: yarn,
    factor: 4.0}, max_position_embeddings: 32768}`: in the trainer, in engines, and in exports."""

    @field_validator("overrides")
    @classmethod
    def _overrides_leave_the_model(cls, overrides: dict[str, Any]) -> dict[str, Any]:
        for name in ("model_type", "architectures", "dtype", "torch_dtype"):
            if name in overrides:
                why = "it is model.dtype" if "dtype" in name else "the weights are of the model as it is"
                raise ValueError(f"{name} cannot be overridden: {why}")
        return overrides


class DataConfig(Section):
    """Datasets are JSONL or Parquet, in verl's columns or in GSM8K's `question` and `answer`."""

    train: str | list[str]
    """File or files with the training prompts."""
    eval: dict[str, str] = Field(default_factory=dict)
    """Evaluation sets by name; each is scored by the rewards of the run whose `lanes` hold `eval`."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    system_prompt: str = ""
    """Put before the prompt where the tokenizer has a chat template."""
    prompt_suffix: str = ""
    """Appended to every prompt text, for instance the request for an answer format."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """`auto` applies the tokenizer's chat template where it has one."""
    max_prompt_tokens: int = Field(1024, ge=1, le=1 << 20)
    """A longer prompt is an error that names its row; see `overlong_prompts`."""
    overlong_prompts: Literal["error", "drop", "left", "right", "middle"] = "error"
    """`drop` leaves out prompts above the limit; `left`, `right` and `middle` cut tokens off there, with the
    chat template in place. How many is logged."""
    max_rows: int | None = Field(None, ge=1)
    """Take only the first rows of the training set; null takes all. Overlong prompts count among them."""
    shuffle: bool = True
    """Visit the rows in a new seeded order each epoch."""


class ArchiveConfig(Section):
    """Entries are written to Parquet files in the run's folder before they are trimmed from Redis."""

    enabled: bool = True
    """Trim only what is archived, and archive the rest at the end; needs `python -m services.jobs RUN_ID`,
    which `tidemill up` starts. Off, trimmed entries are gone."""
    segment_mb: float = Field(32.0, ge=0.001, le=1024.0)
    """Payload of one file, in MiB. Redis keeps as much of each stream beyond what the run needs."""
    keep_gb: float | None = Field(None, ge=0.001, le=1e6)
    """Most GiB of the archive's files: the oldest entries beyond it are removed. Null keeps all."""
    keep_days: float | None = Field(None, ge=0.001, le=1e5)
    """Files whose newest entry is older are removed. Null keeps all."""


class StreamsConfig(Section):
    """How messages are held, retried and kept."""

    lease_s: float = Field(30.0, ge=0.2, le=3600.0)
    """A message whose holder is silent this long is taken over; holders renew at a third of it."""
    drain_s: float = Field(20.0, ge=0.0, le=3600.0)
    """How long a stopping service finishes what it holds before it hands the rest back."""
    max_attempts: int = Field(5, ge=1, le=100)
    """Deliveries of one message before it goes to the dead-letter stream; a trajectory must have been alone
    in its worker in the last ones, so that it is not buried for what another one did."""
    max_message_mb: int = Field(64, ge=1, le=512)
    """Larger messages are refused before they are decoded, in MiB."""
    trim: bool = True
    """Trim the streams below what the last durable checkpoint needs."""
    archive: ArchiveConfig = ArchiveConfig()
    """Files of what was in the streams."""


class ExpectConfig(Section):
    """What must hold at the end of the run; `tidemill up` exits with 1 otherwise."""

    eval_gain: float | None = Field(None, ge=-1e6, le=1e6)
    """Final evaluation minus first evaluation is at least this."""


class RunConfig(Section):
    """A whole run. `--set section.field=value` overrides any field."""

    run_id: str = Field("", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$|^$")
    """Name of the run; empty takes the file's folder and the time."""
    seed: int = Field(0, ge=0, le=2**31 - 1)
    """Seeds data order and sampling."""
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    trainer: TrainerConfig = TrainerConfig()
    streams: StreamsConfig = StreamsConfig()
    expect: ExpectConfig = ExpectConfig()

    @model_validator(mode="after")
    def _sections_fit(self) -> "RunConfig":
        total = self.data.max_prompt_tokens + self.rollout.sampling.max_tokens
        if total > self.model.max_model_len:
            raise ValueError(
                f"data.max_prompt_tokens ({self.data.max_prompt_tokens}) + rollout.sampling.max_tokens "
                f"({self.rollout.sampling.max_tokens}) = {total} exceeds model.max_model_len "
                f"({self.model.max_model_len}); lower one or raise the other"
            )
        if self.reward.min_group_size > self.trainer.group_size:
            raise ValueError(
                f"reward.min_group_size ({self.reward.min_group_size}) exceeds trainer.group_size "
                f"({self.trainer.group_size}): no group could ever be trained"
            )
        if self.trainer.groups_per_step % self.trainer.mini_batches:
            raise ValueError(
                f"trainer.mini_batches ({self.trainer.mini_batches}) must divide trainer.groups_per_step "
                f"({self.trainer.groups_per_step}): every update takes the same number of groups"
            )
        self._groups_fit()
        self._rewards_fit()
        self._algorithm_fits()
        self._placement_fits()
        return self

    @property
    def max_completion_tokens(self) -> int:
        """Most tokens of a completion: of a session all that follows its prompt."""
        environment = self.rollout.environment
        if environment.is_single_turn:
            return self.rollout.sampling.max_tokens
        return environment.max_tokens or self.model.max_model_len

    def turn_reward_weight(self, data_source: str) -> float:
        """What the environment's rewards of single turns count in training, by the weights of `reward`."""
        return sum(
            reward.weight
            for reward in self.reward.named.values()
            if reward.environment and "train" in reward.lanes and reward.scores_source(data_source)
        )

    @property
    def shared_turn_s(self) -> float | None:
        """Longest turn on a GPU that rollout workers share with a reward model; None where none is shared."""
        models = [reward.model for reward in self.reward.named.values() if reward.model]
        return min((model.turn_s for model in models if model.shares_rollout_gpus), default=None)

    def _placement_fits(self) -> None:
        rollout = self.rollout
        wanted = rollout.workers * rollout.vllm.tensor_parallel_size
        if rollout.gpus and len(rollout.gpus) != wanted:
            raise ValueError(
                f"rollout.gpus names {len(rollout.gpus)} GPUs, but {rollout.workers} workers with "
                f"{rollout.vllm.tensor_parallel_size} each (rollout.vllm.tensor_parallel_size) need {wanted}"
            )
        if self.shared_turn_s is not None and rollout.engine == "transformers":
            raise ValueError(
                "shares_rollout_gpus needs an engine that can sleep: rollout.engine vllm, on a GPU"
            )

    def _rewards_fit(self) -> None:
        named = [name for name, reward in self.reward.named.items() if reward.environment]
        if named and self.rollout.environment.is_single_turn:
            raise ValueError(
                f"reward.rewards.{named[0]} is the environment's own reward, but rollout.environment.use is "
                "single_turn: nothing answers the model, and nothing gives that reward. Name an environment "
                "in rollout.environment.use, or take another reward"
            )
        algorithm = self.trainer.algorithm
        if named and algorithm.loss_traits.level == "sequence" and algorithm.has_discount:
            raise ValueError(
                f"trainer.algorithm.loss: {algorithm.loss} needs one advantage for a session, but advantage: "
                f"{algorithm.advantage} places the environment's rewards of single turns "
                f"(reward.rewards.{named[0]}) on their tokens. Take loss ppo, or another advantage"
            )
        environment = self.rollout.environment
        if algorithm.overlong.penalty and not environment.is_single_turn and not environment.max_tokens:
            raise ValueError(
                "trainer.algorithm.overlong punishes sessions that come near the limit of their tokens, and "
                "there is none: set rollout.environment.max_tokens, or leave the punishment out"
            )

    def _groups_fit(self) -> None:
        size, algorithm = self.trainer.group_size, self.trainer.algorithm
        if size < 2 and algorithm.filter_zero_variance:
            raise ValueError("filter_zero_variance needs trainer.group_size of at least 2")
        traits = algorithm.advantage_traits
        if size < 2 and traits is not None and traits.compares_siblings:
            raise ValueError(
                f"trainer.algorithm.advantage: {algorithm.advantage} compares the completions of a group, "
                f"and trainer.group_size is {size}: every advantage would be 0. Take at least 2, or "
                "reinforce_plus_plus or gae"
            )
        if algorithm.advantage == "pass_at_k" and algorithm.pass_k > size:
            raise ValueError(
                f"trainer.algorithm.pass_k ({algorithm.pass_k}) exceeds trainer.group_size ({size}): a group "
                "holds no set of that many completions"
            )

    def _algorithm_fits(self) -> None:
        sampling, trainer = self.rollout.sampling, self.trainer
        is_filtered = sampling.top_p < 1.0 or sampling.top_k > 0
        if is_filtered and trainer.algorithm.old_logprobs == "rollout":
            raise ValueError(
                "rollout.sampling.top_p < 1 or top_k > 0 needs trainer.algorithm.old_logprobs: recompute. "
                "The rollout logprobs are those of the filtered distribution, so a ratio against them would "
                "be clipped for tokens that have not moved"
            )
        if is_filtered and trainer.algorithm.kl.place == "reward":
            raise ValueError(
                "rollout.sampling.top_p < 1 or top_k > 0 makes the rollout logprobs those of a filtered "
                "distribution, and trainer.algorithm.kl.place: reward would take their distance from the "
                "reference for KL; put the penalty into the loss"
            )
        if trainer.evaluation.samples > 1 and trainer.evaluation.temperature == 0.0:
            raise ValueError(
                f"trainer.evaluation.samples is {trainer.evaluation.samples}, but at temperature 0 all of "
                "them would be alike; raise trainer.evaluation.temperature or take one sample"
            )
        dataset = trainer.evaluation.keep_best.rpartition("/")[0]
        if dataset and dataset not in self.data.eval:
            raise ValueError(
                f"trainer.evaluation.keep_best names the dataset {dataset!r}; data.eval has "
                f"{', '.join(self.data.eval) or 'none'}"
            )
        is_length_known = trainer.epochs is None or "steps" in trainer.model_fields_set
        if is_length_known and trainer.optimizer.warmup_steps >= trainer.steps > 1:
            raise ValueError(
                f"trainer.optimizer.warmup_steps ({trainer.optimizer.warmup_steps}) must be below "
                f"trainer.steps ({trainer.steps}), or the learning rate never reaches its peak"
            )
