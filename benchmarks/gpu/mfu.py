"""MFU of the trainer's step for dense models at 16k packed tokens on GPUs, and where the rest goes.

    python -m benchmarks.gpu.mfu 4b [--compiled] [--ranks 2] [--dry]

The policy is that of a run, opened from a folder with the settings that the trainer chooses by itself. Where
the whole model does not fit on a GPU, it has as many of its layers as do, and says so: layers are alike.

Model FLOPs are those of a run's metrics (`policy/usage.py`). MFU is model FLOPs over time and the dense bf16
peak of all GPUs.
"""

import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import typer
from torch.autograd import DeviceType
from torch.profiler import profile

from benchmarks.device import free, is_gpu, now_s, random_sample
from benchmarks.gpu.shapes import make_model, shape_of
from benchmarks.report import print_figures, print_table
from tests.support.models import run_config
from tidemill.common.config import RunConfig
from tidemill.services.trainer.algorithm.losses.sums import Sums
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.policy.fsdp.sharded_policy import ShardedPolicy
from tidemill.services.trainer.policy.loading import open_policy
from tidemill.services.trainer.policy.memory.estimate import GIB, trainer_take, usable
from tidemill.services.trainer.policy.memory.fit import choose_passes
from tidemill.services.trainer.policy.memory.sizes import read_model
from tidemill.services.trainer.policy.policy import Policy

_WORDS = {
    "communication": "nccl gloo all_gather allgather reduce_scatter allreduce",
    "attention": "flash fmha attention attn sdpa varlen",
    "optimizer": "adam multi_tensor foreach",
    "matrix products": "gemm gemv splitk cutlass xmma nvjet cublas matmul ::mm ::addmm ::bmm",
    "softmax and reductions": "softmax reduce norm logsumexp triton_red triton_per ::sum ::mean ::max entr",
    "gather and scatter": "gather scatter index embedding",
    "copies and casts": "memcpy memset copy cat convert",
    "elementwise": "elementwise triton_poi silu swiglu rope ::mul ::add ::sub ::div ::exp ::neg",
}
KINDS = {kind: tuple(words.split()) for kind, words in _WORDS.items()}
"""Kinds, and parts of their kernels' names; the first that fits counts. On CPUs it is operators."""
OTHER = "other kernels"
NONE = "no kernel running"


def kind_of(name: str) -> str:
    """The kind of a kernel, or of a CPU's operator."""
    name = name.lower()
    for kind, words in KINDS.items():
        if any(word in name for word in words):
            return kind
    return OTHER


def kernel_shares(events: Iterable[Any], wall_s: float, device: DeviceType) -> dict[str, float]:
    """Share of the wall time in each kind of kernel, and in none of them.

    `events` are the profile's averages by name. What a program or the optimizer names itself
    (`record_function`) is on the GPU's lane too, spans kernels that count on their own, and is left out.
    """
    shares = dict.fromkeys((*KINDS, OTHER), 0.0)
    for event in events:
        if event.device_type != device or event.is_user_annotation:
            continue
        is_cpu = device == DeviceType.CPU
        microseconds = event.self_cpu_time_total if is_cpu else event.self_device_time_total
        shares[kind_of(event.key)] += microseconds / 1e6 / wall_s
    shares[NONE] = max(0.0, 1.0 - sum(shares.values()))
    return {kind: share for kind, share in shares.items() if share >= 0.0005 or kind in (OTHER, NONE)}


FEWEST_LAYERS = 2


class Work(NamedTuple):
    """Input of a step: micro-batches of `packed` tokens, in sequences of equal length."""

    packed: int = 16_384
    sequence: int = 2_048
    prompt: int = 256
    micro_batches: int = 4
    steps: int = 5


TINY_WORK = Work(packed=128, sequence=32, prompt=8, micro_batches=2, steps=2)


def measure(
    name: str, dry: bool, compiled: bool = False, ranks: int = 1, passes: int | None = None
) -> dict[str, Any]:
    """Time, FLOPs, memory and kernels of a step of this shape; micro-batches have `passes` times the packed
    tokens, one for each rank."""
    work = TINY_WORK if dry else Work()
    with tempfile.TemporaryDirectory() as temporary:
        shape, config, figures = _fitting(name, dry, work, Path(temporary), compiled, ranks)
        make_model(shape, Path(temporary))
        started = time.perf_counter()
        policy = open_policy(config)
        figures["open_s"] = time.perf_counter() - started
        try:
            wider = work._replace(packed=work.packed * (passes or ranks))
            return figures | _measured(policy, wider, shape.vocab_size, ranks)
        finally:
            if isinstance(policy, ShardedPolicy):
                policy.close()
            del policy
            free()


