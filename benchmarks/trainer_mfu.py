"""MFU of the trainer's step for dense models at 16k packed tokens on a GPU, and where the rest goes.

`python -m benchmarks.trainer --gpu`. Model FLOPs: 6 for each weight of a matrix product and token (the head
included, the embedding's look-up not), and 12 * hidden for each pair of tokens that attend to each other in
each layer: recomputation is not counted. MFU is model FLOPs over time and the device's dense bf16 peak.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.import_utils import is_flash_attn_2_available

from benchmarks.report import machine, print_result, print_table
from tidemill.common.config.trainer import TrainerConfig
from tidemill.services.trainer.groups.samples import MicroBatch, Sample
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy

PACKED_TOKENS, SEQUENCE_TOKENS, PROMPT_TOKENS = 16_384, 2_048, 256
MICRO_BATCHES, STEPS = 4, 5
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "H20": 148e12, "A100": 312e12, "L40S": 362e12}


@dataclass(frozen=True)
class Shape:
    """A dense Qwen2."""

    name: str
    hidden: int
    layers: int
    heads: int
    intermediate: int


SHAPES = (Shape("0.5B", 896, 24, 14, 4864), Shape("1.5B", 1536, 28, 12, 8960))
KINDS = {
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "matrix products": ("gemm", "cutlass", "xmma", "nvjet", "cublas", "matmul"),
    "softmax and reductions": ("softmax", "reduce", "log", "entr", "gather"),
    "optimizer": ("adam", "multi_tensor", "foreach"),
}


def measure_all() -> None:
    """Measure every shape; the last line is JSON.

    Raises:
        SystemExit: there is no GPU, or its peak is not known.
    """
    if not torch.cuda.is_available():
        raise SystemExit("--gpu needs a CUDA GPU; torch sees none here")
    device = torch.cuda.get_device_name()
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in device), None)
    if peak is None:
        raise SystemExit(f"the bf16 peak of {device} is not known; add it to PEAK_FLOPS in {__name__}")
    rows, result = [], {}
    for shape in SHAPES:
        step_s, flops, peak_bytes, shares = measure(shape)
        mfu = flops / step_s / peak
        tokens_s = PACKED_TOKENS * MICRO_BATCHES / step_s
        rows.append((shape.name, f"{tokens_s:,.0f}", f"{mfu:.1%}", f"{peak_bytes / 2**30:.1f}"))
        profile_rows = [(kind, f"{share:.1%}") for kind, share in shares.items()]
        print_table(f"Where the time of a step goes, {shape.name}", ("kernels", "share"), profile_rows)
        result[f"mfu_{shape.name}"] = round(mfu, 4)
    note = f"{device}, {machine()}; {PACKED_TOKENS} tokens a micro-batch, {MICRO_BATCHES} in a step."
    print_table("MFU of a GRPO step", ("model", "tokens/s", "MFU", "peak GiB"), rows, note)
    print_result(result)


def measure(shape: Shape) -> tuple[float, float, int, dict[str, float]]:
    """Seconds of a step (median), its model FLOPs, peak bytes, and the shares of its kernels."""
    model = _model(shape)
    config = TrainerConfig.model_validate(
        {"micro_batch_tokens": PACKED_TOKENS, "optimizer": {"lr": 1e-6}, "device": "cuda"}
    )
    policy = TransformersPolicy(
        model, config, dtype=torch.bfloat16, temperature=1.0, max_completion_tokens=SEQUENCE_TOKENS
    )
    batches = [_batch(number) for number in range(MICRO_BATCHES)]
    for _ in range(2):
        _step(policy, batches)
    torch.cuda.reset_peak_memory_stats()
    times = [_step(policy, batches) for _ in range(STEPS)]
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        profiled_s = _step(policy, batches)
    shares = _shares(profiler, profiled_s)
    return float(np.median(times)), _flops(model, shape), torch.cuda.max_memory_allocated(), shares


def _step(policy: TransformersPolicy, batches: Sequence[MicroBatch]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    denominator = sum(policy.accumulate(batch).denominator for batch in batches)
    policy.update(denominator)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _model(shape: Shape) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=2,
        max_position_embeddings=SEQUENCE_TOKENS,
        tie_word_embeddings=True,
    )
    config._attn_implementation = "flash_attention_2" if is_flash_attn_2_available() else "sdpa"
    return Qwen2ForCausalLM(config).to("cuda").eval()  # type: ignore[arg-type]


def _batch(seed: int) -> MicroBatch:
    rng = np.random.default_rng(seed)
    count = SEQUENCE_TOKENS - PROMPT_TOKENS
    return MicroBatch(
        tuple(
            Sample(
                key=(seed, index),
                prompt_ids=rng.integers(3, 150_000, PROMPT_TOKENS).astype(np.int32),
                completion_ids=rng.integers(3, 150_000, count).astype(np.int32),
                rollout_logprobs=np.full(count, -12.0, dtype=np.float32),
                mask=np.ones(count, dtype=np.bool_),
                advantage=float(rng.normal()),
                reward=0.0,
            )
            for index in range(PACKED_TOKENS // SEQUENCE_TOKENS)
        )
    )


def _flops(model: PreTrainedModel, shape: Shape) -> float:
    """Model FLOPs of a step, forward and backward."""
    tokens = PACKED_TOKENS * MICRO_BATCHES
    head = model.get_output_embeddings().weight.numel()
    embedding = model.get_input_embeddings().weight.numel()
    body = sum(p.numel() for p in model.parameters() if p.ndim >= 2) - embedding
    scored = tokens * (SEQUENCE_TOKENS - PROMPT_TOKENS) // SEQUENCE_TOKENS
    pairs = tokens // SEQUENCE_TOKENS * SEQUENCE_TOKENS**2 / 2
    return 6.0 * body * tokens + 6.0 * head * scored + 12.0 * shape.hidden * shape.layers * pairs


def _shares(profiler: Any, step_s: float) -> dict[str, float]:
    """Share of the step's wall time in each kind of kernel, and in none of them."""
    shares = dict.fromkeys((*KINDS, "other kernels"), 0.0)
    for event in profiler.key_averages():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        name = event.key.lower()
        kind = next((k for k, words in KINDS.items() if any(word in name for word in words)), "other kernels")
        shares[kind] += event.self_device_time_total / 1e6 / step_s
    shares["no kernel running"] = max(0.0, 1.0 - sum(shares.values()))
    return shares
