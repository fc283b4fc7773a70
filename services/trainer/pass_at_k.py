"""pass@k of an evaluation: the chance that at least one of k samples of a prompt solves it."""

from collections.abc import Sequence


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """The unbiased estimate 1 - C(n - c, k) / C(n, k) from n samples of which c solve (Chen et al. 2021,
    arXiv 2107.03374, eq. 1), as a product, which does not overflow. Range [0, 1].

    With n = 4, c = 1, k = 2: 1 - C(3, 2) / C(4, 2) = 1 - 3 / 6 = 0.5.

    Raises:
        ValueError: not 1 <= k <= n, or not 0 <= c <= n.
    """
    if not (1 <= k <= num_samples and 0 <= num_solved <= num_samples):
        raise ValueError(f"pass@{k} of {num_solved} solved among {num_samples} samples is not defined")
    fail = 1.0
    for i in range(k):
        fail *= max(0, num_samples - num_solved - i) / (num_samples - i)
    return 1.0 - fail


def mean_pass_at_k(by_prompt: Sequence[Sequence[bool]], k: int) -> float:
    """Mean over prompts, NaN where there is none. Prompts with fewer than k scored samples are left out."""
    values = [pass_at_k(len(row), sum(row), k) for row in by_prompt if len(row) >= k]
    return sum(values) / len(values) if values else float("nan")
