"""Auxiliary losses of a mixture model's routers, as terms of the loss of each trained token.

A sequence is a sample: all its segments, and of them the positions that predict trained tokens. So neither
prompts, padding nor what an environment wrote count, and the result is the same for any split into
micro-batches, tiles and ranks.

Shape legend: N trained tokens of whole sequences, S sequences, E experts of a layer, K chosen for a token.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.services.trainer.algorithm.losses.sums import EXPERTS, TileSums
from tidemill.services.trainer.algorithm.losses.tokens import Tokens

AFFINITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits_NE: logits_NE.softmax(-1),
    "sigmoid": torch.sigmoid,
    "given": lambda logits_NE: logits_NE,
}
"""What a router makes of its logits before it chooses; `given`: it returns the result in place of logits."""


class LayerRouting(NamedTuple):
    """What a layer's router returned for N tokens: `logits_NE` with gradient, and the experts it chose.

    Example: one token, three experts, two chosen: `affinity` "softmax", `logits_NE` [[2.0, 0.5, 1.0]],
    `chosen_NK` [[0, 2]].
    """

    affinity: str
    """A name of `AFFINITIES`."""
    logits_NE: Tensor
    chosen_NK: Tensor


def sequence_balance(
    affinities_NE: Tensor, num_chosen: int, sequence_N: Tensor, num_sequences: int
) -> Tensor:
    """sum_i f_i P_i of each sequence. Shape [S]; a sequence needs at least one token.

    DeepSeek-V3, arXiv 2412.19437, eq. 17 to 20 without alpha: P_i is the mean share of expert i in a token's
    affinities, and f_i = E / (K T) times the number of tokens for which it is among the K largest, without
    gradient. 1 where experts are used equally, at most E / K. As there, biases of the choice do not count.
    Affinities (3, 1) and (5, 3) with K = 1: P = (0.6875, 0.3125), f = (2, 0), so 1.375.
    """
    num_experts = affinities_NE.shape[-1]
    shares_NE = affinities_NE / affinities_NE.sum(-1, keepdim=True)
    largest_NK = affinities_NE.detach().topk(num_chosen, dim=-1).indices
    is_largest_NE = torch.zeros_like(shares_NE).scatter_(1, largest_NK, 1.0)
    nothing_SE = shares_NE.new_zeros(num_sequences, num_experts)
    # As the paper has it, f is a count: the gradient goes through P alone.
    counts_SE = nothing_SE.index_add(0, sequence_N, is_largest_NE.detach())
    tokens_S1 = counts_SE.sum(-1, keepdim=True) / num_chosen
    f_SE = counts_SE * num_experts / (num_chosen * tokens_S1)
    p_SE = nothing_SE.index_add(0, sequence_N, shares_NE) / tokens_S1
    return (f_SE * p_SE).sum(-1)


def router_terms(
    routing: Sequence[LayerRouting], sequence_N: Tensor, num_sequences: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Balance loss of each token's sequence, and z-loss of each token (ST-MoE, arXiv 2202.08906, eq. 5: the
    squared logsumexp of the logits); sums over layers. Shapes [N].
    """

    def terms_of(logits_NE: Tensor, affinity: str, num_chosen: int) -> tuple[Tensor, Tensor]:
        wide_NE = logits_NE.to(dtype)
        balance_S = sequence_balance(AFFINITIES[affinity](wide_NE), num_chosen, sequence_N, num_sequences)
        return balance_S[sequence_N], wide_NE.logsumexp(-1).square()

    # For the backward pass only logits are kept: what is made of them is computed again, a layer at a time.
    terms = [
        checkpoint(
            terms_of, layer.logits_NE, layer.affinity, layer.chosen_NK.shape[-1],
            use_reentrant=False, preserve_rng_state=False,
        )
        for layer in routing
    ]  # fmt: skip
    balance, z = zip(*terms, strict=True)
    return torch.stack(balance).sum(0), torch.stack(z).sum(0)


def router_term(tokens: Tokens, algorithm: AlgorithmConfig, sums: TileSums) -> Tensor:
    """The routers' weighted losses of each token. Into `sums` go their unweighted means over layers, and how
    many tokens each expert got."""
    sequences = tokens.sequence_N, tokens.num_sequences
    balance_N, z_N = router_terms(tokens.routing, *sequences, tokens.logprobs_N.dtype)
    sums["balance_sum"] = tokens.of_sampled(balance_N.detach()).sum() / len(tokens.routing)
    sums["router_z_sum"] = tokens.of_sampled(z_N.detach()).sum() / len(tokens.routing)
    for layer, count_E in enumerate(expert_counts(tokens.routing)):
        sums[f"{EXPERTS}{layer}"] = count_E
    return algorithm.router.balance * balance_N + algorithm.router.z * z_N


def rerouted(changed_N: Tensor) -> dict[str, Tensor]:
    """Sums over tokens: those with a layer whose router would have chosen otherwise, and the share of such
    layers."""
    return {"changed_tokens": (changed_N > 0).sum(), "changed_layers": changed_N.sum()}


def expert_counts(routing: Sequence[LayerRouting]) -> list[Tensor]:
    """How many tokens each expert of each layer got, biases of the choice included. Shape [E] each."""
    return [
        torch.bincount(layer.chosen_NK.flatten(), minlength=layer.logits_NE.shape[-1]) for layer in routing
    ]
