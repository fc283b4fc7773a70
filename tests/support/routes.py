"""Routes of samples: those that a model chooses itself, row by row, and others that are made up."""

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm, MixtralTopKRouter

from tests.support.architectures import make_model
from tests.support.models import gradients_of, make_policy, one_batch
from tests.support.samples import changed
from tidemill.common.run.routers import find_routers, parts_of
from tidemill.common.wire.arrays import Int32
from tidemill.services.trainer.groups.choices import make_routes
from tidemill.services.trainer.groups.sample import Sample


def wide_mixtral(monkeypatch: Any, seed: int = 3, num_experts: int = 4) -> PreTrainedModel:
    """A Mixtral in float64 throughout: without these changes its norms and routers compute in float32."""

    def norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden * (hidden.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    def route(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = hidden.reshape(-1, self.hidden_dim) @ self.weight.T
        weights, chosen = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    monkeypatch.setattr(MixtralRMSNorm, "forward", norm)
    monkeypatch.setattr(MixtralTopKRouter, "forward", route)
    fields = {"num_local_experts": num_experts, "experts_implementation": "eager"}
    return make_model("Mixtral", seed, **fields).double()


def rows_of(sample: Sample) -> Iterator[Int32]:
    start = 0
    for prompt_ids, count in sample.segments:
        yield np.concatenate([prompt_ids, sample.completion_ids[start : start + count]])
        start += count


@torch.no_grad()
def choice_of(model: PreTrainedModel, ids: Int32) -> NDArray[np.uint8]:
    """The experts that routers choose for a row by itself. Shape [tokens - 1, layers, experts of a token]."""
    seen: list[torch.Tensor] = []
    hooks = [
        router.register_forward_hook(lambda *called: seen.append(parts_of(called[2])[2]))
        for _, router in find_routers(model)
    ]
    model(input_ids=torch.from_numpy(ids[:-1]).long()[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1).numpy().astype(np.uint8)


def with_own(model: PreTrainedModel, samples: list[Sample]) -> list[Sample]:
    routed = []
    for sample in samples:
        routes = tuple(make_routes(choice_of(model, ids)) for ids in rows_of(sample))
        routed.append(changed(sample, routes=routes))
    return routed


def with_foreign(samples: list[Sample], layers: int = 2, experts: int = 4, chosen: int = 2) -> list[Sample]:
    """Samples with made-up routes, equal where samples of the same parity begin with the same tokens."""

    def of_token(beginning: Int32, parity: int) -> NDArray[np.uint8]:
        rng = np.random.default_rng([zlib.crc32(beginning.tobytes()), parity])
        return np.stack([rng.permutation(experts)[:chosen] for _ in range(layers)]).astype(np.uint8)

    def of_row(ids: Int32, parity: int) -> NDArray[np.uint8]:
        choices = [of_token(ids[: end + 1], parity) for end in range(len(ids) - 1)]
        return np.stack(choices) if choices else np.zeros((0, layers, chosen), dtype=np.uint8)

    routed = []
    for i, sample in enumerate(samples):
        routes = tuple(make_routes(of_row(ids, i % 2)) for ids in rows_of(sample))
        routed.append(changed(sample, routes=routes))
    return routed


def gradient_by_hand(
    model: PreTrainedModel, samples: list[Sample], monkeypatch: Any, **fields: Any
) -> torch.Tensor:
    """The gradient of one row a pass, in which routers are given the row's experts by hand."""
    row: list[NDArray[np.uint8]] = []

    def route(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = hidden.reshape(-1, self.hidden_dim) @ self.weight.T
        layer = next(i for i, block in enumerate(model.model.layers) if block.mlp.gate is self)
        chosen = torch.from_numpy(row[0][: len(logits), layer].astype(np.int64))
        exponentials = logits.exp().gather(1, chosen)
        return logits, exponentials / exponentials.sum(-1, keepdim=True), chosen

    policy = make_policy(torch.float64, model=model, packing=False, **fields)
    monkeypatch.setattr(MixtralTopKRouter, "forward", route)
    score = policy.scorer.score

    def of_row(tile: Any, *args: Any, **kwargs: Any) -> Any:
        (tile_row,) = tile.rows
        by_ids = {ids.tobytes()[: tile_row.ids.nbytes]: routes.experts for ids, routes in pairs}
        row[:] = [by_ids[tile_row.ids.tobytes()]]
        return score(tile, *args, **kwargs)

    monkeypatch.setattr(policy.scorer, "score", of_row)
    policy._tile_tokens = 1
    for sample in samples:
        pairs = list(zip(rows_of(sample), sample.routes, strict=True))
        policy.accumulate(one_batch([changed(sample, routes=())]))
    return gradients_of(policy)