def _fitting(
    name: str, dry: bool, work: Work, folder: Path, compiled: bool, ranks: int
) -> tuple[Any, RunConfig, dict[str, Any]]:
    """The shape, with as many layers as a GPU holds; the run's config with its passes; what was chosen."""
    trainer = {"micro_batch_tokens": work.packed, "optimizer": {"lr": 1e-6}, "compile": compiled}
    sections = {
        "model": {"dtype": "bfloat16", "max_model_len": work.sequence},
        "data": {"max_prompt_tokens": work.prompt},
        "rollout": {"workers": 0, "sampling": {"max_tokens": work.sequence - work.prompt}},
        "trainer": trainer | {"num_ranks": ranks},
    }
    config = run_config(folder, **sections)
    shape = shape_of(name, dry)
    published = shape.num_hidden_layers
    figures = {"ranks": ranks}
    if is_gpu():
        gpu_bytes = float(torch.cuda.get_device_properties(0).total_memory)
        for layers in range(published, 0, -2):
            shape = shape_of(name, dry, layers)
            shape.save_pretrained(folder)
            model = read_model(config)
            _, recomputed, take = choose_passes(config, model, gpu_bytes, usable(gpu_bytes))
            if take.peak <= usable(gpu_bytes) or layers <= FEWEST_LAYERS:
                break
        take = trainer_take(config, model, gpu_bytes, work.packed, recomputed)
        figures |= {"checkpointing": recomputed, "estimated_gib": take.running / GIB}
        sections["trainer"] |= {"gradient_checkpointing": recomputed}
    layers = shape.num_hidden_layers
    figures["layers"] = "all" if layers == published else f"{layers} of {published}"
    return shape, run_config(folder, **sections), figures


def _measured(policy: Policy, work: Work, vocab_size: int, ranks: int) -> dict[str, Any]:
    sizes = (vocab_size, work.prompt, work.sequence - work.prompt)
    batches = []
    for number in range(work.micro_batches):
        rng = np.random.default_rng(number)
        rows = range(work.packed // work.sequence)
        batches.append(MicroBatch(tuple(random_sample(rng, (number, row), *sizes) for row in rows)))
    _, sums, norm = _step(policy, batches)
    _step(policy, batches)
    policy.usage()  # from here on its peak is measured
    step_s = median(_step(policy, batches)[0] for _ in range(work.steps))
    usage = policy.usage()
    with profile() as profiler:
        profiled_s = _step(policy, batches)[0]
    flops = usage.flops.of(sums) / step_s
    return {
        "mfu": flops / usage.peak_flops / ranks if usage.peak_flops else "this device's peak is not known",
        "step_s": step_s,
        "tokens_per_s": work.packed * work.micro_batches / step_s,
        "tflops": flops / 1e12,
        "peak_gib": max(usage.peak_bytes) / GIB,
        "first_loss": sums.loss_sum,
        "first_grad_norm": norm,
        "layout": policy.layout,
        "profile": kernel_shares(
            profiler.key_averages(), profiled_s, DeviceType.CUDA if is_gpu() else DeviceType.CPU
        ),
    }


def _step(policy: Policy, batches: Sequence[MicroBatch]) -> tuple[float, Sums, float]:
    """Seconds, sums and gradient norm of a step."""
    started = now_s()
    sums = reduce(add, (policy.accumulate(batch) for batch in batches))
    norm = policy.update(sums.denominator).grad_norm
    return now_s() - started, sums, norm


def main(name: str, compiled: bool = False, ranks: int = 1, dry: bool = False) -> None:
    """Measure a shape: 0.6b, 4b or 8b, or with --dry a tiny one of its kind; with several ranks (0: one for
    each GPU) beside one rank."""
    ranks = ranks or max(torch.cuda.device_count(), 2 * dry)
    figures = measure(name, dry, compiled, ranks)
    if ranks > 1 and name == "0.6b":
        alone = measure(name, dry, compiled, passes=ranks)
        figures["speedup"] = figures["tokens_per_s"] / alone["tokens_per_s"]
        figures["grad_norm_over_one_rank"] = figures["first_grad_norm"] / alone["first_grad_norm"]
    rows = [(kind, f"{share:.1%}") for kind, share in figures["profile"].items()]
    print_table(f"Where the time of a step goes, {name}", "kernels,share", rows)
    print_figures(f"A GRPO step, {name}", figures)


if __name__ == "__main__":
    typer.run(main)
