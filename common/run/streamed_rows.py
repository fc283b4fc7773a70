"""Rows that stay on the disk: each is read and parsed when it is asked for.

In memory are 16 bytes for each line of a JSONL file; Parquet and what `datasets` opens are memory-mapped.
"""

import os
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, overload

from tidemill.common.errors import ConfigError
from tidemill.common.run.data_files import BYTE_ORDER_MARK
from tidemill.common.run.dataset import Row, jsonl_columns
from tidemill.common.run.hub_datasets import Table


class RowFile(Protocol):
    """A file whose rows can be read in any order."""

    def __len__(self) -> int:
        """Its rows."""

    def columns(self, place: int) -> tuple[str, dict[str, Any]]:
        """Where a row stands, for people, and its columns."""


class JsonlFile:
    """Lines that are not empty, found by where they begin. Raises ConfigError: the file cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begins, self._numbers = array("q"), array("q")
        try:
            self._file = open(path, "rb")  # noqa: SIM115 (for as long as the run reads prompts)
            begin = 0
            for number, line in enumerate(self._file, 1):
                if line.removeprefix(BYTE_ORDER_MARK).strip():
                    self._begins.append(begin)
                    self._numbers.append(number)
                begin += len(line)
        except OSError as error:
            raise ConfigError(f"cannot read dataset {path}: {error.strerror or error}.") from None
        self._written = self._when_written()

    def __len__(self) -> int:
        return len(self._begins)

    def columns(self, place: int) -> tuple[str, dict[str, Any]]:
        """One line, read now. Raises ConfigError: the file was written since, so that lines moved."""
        if self._when_written() != self._written:
            raise ConfigError(f"dataset {self.path} was changed while the run reads it; start the run again.")
        self._file.seek(self._begins[place])
        return jsonl_columns(self.path, self._numbers[place], self._file.readline())

    def _when_written(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_mtime_ns, found.st_size


class TableFile:
    def __init__(self, path: str, table: Table) -> None:
        self.path, self._table = path, table

    def __len__(self) -> int:
        return len(self._table)

    def columns(self, place: int) -> tuple[str, dict[str, Any]]:
        return f"{self.path} row {place}", dict(self._table[place])


class StreamedRows(Sequence[Row]):
    """The rows of several files, one after another, at most the first `max_rows`. `parse` makes a row of
    columns, number and origin."""

    def __init__(
        self,
        files: Sequence[RowFile],
        parse: Callable[[dict[str, Any], int, str], Row],
        max_rows: int | None = None,
    ) -> None:
        self._files, self._parse = files, parse
        count = sum(len(file) for file in files)
        self._count = count if max_rows is None else min(count, max_rows)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, key: int) -> Row: ...
    @overload
    def __getitem__(self, key: slice) -> list[Row]: ...
    def __getitem__(self, key: int | slice) -> Row | list[Row]:
        if isinstance(key, slice):
            return [self[number] for number in range(*key.indices(self._count))]
        if not 0 <= key < self._count:
            raise IndexError(key)
        place = key
        for file in self._files:
            if place < len(file):
                origin, columns = file.columns(place)
                return self._parse(columns, key, origin)
            place -= len(file)
        raise AssertionError("the files have as many rows as are counted")
