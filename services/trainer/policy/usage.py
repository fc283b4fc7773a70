"""How much of its devices a policy uses: FLOPs of the model, peak FLOP/s of a device, memory. None of it
changes a bit of what is computed."""

import re
import resource
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tidemill.services.trainer.algorithm.losses.sums import Sums
from tidemill.services.trainer.policy.attention import head_size, value_size
from tidemill.services.trainer.weights.peers import Peers, pack, unpack

PEAK_FLOPS = {
    "GB300": 2500e12,
    "GB200": 2500e12,
    "B300": 2250e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
}
"""FLOP/s of dense bf16 products with float32 sums, by words of the device's name; the first match counts."""


def peak_flops() -> float:
    """Peak FLOP/s of this process's device; 0 where it is not known."""
    return peak_flops_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else 0.0


def peak_flops_of(device_name: str) -> float:
    """Peak FLOP/s of the device that torch calls so, such as "NVIDIA H100 80GB HBM3"; 0 where not known."""
    for words, flops in PEAK_FLOPS.items():
        # Whole words: an A1000 is no A100.
        if re.search(rf"\b{words}\b", device_name):
            return flops
    return 0.0


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs of forward and backward pass; what is recomputed counts once (arXiv 2204.02311, appendix B)."""

    per_token: float = 0.0
    """6 for each weight of a matrix, 4 for one that is not trained; only experts that the token uses."""
    per_scored_token: float = 0.0
    """The output head, by the same rule."""
    per_pair: float = 0.0
    """Of a token and one that it attends to: 6 * heads * (size of a query + that of a value) * layers with
    attention."""
    per_picture_token: float = 0.0
    """In tower and projector: 6 for each weight of a matrix, and only 2 for one that is not trained, as no
    gradient goes on to what comes before a frozen tower."""
    per_picture_pair: float = 0.0
    """Of two tokens of one picture, in layers of the tower where all its patches attend to each other."""

    def of(self, sums: Sums) -> float:
        """FLOPs of micro-batches, without padding.

        A token that several rows share is computed once, and counts once. Their pairs were counted for each
        row: the same share is taken off.
        """
        computed_tokens = min(sums.positions, sums.row_tokens)
        computed_pairs = sums.row_pairs * computed_tokens / max(sums.row_tokens, 1)
        text = self.per_token * computed_tokens
        text += self.per_scored_token * sums.tokens
        text += self.per_pair * computed_pairs
        pictures = self.per_picture_token * sums.picture_tokens + self.per_picture_pair * sums.picture_pairs
        return float(text + pictures)


def count_flops(model: PreTrainedModel) -> ModelFlops:
    """FLOPs of a model, which may be on the meta device, or split over ranks."""
    text = model.config.get_text_config()
    embedding = model.get_input_embeddings().weight
    num_chosen = getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None) or 1
    per_token = 0.0
    for weight in model.get_decoder().parameters():
        # A norm is no matrix, and a row of the embedding is only looked up.
        if weight.ndim < 2 or weight is embedding:
            continue
        flops = _matrix_flops(weight)
        if weight.ndim == 3:  # [experts, out, in]
            flops *= min(1.0, num_chosen / weight.shape[0])
        per_token += flops
    per_pair = 0.0
    heads = int(getattr(text, "num_attention_heads", None) or 0)
    if heads:
        per_pair = 6.0 * heads * (head_size(text) + value_size(text)) * num_attending(text)
    per_picture_token = 0.0
    per_picture_pair = 0.0
    if getattr(model.config, "vision_config", None) is not None:
        from tidemill.services.trainer.policy.tower_flops import count_tower_flops

        per_picture_token, per_picture_pair = count_tower_flops(model)
    return ModelFlops(
        per_token=per_token,
        per_scored_token=_matrix_flops(model.get_output_embeddings().weight),
        per_pair=per_pair,
        per_picture_token=per_picture_token,
        per_picture_pair=per_picture_pair,
    )


def _matrix_flops(weight: nn.Parameter) -> float:
    """FLOPs of a token in the product with this matrix: 2 for each weight forward, 2 for the gradient of what
    comes before, and 2 for its own gradient where it is trained."""
    return (6.0 if weight.requires_grad else 4.0) * weight.numel()


WITHOUT_PAIRS = ("linear_attention", "conv", "mamba", "mamba2", "moe", "mlp")
"""Kinds of layers in which a token attends to no other."""


def num_attending(text: Any) -> int:
    """Layers with attention: of a model that mixes them with linear ones, as its configuration lists them."""
    kinds = getattr(text, "layer_types", None)
    if not kinds:
        return int(text.num_hidden_layers)
    return sum(kind not in WITHOUT_PAIRS for kind in kinds)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a policy used of its devices.

    Example: two H200 with 61 and 58 GiB at their peaks: `peak_flops` 989e12, `peak_bytes` (61 << 30, 58 <<
    30).
    """

    flops: ModelFlops = field(default_factory=ModelFlops)
    peak_flops: float = 0.0
    """Peak FLOP/s of one rank's device; 0 where it is not known."""
    peak_bytes: tuple[int, ...] = ()
    """Peak memory of each rank: on its GPU since the last call, or without one since the process began."""


def measure_usage(flops: ModelFlops, peers: Peers) -> Usage:
    """The usage of all ranks, of which each makes the call."""
    peaks = peers.gather(pack(take_peak_bytes()))
    return Usage(flops, peak_flops(), tuple(map(unpack, peaks)))


def take_peak_bytes() -> int:
    """Peak memory of this process in bytes; on a GPU the measurement begins again."""
    if not torch.cuda.is_available():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak
