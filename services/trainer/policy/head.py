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
CACHED_ELEMENTS = 1 << 22
CHUNK_TOKENS = 512
"""A CPU is fastest with chunks that stay in its cache; with fewer tokens it, too, waits for the matrix."""
LEAST_LOGPROB = -1e30
"""Below it a probability is 0, and so has to be its product with the logprob, times any gradient."""


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


def log_mass_of(logprobs_CV: Tensor, kept: Rows | None) -> Tensor:
    """The logarithm of the kept ids' probability; 0 where sampling kept all. Shape [C]."""
    if kept is None:
        return logprobs_CV.new_zeros(len(logprobs_CV))
    from tidemill.services.trainer.policy.kept_ids import kept_log_mass

    return kept_log_mass(logprobs_CV, kept)


def score_logits(
    logits_CV: Tensor,
    targets_C: Tensor,
    temperature: float,
    entropy_gradient: bool = False,
    kept: Rows | None = None,
    banned_ids: Tensor | None = None,
) -> Scored:
    """Logprobs of the targets (with gradient), of softmax(logits / temperature) over the ids that are `kept`
    for each of them, entropies over all (with gradient only if asked), and the kept ids' mass (with
    gradient). "All" is without `banned_ids`, which nobody can sample.

    Shapes [C], float32 (float64 where the logits are). Entropies are at least 0, at most log V.
    """
    logits_CV = logits_CV if logits_CV.dtype == torch.float64 else logits_CV.float()
    if temperature != 1.0:
        logits_CV = logits_CV / temperature
    if banned_ids is not None:
        logits_CV = logits_CV.index_fill(-1, banned_ids, -torch.inf)
    logprobs_CV = F.log_softmax(logits_CV, dim=-1)
    targets = logprobs_CV.gather(-1, targets_C[:, None]).squeeze(-1)
    log_mass_C = log_mass_of(logprobs_CV, kept)
    targets = targets - log_mass_C
    if entropy_gradient:
        # The gradient of `entr` is not finite at p = 0; that of this product is 0 wherever exp is.
        bounded_CV = logprobs_CV.clamp(min=LEAST_LOGPROB)
        return targets, -(logprobs_CV.exp() * bounded_CV).sum(-1), log_mass_C
    with torch.no_grad():
        # `torch.special.entr` would take twice as long: it computes logarithms again. 0 * -inf counts as 0.
        terms_CV = logprobs_CV.exp().mul_(logprobs_CV).nan_to_num_(nan=0.0)
        entropies_C = terms_CV.sum(-1).neg()
    return targets, entropies_C, log_mass_C


def score_hidden(
    hidden_NH: Tensor,
    head: nn.Module,
    targets_N: Tensor,
    temperature: float,
    max_elements: int | None = None,
    entropy_gradient: bool = False,
    scaling: Scaling = PLAIN,
    kept: Rows | None = None,
    banned_ids: Tensor | None = None,
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
        return score_logits(logits_CV, targets_C, temperature, entropy_gradient, kept, banned_ids)

    kind = hidden_NH.device.type
    vocabulary = cast(Tensor, head.weight).shape[0]
    chunk = max(1, (max_elements or (CPU_ELEMENTS if kind == "cpu" else GPU_ELEMENTS)) // vocabulary)
    is_one = len(targets_N) <= chunk
    if type(head) is nn.Linear:
        is_plain = kept is None and scaling.cap is None and not entropy_gradient
        keeps = kind == "cpu" and is_one and is_plain and torch.is_grad_enabled()
        if kind == "cpu":
            chunk = min(chunk, max(CACHED_ELEMENTS // vocabulary, CHUNK_TOKENS))
        dtype = autocast_dtype(hidden_NH) or head.weight.dtype
        options = Options(temperature, chunk, dtype, entropy_gradient, scaling, kept, keeps, banned_ids)
        apply: Callable[..., Scored] = ChunkedScores.apply
        return apply(hidden_NH, head.weight, head.bias, targets_N, options)
    if is_one:
        return score_chunk(hidden_NH, targets_N, kept)
    # A head with adapters, or of a class of its own, is called by its forward.
    score: Callable[[Tensor, Tensor, Rows | None], Scored] = score_chunk
    if torch.is_grad_enabled():
        score = partial(checkpoint, score_chunk, use_reentrant=False, preserve_rng_state=False)
    owns = [slice(start, start + chunk) for start in range(0, len(targets_N), chunk)]
    parts = [
        score(hidden_NH[chunk_slice], targets_N[chunk_slice], kept and kept[chunk_slice])
        for chunk_slice in owns
    ]
    return _joined(parts)


def _joined(parts: Sequence[Scored]) -> Scored:
    """The scores of all tokens, from those of chunks."""
    logprobs, entropies, log_masses = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies), torch.cat(log_masses)


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
    banned_ids: Tensor | None = None
    """Ids that are left out of the softmax."""

    @property
    def factor(self) -> float:
        """The gradient of z, which the head returns, over that of `scale * z / temperature`."""
        return self.scaling.scale / self.temperature

    def of(self, chunk_slice: slice) -> "Options":
        """The options for some of the tokens."""
        return self._replace(kept=self.kept and self.kept[chunk_slice])


class ChunkedScores(torch.autograd.Function):
    """`score_logits` of a linear head, whose matrix is cast once and whose gradient is one sum.

    With p = softmax(z / t), q the same over a token's kept ids (p without any), g the gradient of the
    logprobs, m that of the kept ids' log-mass and h that of the entropies E: the gradient of the logits z is
    (g (1[target] - q) + m (q - p) - p h (log p + E)) / t, and that of what the head returns the same times
    the slope of the scaling.
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
        parts = []
        ctx.probabilities = {}
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for start in range(0, max(1, len(targets_N)), options.chunk):  # a rank may have no token at all
                chunk_slice = slice(start, start + options.chunk)
                hidden_CH = hidden_NH[chunk_slice].to(options.dtype)
                scored, p_CV = _score_chunk(hidden_CH, head, targets_N[chunk_slice], options.of(chunk_slice))
                parts.append(scored)
                if options.keeps:
                    ctx.probabilities[start] = p_CV
                del p_CV  # freed before the next chunk's is made
        logprobs_N, entropies_N, log_mass_N = _joined(parts)
        constants = [] if options.entropy_gradient else [entropies_N]
        constants += [log_mass_N] if options.kept is None else []
        ctx.mark_non_differentiable(*constants)
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
            chunk_slice = slice(start, start + options.chunk)
            hidden_CH = hidden_NH[chunk_slice].to(options.dtype)
            p_CV = ctx.probabilities.pop(start, None)
            if p_CV is not None:
                of_targets_C1 = gradients[0][chunk_slice, None].to(p_CV.dtype) * options.factor
                d_logits_CV = p_CV.mul_(-of_targets_C1).scatter_add_(
                    1, targets_N[chunk_slice, None], of_targets_C1
                )
                d_logits_CV = d_logits_CV.to(options.dtype)
            else:
                of_chunk = [gradient[chunk_slice] for gradient in gradients]
                d_logits_CV = _chunk_gradient(
                    hidden_CH, head, targets_N[chunk_slice], options.of(chunk_slice), of_chunk
                )
            d_hidden_NH[chunk_slice] = d_logits_CV @ head[0]
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
    if options.banned_ids is not None:
        # Their probability is 0, and so is their gradient.
        logits_CV.index_fill_(-1, options.banned_ids, -torch.inf)
    return logits_CV, slope_CV


def _score_chunk(hidden_CH: Tensor, head: Head, targets_C: Tensor, options: Options) -> tuple[Scored, Tensor]:
    """Scores of a chunk, and the probabilities of all ids, [C, V]."""
    logits_CV, _ = _scaled_logits(hidden_CH, head, options)
    logprobs_CV = F.log_softmax(logits_CV, dim=-1)
    targets = logprobs_CV.gather(-1, targets_C[:, None]).squeeze(-1)
    log_mass_C = log_mass_of(logprobs_CV, options.kept)
    p_CV = torch.exp(logprobs_CV, out=logits_CV)  # in the memory of the logits
    entropies_C = logprobs_CV.mul_(p_CV).nansum(-1).neg()  # 0 * -inf counts as 0
    return (targets - log_mass_C, entropies_C, log_mass_C), p_CV


def _chunk_gradient(
    hidden_CH: Tensor, head: Head, targets_C: Tensor, options: Options, gradients: Sequence[Tensor]
) -> Tensor:
    """Gradient of what the head returns, in the dtype of the products; see `ChunkedScores`. Shape [C, V]."""
    logits_CV, slope_CV = _scaled_logits(hidden_CH, head, options)
    scaled = [gradient * options.factor for gradient in gradients]
    of_logprobs_C, of_entropies_C, of_mass_C = scaled
    of_whole_C = of_logprobs_C
    if options.kept is not None:
        from tidemill.services.trainer.policy.kept_ids import KeptLogits, count_kept

        has_ids_C = torch.from_numpy(count_kept(options.kept) > 0).to(of_logprobs_C.device)
        of_whole_C = torch.where(has_ids_C, of_mass_C, of_logprobs_C)
    if options.entropy_gradient:
        factor_CV = F.log_softmax(logits_CV, dim=-1)
        # In the memory of the logits, unless these are used below.
        p_CV = torch.exp(factor_CV, out=logits_CV) if options.kept is None else factor_CV.exp()
        factor_CV.clamp_(min=LEAST_LOGPROB)
        factor_CV.sub_((p_CV * factor_CV).sum(-1, keepdim=True))
        factor_CV.mul_(of_entropies_C[:, None]).add_(of_whole_C[:, None])
        d_logits_CV = p_CV.mul_(factor_CV).neg_()
    else:
        p_CV = F.softmax(logits_CV, dim=-1)
        d_logits_CV = p_CV.mul_(-of_whole_C[:, None])
    if options.kept is not None:
        for rows_of_kept in KeptLogits.of(logits_CV, options.kept):
            q_RK = F.softmax(rows_of_kept.values_RK, dim=-1)
            of_part_R = rows_of_kept.of_rows(of_whole_C - of_logprobs_C)
            rows_of_kept.add_to(d_logits_CV, q_RK.mul_(of_part_R[:, None]))
    del logits_CV  # before the gradient in fewer bits
    d_logits_CV.scatter_add_(1, targets_C[:, None], of_logprobs_C[:, None].to(d_logits_CV.dtype))
    if slope_CV is not None:
        d_logits_CV.mul_(slope_CV)
    return d_logits_CV.to(options.dtype)


@cache
def has_wide_products(kind: str, dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of this dtype into float32 on such a device; tried once."""
    if kind == "cpu" or dtype in (torch.float32, torch.float64):
        return False
    ones = torch.ones((16, 16), dtype=dtype, device=kind)
    total = torch.ones((16, 16), device=kind)
    try:
        add_wide_product(total, ones, ones)
        product = wide_product(ones, ones)
    # The device has no such kernel (a RuntimeError), or this torch takes no `out_dtype`.
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17.0).all() and (product == 16.0).all())


def wide_product(first: Tensor, second: Tensor) -> Tensor:
    """The product of matrices of 16 bits in float32, without rounding to 16 bits in between."""
    return torch.mm(first, second, out_dtype=torch.float32)


def add_wide_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    """Add such a product to `total`, in place."""
    torch.addmm(total, first, second, out_dtype=torch.float32, out=total)


def add_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    """Add a product of matrices, which may be of fewer bits than the sum."""
    if total.dtype == first.dtype:
        total.addmm_(first, second)
    elif has_wide_products(first.device.type, first.dtype):
        add_wide_product(total, first, second)
    else:
        total += first @ second
