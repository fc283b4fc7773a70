"""Logprobs and entropies of tokens from hidden states, a chunk of logits at a time.

Guarantee: at most `LOGITS_ELEMENTS` logits exist at once, also in the backward pass, which computes them
again. Peak memory in bytes beside hidden states and their gradient, where products are in 16 bits: 12 for
each of `LOGITS_ELEMENTS` (a chunk's logits, logprobs and gradient), and 6 for each element of the head's
matrix (it in the compute dtype, and its gradient), once for all chunks.

Shape legend: N scored tokens, C tokens of a chunk, H hidden, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

LOGITS_ELEMENTS = 1 << 26
"""Logits in one chunk: 256 MiB of float32, or 441 tokens of a vocabulary of 152,064."""


def score_logits(
    logits_CV: Tensor, targets_C: Tensor, temperature: float, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Logprobs of the targets (with gradient) and entropies (only if asked), of softmax(logits /
    temperature).

    Shapes [C], float32 (float64 where the logits are). Entropies are at least 0, at most log V.
    """
    logits_CV = logits_CV if logits_CV.dtype == torch.float64 else logits_CV.float()
    if temperature != 1.0:
        logits_CV = logits_CV / temperature
    logprobs_CV = F.log_softmax(logits_CV, dim=-1)
    targets = logprobs_CV.gather(-1, targets_C[:, None]).squeeze(-1)
    if entropy_gradient:
        # The gradient of `entr` is not finite at p = 0; that of this product is 0 wherever exp is.
        bounded_CV = logprobs_CV.clamp(min=torch.finfo(logprobs_CV.dtype).min)
        return targets, -(logprobs_CV.exp() * bounded_CV).sum(-1)
    with torch.no_grad():
        # `torch.special.entr` would take twice as long: it computes logarithms again. 0 * -inf counts as 0.
        terms_CV = logprobs_CV.exp().mul_(logprobs_CV).nan_to_num_(nan=0.0)
        entropies_C = terms_CV.sum(-1).neg()
    return targets, entropies_C


def score_hidden(
    hidden_NH: Tensor,
    head: nn.Module,
    targets_N: Tensor,
    temperature: float,
    max_elements: int = LOGITS_ELEMENTS,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `score_logits`, from hidden states, with at most `max_elements` logits in memory at once.

    Up to that size there is one chunk and nothing is recomputed. Beyond it the backward pass computes every
    chunk's logits again, which costs one more product with the head.
    """

    def score_chunk(hidden_CH: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        return score_logits(head(hidden_CH), targets_C, temperature, entropy_gradient)

    vocabulary = cast(Tensor, head.weight).shape[0]
    chunk = max(1, max_elements // vocabulary)
    if len(targets_N) <= chunk:
        return score_chunk(hidden_NH, targets_N)
    if type(head) is nn.Linear:
        kind = hidden_NH.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype
        options = (temperature, chunk, dtype, entropy_gradient)
        apply: Callable[..., tuple[Tensor, Tensor]] = ChunkedScores.apply
        return apply(hidden_NH, head.weight, head.bias, targets_N, options)
    # A head with adapters, or of a class of its own: by its forward.
    score: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = score_chunk
    if torch.is_grad_enabled():
        score = partial(checkpoint, score_chunk, use_reentrant=False, preserve_rng_state=False)
    chunks = zip(hidden_NH.split(chunk), targets_N.split(chunk), strict=True)
    parts = [score(hidden_CH, targets_C) for hidden_CH, targets_C in chunks]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


class ChunkedScores(torch.autograd.Function):
    """`score_logits` of a linear head, whose matrix is cast once and whose gradient is one sum.

    With p = softmax(z / t), g the gradient of the logprobs and h that of the entropies E: the gradient of the
    logits z is (g (1[target] - p) - h p (log p + E)) / t. `options` are temperature, tokens of a chunk, dtype
    of the product, and whether entropies have a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        options: tuple[float, int, torch.dtype, bool],
    ) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies, [N] each."""
        temperature, chunk, dtype, entropy_gradient = options
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N)
        ctx.options = options
        matrix, bias = weight_VH.to(dtype), None if bias_V is None else bias_V.to(dtype)
        parts = []
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for hidden_CH, targets_C in zip(hidden_NH.split(chunk), targets_N.split(chunk), strict=True):
                logits_CV = F.linear(hidden_CH.to(dtype), matrix, bias)
                parts.append(score_logits(logits_CV, targets_C, temperature))
        logprobs_N, entropies_N = (torch.cat(column) for column in zip(*parts, strict=True))
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Of hidden states, matrix and bias."""
        hidden_NH, weight_VH, bias_V, targets_N = ctx.saved_tensors
        temperature, chunk, dtype, entropy_gradient = ctx.options
        matrix, bias = weight_VH.to(dtype), None if bias_V is None else bias_V.to(dtype)
        wants_weight, wants_bias = ctx.needs_input_grad[1:3]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        d_hidden_NH = torch.empty_like(hidden_NH)
        d_weight_VH = torch.zeros_like(weight_VH, dtype=wide) if wants_weight else None
        d_bias_V = torch.zeros_like(bias_V, dtype=wide) if wants_bias else None
        for start in range(0, len(targets_N), chunk):
            own = slice(start, start + chunk)
            hidden_CH, targets_C = hidden_NH[own].to(dtype), targets_N[own]
            logits_CV = F.linear(hidden_CH, matrix, bias).to(wide)
            d_logits_CV = _logits_gradient(
                logits_CV.div_(temperature),
                targets_C,
                gradients[0][own],
                gradients[1][own] if entropy_gradient else None,
            )
            d_logits_CV = d_logits_CV.div_(temperature).to(dtype)
            d_hidden_NH[own] = d_logits_CV @ matrix
            if d_weight_VH is not None:
                d_weight_VH += d_logits_CV.T @ hidden_CH
            if d_bias_V is not None:
                d_bias_V += d_logits_CV.sum(0)
        return (
            d_hidden_NH,
            None if d_weight_VH is None else d_weight_VH.to(weight_VH.dtype),
            None if d_bias_V is None else d_bias_V.to(bias_V.dtype),
            None,
            None,
        )


def _logits_gradient(
    logits_CV: Tensor, targets_C: Tensor, of_logprobs_C: Tensor, of_entropies_C: Tensor | None
) -> Tensor:
    """The gradient of scaled logits, see `ChunkedScores`. Shape [C, V]."""
    logprobs_CV = F.log_softmax(logits_CV, dim=-1)
    p_CV = logprobs_CV.exp()
    gradient_CV = p_CV * -of_logprobs_C[:, None]
    gradient_CV.scatter_add_(1, targets_C[:, None], of_logprobs_C[:, None].to(gradient_CV.dtype))
    if of_entropies_C is not None:
        bounded_CV = logprobs_CV.clamp_(min=torch.finfo(logprobs_CV.dtype).min)
        entropies_C1 = -(p_CV * bounded_CV).sum(-1, keepdim=True)
        gradient_CV -= of_entropies_C[:, None] * p_CV * (bounded_CV + entropies_C1)
    return gradient_CV
