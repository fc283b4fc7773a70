"""What a checkpoint keeps of a policy, and how it gets there: tensors as safetensors and values as JSON, in
one file or one of each rank.

One rank alone writes `policy.safetensors`. Of several, each writes `policy-00000-of-00002.safetensors` with
its rows of every sharded tensor; where they belong is in the file's own metadata. Of most tensors, rank r of
n holds rows [r * c, (r + 1) * c) with c = ceil(rows / n), as FSDP2 does. Any number of ranks can read either.
"""

import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from tidemill.common.errors import ConfigError
from tidemill.services.trainer.weights.peers import Alone, Peers, write_together
from tidemill.services.trainer.weights.shadow import held_rows

PATTERN = "policy*.safetensors"


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a state a rank has.

    Example: rank 1 of 2 has the rows of `model.lm_head.weight` from 4,096 on: `first_rows`
    {"model.lm_head.weight": 4096}, and `file` is "policy-00001-of-00002.safetensors".
    """

    rank: int
    size: int
    first_rows: dict[str, int]
    """First row of each tensor of which it has only some rows."""

    @property
    def file(self) -> str:
        return f"policy-{self.rank:05}-of-{self.size:05}.safetensors"

    @property
    def metadata(self) -> dict[str, str]:
        return {"first_rows": json.dumps(self.first_rows, sort_keys=True)}


class _Piece(NamedTuple):
    first: int
    """Its first row in the whole tensor."""
    file: Any
    shape: tuple[int, ...]


class ShardReader:
    """A state in a folder. Raises ConfigError: the folder holds none that is readable."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pieces: dict[str, list[_Piece]] = {}
        with _naming_folder(folder):
            for path in sorted(folder.glob(PATTERN)):
                # Not mapped: pages of a mapping would count as this process's memory.
                file: Any = safe_open(path, "pt", backend="pread")
                first_rows = json.loads((file.metadata() or {}).get("first_rows", "{}"))
                for name in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                    piece = _Piece(first_rows.get(name, 0), file, tuple(file.get_slice(name).get_shape()))
                    self._pieces.setdefault(name, []).append(piece)
        if not self._pieces:
            raise ConfigError(_NO_STATE.format(folder, "no file of tensors"))
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece.first)

    @property
    def values(self) -> dict[str, Any]:
        """`PolicyState.values`. Raises ConfigError: the folder holds none that are readable."""
        try:
            values: dict[str, Any] = json.loads((self._folder / VALUES_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(_NO_STATE.format(self._folder, error)) from error
        return values

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all whole tensors, by name."""
        lasts = {name: pieces[-1] for name, pieces in sorted(self._pieces.items())}
        return {
            name: (last.first + last.shape[0], *last.shape[1:]) if last.shape else ()
            for name, last in lasts.items()
        }

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) of a tensor, or all of it; in this process's memory."""
        parts: list[Tensor] = []
        with _naming_folder(self._folder):
            for first, file, shape in self._pieces[name]:
                if not shape:
                    scalar: Tensor = file.get_tensor(name)
                    return scalar
                end = first + shape[0]
                low = min(max(start, first), end)
                high = max(low, end if stop is None else min(stop, end))
                if low < high:
                    parts.append(file.get_slice(name)[low - first : high - first])
            if not parts:  # safetensors refuses a slice of no rows at a tensor's end
                nothing: Tensor = file.get_slice(name)[:0] if shape[0] else file.get_tensor(name)
                return nothing
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def fill(tensor: Tensor, source: ShardReader, name: str) -> Tensor:
    """Read this process's part of a tensor (all, or its rows) from a state into it; returns the tensor."""
    if isinstance(tensor, DTensor):
        tensor.to_local().copy_(source.read(name, *held_rows(tensor)))
    else:
        tensor.copy_(source.read(name))
    return tensor


TENSORS_FILE = "policy.safetensors"
VALUES_FILE = "policy.json"

_NO_STATE = "{} holds no state of a policy: {}; resume from another checkpoint"


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What a checkpoint keeps of a policy. No pickle: `tensors` as safetensors, `values` as JSON. Tensors
    share memory with the policy: write them before the next update.

    Example: `tensors` "model.lm_head.weight", its moments and "rng.cpu", `values` {"policy": "transformers",
    "updates": 12}.
    """

    tensors: dict[str, Tensor]
    values: dict[str, Any] = field(default_factory=dict)
    shard: Shard | None = None
    """None for a whole state."""

    def write(self, folder: Path) -> None:
        """Write tensors and values, where there are any; the same state gives the same bytes. Tensors are on
        the disk when this returns."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.tensors:
            path = folder / (self.shard.file if self.shard else TENSORS_FILE)
            tensors = {name: tensor.detach().contiguous() for name, tensor in self.tensors.items()}
            save_file(tensors, path, metadata=self.shard.metadata if self.shard else None)
            # Not left to rank 0, which publishes the folder: it may be on another machine.
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        if self.values:
            (folder / VALUES_FILE).write_text(
                json.dumps(self.values, sort_keys=True) + "\n", encoding="utf-8"
            )


@contextmanager
def _naming_folder(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConfigError(_NO_STATE.format(folder, error)) from error


WHAT = "the policy's state"


class SavesState:
    """The part of a policy that writes its state, beside training. Where several ranks train, all make each
    call.

    Training waits for a copy in host memory alone. Each rank copies and writes its own shard; nothing is
    gathered. The copy stays until the next one: a write that failed can be tried again, whatever the policy
    has become since. The buffers stay too (12 bytes for each parameter of the shard that is trained,
    page-locked where the policy is on a GPU): making them takes several times as long as filling them.
    """

    peers: Peers = Alone()
    """The ranks that train this model."""
    _staged: PolicyState | None = None
    _saving: Future[None] | None = None

    def state(self) -> PolicyState:
        # Abstract: each policy says what its state is.
        raise NotImplementedError

    def own_state(self) -> PolicyState:
        return self.state()

    @cached_property
    def _saver(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    @cached_property
    def _stager(self) -> DefaultStager:
        is_cuda = any(tensor.is_cuda for tensor in self.own_state().tensors.values())
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=is_cuda,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=is_cuda,
            )
        )

    def stage_state(self) -> None:
        """Copy the state to host memory, after the one before is written."""
        # The buffers are filled in place, and the write before reads them.
        self.finish_saving()
        self._staged = None  # frees its buffers where the stager makes others, because tensors have moved
        state = self.own_state()
        tensors = self._stager.stage(state.tensors)
        assert isinstance(tensors, dict), "not a future: staged here and now"
        self._staged = replace(state, tensors=tensors)

    def begin_saving(self, folder: Path) -> Future[None]:
        assert self._staged is not None, "`stage_state` comes first"
        self._saving = self._saver.submit(self._save, self._staged, folder)
        return self._saving

    def finish_saving(self) -> None:
        if self._saving is not None:
            wait([self._saving])

    def _save(self, state: PolicyState, folder: Path) -> None:
        write_together(self.peers, "states", WHAT, folder, partial(state.write, folder))
