"""Where the time of a step goes, by kind of kernel, from a profile of torch."""

from collections.abc import Iterable
from typing import Any

from torch.autograd import DeviceType

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
