"""Logprobs and entropies of tokens from hidden states, a chunk of logits at a time.

Guarantee: at most `CPU_ELEMENTS` or `GPU_ELEMENTS` logits exist at once, also in the backward pass, which
computes them again; where all are no more than that, a CPU keeps their probabilities instead. Peak memory in
bytes beside hidden states and their gradient, where products are in 16 bits: 12 for each of these logits
(they become logprobs and gradients in place; 16 with a cap), and 6 for each element of the head's matrix (it
in the compute dtype, and its gradient), once for all chunks.

Shape legend: N scored tokens, C tokens of a chunk, H hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tidemill.common.wire.choices import Rows
from tidemill.services.trainer.policy.precision import autocast_dtype

CPU_ELEMENTS = 1 << 26
"""Logits at once: 256 MiB of float32, or 441 tokens of a vocabulary of 152,064."""
GPU_ELEMENTS = 1 << 28
"""The same on a GPU: with fewer tokens it waits for the matrix and its gradient, which each chunk moves."""
CACHED_ELEMENTS, CHUNK_TOKENS = 1 << 22, 512
"""A CPU is fastest with chunks that stay in its cache; with fewer tokens it, too, waits for the matrix."""


class Scaling(NamedTuple):
    """What a model makes of its head's output z: `scale * z`, or `cap * tanh(scale * z / cap)`."""

    scale: float = 1.0
    cap: float | None = None

    def of(self, logits: Tensor) -> Tensor:
        """The scaled and capped logits, with a gradient."""
        scaled = logits if self.scale == 1.0 else logits * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap


PLAIN = Scaling()


Scored = tuple[Tensor, Tensor, Tensor]
"""Logprobs and entropies of N tokens, and the log-probability of the kept ids together, 0 if all are kept."""


class KeptLogits(NamedTuple):
    """The kept ids of each of C tokens, and their logits or logprobs; K is the most that a token has.

    Replays top-p, top-k and min-p as the engine applied them: a target's logprob is x[target] -
    logsumexp(x[ids]), with x the logits or the logprobs.
    """

    ids_CK: Tensor
    values_CK: Tensor
    """-inf behind a token's last id. A token without kept ids has a single 0, so its logsumexp is 0."""
    has_ids_C: Tensor

    @classmethod
    def of(cls, values_CV: Tensor, kept: Rows) -> "KeptLogits":
        assert kept.offsets is not None
        counts = np.diff(kept.offsets)
        is_id = np.arange(counts.max(initial=1)) < counts[:, None]
        ids = np.zeros(is_id.shape, dtype=np.int64)
        ids[is_id] = kept.values  # row by row, in their order
        device = values_CV.device
        ids_CK, is_id_CK = torch.from_numpy(ids).to(device), torch.from_numpy(is_id).to(device)
        values_CK = values_CV.gather(-1, ids_CK).masked_fill(~is_id_CK, -torch.inf)
        has_ids_C = is_id_CK[:, 0]
        first_C = values_CK[:, 0].masked_fill(~has_ids_C, 0.0)
        return cls(ids_CK, torch.cat([first_C[:, None], values_CK[:, 1:]], dim=-1), has_ids_C)


def kept_log_mass(logprobs_CV: Tensor, kept: Rows | None) -> Tensor:
    """The logarithm of the kept ids' probability; 0 for a token without any. Shape [C]."""
    if kept is None:
        return logprobs_CV.new_zeros(len(logprobs_CV))
    return KeptLogits.of(logprobs_CV, kept).values_CK.logsumexp(-1)


