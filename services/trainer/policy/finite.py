"""Finds weights that are NaN or infinite, and models that compute such numbers."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tidemill.common.errors import ConfigError
from tidemill.services.trainer.policy.shards import local

MAX_NAMED = 3


def find_broken_weights(weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of weights with a number that is not finite, and how many; one synchronisation with the device.
    Of a weight that is split over ranks, this rank's shard is looked at."""
    shards = [(name, local(weight.detach())) for name, weight in weights]
    shards = [(name, shard) for name, shard in shards if shard.is_floating_point() and shard.numel()]
    if not shards:
        return []
    # The extremes of a tensor are NaN where one of its numbers is; a mask would take as much memory again.
    extremes = [torch.stack(torch.aminmax(shard)).double().cpu() for _, shard in shards]
    are_finite = torch.stack(extremes).isfinite().all(dim=1).tolist()
    return [
        _describe(name, shard)
        for (name, shard), is_finite in zip(shards, are_finite, strict=True)
        if not is_finite
    ]


def _describe(name: str, weight: Tensor) -> str:
    num_nan = int(weight.isnan().sum())
    num_infinite = int(weight.isinf().sum())
    counts = [f"{count:,} {kind}" for count, kind in ((num_nan, "NaN"), (num_infinite, "infinite")) if count]
    return f"{name} ({' and '.join(counts)} of {weight.numel():,})"


def refuse_broken_weights(broken: list[str]) -> None:
    """Raises ConfigError: there are such weights; it names the first ones."""
    if not broken:
        return
    more = f" and {len(broken) - MAX_NAMED} more" if len(broken) > MAX_NAMED else ""
    raise ConfigError(
        f"model.path: weights of the model are not finite: {', '.join(broken[:MAX_NAMED])}{more}. Logprobs "
        "would be NaN. The files are damaged, or come from a training that diverged: take an earlier version "
        "of the model, or download or convert it again"
    )


def refuse_broken_numbers(numbers: Tensor, name: str, dtype: torch.dtype) -> None:
    """Raises ConfigError: finite weights have led to these numbers, and not all of them are finite."""
    if bool(numbers.isfinite().all()):
        return
    raise ConfigError(
        f"model.path: the weights of the model are finite, and its {name} of a few made-up tokens, computed "
        f"in {str(dtype).removeprefix('torch.')}, are not. Either its weights are too large, as in damaged "
        "files: download or convert it again; or it needs a wider type: set model.dtype: float32"
    )
