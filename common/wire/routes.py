"""What the routes of a model look like, and whether recorded ones are what its routers may have chosen."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.common.wire.choices import ROUTES_FAULT, Rows


@dataclass(frozen=True, slots=True)
class Routing:
    """What the routes of a model have to look like.

    Example: `layers` (1, 3), `num_experts` 8: layers 1 and 3 have a router, and each chooses among 8 experts.
    """

    layers: tuple[int, ...]
    """Numbers of the layers that have a router."""
    num_experts: int


def find_routes_fault(routes: Rows, routing: Routing | None = None) -> str:
    """Why these routes are not what a router chose, as a sentence; empty where they may be.

    A router chooses K different experts for each token. Rows that an engine did not fill in are zeros, which
    name expert 0 K times. With K = 1 such a row cannot be told from a choice of expert 0.

    Args:
        routes: rows [layers, K] of one sample.
        routing: that of the model. Without it, a layer that is zero at every token counts as a layer without
            a router, because engines leave those at zero. If all layers are zero, none of them counts so.
    """
    num_rows, num_layers, _ = routes.values.shape
    if not num_rows:
        return ""
    # [K, R, L], so that each comparison runs over memory in order.
    experts_KRL = np.ascontiguousarray(np.moveaxis(routes.values, -1, 0))
    layers: Sequence[int] = range(num_layers)
    # Rows have the routers' layers alone, or all layers of the model; of these the routers' ones are checked.
    if routing is not None and num_layers != len(routing.layers):
        last_layer = max(routing.layers)
        if last_layer >= num_layers:
            return f"{ROUTES_FAULT}have {num_layers} layers, and the model has a router in layer {last_layer}"
        layers = routing.layers
        experts_KRL = experts_KRL[:, :, list(layers)]
    if routing is not None:
        highest = int(experts_KRL.max())
        if highest >= routing.num_experts:
            return f"{ROUTES_FAULT}name expert {highest}, and the model has {routing.num_experts} a layer"
    is_repeated_RL = _name_one_twice(experts_KRL)
    if routing is None and is_repeated_RL.any():
        has_router_L = experts_KRL.any(axis=(0, 1))
        if has_router_L.any():
            is_repeated_RL &= has_router_L
    if not is_repeated_RL.any():
        return ""
    token, position = np.argwhere(is_repeated_RL)[0].tolist()
    chosen = experts_KRL[:, token, position].tolist()
    num_tokens = int(is_repeated_RL.any(axis=1).sum())
    return (
        f"{ROUTES_FAULT}name an expert twice at {num_tokens} of {num_rows} tokens (first: token {token}, "
        f"layer {layers[position]}, experts {chosen}), which no router does: the engine did not record them "
        "(for vLLM see its issue 54730); use another version of the engine, or set rollout.record_routes: "
        "false"
    )


def _name_one_twice(experts_KRL: NDArray[Any]) -> NDArray[np.bool_]:
    """Where an expert is chosen twice for one token in one layer. Shape [R, L]."""
    is_repeated_RL = np.zeros(experts_KRL.shape[1:], dtype=np.bool_)
    for first_RL, second_RL in combinations(experts_KRL, 2):
        is_repeated_RL |= first_RL == second_RL
    return is_repeated_RL
