"""One YAML file per run: its sections, and the checks that span them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, field_validator, model_validator

from tidemill.common.config.data import DataConfig, SourceConfig
from tidemill.common.config.environment import OPENENV
from tidemill.common.config.images import ImagesConfig
from tidemill.common.config.reward import RewardConfig, blind_because, failure_value_warnings, server_rules
from tidemill.common.config.rollout import RolloutConfig, SamplingConfig
from tidemill.common.config.section import PathText, Rules, Section
from tidemill.common.config.servers import ServersConfig
from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.config.weights import WeightsConfig
from tidemill.common.wire.sampling import FILTER_NAMES


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


FILTERED = f"rollout.sampling ({FILTER_NAMES}) filters, so that rollout logprobs lie above the policy's"
"""Beginning of the reason why an option is refused that compares with rollout logprobs."""
SEEING_PROMPTS = ("judge", "model")
"""Kinds of rewards that get the pictures of a prompt, and none that a session shows later."""
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
        yield from self._source_rules()
        yield from self._demonstration_rules()
        yield from self._environment_rules()
        yield from self._comparison_rules()
        yield from self._teacher_rules()
        yield from self._filter_rules()
        yield from self._picture_rules()
        yield from server_rules(self.reward, self.servers)

    def _picture_rules(self) -> Rules:
        trainer = self.trainer
        if self.images is None:
            if trainer.train_tower:
                yield (
                    "trainer.train_tower needs the section images: without pictures a tower has no gradient; "
                    "add `images: {}`, or leave it out"
                )
            return
        environment = self.rollout.environment
        if environment.use.startswith(OPENENV):
            yield (
                f"images: rollout.environment.use is {environment.use}, and the observations of OpenEnv's "
                "servers are read as text: a picture in one would not be seen. Write a class that asks the "
                "server, or leave out `images`"
            )
        if not environment.is_single_turn and not self.rollout.engine_traits.loads_model:
            yield (
                "images: tokens of pictures that a session shows are counted by the model's processor, and "
                f"rollout.engine {self.rollout.engine} loads no model; take transformers or vllm"
            )
        for name, reward in self.reward.named.items():
            problem = blind_because(reward, self.servers)
            if problem:
                yield f"images: reward.rewards.{name} would score without the pictures: {problem}"
            elif not environment.is_single_turn and reward.kind in SEEING_PROMPTS:
                yield (
                    f"images: reward.rewards.{name} would score sessions without the pictures of later "
                    "turns, as judges and reward models get those of the prompt alone. Take a function, or "
                    "the environment's own reward"
                )
        if self.data.chat_template == "never":
            yield (
                "images: the places of pictures are written by the chat template, and data.chat_template is "
                "never; take auto"
            )

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
        return list(failure_value_warnings(self.reward)) if self.generates else []

    @property
    def generates(self) -> bool:
        """Whether completions are sampled and scored; not where there are demonstrations alone, and no
        evaluation."""
        return bool(self.data.prompt_sources or self.data.eval or not self.data.sources)

    @property
    def largest_group_size(self) -> int:
        return max(self._group_sizes().values(), default=1)

    def sampling_of(self, source: SourceConfig) -> SamplingConfig:
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
                f"{_list(self.data.eval)}"
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

    def _source_rules(self) -> Rules:
        sources = self.data.prompt_sources
        limit = self.rollout.sampling.max_tokens
        names = {source.name for source in sources}
        sets = self.data.eval
        scorable = {*names, *sets}
        if self.data.sources and self.trainer.epochs is not None:
            yield (
                "trainer.epochs counts passes over one training set, and sources of data.train have `epochs` "
                "of their own; give trainer.steps in its place"
            )
        for source in sources:
            whose = f"source {source.name!r}"
            try:
                max_tokens = self.sampling_of(source).max_tokens
            except ValidationError as error:
                (field,) = error.errors()[0]["loc"]
                reason = error.errors()[0]["msg"]
                raise ValueError(f"sampling.{field} of {whose}: {reason}") from None
            if max_tokens > limit:
                yield (
                    f"sampling.max_tokens of {whose} ({max_tokens}) exceeds rollout.sampling.max_tokens "
                    f"({limit}), which is the run's limit; raise that one, or lower this one"
                )
            if max_tokens != limit and self.trainer.algorithm.overlong.penalty:
                yield (
                    f"{whose} has sampling.max_tokens of its own, and trainer.algorithm.overlong punishes "
                    "what comes near rollout.sampling.max_tokens: choose one"
                )
            if source.environment and self.rollout.environment.is_single_turn:
                yield (
                    f"{whose} names an environment, and rollout.environment.use is single_turn; name there "
                    "what offers several, or leave it out"
                )
        for name, reward in self.reward.rewards.items():
            unknown = sorted({*reward.sources} - scorable)
            if reward.sources and not names:
                yield (
                    f"reward.rewards.{name} has sources, and data.train lists none: list them, or choose by "
                    "`applies_to`"
                )
            if unknown:
                yield (
                    f"reward.rewards.{name}.sources names {_list(unknown)}; data.train has the sources "
                    f"{_list(sorted(names))}, and data.eval has {_list(sets)}"
                )
        for kind, lane, declared in (("source", "train", names), ("evaluation set", "eval", sets)):
            scoring = [reward for reward in self.reward.named.values() if lane in reward.lanes]
            for name in sorted(declared):
                is_scored = any(not reward.sources or name in reward.sources for reward in scoring)
                if not is_scored:
                    yield f"no reward scores {kind} {name!r}: add it to `sources` of one"

    def _demonstration_rules(self) -> Rules:
        """Checks that settings fit demonstrations, of which each step has a fixed share."""
        if not self.data.demonstrations:
            return
        trainer = self.trainer
        temperature = self.rollout.sampling.temperature
        whose = f"the demonstrations of source {self.data.demonstrations[0].name!r}"
        if trainer.batch_order != "in_order":
            yield (
                f"trainer.batch_order: {trainer.batch_order} takes what is there first, and a step has an "
                f"exact share of {whose}; take in_order"
            )
        if temperature != 1.0:
            yield (
                f"rollout.sampling.temperature is {temperature:g}, and {whose} are imitated at temperature "
                "1; sample at temperature 1"
            )
        if trainer.algorithm.needs_values:
            yield (
                f"trainer.algorithm.advantage: {trainer.algorithm.advantage} learns values of rewards, and "
                f"{whose} have none; take another advantage"
            )

    def _environment_rules(self) -> Rules:
        environment = self.rollout.environment
        algorithm = self.trainer.algorithm
        environment_rewards = [name for name, reward in self.reward.named.items() if reward.environment]
        if environment_rewards and environment.is_single_turn:
            yield (
                f"reward.rewards.{_list(environment_rewards)} is the environment's own reward, "
                "and rollout.environment.use is single_turn, which gives none: name an environment there, or "
                "take another reward"
            )
        if (
            environment_rewards
            and algorithm.loss_traits.level == "sequence"
            and algorithm.advantage_traits.has_discount
        ):
            yield (
                f"trainer.algorithm.loss: {algorithm.loss} needs one advantage for a session, but advantage: "
                f"{algorithm.advantage} places the environment's rewards of single turns "
                f"(reward.rewards.{_list(environment_rewards)}) on their tokens. Take loss ppo, or another "
                "advantage"
            )
        if algorithm.overlong.penalty and not environment.is_single_turn and not environment.max_tokens:
            yield (
                "trainer.algorithm.overlong punishes sessions that come near the limit of their tokens, and "
                "there is none: set rollout.environment.max_tokens, or leave the punishment out"
            )

    def _comparison_rules(self) -> Rules:
        """Checks for an advantage that compares each reward by itself."""
        if not self.trainer.algorithm.advantage_traits.compares_rewards:
            return
        rewards = self.reward.rewards
        advantage = f"trainer.algorithm.advantage: {self.trainer.algorithm.advantage}"
        num_rewards = sum("train" in reward.lanes for reward in rewards.values())
        of_sources = [name for name, reward in rewards.items() if reward.sources]
        if num_rewards < 2:
            yield (
                f"{advantage} normalises each reward by itself before they are added up, and reward.rewards "
                f"has {num_rewards} for training; name several there, or take grpo_batch"
            )
        if of_sources:
            yield (
                f"reward.rewards.{_list(of_sources)} scores some sources only, and {advantage} adds up every "
                "reward of every group; take grpo_batch, or let all rewards score all sources"
            )
        if self.reward.group:
            yield (
                f"reward.group: {self.reward.group} changes the sum of a sample's rewards, and {advantage} "
                "looks at each reward by itself and would not see it; leave one of them out"
            )

    def _teacher_rules(self) -> Rules:
        teachers = self.reward.teachers
        algorithm = self.trainer.algorithm
        temperature = self.rollout.sampling.temperature
        is_reward = algorithm.teacher.place == "reward"
        whose = f"the teacher reward.rewards.{_list(teachers)}"
        if teachers and temperature != 1.0:
            yield (
                f"rollout.sampling.temperature is {temperature:g}, and the logprobs of {whose} are those of "
                "temperature 1: sample at temperature 1"
            )
        if teachers and is_reward and self._is_sampling_filtered():
            yield (
                f"{FILTERED}, and trainer.algorithm.teacher.place: reward would take their distance from "
                f"{whose} for KL; sample unfiltered, or take place: loss"
            )
        has_weight = any(teacher.weight for teacher in teachers.values())
        if has_weight and is_reward and algorithm.loss_traits.level == "sequence":
            yield (
                f"trainer.algorithm.loss: {algorithm.loss} needs one advantage for a sequence, and {whose} "
                "gives one for each token. Take loss ppo or reinforce, or trainer.algorithm.teacher.place: "
                "loss"
            )

    def _is_sampling_filtered(self) -> bool:
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

    def _filter_rules(self) -> Rules:
        """Refuses options that would take the effect of filtered sampling for a change of the policy."""
        if not self._is_sampling_filtered():
            return
        algorithm = self.trainer.algorithm
        if algorithm.kl.place == "reward":
            yield (
                f"{FILTERED}, and trainer.algorithm.kl.place: reward would take their distance from the "
                "reference for KL; put the penalty into the loss"
            )
        if self.rollout.sampling_masks:
            return
        rejecting = algorithm.rejection.of_sequences
        level = algorithm.importance.level
        mode = algorithm.importance_mode
        # Whether one weight is made of all tokens of a sequence, so that their gaps add up.
        is_of_sequences = level == "sequence" or (level == "geometric" and mode == "mask")
        for is_wrong, field, effect in (
            (algorithm.old_logprobs == "rollout", "old_logprobs: rollout",
             "would clip the ratio of tokens that have not moved; take recompute"),
            (algorithm.rollout_penalty, "rollout_penalty", "would pull the policy towards it; leave it out"),
            (algorithm.off_policy_threshold is not None, "off_policy_threshold",
             "would count it as a distance; sample unfiltered, or leave it out"),
            (rejecting, f"rejection.bounds.{_list(rejecting)}",
             "would reject nearly every sequence for it; sample unfiltered, or leave the criterion out"),
            (mode != "off" and is_of_sequences, f"importance.level: {level}",
             "would multiply the gaps of all tokens of a sequence, until next to nothing is left of its "
             "weight; sample unfiltered, or take level token"),
        ):  # fmt: skip
            if is_wrong:
                yield f"{FILTERED}, and trainer.algorithm.{field} {effect}"
        if mode == "off":
            yield (
                f"{FILTERED}, and nothing corrects for it: set rollout.sampling_masks: true, with which "
                "training is exact, or, where the engine records none, trainer.algorithm.importance.mode: "
                "truncate"
            )


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
