"""A loss of the user's own.

    def loss(ratio, algorithm=None):

`ratio` is a `tokens.Tokens` (`ratio_N` and `log_N` with gradient, `advantages_N`, `logprobs_N`, which
sequence each token belongs to, and more), `algorithm` the config's section. It returns the objective of each
token, to be maximised, as a tensor [N] with a gradient (or a `tokens.Surrogate`). Normalisation, importance
weights, KL, entropy bonus and value loss are added around it.

Shape legend: N trained tokens.
"""

import torch

from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.common.config.algorithms.loss import Surrogate
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.algorithm.losses.policy_loss import SurrogateFunction
from tidemill.services.trainer.algorithm.losses.tokens import Tokens
from tidemill.services.trainer.algorithm.users_function import contained, load_users_function

LOSS_FIELD = "trainer.algorithm.loss"


def load_users_loss(algorithm: AlgorithmConfig) -> SurrogateFunction:
    """Raises ConfigError: it cannot be loaded, or fails on three made-up tokens."""
    where = f"{LOSS_FIELD} {algorithm.loss}"
    function, _ = load_users_function(LOSS_FIELD, algorithm.loss, ("ratio", "algorithm"))

    def surrogate(ratio: Tokens, algorithm: AlgorithmConfig) -> Surrogate:
        returned = function(ratio=ratio.completed(_users_columns(algorithm)), algorithm=algorithm)
        if isinstance(returned, torch.Tensor):
            returned = Surrogate(returned)
        if not isinstance(returned, Surrogate) or returned.objective_N.shape != ratio.log_N.shape:
            got = tuple(returned.objective_N.shape) if isinstance(returned, Surrogate) else type(returned)
            raise ConfigError(
                f"{where} returned {got}; expected a tensor of shape {tuple(ratio.log_N.shape)}, the "
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
