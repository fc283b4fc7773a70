"""One policy over several ranks, seen from rank 0 as a policy like any other.

Every call is broadcast and then made on all ranks alike, each on its own shard (`rank_policy.py`), so that
their collective operations meet. A call returns when rank 0's part of it is done, and no other rank ever
makes a call that rank 0 does not make.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from torch import Tensor

from tidemill.services.trainer.algorithm.coefficients import Coefficients
from tidemill.services.trainer.groups.samples import (
    MicroBatch,
    Sample,
    SegmentTokens,
    Teaching,
    TurnEnd,
)
from tidemill.services.trainer.policy.fsdp.ranks import Ranks
from tidemill.services.trainer.policy.policy import Policy
from tidemill.services.trainer.policy.state import PolicyState

STOP = "stop"


class ShardedPolicy:
    """Implements `Policy` on rank 0; `own` is its shard. Every method that is not here is called on all
    ranks."""

    def __init__(self, own: Policy, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks

    def __getattr__(self, name: str) -> Any:
        if name not in Policy.__dict__:
            raise AttributeError(name)
        return partial(self._call, name)

    def _call(self, name: str, *args: Any) -> Any:
        self._ranks.broadcast(encode_call(name, args))
        return getattr(self._own, name)(*args)

    def named_parameters_for_export(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights, gathered from all ranks one by one."""
        # The other ranks take part in what rank 0 gathers, and write nothing.
        self._ranks.broadcast(encode_call("join_export", ()))
        yield from self._own.named_parameters_for_export()

    def coefficients(self) -> Coefficients:
        return self._own.coefficients()

    def state(self) -> PolicyState:
        """Rank 0's shard; `save_state` writes those of all."""
        return self._own.state()

    def load_state(self, source: PolicyState | Path) -> None:
        """Each rank reads its shard, whatever the number of ranks that wrote the folder."""
        assert isinstance(source, Path), "ranks read a state from a folder that all of them see"
        self._call("load_state", source)

    def close(self) -> None:
        """Let the other ranks end, once all that is being written is written."""
        self._own.finish_writing()
        self._ranks.broadcast(encode_call(STOP, ()))
        self._ranks.close()


def serve_calls(own: Policy, ranks: Ranks) -> None:
    """Make rank 0's calls on this rank's shard, until rank 0 closes."""
    while True:
        name, args = decode_call(ranks.broadcast())
        if name == STOP:
            own.finish_writing()
            return
        getattr(own, name)(*args)


def encode_call(name: str, args: Sequence[Any]) -> bytes:
    """A call as msgpack; arguments are numbers, text, paths, samples, micro-batches."""
    encoded: bytes = msgpack.packb([name, [_encode(arg) for arg in args]])
    return encoded


def decode_call(payload: bytes) -> tuple[str, list[Any]]:
    name, args = msgpack.unpackb(payload)
    return name, [_decode(arg) for arg in args]


def _encode(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, MicroBatch):
        return {"batch": [_encode_sample(sample) for sample in value.samples]}
    if isinstance(value, Sequence):
        return {"samples": [_encode_sample(sample) for sample in value]}
    return {"path": str(value)} if isinstance(value, Path) else float(value)


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "path" in value:
        return Path(value["path"])
    if "batch" in value:
        return MicroBatch(tuple(_decode_sample(item) for item in value["batch"]))
    return [_decode_sample(item) for item in value["samples"]]


def _encode_sample(sample: Sample) -> dict[str, Any]:
    values = {item.name: getattr(sample, item.name) for item in fields(Sample)}
    forked = [(_encode_array(segment.prompt_ids), segment.num_completion) for segment in sample.forked]
    taught = sample.teaching
    teaching = taught and (taught.teacher, _encode_array(taught.logprobs), taught.weight)
    special = {"forked": forked, "teaching": teaching}
    return {name: _encode_array(value) for name, value in values.items()} | special


def _encode_array(value: Any) -> Any:
    return {"dtype": str(value.dtype), "data": value.tobytes()} if isinstance(value, np.ndarray) else value


def _decode_sample(encoded: dict[str, Any]) -> Sample:
    values: dict[str, Any] = {name: _decode_array(value) for name, value in encoded.items()}
    ticket, index = encoded["key"]
    taught = encoded["teaching"]
    return Sample(
        **values
        | {
            "key": (ticket, index),
            "forked": tuple(SegmentTokens(_decode_array(ids), count) for ids, count in encoded["forked"]),
            "turns": tuple(TurnEnd(*turn) for turn in encoded["turns"]),
            "teaching": taught and Teaching(taught[0], _decode_array(taught[1]), taught[2]),
        }
    )


def _decode_array(value: Any) -> Any:
    return np.frombuffer(value["data"], dtype=value["dtype"]) if isinstance(value, dict) else value
