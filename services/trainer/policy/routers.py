"""Routers of a mixture of experts: notes what they return in a forward pass, and replays recorded experts.

Whether a router's weights are the softmax or the sigmoid of its logits is found by comparing them.

For a replay a router runs once more, and the result of its top k over experts is replaced by the experts that
the engine chose. So weights are those of the live logits at these experts, with their gradient, in the
model's own arithmetic. Guarantees, tried on every router when the model is loaded: with the experts of its
own choice a router returns the same bits, and with others it returns these.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from tidemill.common.errors import ConfigError
from tidemill.common.run.routers import count_experts, find_routers, is_mixture, parts_of
from tidemill.common.wire.routes import Routing
from tidemill.services.trainer.algorithm.losses.routing import AFFINITIES, LayerRouting, rerouted
from tidemill.services.trainer.algorithm.losses.sums import Sums, TileSums
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.policy.options import OptionSettings, PolicyCore, PolicyOption
from tidemill.services.trainer.policy.tile import Row, Tile
from tidemill.services.trainer.policy.trees import rows_at

MAX_DEVIATION = 0.05
"""Largest relative deviation of a chosen expert's weight from the expected one: bfloat16 makes 0.004."""


class GivenExperts(TorchFunctionMode):
    """Within the block, the K largest of each token's E numbers are those of the experts that are given."""

    def __init__(self, chosen_NK: Tensor, num_experts: int) -> None:
        super().__init__()
        self._chosen_NK = chosen_NK
        self._num_experts = num_experts

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        num_tokens, num_chosen = self._chosen_NK.shape
        if func in (torch.topk, Tensor.topk):
            scores = args[0]
            k = kwargs.get("k", args[1] if len(args) > 1 else None)
            # Not a choice among groups of experts, which some models make first.
            is_of_experts = scores.shape[-1] == self._num_experts
            if k == num_chosen and is_of_experts and scores.numel() == num_tokens * self._num_experts:
                chosen = self._chosen_NK.view(*scores.shape[:-1], k)
                return torch.return_types.topk((scores.gather(-1, chosen), chosen))
        return func(*args, **kwargs)


ROWS_PER_COMPARED = 64
"""Samples of an update's first micro-batch, for each row that is scored without routes too."""


