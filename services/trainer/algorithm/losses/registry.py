"""Losses by name: the objective of each token, and the user's own.

    def loss(ratio, algorithm=None):

`ratio` is a `tokens.Ratio` (log-ratios with gradient, advantages, logprobs, and which sequence each token
belongs to), `algorithm` the config's section. It returns the objective of each token, to be maximised, as a
tensor [N] with a gradient (or a `tokens.Surrogate`). Normalisation, importance weights, KL, entropy bonus and
value loss are added around it.
"""

from collections.abc import Callable

import torch

from tidemill.common.config.algorithm import AlgorithmConfig, is_users_own
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.algorithm.losses.divergence import dppo_kl, dppo_tv
from tidemill.services.trainer.algorithm.losses.sequences import gmpo, vespo
from tidemill.services.trainer.algorithm.losses.surrogates import cispo, gspo, kl_cov, ppo, reinforce, sapo
from tidemill.services.trainer.algorithm.losses.tokens import Ratio, Surrogate, unclipped
from tidemill.services.trainer.algorithm.users_function import contained, load_users_function

LOSS_FIELD = "trainer.algorithm.loss"

SurrogateFunction = Callable[[Ratio, AlgorithmConfig], Surrogate]

_BY_NAME: dict[str, SurrogateFunction] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "clip_cov": ppo,
    "kl_cov": kl_cov,
    "gmpo": gmpo,
    "vespo": vespo,
}
"""By the names of `tidemill.common.config.algorithm_table`."""


def find_loss(algorithm: AlgorithmConfig) -> SurrogateFunction:
    """The surrogate that the config names.

    Raises:
        ConfigError: a user's own cannot be loaded, or fails on three made-up tokens.
    """
    if not is_users_own(algorithm.loss):
        return _BY_NAME[algorithm.loss]
    where = f"{LOSS_FIELD} {algorithm.loss}"
    function = load_users_function(LOSS_FIELD, algorithm.loss, ("ratio", "algorithm"))

    def surrogate(ratio: Ratio, algorithm: AlgorithmConfig) -> Surrogate:
        returned = function(ratio=ratio, algorithm=algorithm)
        if isinstance(returned, torch.Tensor):
            returned = unclipped(returned)
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


def _try(surrogate: SurrogateFunction, algorithm: AlgorithmConfig) -> None:
    logprobs_N = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    made_up = Ratio(
        log_N=logprobs_N - torch.tensor([-1.1, -1.9, -0.5]),
        advantages_N=torch.tensor([1.0, 1.0, -1.0]),
        logprobs_N=logprobs_N,
        sequence_N=torch.tensor([0, 0, 1]),
        num_sequences=2,
    )
    objective_N = surrogate(made_up, algorithm).objective_N
    if not objective_N.requires_grad or not torch.isfinite(objective_N).all():
        raise ConfigError(
            f"{LOSS_FIELD} {algorithm.loss} returned {objective_N.tolist()} without a gradient, or not "
            "finite; compute it from ratio.log_N, ratio.ratio_N or ratio.logprobs_N"
        )
