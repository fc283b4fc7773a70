"""What a model keeps of the tokens so far, for the rows of a batch: keys and values, and recurrent states.

Keys and values of a token lie in its column, so padding on the left of a shorter row is masked. A recurrent
state has no columns: padding that enters it stays. So models with such states compute prompts of one length
at a time, without padding, and what they keep of them is joined afterwards.

Shapes: B rows of the batch.
"""

from collections.abc import MutableMapping, MutableSequence, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

TOKEN_AXES = {"keys": -2, "values": -2, "indexer_keys": 1}
"""Attributes of a layer with an entry for each token, and the axis of these."""
"""Tensors in a dict or a list of a layer, or of the whole cache, are states: a row for each of the batch."""


class Slot(NamedTuple):
    """Where a tensor lies, whose first axis is the rows of the batch."""

    holder: MutableMapping[Any, Any] | MutableSequence[Any]
    key: Any
    token_axis: int | None
    """Its axis of tokens; None: it has none."""

    @property
    def tensor(self) -> Tensor:
        tensor: Tensor = self.holder[self.key]
        return tensor

    def put(self, tensor: Tensor) -> None:
        self.holder[self.key] = tensor


def is_recurrent(model: Any) -> bool:
    """Whether the model keeps something else than keys and values, which padding could enter."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    if getattr(model, "_is_stateful", False):
        return True
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    return any(type(layer) not in plain for layer in DynamicCache(config=model.config).layers)


def has_keys(cache: Any) -> bool:
    """Whether some layer attends to earlier tokens, so that a mask says which of them are padding."""
    return any(slot.token_axis is not None for slot in slots_of(cache))


def slots_of(cache: Any) -> list[Slot]:
    """All tensors of a cache, always in the same order."""
    slots: list[Slot] = []
    for holder in (cache, *getattr(cache, "layers", ())):
        for name, value in vars(holder).items():
            if isinstance(value, Tensor):
                if name in TOKEN_AXES and value.numel():
                    slots.append(Slot(vars(holder), name, TOKEN_AXES[name]))
            elif isinstance(value, MutableMapping):
                slots += [Slot(value, key, None) for key, state in value.items() if isinstance(state, Tensor)]
            elif isinstance(value, MutableSequence):
                slots += [
                    Slot(value, key, None) for key, state in enumerate(value) if isinstance(state, Tensor)
                ]
    return slots


def select_rows(cache: Any, rows_B: Tensor) -> None:
    """Keep these rows, in this order; a row may be taken several times."""
    for slot in slots_of(cache):
        slot.put(slot.tensor.index_select(0, rows_B))


def join_rows(caches: Sequence[Any]) -> Any:
    """The rows of all caches, of one model and different numbers of tokens, in the first of them."""
    joined = caches[0]
    for slots in zip(*map(slots_of, caches), strict=True):
        slots[0].put(_joined([slot.tensor for slot in slots], slots[0].token_axis))
    for number, layer in enumerate(getattr(joined, "layers", ())):
        if hasattr(layer, "cumulative_length"):  # also of the tokens that have left a sliding window
            layer.cumulative_length = max(cache.layers[number].cumulative_length for cache in caches)
    return joined


def _joined(parts: Sequence[Tensor], token_axis: int | None) -> Tensor:
    """Rows end to end, with padding before the tokens of shorter ones."""
    if token_axis is not None:
        longest = max(tensor.shape[token_axis] for tensor in parts)
        parts = [_padded(tensor, longest, token_axis) for tensor in parts]
    return torch.cat(list(parts))


def _padded(tensor: Tensor, longest: int, token_axis: int) -> Tensor:
    axes_after = tensor.ndim - 1 - (token_axis % tensor.ndim)
    return F.pad(tensor, [0, 0] * axes_after + [longest - tensor.shape[token_axis], 0])
