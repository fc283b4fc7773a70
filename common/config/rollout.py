"""The `rollout` section: how completions are generated."""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

from tidemill.common.config.environment import EnvironmentConfig
from tidemill.common.config.section import Section
from tidemill.common.wire.sampling import TokenFilters


class EngineTraits(NamedTuple):
    """What is known of an engine before it is built."""

    class_name: str
    """`module:Class` in services/rollout/engines."""
    package: str = ""
    """A build of vLLM that has to be installed; the machine is checked for what vLLM needs."""
    loads_model: bool = True
    """Whether it computes with `model.path`, and so on a GPU where there is one."""
    samples_all_models: bool = True
    """Whether it can sample from every model; else `check_sampling` names those that it cannot."""
    leaves_gpu: bool = True
    """Whether it gives its memory of the GPU back while it sleeps."""
    reserves_gpu_memory: bool = False
    """Whether it takes a share of the GPU's memory at its start."""


ENGINES = {
    "vllm": EngineTraits("vllm:VllmEngine", package="vllm", reserves_gpu_memory=True),
    "transformers": EngineTraits(
        "transformers:TransformersEngine", samples_all_models=False, leaves_gpu=False
    ),
    "simulated": EngineTraits("simulated:SimulatedEngine", loads_model=False),
}
"""Engines by `rollout.engine`. No other code compares these names: a new engine is a file and a row."""


def _known(name: str) -> str:
    if name not in ENGINES:
        raise ValueError(f"must be one of {', '.join(ENGINES)}, got {name!r}")
    return name


class SamplingConfig(TokenFilters, Section):
    """Sampling of training tickets. What leaves ids out needs `sampling_masks`, or importance weights."""

    max_tokens: int = Field(512, ge=1, le=1 << 20)
    """Longest completion, in tokens; with an environment, longest turn."""
    temperature: float = Field(1.0, ge=0.01, le=10.0)
    """The trainer divides its logits by it, too."""

    @property
    def is_filtered(self) -> bool:
        """Whether tokens are sampled from some ids only."""
        return bool(self.filters_on)


class VllmConfig(Section):
    """Options of the `vllm` engine."""

    gpu_memory_utilization: float = Field(0.85, gt=0.0, le=1.0)
    """Share of GPU memory for weights and KV cache."""
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    """GPUs of one engine."""
    enforce_eager: bool = False
    """No graph capture: starts faster, decodes slower."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further fields of vLLM's AsyncEngineArgs, such as `{enable_prefix_caching: false}`."""


class SimulatedConfig(Section):
    """Delays in place of a model, for benchmarks and tests."""

    group_s: float = Field(0.0, ge=0.0, le=3600.0)
    """Mean time of one completion, in seconds."""
    jitter: float = Field(0.0, ge=0.0, le=1.0)
    """Relative spread of that time, uniform."""
    tokens: int = Field(16, ge=1, le=1 << 20)
    """Tokens in each completion; with `sigma`, their median."""
    sigma: float = Field(0.0, ge=0.0, le=3.0)
    """Log-normal spread of lengths and times; at 0.99 one completion in a hundred is ten times the median
    (arXiv 2510.12633)."""
    load_s: float = Field(0.0, ge=0.0, le=600.0)
    """Time one weight update takes, in seconds."""
    vocab_size: int = Field(128, ge=2, le=1 << 20)
    """Ids are drawn from 0 to this, exclusive."""


class RolloutConfig(Section):
    """How tickets become trajectories."""

    engine: Annotated[str, AfterValidator(_known)] = "vllm"
    """What generates: `vllm`, `transformers` (needs no GPU), or `simulated` (delays)."""
    gpus: tuple[int, ...] = ()
    """GPUs for this machine's workers, `vllm.tensor_parallel_size` each; empty takes free ones."""
    trainer_gpus: Literal["auto", "turns", "shared"] = "auto"
    """`turns`: engine and trainer share GPUs, one at a time. `shared`: at once, with memory left by
    `vllm.gpu_memory_utilization`. `auto`: `turns` where `tidemill up` finds one GPU, else neither."""
    gpu_turn_s: float = Field(5.0, ge=0.05, le=3600.0)
    """How long a process keeps a GPU for which another waits."""
    workers: int = Field(1, ge=0, le=1024)
    """Processes that `tidemill up` starts on this machine."""
    stall_s: float = Field(600.0, gt=0.0, le=86_400.0)
    """An engine that finishes nothing for so long is started again."""
    max_groups_in_flight: Literal["auto"] | Annotated[int, Field(ge=1, le=65536)] = "auto"
    """Groups that a worker holds at once. `auto`: what vLLM's KV cache bears, else 64."""
    max_num_seqs: int = Field(256, ge=1, le=65536)
    """Most sequences that an engine decodes at once."""
    num_threads: int = Field(0, ge=0, le=1024)
    """CPU threads of the engine; 0 divides the cores, less one, among the workers."""
    sampling: SamplingConfig = SamplingConfig()
    sampling_masks: bool = True
    """Where sampling leaves ids out (`top_p` and its like), record which it keeps; the trainer takes logprobs
    over these. Off, importance weights have to correct."""
    record_routes: bool = True
    """Record which experts each token went to; the trainer sends it there again."""
    environment: EnvironmentConfig = EnvironmentConfig()
    vllm: VllmConfig = VllmConfig()
    simulated: SimulatedConfig = SimulatedConfig()

    @property
    def engine_traits(self) -> EngineTraits:
        return ENGINES[self.engine]
