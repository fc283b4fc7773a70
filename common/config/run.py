"""One YAML file per run: its sections, and the checks that span them."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, field_validator, model_validator

from tidemill.common.config.data import DataConfig, SourceConfig
from tidemill.common.config.reward import RewardConfig, check_servers
from tidemill.common.config.rollout import RolloutConfig, SamplingConfig
from tidemill.common.config.section import Section
from tidemill.common.config.servers import ServersConfig
from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.config.weights import WeightsConfig


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
    """Prompt plus completion, in tokens; at most the model's context. Where a model has positions for short
    and for long sequences (LongRoPE), this chooses them, in trainer and engines."""
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


class ArchiveConfig(Section):
    """Entries are written to Parquet files in the run's folder before they are trimmed from Redis."""

    enabled: bool = True
    """Trim only what is archived, and archive the rest at the end; needs
    `python -m tidemill.services.jobs RUN_ID`, which `tidemill up` starts. Off, trimmed entries are gone."""
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
    in its worker in the last ones, so that it is not dead-lettered for what another one did."""
    max_message_mb: int = Field(64, ge=1, le=512)
    """Larger messages are refused before they are decoded, in MiB."""
    claim_check_bytes: int = Field(0, ge=0, le=2**40)
    """Training trajectories of so many bytes and more go to files in the run's folder, which all services
    must share then, or to `claim_check_url`; the stream gets pointer, size and digest. 0 puts everything into
    the stream."""
    claim_check_url: str = Field("", pattern=r"^((s3|gs|az)://[^\s?#]+)?$")
    """Where they go instead of the run's folder: `s3://bucket/folder`, an object store that every service
    reaches, as with `weights.url`."""
    trim: bool = True
    """Trim what is archived and not in flight any more; without an archive, what no kept checkpoint needs."""
    archive: ArchiveConfig = ArchiveConfig()
    """Files of what was in the streams."""

    @property
    def trims_commits(self) -> bool:
        """Whether commits leave Redis for the journal alone, at a checkpoint."""
        return self.trim and not self.archive.enabled


class ExpectConfig(Section):
    """What must hold at the end of the run; `tidemill up` exits with 1 otherwise."""

    eval_gain: float | None = Field(None, ge=-1e6, le=1e6)
    """Final evaluation minus first evaluation is at least this."""


FILTERED = (
    "rollout.sampling (top_p, top_k, min_p) makes the rollout logprobs those of a filtered distribution"
)
ServersName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


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
    servers: dict[ServersName, ServersConfig] = Field(default_factory=dict, max_length=64)
    """Models behind HTTP by name: judges, reward models, teachers and functions name them."""
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()
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
        if self.trainer.groups_per_step % self.trainer.mini_batches:
            raise ValueError(
                f"trainer.mini_batches ({self.trainer.mini_batches}) must divide trainer.groups_per_step "
                f"({self.trainer.groups_per_step}): every update takes the same number of groups"
            )
        for field, size in self._group_sizes():
            self._groups_fit(field, size)
        self._sources_fit()
        self._rewards_fit()
        check_servers(self.reward, self.servers)
        self._teachers_fit()
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

    def group_size(self, source: str) -> int:
        """Completions of a group of the source that has this name."""
        own = next((item.group_size for item in self.data.sources if item.name == source), None)
        return own or self.trainer.group_size

    @property
    def largest_group_size(self) -> int:
        """Completions of the largest groups."""
        return max(size for _, size in self._group_sizes())

    def turn_reward_weight(self, data_source: str, source: str = "") -> float:
        """What the environment's rewards of single turns count in training, by the weights of `reward`."""
        return sum(
            reward.weight
            for reward in self.reward.named.values()
            if reward.environment and "train" in reward.lanes and reward.scores_source(data_source, source)
        )

    @property
    def shared_turn_s(self) -> float | None:
        """Longest turn of an engine on GPUs that it has in turn with others; None where there are none."""
        return (
            self.rollout.gpu_turn_s if self.rollout.trainer_gpus == "turns" or self._shares_gpus() else None
        )

    def _shares_gpus(self) -> bool:
        return any(one.local and one.local.shares_rollout_gpus for one in self.servers.values())

    def _placement_fits(self) -> None:
        rollout = self.rollout
        wanted = rollout.workers * rollout.vllm.tensor_parallel_size
        if rollout.gpus and len(rollout.gpus) != wanted:
            raise ValueError(
                f"rollout.gpus names {len(rollout.gpus)} GPUs, but {rollout.workers} workers with "
                f"{rollout.vllm.tensor_parallel_size} each (rollout.vllm.tensor_parallel_size) need {wanted}"
            )
        if self._shares_gpus() and not rollout.engine_traits.leaves_gpu:
            raise ValueError("shares_rollout_gpus needs an engine that sleeps: rollout.engine vllm, on a GPU")

    def _rewards_fit(self) -> None:
        named = [name for name, reward in self.reward.named.items() if reward.environment]
        if named and len(named) == len(self.reward.named):
            self.data.without_truth()
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
        if algorithm.advantage_traits.compares_rewards:
            self._rewards_can_be_compared(algorithm.advantage)
        environment = self.rollout.environment
        if algorithm.overlong.penalty and not environment.is_single_turn and not environment.max_tokens:
            raise ValueError(
                "trainer.algorithm.overlong punishes sessions that come near the limit of their tokens, and "
                "there is none: set rollout.environment.max_tokens, or leave the punishment out"
            )

    def _rewards_can_be_compared(self, advantage: str) -> None:
        num_rewards = sum("train" in reward.lanes for reward in self.reward.rewards.values())
        if num_rewards < 2:
            raise ValueError(
                f"trainer.algorithm.advantage: {advantage} normalises each reward by itself before they are "
                f"added up, and reward.rewards has {num_rewards} for training; name several there, or take "
                "grpo_batch"
            )
        if named := [name for name, reward in self.reward.rewards.items() if reward.sources]:
            raise ValueError(
                f"reward.rewards.{named[0]} scores some sources only, and trainer.algorithm.advantage: "
                f"{advantage} adds up every reward of every group, each normalised; take grpo_batch, or let "
                "all rewards score all sources"
            )
        if self.reward.group:
            raise ValueError(
                f"reward.group: {self.reward.group} changes the sum of a sample's rewards, and "
                f"trainer.algorithm.advantage: {advantage} looks at each reward by itself and would not see "
                "it; leave one of them out"
            )

    def _teachers_fit(self) -> None:
        if not self.reward.teachers:
            return
        algorithm, sampling = self.trainer.algorithm, self.rollout.sampling
        name = next(iter(self.reward.teachers))
        if sampling.temperature != 1.0:
            raise ValueError(
                f"rollout.sampling.temperature is {sampling.temperature:g}, and the logprobs of the teacher "
                f"reward.rewards.{name} are those of temperature 1: the two distributions would differ where "
                "the models do not. Sample at temperature 1"
            )
        if algorithm.teacher.place == "loss":
            return
        if self._is_sampling_filtered():
            raise ValueError(
                f"{FILTERED}, and trainer.algorithm.teacher.place: reward would take their distance from "
                f"the teacher (reward.rewards.{name}) for KL; sample unfiltered, or take place: loss"
            )
        has_weight = any(teacher.weight for teacher in self.reward.teachers.values())
        if algorithm.loss_traits.level == "sequence" and has_weight:
            raise ValueError(
                f"trainer.algorithm.loss: {algorithm.loss} needs one advantage for a sequence, and a teacher "
                f"(reward.rewards.{name}) gives one for each token. Take loss ppo or reinforce, or "
                "trainer.algorithm.teacher.place: loss"
            )

    def _group_sizes(self) -> list[tuple[str, int]]:
        """Every size that groups have, with the field that says so."""
        own = [
            (f"group_size of source {source.name!r}", source.group_size)
            for source in self.data.sources
            if source.group_size is not None
        ]
        needs_common = not self.data.sources or len(own) < len(self.data.sources)
        return [("trainer.group_size", self.trainer.group_size)] * needs_common + own

    def _groups_fit(self, field: str, size: int) -> None:
        algorithm = self.trainer.algorithm
        if self.reward.min_group_size > size:
            raise ValueError(
                f"reward.min_group_size ({self.reward.min_group_size}) exceeds {field} ({size}): "
                "no group could ever be trained"
            )
        if size < 2 and algorithm.filter_zero_variance:
            raise ValueError(f"filter_zero_variance needs {field} of at least 2")
        traits = algorithm.advantage_traits
        if size < 2 and traits.compares_siblings and not self.reward.distils_alone:
            raise ValueError(
                f"trainer.algorithm.advantage: {algorithm.advantage} compares the completions of a group, "
                f"and {field} is {size}: every advantage would be 0. Take at least 2, or "
                "reinforce_plus_plus or gae"
            )
        if traits.is_binary and algorithm.pass_k > size:
            raise ValueError(
                f"trainer.algorithm.pass_k ({algorithm.pass_k}) exceeds {field} ({size}): a group "
                "holds no set of that many completions"
            )

    def _sources_fit(self) -> None:
        if self.data.sources and self.trainer.epochs is not None:
            raise ValueError(
                "trainer.epochs counts passes over one training set, and data.train lists sources, which "
                "have `epochs` of their own; give trainer.steps in its place"
            )
        for source in self.data.sources:
            self._sampling_fits(source)
        playing = [source.name for source in self.data.sources if source.environment]
        if playing and self.rollout.environment.is_single_turn:
            raise ValueError(
                f"source {playing[0]!r} names an environment, and rollout.environment.use is single_turn; "
                "name there what offers several, or leave it out"
            )
        names = {source.name for source in self.data.sources}
        for reward, named in self.reward.rewards.items():
            if named.sources and not names:
                raise ValueError(
                    f"reward.rewards.{reward} has sources, and data.train lists none: list them, or choose "
                    "by `applies_to`"
                )
            if unknown := sorted({*named.sources} - names - self.data.eval.keys()):
                raise ValueError(
                    f"reward.rewards.{reward}.sources names {unknown[0]!r}; data.train has the sources "
                    f"{', '.join(sorted(names)) or 'none'}, and data.eval has "
                    f"{', '.join(self.data.eval) or 'none'}"
                )
        for what, lane, known in (("source", "train", names), ("evaluation set", "eval", self.data.eval)):
            scoring = [reward for reward in self.reward.named.values() if lane in reward.lanes]
            for name in sorted(known):
                if all(reward.sources and name not in reward.sources for reward in scoring):
                    raise ValueError(f"no reward scores {what} {name!r}: add it to `sources` of one")

    def sampling_of(self, source: SourceConfig) -> SamplingConfig:
        """How completions of a source are sampled."""
        return SamplingConfig.model_validate(self.rollout.sampling.model_dump() | source.sampling)

    def _sampling_fits(self, source: SourceConfig) -> None:
        try:
            limit, own = self.rollout.sampling.max_tokens, self.sampling_of(source).max_tokens
        except ValidationError as error:
            (field,), reason = error.errors()[0]["loc"], error.errors()[0]["msg"]
            raise ValueError(f"sampling.{field} of source {source.name!r}: {reason}") from None
        if own > limit:
            raise ValueError(
                f"sampling.max_tokens of source {source.name!r} ({own}) exceeds rollout.sampling.max_tokens "
                f"({limit}), which is the run's limit; raise that one, or lower this one"
            )
        if own != limit and self.trainer.algorithm.overlong.penalty:
            raise ValueError(
                f"source {source.name!r} has sampling.max_tokens of its own, and trainer.algorithm.overlong "
                "punishes what comes near rollout.sampling.max_tokens: choose one"
            )

    def _is_sampling_filtered(self) -> bool:
        every = [self.rollout.sampling, *map(self.sampling_of, self.data.sources)]
        return any(s.top_p < 1.0 or s.top_k or s.min_p for s in every)

    def _sampling_is_corrected(self) -> None:
        """Filtered sampling gives each token a rollout logprob above the policy's: what takes the gap for a
        moved policy is refused."""
        algorithm = self.trainer.algorithm
        if not self._is_sampling_filtered():
            return
        rejecting = algorithm.rejection.of_sequences
        level, mode = algorithm.importance.level, algorithm.importance_mode
        is_of_sequences = level == "sequence" or (level == "geometric" and mode == "mask")
        for field, is_wrong, effect in (
            ("old_logprobs: rollout", algorithm.old_logprobs == "rollout",
             "would clip the ratio of tokens that have not moved; take recompute"),
            ("rollout_penalty", algorithm.rollout_penalty, "would pull the policy towards it; leave it out"),
            ("kl.place: reward", algorithm.kl.place == "reward",
             "would take their distance from the reference for KL; put the penalty into the loss"),
            (f"rejection.bounds.{rejecting[0]}" if rejecting else "", rejecting,
             "would reject nearly every sequence for it; sample unfiltered, or leave the criterion out"),
            (f"importance.level: {level}", mode != "off" and is_of_sequences,
             "would multiply the gaps of all tokens of a sequence, until next to nothing is left of its "
             "weight; sample unfiltered, or take level token"),
        ):  # fmt: skip
            if is_wrong:
                raise ValueError(f"{FILTERED}, and trainer.algorithm.{field} {effect}")

    def _algorithm_fits(self) -> None:
        trainer = self.trainer
        self._sampling_is_corrected()
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
