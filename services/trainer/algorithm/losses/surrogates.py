"""Losses by name: the objective of each token, and the user's own.

    def loss(ratio, algorithm=None):

`ratio` is a `tokens.Tokens` (`ratio_N` and `log_N` with gradient, `advantages_N`, `logprobs_N`, which
sequence each token belongs to, and more), `algorithm` the config's section. It returns the objective of each
token, to be maximised, as a tensor [N] with a gradient (or a `tokens.Surrogate`). Normalisation, importance
weights, KL, entropy bonus and value loss are added around it.

Shape legend: N trained tokens, S sequences that they belong to.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from tidemill.common.config.algorithm import AlgorithmConfig, is_users_own
from tidemill.common.errors import ConfigError
from tidemill.common.wire.arrays import Float64
from tidemill.services.trainer.algorithm.losses.tokens import (
    MAX_LOG_RATIO,
    Surrogate,
    Tokens,
    sequence_means,
    sequence_sums,
)
from tidemill.services.trainer.algorithm.users_function import contained, load_users_function


def ppo(ratio: Tokens, algorithm: AlgorithmConfig) -> Surrogate:
    """The clipped objective of each token by its own ratio."""
    return clipped_surrogate(ratio.ratio_N, ratio.advantages_N, algorithm)


Place = tuple[tuple[int, int], int]
"""The key of a token's sample, and the token's place in the completion."""


def token_covariances(ratio: Tokens) -> Float64:
    """(A - mean A) (logprob - mean logprob) of each token of a mini-batch, with means over all. Shape [N].

    arXiv 2505.22617: the entropy falls fastest where this is large, and most of it comes from a few tokens.
    Advantages 1, -1 with logprobs -1, -3: both 1.
    """
    # By numpy: sums of torch depend on the number of its threads, and the last bit may decide between tokens.
    advantages_N, logprobs_N = ratio.advantages_N.numpy(), ratio.logprobs_N.numpy()
    count = max(len(logprobs_N), 1)
    covariances_N: Float64 = (advantages_N - advantages_N.sum() / count) * (
        logprobs_N - logprobs_N.sum() / count
    )
    return covariances_N


def clip_cov_tokens(
    ratio: Tokens, result: Surrogate, places: Sequence[Place], algorithm: AlgorithmConfig
) -> list[int]:
    """Which of N tokens clip-cov takes the gradient from: a share of all, at least one, at random among those
    whose covariance lies in (low, high) and that the ordinary clip leaves alone (arXiv 2505.22617).

    Chance is a hash of the token's key and place: the same in every replay.
    """
    covariances_N, bounds = token_covariances(ratio), algorithm.covariance
    assert result.is_low_N is not None and result.is_high_N is not None, "PPO has both bounds"
    is_free_N = ~(result.is_low_N | result.is_high_N).numpy()
    inside_N = (covariances_N > bounds.low) & (covariances_N < bounds.high) & is_free_N
    order = sorted(np.flatnonzero(inside_N).tolist(), key=lambda n: (_chance(*places[n]), n))
    return order[: max(int(bounds.share * len(places)), 1)]


def kl_cov_tokens(
    ratio: Tokens, result: Surrogate, places: Sequence[Place], algorithm: AlgorithmConfig
) -> list[int]:
    """Which of N tokens kl-cov penalises: the share with the largest covariances, at least one; of equal ones
    the first by key and place (arXiv 2505.22617)."""
    order: list[int] = np.argsort(-token_covariances(ratio), kind="stable").tolist()
    return order[: max(int(algorithm.covariance.share * len(places)), 1)]


def _chance(key: tuple[int, int], place: int) -> int:
    # Little-endian on every machine: it has to be the same hash.
    return xxhash.xxh3_64_intdigest(np.array([*key, place], dtype="<i8").tobytes())


def kl_cov(ratio: Tokens, algorithm: AlgorithmConfig) -> Surrogate:
    """r A, less coefficient * |log r| on the chosen tokens; nothing is clipped.

    r = 1.2, A = 2, coefficient 1: 2.4, and 2.4 - 0.1823 = 2.2177 on a chosen token.
    """
    objective_N = ratio.ratio_N * ratio.advantages_N
    if ratio.penalised_N is not None:
        distance_N = ratio.log_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).abs()
        objective_N = objective_N - algorithm.covariance.coefficient * ratio.penalised_N * distance_N
    return Surrogate(objective_N)


def clipped_surrogate(ratio_N: Tensor, advantages_N: Tensor, algorithm: AlgorithmConfig) -> Surrogate:
    """min(r A, clip(r, 1 - low, 1 + high) A), and at least `dual_clip` * A where A < 0. Shapes [N].

    arXiv 1707.06347, eq. 7; separate bounds are DAPO's clip-higher (arXiv 2503.14476); the dual clip is arXiv
    1912.09729 (TRL's `delta`). The gradient is zero where a positive advantage meets r > 1 + high, or a
    negative one r < 1 - low (those tokens have already moved enough) or r > `dual_clip` (one token that
    became much likelier would outweigh all others). r = 1.5, A = 2, high = 0.28 gives 2.56.
    """
    low, high, dual_clip = 1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high, algorithm.dual_clip_bound
    clipped_N = ratio_N.clamp(low, high)
    # Above 1 + high, the minimum of a positive A is the clipped side: so this bound acts on negative A alone.
    bounded_N = ratio_N if dual_clip is None else ratio_N.clamp(max=dual_clip)
    objective_N = torch.minimum(bounded_N * advantages_N, clipped_N * advantages_N)
    return Surrogate(
        objective_N,
        is_low_N=(ratio_N < low) & (advantages_N < 0),
        is_high_N=(ratio_N > high) & (advantages_N > 0),
        is_dual_N=None if dual_clip is None else (ratio_N > dual_clip) & (advantages_N < 0),
    )


def reinforce(ratio: Tokens, algorithm: AlgorithmConfig) -> Surrogate:
    """A * logprob: its gradient is A times the gradient of the logprob. Shapes [N].

    Williams 1992, with the baseline in the advantage; RLOO (arXiv 2402.14740) and REINFORCE++ use it. Nothing
    is clipped: `importance` weights alone correct for policies other than the current one.
    """
    return Surrogate(ratio.advantages_N * ratio.logprobs_N)


def cispo(ratio: Tokens, algorithm: AlgorithmConfig) -> Surrogate:
    """stop_gradient(clip(r, 1 - low, 1 + high)) * A * logprob. Shapes [N].

    CISPO, MiniMax-M1, arXiv 2506.13585, eq. 4 and 5. In place of PPO's clip, which silences tokens that have
    moved, every token keeps its gradient with a bounded weight. The paper leaves the lower bound open
    (`clip_low: 1`); TRL's `epsilon_high` is our 1 + clip_high. r = 7, high = 4 weighs the token by 5.

    Counted as clipped is what the bound changed and PPO would have silenced as well.
    """
    ratio_N = ratio.ratio_N.detach()
    low, high = 1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high
    return Surrogate(
        ratio_N.clamp(low, high) * ratio.advantages_N * ratio.logprobs_N,
        is_low_N=(ratio_N < low) & (ratio.advantages_N < 0),
        is_high_N=(ratio_N > high) & (ratio.advantages_N > 0),
    )


def gspo(ratio: Tokens, algorithm: AlgorithmConfig) -> Surrogate:
    """The clipped surrogate of s = (product of the token ratios)^(1 / len), at each of the len tokens.

    GSPO, arXiv 2507.18071, eq. 5 and 7: s is the geometric mean of the token ratios, so its clip range is far
    narrower than PPO's (3e-4 and 4e-4 in the paper). With `normalisation: sequence` the len equal terms are
    averaged to the paper's one term for a sequence. Token ratios 1.2 and 0.9 give s = sqrt(1.08) = 1.0392.
    """
    log_S = sequence_means(ratio.log_N, ratio.sequence_N, ratio.num_sequences)
    ratio_S = log_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return clipped_surrogate(ratio_S[ratio.sequence_N], ratio.advantages_N, algorithm)


TEMPERATURE_POSITIVE, TEMPERATURE_NEGATIVE = 1.0, 1.05
"""The paper's: tokens with a negative advantage are gated a little harder. Also TRL's defaults."""


def sapo(ratio: Tokens, algorithm: AlgorithmConfig) -> Surrogate:
    """A * sigmoid(t (r - 1)) * 4 / t with t by the sign of A. Shapes [N].

    SAPO, arXiv 2511.20347: at r = 1 the gradient is that of PPO, and it fades on both sides instead of ending
    at a bound. r = 1 gives 2 A / t.
    """
    positive_N = torch.full_like(ratio.advantages_N, TEMPERATURE_POSITIVE)
    temperature_N = positive_N.masked_fill(ratio.advantages_N <= 0, TEMPERATURE_NEGATIVE)
    gate_N = torch.sigmoid(temperature_N * (ratio.ratio_N - 1.0)) * 4.0 / temperature_N
    return Surrogate(gate_N * ratio.advantages_N)


LEAST_REST = 1e-8
"""Lower bound of the probability of all other tokens, so that its logarithm stays finite."""


def dppo_tv(ratio: Tokens, algorithm: AlgorithmConfig) -> Surrogate:
    """r A, or no gradient where p - q leaves [-clip_low, clip_high] on the side that A pushes to.

    DPPO, arXiv 2602.04879, by total variation: a trust region in probabilities in place of PPO's in ratios.
    A ratio says little about how far a policy has moved: a token of probability 1e-5 may double without harm,
    one of 0.9 that falls to 0.5 is a large step with a small ratio. So a token loses its gradient where the
    divergence of the two policies, seen on that token alone ("binary": this token against all others),
    exceeds its bound and the update would enlarge it; p is its probability now, q the old one. verl's
    `dppo_tv`; prime-rl's default loss with bounds 0.2.

    p = 0.5, q = 0.2, A = 2, clip_high = 0.2: 0.3 is too far, the objective is 0; with A = -2 it is -5.
    """
    moved_N = ratio.logprobs_N.detach().exp() - ratio.old_logprobs_N.exp()
    return _masked(ratio, algorithm, moved_N > algorithm.clip_high, moved_N < -algorithm.clip_low)


def dppo_kl(ratio: Tokens, algorithm: AlgorithmConfig) -> Surrogate:
    """r A, or no gradient where q log(q / p) + (1 - q) log((1 - q) / (1 - p)) exceeds its bound on the side
    that A pushes to: the binary KL.

    verl's `dppo_kl`; otherwise like `dppo_tv`. p = 0.5, q = 0.2: 0.2 log 0.4 + 0.8 log 1.6 = 0.1927.
    """
    log_N, old_N = ratio.log_N.detach(), ratio.old_logprobs_N
    divergence_N = -old_N.exp() * log_N + _rest(old_N) * (
        _rest(old_N).log() - _rest(ratio.logprobs_N.detach()).log()
    )
    is_high_N = (divergence_N > algorithm.clip_high) & (log_N > 0)
    return _masked(ratio, algorithm, is_high_N, (divergence_N > algorithm.clip_low) & (log_N < 0))


def _rest(logprobs_N: Tensor) -> Tensor:
    """1 - p, also where p is nearly 1."""
    # `1 - exp(x)` has no digits left where p is nearly 1; `expm1` keeps them.
    return (-logprobs_N.expm1()).clamp(min=LEAST_REST)


def _masked(
    ratio: Tokens, algorithm: AlgorithmConfig, is_too_high_N: Tensor, is_too_low_N: Tensor
) -> Surrogate:
    """r A where the token is inside its bounds. r stops at `dppo.max_ratio`; the token keeps its gradient."""
    ratio_N, bound = ratio.ratio_N.detach(), algorithm.dppo.max_ratio
    weight_N = ratio_N if bound is None else ratio_N.clamp(max=bound)
    is_high_N = is_too_high_N & (ratio.advantages_N > 0)
    is_low_N = is_too_low_N & (ratio.advantages_N < 0)
    # Value w, gradient w times that of the logprob.
    one_N = 1.0 + ratio.logprobs_N - ratio.logprobs_N.detach()
    objective_N = (weight_N * ratio.advantages_N * one_N).masked_fill(is_high_N | is_low_N, 0.0)
    is_bounded_N = (ratio_N > weight_N) & ~is_high_N & ~is_low_N
    return Surrogate(objective_N, is_low_N=is_low_N, is_high_N=is_high_N, is_dual_N=is_bounded_N)


LEAST_LOG_WEIGHT = math.log(1e-8)
"""Lower bound of the logarithm of a sequence's ratio in VESPO, as in TRL."""


def gmpo(ratio: Tokens, algorithm: AlgorithmConfig) -> Surrogate:
    """A times the geometric mean of a sequence's clipped ratios, at each of its tokens.

    arXiv 2507.20673 (verl's `geo_mean`): each log-ratio stops at clip_high where A > 0, at -clip_low where A
    < 0. Bounds are of log-ratios: the paper's e^-0.4 and e^0.4 are 0.4 and 0.4. With `normalisation:
    sequence` the equal terms of a sequence are averaged to the paper's one. Log-ratios 0.5 and 0.1, A = 2,
    clip_high = 0.4: 2 exp(0.25) = 2.568.
    """
    log_N = ratio.log_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    is_high_N = (log_N > algorithm.clip_high) & (ratio.advantages_N > 0)
    is_low_N = (log_N < -algorithm.clip_low) & (ratio.advantages_N < 0)
    clipped_N = log_N.clamp(-algorithm.clip_low, algorithm.clip_high)
    means_S = sequence_means(
        torch.where(is_high_N | is_low_N, clipped_N, log_N), ratio.sequence_N, ratio.num_sequences
    )
    objective_N = means_S.exp()[ratio.sequence_N] * ratio.advantages_N
    return Surrogate(objective_N, is_low_N, is_high_N)


def vespo(ratio: Tokens, algorithm: AlgorithmConfig) -> Surrogate:
    """phi(W) A logprob, with W the product of a sequence's ratios and phi(W) = W^k exp(lambda (1 - W)).

    arXiv 2602.10693, section 3.4: in place of a clip, a smooth weight without gradient, which is 1 at W = 1
    and fades on both sides; k and lambda depend on the sign of A. W = 2 with k = 2, lambda = 3: 4 exp(-3) =
    0.1991.
    """
    positive, negative = algorithm.vespo.positive, algorithm.vespo.negative
    with torch.no_grad():
        log_N = ratio.log_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        log_S = sequence_sums(log_N, ratio.sequence_N, ratio.num_sequences)
        log_weight_N = log_S.clamp(LEAST_LOG_WEIGHT, MAX_LOG_RATIO)[ratio.sequence_N]
        is_negative_N = ratio.advantages_N < 0
        power_N = torch.full_like(log_weight_N, positive[0]).masked_fill(is_negative_N, negative[0])
        decay_N = torch.full_like(log_weight_N, positive[1]).masked_fill(is_negative_N, negative[1])
        phi_N = (power_N * log_weight_N + decay_N * (1.0 - log_weight_N.exp())).exp()
    return Surrogate(phi_N * ratio.advantages_N * ratio.logprobs_N)


LOSS_FIELD = "trainer.algorithm.loss"

SurrogateFunction = Callable[[Tokens, AlgorithmConfig], Surrogate]


class Loss(NamedTuple):
    """A built-in loss, and how it chooses tokens of a mini-batch, if it does."""

    surrogate: SurrogateFunction
    choose: Callable[[Tokens, Surrogate, Sequence[Place], AlgorithmConfig], list[int]] | None = None
    """From all tokens at the start of the step, and what the surrogate makes of them."""
    leaves_out: bool = False
    """Whether the chosen ones have no policy term; else they are `Tokens.penalised_N`."""


_PLAIN = (ppo, gspo, cispo, reinforce, sapo, dppo_tv, dppo_kl, gmpo, vespo)
LOSSES = {one.__name__: Loss(one) for one in _PLAIN} | {
    "clip_cov": Loss(ppo, clip_cov_tokens, leaves_out=True),
    "kl_cov": Loss(kl_cov, kl_cov_tokens),
}
"""Losses by the names of `tidemill.common.config.algorithm_table`."""


def find_loss(algorithm: AlgorithmConfig) -> SurrogateFunction:
    """The surrogate that the config names.

    Raises:
        ConfigError: a user's own cannot be loaded, or fails on three made-up tokens.
    """
    if not is_users_own(algorithm.loss):
        return LOSSES[algorithm.loss].surrogate
    where = f"{LOSS_FIELD} {algorithm.loss}"
    function, _ = load_users_function(LOSS_FIELD, algorithm.loss, ("ratio", "algorithm"))

    def surrogate(ratio: Tokens, algorithm: AlgorithmConfig) -> Surrogate:
        returned = function(ratio=ratio.completed(_users_columns(algorithm)), algorithm=algorithm)
        if isinstance(returned, torch.Tensor):
            returned = Surrogate(returned)
        if not isinstance(returned, Surrogate) or returned.objective_N.shape != ratio.log_N.shape:
            found = tuple(returned.objective_N.shape) if isinstance(returned, Surrogate) else type(returned)
            raise ConfigError(
                f"{where} returned {found}; expected a tensor of shape {tuple(ratio.log_N.shape)}, the "
                "objective of each token"
            )
        return returned

    with contained(where):
        _try(surrogate, algorithm)
    return surrogate


def _users_columns(algorithm: AlgorithmConfig) -> list[str]:
    """Columns that a user's loss can rely on with this config, beside those of all tokens. Without this, a
    pass with demonstrations alone would lack them, and one without a taught token the teacher's."""
    names = ["teacher_logprobs"]
    if algorithm.needs_reference:
        names.append("reference_logprobs")
    if algorithm.needs_values:
        names += ["values", "returns"]
    if algorithm.needs_statistics:
        names.append("factors")
    return names


def _try(surrogate: SurrogateFunction, algorithm: AlgorithmConfig) -> None:
    """Call it as the first mini-batch will, with numbers for all columns that this config will have."""
    logprobs_N = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    rollout_N = torch.tensor([-1.1, -1.9, -0.5])
    values_N = torch.tensor([0.5, 0.25, -0.5])
    made_up_columns = {
        "rollout_logprobs": rollout_N,
        "advantages": torch.tensor([1.0, 1.0, -1.0]),
        "teacher_logprobs": torch.tensor([-0.7, -1.5, -0.9]),
        "reference_logprobs": torch.tensor([-1.2, -1.8, -0.6]),
        "values": values_N,
        "returns": torch.tensor([1.5, 1.25, -1.5]),
        "factors": torch.tensor([1.0, 0.0, 1.0]),
    }
    names = ["rollout_logprobs", "advantages", *_users_columns(algorithm)]
    made_up = Tokens(
        logprobs_N=logprobs_N,
        weights_N=torch.ones(3),
        sequence_N=torch.tensor([0, 0, 1]),
        num_sequences=2,
        entropies_N=torch.ones(3),
        columns={name: made_up_columns[name] for name in names},
        values_N=values_N.clone().requires_grad_() if algorithm.needs_values else None,
        teacher_weights_N=torch.tensor([1.0, 0.5, 0.0]),
        log_N=logprobs_N - rollout_N,
    )
    objective_N = surrogate(made_up, algorithm).objective_N
    if not objective_N.requires_grad or not torch.isfinite(objective_N).all():
        raise ConfigError(
            f"{LOSS_FIELD} {algorithm.loss} returned {objective_N.tolist()} without a gradient, or not "
            "finite; compute it from ratio.log_N, ratio.ratio_N or ratio.logprobs_N"
        )
