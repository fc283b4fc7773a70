"""MFU of the trainer's step for dense models at 16k packed tokens on GPUs, and where the rest goes.

    python -m benchmarks.gpu.mfu 4b [--compiled] [--ranks 2] [--dry]

The policy is that of a run, opened from a folder with the settings that the trainer chooses by itself. Where
the whole model does not fit on a GPU, it has as many of its layers as do, and says so: layers are alike.

Model FLOPs are those of a run's metrics (`policy/usage.py`). MFU is model FLOPs over time and the dense bf16
peak of all GPUs.
"""

import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from benchmarks.device import free, is_gpu, now_s, random_sample
from benchmarks.gpu.shapes import make_model, shape_of
from benchmarks.report import print_figures, print_table
from tidemill.common.config import RunConfig
from tidemill.services.trainer.groups.samples import MicroBatch
from tidemill.services.trainer.policy import usage
from tidemill.services.trainer.policy.fsdp.sharded_policy import ShardedPolicy
from tidemill.services.trainer.policy.loading import open_policy
from tidemill.services.trainer.policy.memory.estimate import GIB, Take, trainer_take, usable
from tidemill.services.trainer.policy.memory.fit import choose_passes
from tidemill.services.trainer.policy.memory.sizes import read_model
from tidemill.services.trainer.policy.policy import Policy
from tidemill.services.trainer.policy.usage import peak_flops

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
OTHER, NONE = "other kernels", "no kernel running"


def kind_of(name: str) -> str:
    """The kind of a kernel, or of a CPU's operator."""
    name = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), OTHER)


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


@dataclass(frozen=True)
class Work:
    """Input of a step: micro-batches of `packed` tokens, in sequences of equal length."""

    packed: int = 16_384
    sequence: int = 2_048
    prompt: int = 256
    micro_batches: int = 4
    steps: int = 5

    @property
    def tokens(self) -> int:
        return self.packed * self.micro_batches


TINY_WORK = Work(packed=128, sequence=32, prompt=8, micro_batches=2, steps=2)


def measure(
    name: str, dry: bool, compiled: bool = False, ranks: int = 1, passes: int | None = None
) -> dict[str, Any]:
    """Time, FLOPs, memory and kernels of a step of this shape; micro-batches have `passes` times the packed
    tokens, one for each rank."""
    work = TINY_WORK if dry else Work()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shape, config, take = _fitting(name, dry, work, folder, compiled, ranks)
        make_model(shape, folder)
        started = time.perf_counter()
        policy = open_policy(config)
        opened_s = time.perf_counter() - started
        try:
            found = _measured(policy, replace(work, packed=work.packed * (passes or ranks)), shape)
        finally:
            if isinstance(policy, ShardedPolicy):
                policy.close()
            del policy
            free()
    published = shape_of(name, dry).num_hidden_layers
    layers = f"{shape.num_hidden_layers} of {published}" if shape.num_hidden_layers < published else "all"
    chosen = {"layers": layers, "ranks": ranks, "checkpointing": config.trainer.gradient_checkpointing}
    return chosen | {"open_s": opened_s} | found | ({"estimated_gib": take.running / GIB} if take else {})


def _fitting(
    name: str, dry: bool, work: Work, folder: Path, compiled: bool, ranks: int
) -> tuple[Any, RunConfig, Take | None]:
    """The shape, with as many layers as a GPU holds; the run's config with its passes; what a rank takes."""
    tree = {
        "model": {"path": str(folder), "dtype": "bfloat16", "max_model_len": work.sequence},
        "data": {"train": "none", "max_prompt_tokens": work.prompt},
        "rollout": {"workers": 0, "sampling": {"max_tokens": work.sequence - work.prompt}},
        "trainer": {
            "micro_batch_tokens": work.packed,
            "optimizer": {"lr": 1e-6},
            "compile": compiled,
            "num_ranks": ranks,
        },
    }
    config = RunConfig.model_validate(tree)
    shape = shape_of(name, dry)
    if not is_gpu():
        return shape, config, None
    gpu_bytes = float(torch.cuda.get_device_properties(0).total_memory)
    for layers in range(shape.num_hidden_layers, 0, -2):
        shape = shape_of(name, dry, layers)
        shape.save_pretrained(folder)
        model = read_model(config)
        _, recomputed, take = choose_passes(config, model, gpu_bytes, usable(gpu_bytes))
        if take.peak <= usable(gpu_bytes) or layers <= FEWEST_LAYERS:
            break
    tree["trainer"]["gradient_checkpointing"] = recomputed
    return (
        shape,
        RunConfig.model_validate(tree),
        trainer_take(config, model, gpu_bytes, work.packed, recomputed),
    )


