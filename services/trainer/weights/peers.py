"""The ranks that train one model, as they exchange values and write files together: nothing is pickled."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgpack
import numpy as np
from pydantic import BaseModel

from tidemill.common.files import StorageError, storage_errors

Thread = Literal["policy", "weights", "states"]
"""A rank's threads: the policy's own, and those that write weights and checkpoints beside it."""


class Peers(Protocol):
    rank: int
    size: int

    def gather(self, payload: bytes, thread: Thread = "policy") -> list[bytes]:
        """Every rank's bytes, on every rank; `thread` is the one that calls."""


class Alone:
    """Implements `Peers` where one rank trains."""

    rank = 0
    size = 1

    def gather(self, payload: bytes, thread: Thread = "policy") -> list[bytes]:
        return [payload]


def write_together(
    peers: Peers, thread: Thread, content: str, folder: Path, write: Callable[[], Any]
) -> list[Any]:
    """Have every rank write its part of `content`; returns what `write` gave on each. A call of all ranks.

    Returns and raises only when no rank writes any more: the folder is complete then, or to be given up.

    Raises:
        StorageError: the disk of a rank, which is named, did not take its part; on every rank.
    """
    try:
        with storage_errors(content, folder):
            receipt = [write()]
    except StorageError as error:
        # Not raised before all ranks have reported: others wait in `gather` for this rank's receipt.
        receipt = [error.errno, error.reason]
    receipts = [unpack(packed) for packed in peers.gather(pack(receipt), thread)]
    for rank, (first, *reason) in enumerate(receipts):
        if reason:
            where = f" (rank {rank})" if peers.size > 1 else ""
            raise StorageError(content, folder, first, f"{reason[0]}{where}")
    return [written for (written,) in receipts]


def pack(value: Any) -> bytes:
    """Numbers, text, paths, arrays, dataclasses, models and named tuples, and lists and maps of them, as
    msgpack."""
    packed: bytes = msgpack.packb(value, default=_encode, strict_types=True)
    return packed


def unpack(payload: bytes, *kinds: type) -> Any:
    """What was packed, lists as tuples; `kinds` are the classes that may be in it."""
    by_name = {kind.__name__: kind for kind in kinds}

    def decode(tree: dict[str, Any]) -> Any:
        if "dtype" in tree:
            return np.frombuffer(tree["data"], dtype=tree["dtype"]).reshape(tree["shape"])
        if "path" in tree:
            return Path(tree["path"])
        return by_name[tree.pop("kind")](**tree) if "kind" in tree else tree

    return msgpack.unpackb(payload, object_hook=decode, use_list=False)


def _encode(value: Any) -> Any:
    """A value of a type that msgpack lacks, in types that it has."""
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "shape": value.shape, "data": value.tobytes()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return {"path": str(value)}
    names = getattr(value, "_fields", ())
    if isinstance(value, BaseModel):
        names = type(value).model_fields
    if is_dataclass(value):
        names = [item.name for item in fields(value) if item.init]
    if names:
        return {"kind": type(value).__name__} | {name: getattr(value, name) for name in names}
    return list(value)
