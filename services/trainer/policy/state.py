"""What a checkpoint keeps of a policy: tensors as safetensors and values as JSON, in one file or one of each
rank.

One rank alone writes `policy.safetensors`. Of several, each writes `policy-00000-of-00002.safetensors` with
its rows of every sharded tensor; where they belong is in the file's own metadata. Rank r of n holds rows
[r * c, (r + 1) * c) with c = ceil(rows / n), as FSDP2 does. Any number of ranks can read either again.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tidemill.common.errors import ConfigError

PATTERN = "policy*.safetensors"


def rows_of(num_rows: int, rank: int, size: int) -> tuple[int, int]:
    """First row and end of a rank's share. 5 rows over 2 ranks are (0, 3) and (3, 5)."""
    count = -(-num_rows // size)
    return min(num_rows, rank * count), min(num_rows, (rank + 1) * count)


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a state a rank has."""

    rank: int
    size: int
    num_rows: dict[str, int]
    """Of the tensors of which it has its rows alone."""

    @property
    def file(self) -> str:
        """Its name."""
        return f"policy-{self.rank:05}-of-{self.size:05}.safetensors"

    @property
    def metadata(self) -> dict[str, str]:
        """First row of each of those tensors."""
        first = {name: rows_of(count, self.rank, self.size)[0] for name, count in self.num_rows.items()}
        return {"first_rows": json.dumps(first, sort_keys=True)}


class ShardReader:
    """Reads rows of tensors out of a state's files. Raises ConfigError: the folder holds no state."""

    def __init__(self, folder: Path) -> None:
        self._pieces: dict[str, list[tuple[int, Path]]] = {}
        for path in sorted(folder.glob(PATTERN)):
            with safe_open(path, "pt") as file:
                first_rows = json.loads((file.metadata() or {}).get("first_rows", "{}"))
                for name in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                    self._pieces.setdefault(name, []).append((first_rows.get(name, 0), path))
        if not self._pieces:
            raise ConfigError(f"{folder} holds no state of a policy; resume from another checkpoint")

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return sorted(self._pieces)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) of a tensor, or all of it."""
        parts: list[Tensor] = []
        for first, path in sorted(set(self._pieces[name])):
            with safe_open(path, "pt") as file:
                piece = file.get_slice(name)
                if not piece.get_shape():
                    scalar: Tensor = file.get_tensor(name)
                    return scalar
                end = first + piece.get_shape()[0]
                low = min(max(start, first), end)
                high = max(low, end if stop is None else min(stop, end))
                parts.append(piece[low - first : high - first])
        return torch.cat(parts)


TENSORS_FILE = "policy.safetensors"
VALUES_FILE = "policy.json"

_NO_STATE = "{} holds no state of a policy: {}; resume from another checkpoint"


@dataclass(frozen=True, slots=True)
class PolicyState:
    """All of a policy that a checkpoint keeps. No pickle: `tensors` as safetensors, `values` as JSON. Tensors
    share memory with the policy: write them before the next update."""

    tensors: dict[str, Tensor]
    values: dict[str, Any] = field(default_factory=dict)
    shard: Shard | None = None
    """None of a whole one."""

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with it, without it."""
        found = {name: tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): tensor for name, tensor in found.items()}

    def write(self, folder: Path) -> None:
        """Write tensors and values, where there are any; the same state gives the same bytes. Tensors are on
        the disk when this returns: rank 0, which publishes the folder, may be on another machine."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.tensors:
            path = folder / (self.shard.file if self.shard else TENSORS_FILE)
            tensors = {name: tensor.detach().contiguous() for name, tensor in self.tensors.items()}
            save_file(tensors, path, metadata=self.shard.metadata if self.shard else None)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        if self.values:
            (folder / VALUES_FILE).write_text(
                json.dumps(self.values, sort_keys=True) + "\n", encoding="utf-8"
            )

    @classmethod
    def read(cls, folder: Path) -> "PolicyState":
        """Read what `write` wrote, or what ranks wrote, each its shard. Raises ConfigError: the folder holds
        no readable state."""
        values = cls.read_values(folder)
        try:
            if (folder / TENSORS_FILE).exists():
                return cls(load_file(folder / TENSORS_FILE), values)
            reader = ShardReader(folder)
            return cls({name: reader.read(name) for name in reader.names}, values)
        except (OSError, SafetensorError) as error:
            raise ConfigError(_NO_STATE.format(folder, error)) from error

    @staticmethod
    def read_values(folder: Path) -> dict[str, Any]:
        """Read `policy.json` alone. Raises ConfigError: the folder holds none that is readable."""
        try:
            values: dict[str, Any] = json.loads((folder / VALUES_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(_NO_STATE.format(folder, error)) from error
        return values
