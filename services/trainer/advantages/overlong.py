"""Soft overlong punishment: less reward for completions that come near the length limit."""


def overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: float, penalty: float) -> float:
    """What is added to the reward of a completion of `num_tokens`: in [-penalty, 0].

    DAPO, arXiv 2503.14476, eq. 13: 0 up to max - buffer, then falling linearly to -penalty at max. The limit
    belongs to the rollout, so no completion is longer. 100 tokens at most, a buffer of 20 and penalty 1: 90
    tokens give -0.5.
    """
    over = num_tokens - (max_tokens - buffer_tokens)
    return -penalty * min(1.0, over / buffer_tokens) if over > 0 else 0.0
