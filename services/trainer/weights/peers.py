"""The ranks that train one model, as they exchange values and write files together: nothing is pickled."""

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgpack
import numpy as np
from pydantic import BaseModel

from tidemill.common.errors import TidemillError, text_of
from tidemill.common.files import StorageError, storage_errors

Thread = Literal["policy", "weights", "states"]
"""A rank's threads: the policy's own, and those that write weights and checkpoints beside it."""


class Peers(Protocol):
    """The ranks, as one of them sees them."""

    rank: int
    """The number of this one, from 0."""
    size: int
    """How many there are."""

    def gather(self, payload: bytes, thread: Thread = "policy") -> list[bytes]:
        """Every rank's bytes, on every rank. `thread` is the one that calls: those of one name answer each
        other, so that the threads of a rank need no common order."""


class Alone:
    """Implements `Peers` where one rank trains."""

    rank = 0
    size = 1

    def gather(self, payload: bytes, thread: Thread = "policy") -> list[bytes]:
        return [payload]


class PeerError(TidemillError):
    """Another rank failed in what all do together."""


def write_together(
    peers: Peers, thread: Thread, content: str, folder: Path, write: Callable[[], Any]
) -> list[Any]:
    """Have every rank write its part of `content`; returns what `write` gave on each. A call of all ranks.

    Returns and raises only when no rank writes any more: the folder is complete then, or to be given up.

    Raises:
        StorageError: the disk of a rank, which is named, did not take its part; on every rank.
        PeerError: `write` raised anything else on another rank. That rank raises its own error.
    """
    written: Any = None
    failure: tuple[int | None, str] | None = None
    raised: Exception | None = None
    try:
        with storage_errors(content, folder):
            written = write()
    except StorageError as error:
        # Not raised before all ranks have reported: others wait in `gather` for this rank's receipt.
        failure = (error.errno, error.reason)
    except Exception as error:
        raised = error
    problem = f"{type(raised).__name__}: {text_of(raised)}" if raised is not None else ""
    receipts = [unpack(packed) for packed in peers.gather(pack((written, failure, problem)), thread)]
    if raised is not None:
        raise raised
    # Before what a disk did not take: that is written again, and this ends the trainer.
    for rank, (_, _, problem_of_rank) in enumerate(receipts):
        if problem_of_rank:
            raise PeerError(f"rank {rank} could not write {content}: {problem_of_rank}")
    for rank, (_, failure_of_rank, _) in enumerate(receipts):
        if failure_of_rank is not None:
            errno, reason = failure_of_rank
            where = f" (rank {rank})" if peers.size > 1 else ""
            raise StorageError(content, folder, errno, f"{reason}{where}")
    return [written_by_rank for written_by_rank, _, _ in receipts]


def pack(value: Any) -> bytes:
    """Numbers, text, paths, arrays, dataclasses, models and named tuples, and lists and maps of them, as
    msgpack."""
    packed: bytes = msgpack.packb(value, default=_encode, strict_types=True)
    return packed


def unpack(payload: bytes, *kinds: type) -> Any:
    """What was packed, lists as tuples; `kinds` are the classes that may be in it."""
    by_name = {kind.__name__: kind for kind in kinds}

    def decode(tree: dict[str, Any]) -> Any:
        """The inverse of `_encode`, for a map that it has made; other maps stay."""
        if ARRAY in tree:
            return np.frombuffer(tree["data"], dtype=tree[ARRAY]).reshape(tree["shape"])
        if PATH in tree:
            return Path(tree[PATH])
        if KIND in tree:
            return by_name[tree.pop(KIND)](**tree)
        return tree

    return msgpack.unpackb(payload, object_hook=decode, use_list=False)


# Keys that no field and no other map has.
ARRAY = "$array"
PATH = "$path"
KIND = "$kind"


def _encode(value: Any) -> Any:
    """A value of a type that msgpack lacks, in types that it has."""
    if isinstance(value, np.ndarray):
        return {ARRAY: str(value.dtype), "shape": value.shape, "data": value.tobytes()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return {PATH: str(value)}
    if isinstance(value, BaseModel):
        names: Iterable[str] = type(value).model_fields
    elif is_dataclass(value):
        names = [item.name for item in fields(value) if item.init]
    else:
        names = getattr(value, "_fields", ())  # of a named tuple
    if names:
        return {KIND: type(value).__name__} | {name: getattr(value, name) for name in names}
    return list(value)  # of a tuple, which `strict_types` sends here
