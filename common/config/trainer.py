"""The `trainer` section: schedule, algorithm, optimizer, weights and checkpoints."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.common.config.diagnostics import Ranges
from tidemill.common.config.section import Rules, Section
from tidemill.common.wire.sampling import TokenFilters


class LoraConfig(Section):
    """LoRA adapters (arXiv 2106.09685) on the model's linear layers, through PEFT."""

    rank: int = Field(16, ge=1, le=4096)
    """Rank of each adapter."""
    alpha: float = Field(32.0, gt=0.0, le=1e6)
    """An adapter's output is multiplied by alpha / rank."""
    rank_stabilized: bool = False
    """Multiply by alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732): for ranks above 64."""
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Linear layers with an adapter: `[q_proj, v_proj]`; `all-linear`: all but the output head."""


BEST_METRICS = ("score", "accuracy", "pass_at_k")
"""Metrics of an evaluation that can choose the best version; more is better."""
PASS_K = (2, 4, 8, 10, 16, 32, 64, 100, 128, 256, 512)


class OptimizerConfig(Section):
    """AdamW with linear warm-up, then constant, linear or cosine decay."""

    lr: float = Field(1e-6, gt=0.0, le=1.0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's moment decays."""
    eps: float = Field(1e-8, gt=0.0, le=1.0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.0, ge=0.0, le=10.0)
    """Decoupled weight decay, on matrices only."""
    max_grad_norm: float = Field(1.0, gt=0.0, le=1e6)
    """Gradients are scaled down to this global norm."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up; the rate moves with every update."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls after warm-up."""


class EvaluationConfig(TokenFilters, Section):
    """Held-out prompts, on a lane of their own."""

    every: int = Field(0, ge=0)
    """Steps between evaluations; 0: only the first and the final model."""
    at_start: bool = True
    """Evaluate the starting model."""
    samples: int = Field(1, ge=1, le=1024)
    """Completions for each prompt: avg@k, and pass@k for smaller k."""
    temperature: float = Field(0.0, ge=0.0, le=10.0)
    """0 is greedy."""
    max_prompts: int | None = Field(None, ge=1)
    """Number of rows to use, from the beginning of each set."""
    keep_best: str = Field("score", pattern=rf"^$|^(.+/)?({'|'.join(BEST_METRICS)}|pass_at_[0-9]+)$")
    """The best version by this metric keeps its weights: over all sets, or `SET/METRIC`. Empty keeps none."""

    @property
    def pass_k(self) -> list[int]:
        """The k below `samples` for which pass@k is estimated."""
        return [k for k in PASS_K if k < self.samples]

    def rules(self) -> Rules:
        name = self.keep_best.rpartition("/")[2]
        if name not in ("", *BEST_METRICS) and int(name.removeprefix("pass_at_")) not in self.pass_k:
            yield (
                f"keep_best is {self.keep_best!r}: with samples {self.samples}, pass@k is estimated for k in "
                f"{self.pass_k}"
            )


class SimulatedPolicyConfig(Section):
    """Delays in place of a model, for benchmarks and tests."""

    group_s: float = Field(0.0, ge=0.0, le=3600.0)
    """Time to train on one group, in seconds."""
    prepare_s: float = Field(0.0, ge=0.0, le=3600.0)
    """Time of the further forward passes over one group, in seconds, with several updates a step."""
    update_s: float = Field(0.0, ge=0.0, le=3600.0)
    """Time of one optimizer update, in seconds."""


DEFAULT_RANK_TOKENS = 16_384
"""First value of `micro_batch_tokens: auto`."""