def score_logits(
    logits_CV: Tensor,
    targets_C: Tensor,
    temperature: float,
    entropy_gradient: bool = False,
    kept: Rows | None = None,
) -> Scored:
    """Logprobs of the targets (with gradient), of softmax(logits / temperature) over the ids that are `kept`
    for each of them, and entropies (only if asked), over all.

    Shapes [C], float32 (float64 where the logits are). Entropies are at least 0, at most log V.
    """
    logits_CV = logits_CV if logits_CV.dtype == torch.float64 else logits_CV.float()
    if temperature != 1.0:
        logits_CV = logits_CV / temperature
    logprobs_CV = F.log_softmax(logits_CV, dim=-1)
    targets = logprobs_CV.gather(-1, targets_C[:, None]).squeeze(-1)
    log_mass_C = kept_log_mass(logprobs_CV, kept)
    targets = targets - log_mass_C
    if entropy_gradient:
        # The gradient of `entr` is not finite at p = 0; that of this product is 0 wherever exp is.
        bounded_CV = logprobs_CV.clamp(min=torch.finfo(logprobs_CV.dtype).min)
        return targets, -(logprobs_CV.exp() * bounded_CV).sum(-1), log_mass_C.detach()
    with torch.no_grad():
        # `torch.special.entr` would take twice as long: it computes logarithms again. 0 * -inf counts as 0.
        terms_CV = logprobs_CV.exp().mul_(logprobs_CV).nan_to_num_(nan=0.0)
        entropies_C = terms_CV.sum(-1).neg()
    return targets, entropies_C, log_mass_C.detach()