class Routers(PolicyOption):
    """Notes what a model's routers return, in passes that compute gradients, and replays routes in passes."""

    def __init__(self, settings: OptionSettings) -> None:
        self._measures = settings.trainer.algorithm.router.is_on
        self._wants_replays = settings.replays_routes
        self._seen: list[tuple[nn.Module, Any]] | None = None
        self._routes: Tensor | None = None
        self._changed: list[Tensor] = []
        self._is_trial = False
        self._affinities: dict[nn.Module, str] = {}
        self._layers: list[int] = []

    def join(self, model: PreTrainedModel, policy: PolicyCore) -> None:
        """Put a hook on each router; the copies of the model have been made, and get none. Raises
        ConfigError: it is a mixture whose routers are not known."""
        self._name = type(model).__name__
        routers = find_routers(model)
        self._layers = [layer for layer, _ in routers]
        self._replays = self._wants_replays and bool(routers)
        if self._replays:
            self.routing = Routing(tuple(self._layers), count_experts(model.config))
        for number, (_, router) in enumerate(routers):
            if self._replays:
                # Compiled it would round otherwise than when it runs once more, in the hook.
                router.forward = torch.compiler.disable(router.forward)
            router.register_forward_hook(partial(self._note, number), with_kwargs=True)
        if self._wants_replays and not routers and is_mixture(model.config):
            raise self._no_replay("transformers names none")
        if any(module._compiled_call_impl is not None for module in model.modules()):
            torch.compiler.reset()  # what was compiled before would go on without the hooks

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it would compile one variant for each router
    def _note(self, number: int, router: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        again: Callable[[Tensor], Any] = partial(_again, router, args, kwargs, output)
        if self._is_trial and self._replays:
            self._try(again, output)
        if self._routes is not None:
            parts = parts_of(output)
            assert parts is not None, "it was tried"
            given_NK = self._routes[:, number].to(parts[2].dtype)
            own_NK = parts[2]
            # Padding has no routes.
            chosen_NK = torch.where(given_NK < 0, own_NK, given_NK)
            if self._seen is not None:
                self._changed.append((chosen_NK.sort(-1).values != own_NK.sort(-1).values).any(-1))
            output = again(chosen_NK)
        # Layers that are run again for their gradient are not noted twice: `_seen` is None by then.
        if self._seen is not None:
            self._seen.append((router, output))
        return output

    @torch.no_grad()
    def _try(self, again: Callable[[Tensor], Any], output: Any) -> None:
        """Try a replay. Raises ConfigError: the router cannot be given its experts."""
        parts = parts_of(output)
        if parts is None:
            raise self._no_replay("one does not return logits, weights and experts")
        experts = parts[2]
        next_experts = (parts[2] + 1) % parts[0].shape[-1]
        same = parts_of(again(experts))
        moved = parts_of(again(next_experts))
        if same is None or moved is None or not all(map(torch.equal, same, parts)):
            raise self._no_replay("one returns others each time")
        if not torch.equal(moved[2], next_experts):
            raise self._no_replay("one does not choose by torch.topk")

    def _no_replay(self, reason: str) -> ConfigError:
        return ConfigError(
            f"rollout.record_routes: the routers of {self._name} cannot be given the engine's experts "
            f"({reason}); set it to false to train along the trainer's own choice"
        )

    def around_pass(self, tile: Tile, device: torch.device) -> AbstractContextManager[None]:
        routes = None if tile.routes is None else tile.routes.to(device)
        return self._passing(routes, is_noted=torch.is_grad_enabled())

    @contextmanager
    def _passing(self, routes: Tensor | None = None, is_noted: bool = True) -> Iterator[None]:
        """One forward pass, with routes or without; until the end of the block, note what routers return.
        Layers that run again in its backward pass get the same routes. Shape [tokens, layers, experts of a
        token]; -1: the router's own."""
        self._routes = None
        self._changed = []
        if routes is not None:
            # Engines may count all layers, with those that have no router.
            indices = range(len(self._layers)) if routes.shape[1] == len(self._layers) else self._layers
            if max(indices) >= routes.shape[1]:
                raise ValueError(f"routes of {routes.shape[1]} layers for {len(self._layers)} routers")
            self._routes = routes[:, list(indices)]
        self._seen = [] if is_noted else None
        try:
            yield
        finally:
            self._seen = None

    @contextmanager
    def around_trial(self) -> Iterator[None]:
        """Within the block, passes find out what routers can do. Raises ConfigError: not what is wanted."""
        self._is_trial = True
        try:
            with self._passing():
                yield
                if self._measures:
                    self._learn()
        finally:
            self._is_trial = False

    def _learn(self) -> None:
        """Find out from what was noted how weights are made of logits. Raises ConfigError: there are
        no routers, or they do it in no known way."""
        if not self._seen:
            raise ConfigError(
                f"trainer.algorithm.router: transformers names no routers in {self._name}; the section is "
                "for mixtures of experts, leave it out"
            )
        self._affinities = {router: self._affinity_of(output) for router, output in self._seen}

    def _affinity_of(self, output: Any) -> str:
        parts = parts_of(output)
        if parts is not None:
            constants = [tensor.detach() for tensor in parts]
            logits_NE, weights_NK, chosen_NK = constants
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

    def pass_scores(self, sources_N: Tensor) -> dict[str, Any]:
        return {"routing": self._routing_at(sources_N), "changed_N": self._changed_at(sources_N)}

    def _routing_at(self, sources_N: Tensor) -> tuple[LayerRouting, ...]:
        """What routers returned at these flat positions, layer by layer."""
        if not self._measures:
            return ()
        assert self._seen is not None and len(self._seen) == len(self._affinities), "every router was heard"
        routings = []
        for router, output in self._seen:
            parts = parts_of(output)
            assert parts is not None, "it was when the model was loaded"
            logits_NE = rows_at(parts[0], sources_N)
            chosen_NK = rows_at(parts[2], sources_N)
            routings.append(LayerRouting(self._affinities[router], logits_NE, chosen_NK))
        return tuple(routings)

    def _changed_at(self, sources_N: Tensor) -> Tensor | None:
        """The share of layers in which the routers of these flat positions would have chosen otherwise, in
        the last pass that was noted. Shape [N]; None where it had no routes."""
        if not self._changed:
            return None
        return rows_at(torch.stack(self._changed, -1).float().mean(-1), sources_N)

    def sums_of(self, tile: Tile) -> TileSums:
        return {} if tile.changed_N is None else rerouted(tile.changed_N)

    @torch.no_grad()
    def begin_update(self, batch: MicroBatch, plan: Sequence[Tile], policy: PolicyCore) -> Sums:
        """How far logprobs of some rows are from the engine's, with its routes and with the routers' own
        choice: two passes, which the other ranks make too."""
        if self.routing is None:
            return Sums()
        # Without demonstrations: no engine has chosen for them, nor said a logprob.
        rows = [row for tile in plan[:1] for row in tile.rows if row.routes is not None]
        rows = rows[: max(1, len(batch.samples) // ROWS_PER_COMPARED)]
        with_routes = _gap_to_engine(batch, rows, policy)
        without_routes = _gap_to_engine(batch, [replace(row, routes=None) for row in rows], policy)
        return Sums(
            compared_tokens=sum(len(row.targets) for row in rows),
            replayed_gap_sum=with_routes,
            unreplayed_gap_sum=without_routes,
        )


def _gap_to_engine(batch: MicroBatch, rows: Sequence[Row], policy: PolicyCore) -> float:
    """The sum of |logprob - the engine's| over the tokens of rows that fit into one pass."""
    tile = policy.score_rows(rows)
    logprobs_N = tile.logprobs_N.double().cpu().numpy()
    if not rows:
        return 0.0
    of_engine = [batch.samples[row.sample].rollout_logprobs[row.places] for row in tile.rows]
    return float(np.abs(logprobs_N - np.concatenate(of_engine)).sum())


def _again(router: nn.Module, args: Any, kwargs: Any, output: Any, chosen_NK: Tensor) -> Any:
    """What a router returns where it has to choose these experts."""
    parts = parts_of(output)
    assert parts is not None, "it was tried"
    with GivenExperts(chosen_NK, parts[0].shape[-1]):
        return router.forward(*args, **kwargs)


def _deviation(affinities_NE: Tensor, weights_NK: Tensor, chosen_NK: Tensor) -> float:
    """How far weights are from a multiple of the affinities: one multiple for each token that has several
    experts, else one for all."""
    ratios_NK = weights_NK / affinities_NE.gather(1, chosen_NK)
    means = ratios_NK.mean(-1, keepdim=True) if ratios_NK.shape[-1] > 1 else ratios_NK.mean()
    deviation = float((ratios_NK / means - 1.0).abs().max())
    # NaN compares as neither greater nor smaller: `min` could choose it.
    return deviation if deviation == deviation else float("inf")
