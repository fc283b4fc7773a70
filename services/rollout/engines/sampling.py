"""From logits to sampled tokens and the logprobs they had, row by row with its own parameters.

The logprob of a token is that of the distribution it was drawn from: temperature, then top-k, then
top-p, each renormalised, in float32. A greedy row (temperature 0) takes the likeliest token and reports
its logprob at temperature 1, as vLLM does.

Shapes: B sequences, V vocabulary.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.wire.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of B rows as tensors; a filter that no row uses is None."""

    temperature_B: Tensor
    is_greedy_B: Tensor | None
    top_k_B: Tensor | None
    top_p_B: Tensor | None

    @classmethod
    def of(cls, rows: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> "SamplingBatch":
        """Collect the parameters of the rows of a batch."""
        greedy = [row.temperature == 0.0 for row in rows]
        temperatures = [1.0 if row.temperature == 0.0 else row.temperature for row in rows]
        # A greedy row is not filtered, so that its logprob is that of the whole distribution.
        top_k = [row.top_k if 0 < row.top_k < vocab_size and row.temperature else vocab_size for row in rows]
        top_p = [row.top_p if row.temperature else 1.0 for row in rows]
        return cls(
            torch.tensor(temperatures, device=device),
            torch.tensor(greedy, device=device) if any(greedy) else None,
            torch.tensor(top_k, device=device) if min(top_k) < vocab_size else None,
            torch.tensor(top_p, device=device) if min(top_p) < 1.0 else None,
        )

    def select(self, rows: Tensor) -> "SamplingBatch":
        """The parameters of some of the rows, in the order of `rows`."""
        return SamplingBatch(
            self.temperature_B[rows],
            None if self.is_greedy_B is None else self.is_greedy_B[rows],
            None if self.top_k_B is None else self.top_k_B[rows],
            None if self.top_p_B is None else self.top_p_B[rows],
        )


def processed_logprobs(logits_BV: Tensor, sampling: SamplingBatch) -> Tensor:
    """Logprobs of the distribution that is sampled from. Shape [B, V], float32; filtered tokens are -inf."""
    logits_BV = logits_BV.float() / sampling.temperature_B[:, None]
    if sampling.top_k_B is not None or sampling.top_p_B is not None:
        logits_BV = _filter(logits_BV, sampling.top_k_B, sampling.top_p_B)
    return torch.log_softmax(logits_BV, dim=-1)


def _filter(logits_BV: Tensor, top_k_B: Tensor | None, top_p_B: Tensor | None) -> Tensor:
    """Set to -inf what top-k, then top-p among the rest, leave out; the likeliest token always stays."""
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
    if top_k_B is not None:
        ranks_V = torch.arange(sorted_BV.shape[-1], device=sorted_BV.device)
        sorted_BV = sorted_BV.masked_fill(ranks_V[None, :] >= top_k_B[:, None], -torch.inf)
    if top_p_B is not None:
        probs_BV = sorted_BV.softmax(dim=-1)
        # The mass before a token decides, so that the one which crosses the threshold is kept.
        mass_before_BV = probs_BV.cumsum(dim=-1) - probs_BV
        drop_BV = mass_before_BV >= top_p_B[:, None]
        drop_BV[:, 0] = False
        # Rows that do not use top-p must not lose a tail to rounding in the running sum.
        drop_BV &= (top_p_B < 1.0)[:, None]
        sorted_BV = sorted_BV.masked_fill(drop_BV, -torch.inf)
    return torch.empty_like(logits_BV).scatter_(-1, order_BV, sorted_BV)


def draw(logprobs_BV: Tensor, sampling: SamplingBatch, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the distribution's running sum at `uniforms_B` (float64, [0, 1)).

    Returns the ids (int64) and their logprobs (float32), both of shape [B].
    """
    # Float64: in float32 the running sum over a large vocabulary would favour its first tokens.
    mass_BV = logprobs_BV.double().exp().cumsum(dim=-1)
    total_B = mass_BV[:, -1]
    # Rounding could make the product equal to the total, and no running sum exceeds that.
    target_B = torch.minimum(uniforms_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    # The first token whose running sum exceeds the target: never one of probability zero.
    ids_B1 = torch.searchsorted(mass_BV, target_B[:, None], right=True)
    if sampling.is_greedy_B is not None:
        greedy_B1 = logprobs_BV.argmax(dim=-1, keepdim=True)
        ids_B1 = torch.where(sampling.is_greedy_B[:, None], greedy_B1, ids_B1)
    return ids_B1[:, 0], logprobs_BV.gather(-1, ids_B1)[:, 0]


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def request_key(seed: int, request_id: str) -> int:
    """64 bits that differ between requests and between seeds."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{request_id}".encode(), digest_size=8).digest(), "little")


def uniforms(keys_B: NDArray[np.uint64], draw: int | NDArray[np.uint64]) -> NDArray[np.float64]:
    """The `draw`-th number of each key, in [0, 1). Shape [B], float64. The mixer is SplitMix64."""
    with np.errstate(over="ignore"):
        state = keys_B + (np.asarray(draw, dtype=np.uint64) + np.uint64(1)) * _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * _MIX_1
        state = (state ^ (state >> np.uint64(27))) * _MIX_2
        state = state ^ (state >> np.uint64(31))
    fractions: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return fractions
