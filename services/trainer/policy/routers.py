"""The routers of a mixture model: which modules they are, and what they said in a forward pass.

transformers names a model's routers in `_can_record_outputs`. They return logits, the weights of the chosen
experts and their numbers, in this order or the reverse. What makes weights of logits, a softmax or a sigmoid,
is found by comparing the two.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tidemill.common.errors import ConfigError
from tidemill.services.trainer.algorithm.losses.routing import AFFINITIES, LayerRouting
from tidemill.services.trainer.policy.trees import rows_at

MAX_DEVIATION = 0.05
"""Of a chosen expert's weight from what it should be, relative: bfloat16 makes 0.004."""


class Routers:
    """Notes what a model's routers return, in passes that ask for it. Make it before the model is sharded."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._name = type(model).__name__
        self._seen: list[tuple[nn.Module, Any]] | None = None
        self._affinities: dict[nn.Module, str] = {}
        for router in find_routers(model):
            router.register_forward_hook(self._note)
        if any(module._compiled_call_impl is not None for module in model.modules()):
            torch.compiler.reset()  # what was compiled before would go on without the hooks

    def _note(self, router: nn.Module, _: Any, output: Any) -> None:
        # Layers that are run again for their gradient are not noted twice: nobody records then.
        if self._seen is not None:
            self._seen.append((router, output))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note what routers return until the end of the block."""
        self._seen = []
        try:
            yield
        finally:
            self._seen = None

    def learn(self) -> None:
        """Find out from what was noted how weights are made of logits. Raises ConfigError: there are
        no routers, or they do it in no known way."""
        if not self._seen:
            raise ConfigError(
                f"trainer.algorithm.router: transformers names no routers in {self._name}; the section is "
                "for mixtures of experts, leave it out"
            )
        self._affinities = {router: self._affinity_of(output) for router, output in self._seen}

    def _affinity_of(self, output: Any) -> str:
        parts = _parts(output)
        if parts is not None:
            logits_NE, weights_NK, chosen_NK = (part.detach() for part in parts)
            deviations = {
                name: _deviation(affinity(logits_NE.float()), weights_NK.float(), chosen_NK)
                for name, affinity in AFFINITIES.items()
            }
            best = min(deviations, key=lambda name: deviations[name])
            if deviations[best] < MAX_DEVIATION:
                return best
        raise ConfigError(
            f"trainer.algorithm.router: routers of {self._name} do not return logits, weights and experts of "
            "which the weights are a softmax or sigmoid of the logits; leave it out"
        )

    def at(self, sources_N: Tensor) -> tuple[LayerRouting, ...]:
        """What was noted of these flat positions, layer by layer."""
        assert self._seen is not None and len(self._seen) == len(self._affinities), "every router was heard"
        found = []
        for router, output in self._seen:
            parts = _parts(output)
            assert parts is not None, "it was when the model was loaded"
            logits_NE, chosen_NK = (rows_at(part, sources_N) for part in (parts[0], parts[2]))
            found.append(LayerRouting(self._affinities[router], logits_NE, chosen_NK))
        return tuple(found)


def find_routers(model: nn.Module) -> list[nn.Module]:
    """The modules whose outputs transformers would record as router logits, in the order of the model."""
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    recorders = [recorder for part in parts for recorder in _recorders(part)]
    return [
        module
        for name, module in model.named_modules()
        if any(
            isinstance(module, recorder.target_class) and f".{recorder.layer_name or ''}" in f".{name}"
            for recorder in recorders
        )
    ]


def _recorders(model: PreTrainedModel) -> list[Any]:
    named = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits", [])
    return [one for one in (named if isinstance(named, list) else [named]) if hasattr(one, "target_class")]


def _parts(output: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """Logits [.., E], weights [.., K] and numbers [.., K] of the chosen experts, flat over positions."""
    if not isinstance(output, tuple) or len(output) < 3 or not all(isinstance(x, Tensor) for x in output[:3]):
        return None
    logits, weights, chosen = (part.flatten(0, -2) for part in output[:3])
    if not logits.is_floating_point():
        logits, chosen = chosen, logits
    if chosen.is_floating_point() or not logits.is_floating_point() or weights.shape != chosen.shape:
        return None
    return logits, weights, chosen


def _deviation(affinities_NE: Tensor, weights_NK: Tensor, chosen_NK: Tensor) -> float:
    """How far weights are from a multiple of the affinities: one multiple for each token that has several
    experts, else one for all."""
    ratios_NK = weights_NK / affinities_NE.gather(1, chosen_NK)
    means = ratios_NK.mean(-1, keepdim=True) if ratios_NK.shape[-1] > 1 else ratios_NK.mean()
    deviation = float((ratios_NK / means - 1.0).abs().max())
    # NaN is neither greater nor smaller: `min` could choose it.
    return deviation if deviation == deviation else float("inf")
