"""By which files an engine gets from what it holds to a version."""

import os
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tidemill.common.errors import DamagedWeightsError, WeightsError
from tidemill.common.weights.bits import Bits, TensorInfo
from tidemill.common.weights.digest import Digest, digest_of, is_additive
from tidemill.common.wire.messages import WeightManifest
from tidemill.services.rollout.engines.checkpoint import patched_tensors, read_tensors

NUM_THREADS = min(8, len(os.sched_getaffinity(0)))
"""Tensors whose digests are computed at once. Where deltas change them, so many copies are in memory."""


class Versions(Protocol):
    """Where versions come from; blocking."""

    def manifest(self, version: int) -> WeightManifest | None:
        """Its manifest, or None."""

    def files(self, manifest: WeightManifest) -> list[Path]:
        """Its files, whole and checked."""


@dataclass(frozen=True, slots=True)
class Route:
    """A full version's files, or none, and the deltas since then, oldest first."""

    files: Sequence[Path]
    deltas: Sequence[Sequence[Path]]


def find_route(versions: Versions, wanted: WeightManifest, held: WeightManifest | None) -> Route:
    """From the weights of `held`, where the chain of `wanted` goes through them; else from its full version.

    Deltas are fetched and checked on the way, and what is returned leads to `wanted`: of a route from a full
    version that is proven here, of one from `held` the engine proves it.

    Raises:
        WeightsError: something of the chain is missing, torn, or of another history.
    """
    chain = [wanted]
    while (child := chain[0]).is_delta:
        if held is not None and (child.parent, child.parent_digest) == (held.version, held.digest):
            return Route((), [versions.files(each) for each in chain])
        chain.insert(0, _parent(versions, child, wanted))
    files = versions.files(chain[0])
    route = Route(files, [versions.files(each) for each in chain[1:]])
    if is_additive(wanted.digest):
        found = _digest_of(patched_tensors(read_tensors(files), route.deltas))
        if found != Digest.parse(wanted.digest):
            raise DamagedWeightsError(
                f"weights of version {wanted.version}: its files make {found}, the trainer committed "
                f"{wanted.digest}; they are of another history, or damaged before they were announced."
            )
    return route


def _digest_of(tensors: Iterable[tuple[TensorInfo, Bits]]) -> Digest:
    """Of several tensors at once: numpy computes without the interpreter's lock."""
    total, waiting = Digest(), deque[Future[Digest]]()
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for tensor in tensors:
            waiting.append(threads.submit(lambda each: digest_of([each]), tensor))
            if len(waiting) > NUM_THREADS:
                total += waiting.popleft().result()
    return sum((future.result() for future in waiting), total)


def _parent(versions: Versions, child: WeightManifest, wanted: WeightManifest) -> WeightManifest:
    parent = versions.manifest(child.parent)
    if parent is None or (parent.version, parent.digest) != (child.parent, child.parent_digest):
        found = "not there" if parent is None else f"of other weights ({parent.digest})"
        raise WeightsError(
            f"weights of version {wanted.version}: version {child.version} changes version {child.parent} "
            f"({child.parent_digest}), which is {found}."
        )
    return parent
