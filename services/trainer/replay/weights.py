"""Weights of a moment: copies of a policy's state, and how far apart two are."""

from typing import Any

import torch
from torch import Tensor

from services.trainer.policy import Policy, PolicyState

NOT_WEIGHTS = ("optimizer.", "rng.", "reference.")
"""Beginnings of names in a policy's state."""


def copied_state(policy: Policy) -> PolicyState:
    """A copy of all that the policy's next step depends on."""
    state = policy.state()
    return PolicyState(
        {name: tensor.detach().clone() for name, tensor in state.tensors.items()}, state.values
    )


def named_weights(state: PolicyState) -> dict[str, Tensor]:
    """What is trained, under the names of the model's own parameters; those of a value head keep theirs."""
    return {
        name.removeprefix("model."): tensor.detach().cpu()
        for name, tensor in state.tensors.items()
        if not name.startswith(NOT_WEIGHTS)
    }


def weight_distance(start: PolicyState, replayed: PolicyState, changed: PolicyState) -> dict[str, Any] | None:
    """How far the two results lie apart, beside how far each step went; None of a policy without weights.

    Norms are over all trained weights, in float64; `cosine` is that of the angle between the two steps.
    """
    names = [
        name
        for name, tensor in start.tensors.items()
        if not name.startswith(NOT_WEIGHTS) and tensor.is_floating_point()
    ]
    if not names:
        return None
    apart, first, second, product, greatest = 0.0, 0.0, 0.0, 0.0, 0.0
    for name in names:
        origin = _wide(start.tensors[name])
        one, other = _wide(replayed.tensors[name]) - origin, _wide(changed.tensors[name]) - origin
        apart += float((other - one).square().sum())
        first, second = first + float(one.square().sum()), second + float(other.square().sum())
        product += float((one * other).sum())
        greatest = max(greatest, float((other - one).abs().max())) if one.numel() else greatest
    lengths = (first * second) ** 0.5
    return {
        "norm": apart**0.5,
        "max_abs": greatest,
        "replayed_update_norm": first**0.5,
        "changed_update_norm": second**0.5,
        "cosine": product / lengths if lengths else None,
    }


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)
