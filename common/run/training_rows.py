"""The rows of a run: of each training source, and of each evaluation set."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tidemill.common.errors import ConfigError
from tidemill.common.run.data_files import JSONL, TABLES, files_of, is_document, suffix_of
from tidemill.common.run.dataset import Row, parse_row, read_dataset
from tidemill.common.run.hub_datasets import is_hub_dataset, open_hub_dataset, open_parquet
from tidemill.common.run.streamed_rows import JsonlFile, RowFile, StreamedRows, TableFile
from tidemill.common.run.users_rows import is_users_rows

if TYPE_CHECKING:
    from pathlib import Path

    from tidemill.common.config.data import DataConfig, SourceConfig


def read_training_rows(data: "DataConfig") -> dict[str, Sequence[Row]]:
    """The rows of each source by its name; of the files that `train` names, under the empty name.

    Raises:
        ConfigError: as `read_dataset`.
    """
    if data.sources:
        return {source.name: _read_source(data, source) for source in data.sources}
    if data.stream:
        return {"": _streamed(data.train_files, partial(_parse, data, None), data.max_rows)}
    return {"": _read(data.train_files, data, data.max_rows)}


def read_evaluation_rows(data: "DataConfig", max_rows: int | None = None) -> dict[str, list[Row]]:
    """The rows of each evaluation set by its name, at most the first `max_rows` of each. Where training has
    sources, rows tell which set they are of. Raises ConfigError: as `read_dataset`."""
    sets = {name: _read(path, data, max_rows) for name, path in data.eval.items()}
    if not data.sources:
        return sets
    return {name: [replace(row, source=name) for row in rows] for name, rows in sets.items()}


def _read_source(data: "DataConfig", source: "SourceConfig") -> Sequence[Row]:
    own = data.of_source(source)
    if data.stream:
        return _streamed(source.path, partial(_parse, own, source), data.max_rows)
    return [_of_source(row, source) for row in _read(source.path, own, data.max_rows)]


def _read(paths: str | list[str], data: "DataConfig", max_rows: int | None) -> list[Row]:
    return read_dataset(paths, max_rows, data.columns, data.needs_truth)


def _parse(
    data: "DataConfig", source: "SourceConfig | None", columns: dict[str, Any], number: int, origin: str
) -> Row:
    row = parse_row(columns, number, origin, data.columns, data.needs_truth)
    return row if source is None else _of_source(row, source)


def _of_source(row: Row, source: "SourceConfig") -> Row:
    name = row.data_source or source.data_source or source.name
    chosen = {"environment": source.environment} if source.environment else {}
    return replace(row, source=source.name, data_source=name, extra=chosen | row.extra)


def _streamed(paths: str | list[str], parse: Any, max_rows: int | None) -> StreamedRows:
    files = [_open(file) for file in files_of(paths)]
    for file, path in zip(files, files_of(paths), strict=True):
        if not len(file):
            raise ConfigError(f"dataset {path} has no rows; give a file with at least one.")
    return StreamedRows(files, parse, max_rows)


def _open(file: "Path") -> RowFile:
    if is_hub_dataset(str(file)):
        return TableFile(str(file), open_hub_dataset(str(file)))
    if is_users_rows(str(file)):
        raise ConfigError(f"dataset {file} is Python code, which data.stream cannot read row by row.")
    suffix = suffix_of(file)
    if suffix in TABLES or is_document(file):
        raise ConfigError(
            f"dataset {file} cannot be read row by row, as data.stream wants it; make it .jsonl or .parquet."
        )
    if suffix in JSONL:
        return JsonlFile(file)
    return TableFile(str(file), open_parquet(str(file)))
