"""Rows that stay on disk (`data.stream`)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import overload

from tidemill.common.data.dataset import Row
from tidemill.common.data.row_file import Located, RowFile


class StreamedRows(Sequence[Row]):
    """Rows that are read from disk and parsed on access: at most the first `max_rows` of several files in
    order. `parse` makes a row from its columns and origin, its number, and the file's folder, which
    `folders` has for each file."""

    def __init__(
        self,
        files: Sequence[RowFile],
        folders: Sequence[Path],
        parse: Callable[[Located, int, Path], Row],
        max_rows: int | None = None,
    ) -> None:
        self._files = files
        self._folders = folders
        self._parse = parse
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
        index = key
        for file, folder in zip(self._files, self._folders, strict=True):
            if index < len(file):
                return self._parse(file[index], key, folder)
            index -= len(file)
        raise IndexError(key)