class TrainerConfig(Section):
    """Schedule, algorithm and resources of training, and what is kept."""

    steps: int = Field(100, ge=1)
    """Steps of the run."""
    epochs: float | None = Field(None, gt=0.0, le=1e6)
    """Passes over the training rows, in place of `steps`."""
    groups_per_step: int = Field(32, ge=1, le=65536)
    """Groups in one step."""
    mini_batches: int = Field(1, ge=1, le=1024)
    """Optimizer updates in a step; divides `groups_per_step`."""
    passes: int = Field(1, ge=1, le=64)
    """Passes over a step's mini-batches (PPO epochs), with the old logprobs of its start."""
    group_size: int = Field(8, ge=1, le=4096)
    """Completions of each group (verl's `rollout.n`, TRL's `num_generations`)."""
    max_staleness: int = Field(1, ge=0, le=1024)
    """Largest staleness of a token, in steps. 0 is on-policy, 1 one step off-policy, more asynchronous."""
    batch_order: Literal["in_order", "as_ready"] = "in_order"
    """`in_order` is reproducible; `as_ready` takes the first complete groups."""
    start_early: bool = True
    """Train on groups as they complete; the result is the same."""
    policy: Literal["transformers", "simulated"] = "transformers"
    """What is trained: a Hugging Face causal language model, or delays."""
    train_tower: bool = False
    """Train what makes features of pictures, too (`images`): the tower and the projector behind it."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = None
    """Train LoRA adapters (`pip install 'tidemill[lora]'`); `{}` takes the defaults."""
    evaluation: EvaluationConfig = EvaluationConfig()
    diagnostics: Ranges = Field(default_factory=dict)
    """Other healthy ranges than those of docs/metrics.md, by check."""
    simulated: SimulatedPolicyConfig = SimulatedPolicyConfig()
    micro_batch_tokens: Annotated[int, Field(ge=16)] | Literal["auto"] = "auto"
    """Most tokens of a micro-batch on one rank. `auto`: 16,384, or what a GPU holds."""
    packing: bool = True
    """Compute common beginnings of samples once, without padding, where the attention allows it."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute activations in the backward pass. `auto`: on a GPU that would not hold them."""
    num_ranks: int = Field(1, ge=1, le=4096)
    """Processes that train together, a GPU each (FSDP2); on several machines started by torchrun."""
    shard_ranks: int | None = Field(None, ge=1)
    """Ranks that hold one copy of the model (HSDP); divides `num_ranks`. Null: all."""
    context_ranks: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = "auto"
    """Ranks that share a forward pass, for long sequences (Ulysses). Divides `num_ranks` and the attention
    heads. `auto`: as few as fit, on CPUs one."""
    expert_ranks: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = 1
    """Ranks that divide the experts of each layer, and send each other tokens. Divides the experts, and the
    ranks of one copy of the model. `auto`: with several hosts, ranks of one host; else 1."""
    sum_gradients: Literal["auto", "update", "micro_batch"] = "auto"
    """Sum gradients once an `update`, or with every `micro_batch`, which saves 4 bytes a parameter."""
    offload_optimizer: bool = False
    """AdamW's moments (8 bytes a parameter) in host memory; bit-identical."""
    gpus: tuple[int, ...] = ()
    """GPUs of this machine for the trainer; empty takes free ones."""
    compile: bool = False
    """torch.compile: minutes at the start, faster steps."""
    liger: Literal["auto", "on", "off"] = "auto"
    """Liger's fused kernels (`pip install 'tidemill[liger]'`, GPUs only); `auto`: not with `compile`."""
    device: str = "auto"
    """`auto` takes the first GPU, else the CPU."""
    num_threads: int = Field(0, ge=0, le=1024)
    """CPU threads of torch; 0 leaves the library's default."""
    deterministic: bool = False
    """Deterministic kernels: replays are bit-identical on the same hardware."""
    keep_weights: int = Field(3, ge=2, le=1000)
    """Versions kept in the weights folder."""
    checkpoint_every: int = Field(10, ge=0)
    """Steps between checkpoints; the last step has one. With 0 a crash replays all steps."""
    keep_checkpoints: int = Field(2, ge=1, le=1000)
    """Checkpoints kept."""
    reissue_after_s: float = Field(15.0, gt=0.0, le=86_400.0)
    """A ticket that no stream holds is issued again after so long without progress."""
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ("tensorboard",)
    """Trackers of all metrics (`pip install 'tidemill[wandb]'` and so on)."""
    logger_project: str = Field("tidemill", min_length=1, max_length=128)
    """Name of the trackers' project (MLflow: experiment)."""

    def rules(self) -> Rules:
        is_simulated = self.policy == "simulated"
        if is_simulated and self.num_ranks > 1:
            yield (
                f"num_ranks is {self.num_ranks}, but policy: simulated works on one rank only; leave it out, "
                "or set num_ranks to 1"
            )
        if self.num_ranks % (self.shard_ranks or 1):
            yield (
                f"num_ranks is {self.num_ranks}, which shard_ranks {self.shard_ranks} does not divide: every "
                "copy of the model is split over as many ranks"
            )
        if self.num_ranks % self.context_size:
            yield (
                f"num_ranks is {self.num_ranks}, which context_ranks {self.context_ranks} does not divide: "
                "each of them has a part of the same forward pass"
            )
        if self.train_tower and self.lora is not None:
            yield (
                "train_tower with lora: adapters are of the language model alone, and engines load none of a "
                "tower; leave one of the two out"
            )
        copy = self.shard_ranks or self.num_ranks
        if copy % self.expert_size:
            yield (
                f"expert_ranks is {self.expert_ranks}, which does not divide the {copy} ranks that hold one "
                "copy of the model (shard_ranks, else num_ranks): take a number that divides these and the "
                "experts"
            )
        yield from self._ratio_rules()
        if self.lora is None:
            return
        algorithm = self.algorithm
        reference = self.algorithm.reference
        if is_simulated:
            yield "lora needs a model, and policy: simulated has none; take policy transformers"
        if algorithm.needs_values and algorithm.value.model == "own":
            yield (
                "with lora the value head sits on the policy: algorithm.value.model: own would train a whole "
                "second model beside a few adapters; leave it out"
            )
        if reference.model == "updated":
            yield (
                "with lora the reference is the model with its adapters off, which stays as it was: "
                "algorithm.reference.model can be frozen or off, not updated"
            )
        if reference.model == "frozen" and reference.dtype != "float32":
            yield (
                "with lora the reference is the model itself with its adapters off, and no copy: leave "
                "algorithm.reference.dtype out"
            )

    def _ratio_rules(self) -> Rules:
        """Checks that loss and corrections fit the number of updates in a step."""
        algorithm = self.algorithm
        has_ratio = self.algorithm.loss_traits.has_ratio
        if algorithm.importance.normalise and self.updates_per_step > 1 and not has_ratio:
            yield (
                "algorithm.importance.normalise needs weights that stay as they are during a step, and loss: "
                f"{algorithm.loss} takes those of the current policy, which moves with each of "
                f"{self.updates_per_step} updates; take one, or loss ppo"
            )
        if self.passes > 1 and not has_ratio:
            yield (
                f"passes is {self.passes}, but algorithm.loss: {algorithm.loss} has no ratio to the policy "
                "that sampled: nothing would say how far later passes have moved from it. Take a loss with a "
                "ratio, such as ppo, or one pass"
            )
        is_always_one = self.updates_per_step == 1 and algorithm.old_logprobs == "recompute"
        for name, bounds_ratio in (
            (f"loss: {algorithm.loss}", algorithm.loss_traits.is_idle_at_one),
            ("dual_clip", isinstance(algorithm.dual_clip, float)),
        ):
            if is_always_one and bounds_ratio:
                yield (
                    f"algorithm.{name} bounds the ratio to the old logprobs, which is always 1 with one "
                    "update a step and `old_logprobs: recompute`; take `old_logprobs: rollout`, or several "
                    "mini_batches or passes"
                )

    @property
    def rank_tokens(self) -> int:
        """`micro_batch_tokens`, or its first value while `auto` is undecided."""
        return DEFAULT_RANK_TOKENS if self.micro_batch_tokens == "auto" else self.micro_batch_tokens

    @property
    def context_size(self) -> int:
        """`context_ranks`, or 1 while `auto` is undecided."""
        return 1 if self.context_ranks == "auto" else self.context_ranks

    @property
    def expert_size(self) -> int:
        """`expert_ranks`, or 1 while `auto` is undecided."""
        return 1 if self.expert_ranks == "auto" else self.expert_ranks

    @property
    def bin_tokens(self) -> int:
        """Most tokens in a bin: the samples of the ranks that share forward passes."""
        return self.rank_tokens * self.context_size

    @property
    def num_bins(self) -> int:
        """Number of bins of a micro-batch, which are computed in parallel."""
        return self.num_ranks // self.context_size

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of a step, over all passes."""
        return self.mini_batches * self.passes

    @property
    def needs_proximal(self) -> bool:
        """Whether logprobs under the policy at the step's start need forward passes beside the updates'."""
        algorithm = self.algorithm
        return (
            self.updates_per_step > 1
            and algorithm.old_logprobs == "recompute"
            and algorithm.loss_traits.has_ratio
        )


USUAL_LR = 0.01
"""Largest learning rate that is not noted: AdamW moves a weight by about the rate in each update, and most
weights of a language model are smaller than 0.1."""


def learning_rate_warnings(config: TrainerConfig) -> Iterator[str]:
    """A sentence for each learning rate that is so large that it most likely destroys the model."""
    if config.policy == "simulated":
        return
    rates = {"trainer.optimizer.lr": config.optimizer.lr}
    if config.algorithm.needs_values and config.algorithm.value.lr is not None:
        rates["trainer.algorithm.value.lr"] = config.algorithm.value.lr
    for field, rate in rates.items():
        if rate > USUAL_LR:
            yield (
                f"{field} is {rate:g}: each update moves every weight by about so much, and most weights are "
                "below 0.1, so the model is most likely lost with the first updates. Usual are 1e-7 to 1e-4, "
                "and up to 1e-3 with lora or for small models"
            )