def _measured(policy: Policy, work: Work, shape: Any) -> dict[str, Any]:
    sizes, batches = (shape.vocab_size, work.prompt, work.sequence - work.prompt), []
    for number in range(work.micro_batches):
        rng = np.random.default_rng(number)
        rows = range(work.packed // work.sequence)
        batches.append(MicroBatch(tuple(random_sample(rng, (number, row), *sizes) for row in rows)))
    _, loss, norm = _step(policy, batches)
    _step(policy, batches)
    if is_gpu():
        torch.cuda.reset_peak_memory_stats()
    times = [_step(policy, batches)[0] for _ in range(work.steps)]
    peak_bytes = torch.cuda.max_memory_allocated() if is_gpu() else 0
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu() else [])]
    ) as profiler:
        profiled_s = _step(policy, batches)[0]
    device = DeviceType.CUDA if is_gpu() else DeviceType.CPU
    step_s = statistics.median(times)
    tflops = count_flops(shape, work) / step_s / 1e12
    return {
        "step_s": step_s,
        "tokens_per_s": work.tokens / step_s,
        "tflops": tflops,
        **({"peak_gib": peak_bytes / GIB} if is_gpu() else {}),
        "first_loss": loss,
        "first_grad_norm": norm,
        "layout": str(getattr(getattr(policy, "_own", policy), "layout", "")),
        "profile": kernel_shares(profiler.key_averages(), profiled_s, device),
    }


def with_mfu(found: dict[str, Any]) -> dict[str, Any]:
    """The figures with MFU, where this device's peak is known."""
    if peak := peak_flops():
        return {"mfu": found["tflops"] * 1e12 / peak / found["ranks"], **found}
    unknown = f"the bf16 peak of {torch.cuda.get_device_name()} is not in policy/usage.py" if is_gpu() else ""
    return found | ({"mfu": unknown} if unknown else {})


def _step(policy: Policy, batches: Sequence[MicroBatch]) -> tuple[float, float, float]:
    """Seconds, loss and gradient norm of a step."""
    started = now_s()
    parts = [policy.accumulate(batch) for batch in batches]
    norm = policy.update(sum(part.denominator for part in parts)).grad_norm
    return now_s() - started, sum(part.loss_sum for part in parts), norm


def count_flops(shape: Any, work: Work) -> float:
    """Model FLOPs of a step, forward and backward."""
    with torch.device("meta"):
        flops = usage.count_flops(AutoModelForCausalLM.from_config(shape))
    scored = work.tokens * (work.sequence - work.prompt) // work.sequence
    pairs = work.tokens // work.sequence * work.sequence**2 / 2
    return flops.token * work.tokens + flops.score * scored + flops.pair * pairs


def main(
    name: Annotated[str, typer.Argument(help="0.6b, 4b or 8b")],
    compiled: Annotated[bool, typer.Option("--compiled", help="with trainer.compile")] = False,
    ranks: Annotated[int, typer.Option(help="ranks that shard the model; 0 is one for each GPU")] = 1,
    dry: Annotated[bool, typer.Option("--dry", help="a tiny model of the same kind")] = False,
) -> None:
    """Measure one shape, and one rank beside several; the last line is JSON."""
    ranks = ranks or max(torch.cuda.device_count(), 2 * dry)
    figures = with_mfu(measure(name, dry, compiled, ranks))
    if ranks > 1 and name == "0.6b":
        alone = measure(name, dry, compiled, passes=ranks)
        figures["speedup"] = figures["tokens_per_s"] / alone["tokens_per_s"]
        figures["grad_norm_over_one_rank"] = figures["first_grad_norm"] / alone["first_grad_norm"]
    rows = [(kind, f"{share:.1%}") for kind, share in figures["profile"].items()]
    print_table(f"Where the time of a step goes, {name}", ("kernels", "share"), rows)
    plain = {key: value for key, value in figures.items() if key != "profile"}
    print_figures(f"A GRPO step, {name}", figures, plain)


if __name__ == "__main__":
    typer.run(main)
