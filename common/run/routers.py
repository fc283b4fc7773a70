"""The routers of a mixture of experts in transformers: which modules they are, and their outputs.

transformers names them in `_can_record_outputs`. They return logits, the weights of the chosen experts and
their indices, in this order or the reverse. Only attributes of models and tensors are used, no library.
"""

from typing import Any

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in configurations."""


def is_mixture(config: Any) -> bool:
    """Whether a model of this configuration has more than one expert."""
    return count_experts(config) > 1


def count_experts(config: Any) -> int:
    """Number of experts that a router chooses from; 0 where the configuration names none."""
    text = config.get_text_config()
    counts = [getattr(text, name, 0) for name in EXPERT_COUNTS]
    return max([0, *(count for count in counts if isinstance(count, int))])


def find_routers(model: Any) -> list[tuple[int, Any]]:
    """Routers in the order of the model, each with the number of its layer."""
    recorded = [getattr(module, "_can_record_outputs", None) or {} for module in model.modules()]
    recorders = []
    for outputs in recorded:
        of_logits = outputs.get("router_logits") or []
        recorders += of_logits if isinstance(of_logits, list) else [of_logits]
    routers = []
    for name, module in model.named_modules():
        is_router = any(
            isinstance(module, recorder.target_class) and f".{recorder.layer_name or ''}" in f".{name}"
            for recorder in recorders
            if hasattr(recorder, "target_class")
        )
        if is_router:
            numbers = (int(word) for word in name.split(".") if word.isdigit())
            routers.append((next(numbers, 0), module))
    return routers


ROUTER_NAMES = ("gate", "router", "router_gate")
"""Names of routers in blocks that report their router's output as their own."""


def modules_of_routers(model: Any) -> set[int]:
    """Ids of all modules that are routers or parts of one."""
    recorded = [module for _, module in find_routers(model)]
    ids: set[int] = set()
    for module in recorded:
        parts = dict(module.named_modules())
        names = [name for name in parts if name.rpartition(".")[2] in ROUTER_NAMES]
        # A whole block of attention or experts may be recorded: of its parts the router alone counts.
        routers = [parts[name] for name in names] or [module]
        for router in routers:
            ids |= set(map(id, router.modules()))
    return ids


def parts_of(output: Any) -> tuple[Any, Any, Any] | None:
    """Logits [N, E], and weights [N, K] and indices [N, K] of the chosen experts, over N positions; None
    where `output` is not that of such a router."""
    if not isinstance(output, tuple) or len(output) < 3:
        return None
    if any(getattr(tensor, "ndim", 0) < 2 for tensor in output[:3]):
        return None
    logits = output[0].flatten(0, -2)
    weights = output[1].flatten(0, -2)
    chosen = output[2].flatten(0, -2)
    if not logits.is_floating_point():
        logits, chosen = chosen, logits
    if chosen.is_floating_point() or not logits.is_floating_point() or weights.shape != chosen.shape:
        return None
    return logits, weights, chosen
