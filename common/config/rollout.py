"""The `rollout` section: how completions are generated."""

from typing import Any, Literal, NamedTuple

from pydantic import Field

from tidemill.common.config.environment import EnvironmentConfig
from tidemill.common.config.section import Section


class EngineTraits(NamedTuple):
    """What is known of an engine before it is built."""

    class_name: str
    """`module:Class` in services/rollout/engines."""
    package: str = ""
    """What has to be installed for it."""
    loads_model: bool = True
    """Whether it computes with `model.path`, and so on a GPU where its section names no other device."""
    leaves_gpu: bool = True
    """Whether it gives its memory of the GPU back while it sleeps."""
    reserves_gpu_memory: bool = False
    """Whether it takes a share of the GPU's memory at its start."""


ENGINES = {
    "vllm": EngineTraits("vllm:VllmEngine", package="vllm", reserves_gpu_memory=True),
    "transformers": EngineTraits("transformers:TransformersEngine", leaves_gpu=False),
    "simulated": EngineTraits("simulated:SimulatedEngine", loads_model=False),
}
"""By `rollout.engine`. Nothing else compares with these names."""


class SamplingConfig(Section):
    """How completions of training tickets are sampled."""

    max_tokens: int = Field(512, ge=1, le=1 << 20)
    """Longest completion, in tokens; with an environment, longest turn."""
    temperature: float = Field(1.0, ge=0.01, le=10.0)
    """Softmax temperature; the trainer divides its logits by the same number."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Nucleus sampling. Below 1 the trainer's distribution differs from the sampled one."""
    top_k: int = Field(0, ge=0, le=1 << 20)
    """Sample among the k likeliest tokens; 0 means all. Not 0: as with `top_p`."""
    min_p: float = Field(0.0, ge=0.0, lt=1.0)
    """Leave out tokens less likely than this share of the likeliest; 0 is off. Not 0: as with `top_p`."""


class VllmConfig(Section):
    """Options of the `vllm` engine."""

    gpu_memory_utilization: float = Field(0.85, gt=0.0, le=1.0)
    """Share of GPU memory for weights and KV cache."""
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    """GPUs that hold one engine together."""
    max_num_seqs: int = Field(256, ge=1, le=8192)
    """Most sequences in one decoding batch."""
    enforce_eager: bool = False
    """Skip graph capture: starts faster, decodes slower."""
    prefix_caching: bool = True
    """Reuse the KV cache of a group's prompt; a new version reuses nothing of older ones."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further fields of vLLM's AsyncEngineArgs, as they are; on a CPU `kv_cache_memory_bytes` is 1 GiB."""


class TransformersConfig(Section):
    """Options of the `transformers` engine."""

    max_batch_size: int = Field(128, ge=1, le=4096)
    """Most sequences decoded together."""
    gather_ms: float = Field(20.0, ge=0.0, le=10_000.0)
    """How long the first request of a batch waits to fill a batch, in milliseconds."""
    device: str = "auto"
    """`auto` takes the first GPU, else the CPU."""


class SimulatedConfig(Section):
    """Options of the `simulated` engine: delays in place of a model, for benchmarks and tests."""

    group_s: float = Field(0.0, ge=0.0, le=3600.0)
    """Mean time to generate one completion, in seconds, however many run at once."""
    jitter: float = Field(0.0, ge=0.0, le=1.0)
    """Spread of that time: uniform between (1 - jitter) and (1 + jitter) times the mean."""
    tokens: int = Field(16, ge=1, le=1 << 20)
    """Tokens in each completion; with `sigma`, their median."""
    sigma: float = Field(0.0, ge=0.0, le=3.0)
    """Spread of the lengths, and of the times with them: log-normal around `tokens`, cut at
    `sampling.max_tokens`. At 0.99 one completion in a hundred is ten times the median (arXiv 2510.12633)."""
    capacity: int = Field(1_000_000, ge=1)
    """Completions generated at once; others wait."""
    load_s: float = Field(0.0, ge=0.0, le=600.0)
    """Time one weight update takes, in seconds."""
    vocab_size: int = Field(128, ge=2, le=1 << 20)
    """Ids are drawn from 0 to this, exclusive."""


class RolloutConfig(Section):
    """How the rollout service turns tickets into trajectories."""

    engine: Literal["vllm", "transformers", "simulated"] = "vllm"
    """What generates: vLLM, plain transformers (no GPU library needed), or delays."""
    gpus: tuple[int, ...] = ()
    """GPUs of this machine for its rollout workers, dealt out in turn, `vllm.tensor_parallel_size` to each;
    empty takes GPUs that nobody has (`tidemill up`), of CUDA_VISIBLE_DEVICES where that is set."""
    shares_trainer_gpus: bool = False
    """Rollout workers are on GPUs of the trainer, without `gpu_turns` both at once:
    `vllm.gpu_memory_utilization` has to leave what the trainer takes."""
    gpu_turns: Literal["auto", "on", "off"] = "auto"
    """Rollout workers are on GPUs of the trainer, and take turns with it: the engine sleeps while the trainer
    computes a step, and the trainer waits in the host's memory while the engine generates. `auto` does where
    `tidemill up` finds one GPU for the trainer and vLLM."""
    gpu_turn_s: float = Field(5.0, ge=0.05, le=3600.0)
    """How long a process keeps a GPU that it shares in turns while another one waits, in seconds: with
    `gpu_turns`, and with `shares_rollout_gpus` of servers."""
    workers: int = Field(1, ge=0, le=1024)
    """Rollout processes that `tidemill up` starts on this machine."""
    stall_s: float = Field(600.0, gt=0.0, le=86_400.0)
    """An engine that has work and finishes no completion for this long is started again, in seconds."""
    max_groups_in_flight: int = Field(64, ge=1, le=65536)
    """Groups one worker holds at once; a finished group frees a slot."""
    seed: int | None = Field(None, ge=0)
    """Seeds the engine's sampling; absent takes the run's seed."""
    num_threads: int = Field(0, ge=0, le=1024)
    """CPU threads of the engine; 0 shares the cores, less one, between this machine's workers."""
    sampling: SamplingConfig = SamplingConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    vllm: VllmConfig = VllmConfig()
    transformers: TransformersConfig = TransformersConfig()
    simulated: SimulatedConfig = SimulatedConfig()

    @property
    def engine_traits(self) -> EngineTraits:
        """What is known of the engine."""
        return ENGINES[self.engine]

    @property
    def uses_gpus(self) -> bool:
        """Whether the engine computes on GPUs."""
        device = getattr(getattr(self, self.engine), "device", "auto")
        return self.engine_traits.loads_model and not device.startswith("cpu")

    @property
    def takes_gpu_turns(self) -> bool:
        """Whether the trainer has the GPUs in turn with its engines."""
        return self.gpu_turns == "on"

    @property
    def on_trainer_gpus(self) -> bool:
        """Whether both are meant to be on the same ones."""
        return self.shares_trainer_gpus or self.takes_gpu_turns
