"""How much of its devices a policy uses: FLOPs of the model, peak FLOP/s of a device, memory. None of it
changes a bit of what is computed."""

import resource
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from tidemill.services.trainer.algorithm.losses.sums import Sums
from tidemill.services.trainer.policy.attention import head_size, value_size
from tidemill.services.trainer.weights.peers import Peers, pack, unpack

PEAK_FLOPS = {
    "B300": 2250e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}
"""FLOP/s of dense bf16 products with float32 sums, by part of the device's name; the first match counts."""


def peak_flops() -> float:
    """Peak FLOP/s of this process's device; 0 where it is not known."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device), 0.0)


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs of forward and backward pass; what is recomputed counts once (arXiv 2204.02311, appendix B)."""

    token: float = 0.0
    """A token: 6 for each weight of a matrix, 4 for one that is not trained; only experts that it uses."""
    score: float = 0.0
    """A scored token: the output head."""
    pair: float = 0.0
    """A token and one that it attends to: 6 * heads * (size of a query + of a value) * layers that attend."""
    picture_token: float = 0.0
    """A token of a picture, in tower and projector: 6 for each weight of a matrix, and only 2 for one that is
    not trained, as no gradient goes on to what comes before a frozen tower."""
    picture_pair: float = 0.0
    """Two tokens of one picture, in layers of the tower where all its patches attend to each other."""

    def of(self, sums: Sums) -> float:
        """FLOPs of micro-batches, without padding. Tokens that rows share count once. Of the pairs, which are
        not counted so, the same share is taken off."""
        tokens = min(sums.positions, sums.row_tokens)
        pairs = sums.row_pairs * tokens / max(sums.row_tokens, 1)
        text = self.token * tokens + self.score * sums.tokens + self.pair * pairs
        pictures = self.picture_token * sums.picture_tokens + self.picture_pair * sums.picture_pairs
        return float(text + pictures)


def count_flops(model: PreTrainedModel) -> ModelFlops:
    """FLOPs of a model, which may be on the meta device, or split over ranks."""
    text = model.config.get_text_config()
    embedding = model.get_input_embeddings().weight
    chosen = getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None) or 1
    token = sum(
        (6.0 if weight.requires_grad else 4.0)
        * weight.numel()
        * (min(1.0, chosen / weight.shape[0]) if weight.ndim == 3 else 1.0)
        for weight in model.get_decoder().parameters()
        if weight.ndim >= 2 and weight is not embedding
    )
    heads = int(getattr(text, "num_attention_heads", None) or 0)
    pair = 6.0 * heads * (head_size(text) + value_size(text)) * num_attending(text) if heads else 0.0
    of_text = ModelFlops(token, 6.0 * model.get_output_embeddings().weight.numel(), pair)
    if getattr(model.config, "vision_config", None) is None:
        return of_text
    from tidemill.services.trainer.policy.tower_flops import count_tower_flops

    picture_token, picture_pair = count_tower_flops(model)
    return replace(of_text, picture_token=picture_token, picture_pair=picture_pair)


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
