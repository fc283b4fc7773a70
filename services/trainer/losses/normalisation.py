"""What sums over tokens are divided by, so that gradients of micro-batches simply add.

The loss of an update is `sum(weight * loss of the token) / D` over its trained tokens. Micro-batches
accumulate the sum; the optimizer divides by D once. Whatever the split and the order, the gradient is that of
one big batch (no mean of means). With `len` the trained tokens of a sequence:

| normalisation | weight of a token | D | paper |
|---|---|---|---|
| `sequence` | 1 / len | sequences | GRPO, arXiv 2402.03300, eq. 3 |
| `token` | 1 | trained tokens | DAPO, arXiv 2503.14476, token-level loss |
| `constant` | 1 | sequences * max_completion_tokens | Dr. GRPO, arXiv 2503.20783 |

A sequence without trained tokens (empty, or masked entirely) has no gradient and counts in D of `sequence`
and `constant`, as in TRL: filtering truncated completions then does not raise the weight of the others.
"""

from typing import Literal

Normalisation = Literal["sequence", "token", "constant"]


def token_weight(normalisation: Normalisation, num_trained: int) -> float:
    """The weight of each trained token of a sequence with `num_trained` of them."""
    return 1.0 / num_trained if normalisation == "sequence" and num_trained else 1.0


def denominator(
    normalisation: Normalisation, num_sequences: int, num_trained: int, max_completion_tokens: int
) -> float:
    """What these sequences and tokens add to D; the denominator of an update is the sum over its parts."""
    if normalisation == "sequence":
        return float(num_sequences)
    if normalisation == "token":
        return float(num_trained)
    return float(num_sequences * max_completion_tokens)
