"""One policy over several ranks, seen from rank 0 as a policy like any other.

Every call is broadcast and then made on all ranks alike, each on its own shard (`rank_policy.py`), so that
their collective operations meet. Guarantee: a call returns when the leader's part of it is done, and no
follower ever makes a call that the leader does not make.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from torch import Tensor

from common.wire.arrays import Float32
from services.trainer.groups.micro_batches import MicroBatch
from services.trainer.groups.samples import PreparedTokens, Sample
from services.trainer.policy.fsdp.ranks import Ranks
from services.trainer.policy.policy import MicroBatchMetrics, Policy, PolicyState, UpdateResult

STOP = "stop"


class ShardedPolicy:
    """Implements `Policy` on rank 0; `own` is its shard."""

    def __init__(self, own: Policy, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks

    def _call(self, name: str, *args: Any) -> Any:
        self._ranks.broadcast(encode_call(name, args))
        return getattr(self._own, name)(*args)

    def accumulate(self, batch: MicroBatch) -> MicroBatchMetrics:
        """Each rank adds the gradient of its share of the samples; the metrics are those of all."""
        metrics: MicroBatchMetrics = self._call("accumulate", batch)
        return metrics

    def update(self, denominator: float) -> UpdateResult:
        """Each rank updates its shard of the weights."""
        result: UpdateResult = self._call("update", denominator)
        return result

    def zero(self) -> None:
        """Discard what has been accumulated, on every rank."""
        self._call("zero")

    def logprobs(self, samples: Sequence[Sample], temperature: float = 1.0) -> list[Float32]:
        """Of every completion token, each rank for its share of the samples."""
        results: list[Float32] = self._call("logprobs", list(samples), temperature)
        return results

    def prepare(self, samples: Sequence[Sample]) -> list[PreparedTokens]:
        """Each rank prepares its share of the samples."""
        results: list[PreparedTokens] = self._call("prepare", list(samples))
        return results

    def hold_weights(self) -> None:
        """Each rank keeps its shard of the current weights."""
        self._call("hold_weights")

    def release_weights(self) -> None:
        """Each rank frees its copy."""
        self._call("release_weights")

    def named_parameters_for_export(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights, gathered from all ranks one by one."""
        # The followers take part in what the leader gathers, and write nothing.
        self._ranks.broadcast(encode_call("save_weights", [Path()]))
        yield from self._own.named_parameters_for_export()

    def save_weights(self, folder: Path) -> list[Path]:
        """The whole weights, gathered and written by rank 0."""
        paths: list[Path] = self._call("save_weights", folder)
        return paths

    def state(self) -> PolicyState:
        """Rank 0's shard; `save_state` writes those of all."""
        return self._own.state()

    def save_state(self, folder: Path) -> None:
        """Each rank writes its shard; all of them are there when this returns."""
        self._call("save_state", folder)

    def load_state(self, source: PolicyState | Path) -> None:
        """Each rank reads its shard, whatever the number of ranks that wrote the folder."""
        assert isinstance(source, Path), "ranks read a state from a folder that all of them see"
        self._call("load_state", source)

    def digest(self) -> str:
        """Over the whole weights."""
        digest: str = self._call("digest")
        return digest

    def close(self) -> None:
        """Let the followers end."""
        self._ranks.broadcast(encode_call(STOP, ()))
        self._ranks.close()


def follow(own: Policy, ranks: Ranks) -> None:
    """Make the leader's calls on this rank's shard, until the leader closes."""
    while True:
        name, args = decode_call(ranks.broadcast())
        if name == STOP:
            return
        getattr(own, name)(*args)


def encode_call(name: str, args: Sequence[Any]) -> bytes:
    """A call as msgpack; arguments are numbers, paths, samples, micro-batches."""
    encoded: bytes = msgpack.packb([name, [_encode(arg) for arg in args]])
    return encoded


def decode_call(payload: bytes) -> tuple[str, list[Any]]:
    """The inverse of `encode_call`."""
    name, args = msgpack.unpackb(payload)
    return name, [_decode(arg) for arg in args]


def _encode(value: Any) -> Any:
    if isinstance(value, MicroBatch):
        return {"batch": [_encode_sample(sample) for sample in value.samples]}
    if isinstance(value, list):
        return {"samples": [_encode_sample(sample) for sample in value]}
    if isinstance(value, Path):
        return {"path": str(value)}
    return float(value)


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
    return {
        name: [str(value.dtype), value.tobytes()] if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }


def _decode_sample(encoded: dict[str, Any]) -> Sample:
    values = dict(encoded)
    key = values.pop("key")
    arrays: dict[str, Any] = {
        name: np.frombuffer(value[1], dtype=value[0]) if isinstance(value, list) else value
        for name, value in values.items()
    }
    return Sample(key=(key[0], key[1]), **arrays)