def score_hidden(
    hidden_NH: Tensor,
    head: nn.Module,
    targets_N: Tensor,
    temperature: float,
    max_elements: int | None = None,
    entropy_gradient: bool = False,
    scaling: Scaling = PLAIN,
    kept: Rows | None = None,
) -> Scored:
    """Like `score_logits`, from hidden states, with at most `max_elements` logits in memory at once; None
    takes the limit of the device.

    Without `Options.keeps`, the backward pass computes every chunk's logits again, which costs one more
    product with the head.
    """

    def score_chunk(hidden_CH: Tensor, targets_C: Tensor, kept: Rows | None) -> Scored:
        logits_CV = head(hidden_CH)
        if scaling != PLAIN:
            logits_CV = scaling.of(logits_CV if logits_CV.dtype == torch.float64 else logits_CV.float())
        return score_logits(logits_CV, targets_C, temperature, entropy_gradient, kept)

    kind, vocabulary = hidden_NH.device.type, cast(Tensor, head.weight).shape[0]
    chunk = max(1, (max_elements or (CPU_ELEMENTS if kind == "cpu" else GPU_ELEMENTS)) // vocabulary)
    is_one = len(targets_N) <= chunk
    if type(head) is nn.Linear:
        is_plain = kept is None and scaling.cap is None and not entropy_gradient
        keeps = kind == "cpu" and is_one and is_plain and torch.is_grad_enabled()
        if kind == "cpu":
            chunk = min(chunk, max(CACHED_ELEMENTS // vocabulary, CHUNK_TOKENS))
        dtype = autocast_dtype(hidden_NH) or head.weight.dtype
        options = Options(temperature, chunk, dtype, entropy_gradient, scaling, kept, keeps)
        apply: Callable[..., Scored] = ChunkedScores.apply
        return apply(hidden_NH, head.weight, head.bias, targets_N, options)
    if is_one:
        return score_chunk(hidden_NH, targets_N, kept)
    # A head with adapters, or of a class of its own, is called by its forward.
    score: Callable[[Tensor, Tensor, Rows | None], Scored] = score_chunk
    if torch.is_grad_enabled():
        score = partial(checkpoint, score_chunk, use_reentrant=False, preserve_rng_state=False)
    owns = [slice(start, start + chunk) for start in range(0, len(targets_N), chunk)]
    parts = [score(hidden_NH[own], targets_N[own], kept and kept[own]) for own in owns]
    logprobs_N, entropies_N, log_mass_N = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs_N, entropies_N, log_mass_N


class Options(NamedTuple):
    temperature: float
    chunk: int
    """Tokens of a chunk."""
    dtype: torch.dtype
    """Dtype of the products."""
    entropy_gradient: bool
    scaling: Scaling
    kept: Rows | None = None
    """Kept ids of the scored tokens."""
    keeps: bool = False
    """Whether the forward pass keeps the probabilities, which are all that the backward pass needs."""

    @property
    def factor(self) -> float:
        """The gradient of z, which the head returns, over that of `scale * z / temperature`."""
        return self.scaling.scale / self.temperature

    def of(self, own: slice) -> "Options":
        """The options for some of the tokens."""
        return self._replace(kept=self.kept and self.kept[own])


class ChunkedScores(torch.autograd.Function):
    """`score_logits` of a linear head, whose matrix is cast once and whose gradient is one sum.

    With p = softmax(z / t), q the same over a token's kept ids (p without any), g the gradient of the
    logprobs and h that of the entropies E: the gradient of the logits z is (g (1[target] - q) - p h (log p +
    E)) / t, and that of what the head returns the same times the slope of the scaling.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        options: Options,
    ) -> Scored:
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N)
        ctx.options = options
        head = _cast_head(weight_VH, bias_V, options.dtype)
        parts, ctx.probabilities = [], {}
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for start in range(0, max(1, len(targets_N)), options.chunk):  # a rank may have no token at all
                own = slice(start, start + options.chunk)
                hidden_CH = hidden_NH[own].to(options.dtype)
                scored, p_CV = _score_chunk(hidden_CH, head, targets_N[own], options.of(own))
                parts.append(scored)
                if options.keeps:
                    ctx.probabilities[start] = p_CV
                del p_CV  # freed before the next chunk's is made
        logprobs_N, entropies_N, log_mass_N = (torch.cat(column) for column in zip(*parts, strict=True))
        constants = [] if options.entropy_gradient else [entropies_N]
        ctx.mark_non_differentiable(log_mass_N, *constants)
        return logprobs_N, entropies_N, log_mass_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden states, matrix and bias."""
        hidden_NH, weight_VH, bias_V, targets_N = ctx.saved_tensors
        options: Options = ctx.options
        head = _cast_head(weight_VH, bias_V, options.dtype)
        wants_weight, wants_bias = ctx.needs_input_grad[1:3]
        wide = torch.promote_types(options.dtype, torch.float32)
        d_hidden_NH = torch.empty_like(hidden_NH)
        # A sum over chunks: in 16 bits each addition would round it.
        d_weight_VH = torch.zeros_like(weight_VH, dtype=wide) if wants_weight else None
        d_bias_V = torch.zeros_like(bias_V, dtype=wide) if wants_bias else None
        for start in range(0, len(targets_N), options.chunk):
            own = slice(start, start + options.chunk)
            hidden_CH = hidden_NH[own].to(options.dtype)
            if (p_CV := ctx.probabilities.pop(start, None)) is not None:
                of_targets_C1 = gradients[0][own, None].to(p_CV.dtype) * options.factor
                d_logits_CV = p_CV.mul_(-of_targets_C1).scatter_add_(1, targets_N[own, None], of_targets_C1)
                d_logits_CV = d_logits_CV.to(options.dtype)
            else:
                of_chunk = [gradient[own] for gradient in gradients[:2]]
                d_logits_CV = _chunk_gradient(hidden_CH, head, targets_N[own], options.of(own), of_chunk)
            d_hidden_NH[own] = d_logits_CV @ head[0]
            if d_weight_VH is not None:
                add_product(d_weight_VH, d_logits_CV.T, hidden_CH)
            if d_bias_V is not None:
                d_bias_V += d_logits_CV.sum(0)
            del d_logits_CV, p_CV  # one tensor, where p was kept; freed before the next chunk's is made
        return (
            d_hidden_NH,
            None if d_weight_VH is None else d_weight_VH.to(weight_VH.dtype),
            None if d_bias_V is None else d_bias_V.to(bias_V.dtype),
            None,
            None,
        )


Head = tuple[Tensor, Tensor | None]
"""Matrix and bias."""


def _cast_head(weight_VH: Tensor, bias_V: Tensor | None, dtype: torch.dtype) -> Head:
    return weight_VH.to(dtype), None if bias_V is None else bias_V.to(dtype)


def _scaled_logits(hidden_CH: Tensor, head: Head, options: Options) -> tuple[Tensor, Tensor | None]:
    """Logits, scaled, capped and over the temperature, and the slope of the cap, if any; [C, V] each."""
    matrix, bias = head
    wide = torch.promote_types(options.dtype, torch.float32)
    if has_wide_products(hidden_CH.device.type, options.dtype):
        logits_CV = wide_product(hidden_CH, matrix.T)
        if bias is not None:
            logits_CV += bias
    else:
        logits_CV = F.linear(hidden_CH, matrix, bias).to(wide)
    scale, cap = options.scaling
    slope_CV: Tensor | None = None
    if scale != 1.0:
        logits_CV.mul_(scale)
    if cap is not None:
        logits_CV.div_(cap).tanh_()
        slope_CV = logits_CV.square().neg_().add_(1.0)
        logits_CV.mul_(cap)
    if options.temperature != 1.0:
        logits_CV.div_(options.temperature)
    return logits_CV, slope_CV


def _score_chunk(hidden_CH: Tensor, head: Head, targets_C: Tensor, options: Options) -> tuple[Scored, Tensor]:
    """Scores of a chunk, and the probabilities of all ids, [C, V]."""
    logits_CV, _ = _scaled_logits(hidden_CH, head, options)
    logprobs_CV = F.log_softmax(logits_CV, dim=-1)
    targets = logprobs_CV.gather(-1, targets_C[:, None]).squeeze(-1)
    log_mass_C = kept_log_mass(logprobs_CV, options.kept)
    p_CV = torch.exp(logprobs_CV, out=logits_CV)  # in the memory of the logits
    entropies_C = logprobs_CV.mul_(p_CV).nansum(-1).neg()  # 0 * -inf counts as 0
    return (targets - log_mass_C, entropies_C, log_mass_C), p_CV


def _chunk_gradient(
    hidden_CH: Tensor, head: Head, targets_C: Tensor, options: Options, gradients: Sequence[Tensor]
) -> Tensor:
    """Gradient of what the head returns, in the dtype of the products; see `ChunkedScores`. Shape [C, V]."""
    logits_CV, slope_CV = _scaled_logits(hidden_CH, head, options)
    of_logprobs_C, of_entropies_C = (gradient * options.factor for gradient in gradients)
    of_whole_C, filtered = of_logprobs_C, None
    if options.kept is not None:
        # Before the logits become probabilities, in place.
        filtered = KeptLogits.of(logits_CV, options.kept)
        of_whole_C = of_logprobs_C.masked_fill(filtered.has_ids_C, 0.0)
    if options.entropy_gradient:
        factor_CV = F.log_softmax(logits_CV, dim=-1)
        p_CV = torch.exp(factor_CV, out=logits_CV)
        factor_CV.clamp_(min=torch.finfo(factor_CV.dtype).min)
        factor_CV.sub_((p_CV * factor_CV).sum(-1, keepdim=True))
        factor_CV.mul_(of_entropies_C[:, None]).add_(of_whole_C[:, None])
        d_logits_CV = p_CV.mul_(factor_CV).neg_()
    else:
        p_CV = F.softmax(logits_CV, dim=-1)
        d_logits_CV = p_CV.mul_(-of_whole_C[:, None])
    del logits_CV  # before the gradient in fewer bits
    if filtered is not None:
        q_CK = F.softmax(filtered.values_CK, dim=-1)
        d_logits_CV.scatter_add_(1, filtered.ids_CK, q_CK.mul_((of_whole_C - of_logprobs_C)[:, None]))
    d_logits_CV.scatter_add_(1, targets_C[:, None], of_logprobs_C[:, None].to(d_logits_CV.dtype))
    if slope_CV is not None:
        d_logits_CV.mul_(slope_CV)
    return d_logits_CV.to(options.dtype)


@cache
def has_wide_products(kind: str, dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of this dtype into float32 on such a device; tried once."""
    if kind == "cpu" or dtype in (torch.float32, torch.float64):
        return False
    ones, total = torch.ones((16, 16), dtype=dtype, device=kind), torch.ones((16, 16), device=kind)
    try:
        add_wide_product(total, ones, ones)
        product = wide_product(ones, ones)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return bool((total == 17.0).all() and (product == 16.0).all())


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """The product of matrices of 16 bits in float32, without rounding to 16 bits in between."""
    return torch.mm(left, right, out_dtype=torch.float32)


def add_wide_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add such a product to `total`, in place."""
    torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product of matrices, which may be of fewer bits than the sum."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif has_wide_products(left.device.type, left.dtype):
        add_wide_product(total, left, right)
    else:
        total += left @ right
