"""Reads rows from Parquet files, datasets of the Hugging Face hub, and folders of `save_to_disk`."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tidemill.common.data.arrow_values import Convert, convert, converter_of
from tidemill.common.data.row_file import Located, RowFile, check_column_names
from tidemill.common.errors import ConfigError
from tidemill.common.run.hub import told_while_waiting

_HUB_NAME = re.compile(r"hub:(?P<name>[^/@]+(?:/[^/@]+)?)(?:/(?P<config>[^/@]+))?(?:@(?P<split>.+))?")


class TableFile(RowFile):
    """A table that the package `datasets` has opened; `path` names it in messages."""

    def __init__(self, path: str, open_it: Callable[[Any], Any]) -> None:
        """`open_it` gets the package.

        Raises:
            ConfigError: the package is not installed, or it cannot open this.
        """
        try:
            import datasets
        except ImportError:
            raise ConfigError(
                f"dataset {path} needs the package datasets, which is not installed here: "
                "pip install 'tidemill[datasets]'"
            ) from None
        self.path = path
        try:
            # As Arrow's values: the package's own reading of JSON rounds numbers. And a folder of
            # `save_to_disk` may ask for tensors, or for some of its columns only.
            self._table = open_it(datasets).with_format("arrow")
            self._converters = _converters_of(self._table.data.schema)
        except Exception as error:  # the library raises its own, OSErrors, and those of several HTTP clients
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigError(f"dataset {path} cannot be opened: {lines[0]}") from None

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Located:
        origin = f"{self.path} row {index}"
        (columns,) = self._table[index].to_pylist()
        return origin, _convert_columns(self._converters, columns, origin)


def open_parquet(file: Path, is_streamed: bool) -> Iterable[Located]:
    """The rows of a file; a `RowFile` where `is_streamed`."""
    if not is_streamed:
        return _read_parquet(file)
    path = str(file)
    # Converted once, into the cache of datasets.
    return TableFile(path, lambda ds: ds.load_dataset("parquet", data_files=path, split="train"))


def open_saved(path: str, folder: str, split: str) -> TableFile:
    """A folder of `save_to_disk`."""
    return TableFile(path, lambda datasets: _saved(datasets, folder, split))


def open_hub_dataset(path: str) -> TableFile:
    """A dataset of the hub, downloaded unless it is cached."""
    match = _HUB_NAME.fullmatch(path)
    if match is None:
        raise ConfigError(
            f"dataset {path}: expected hub:OWNER/NAME, with /CONFIG and @SPLIT where they are wanted, such "
            "as hub:openai/gsm8k/main@train."
        )
    name = match["name"]
    config = match["config"]
    split = match["split"] or "train"

    def load(datasets: Any) -> Any:
        with told_while_waiting(path):
            return datasets.load_dataset(name, config, split=split)

    return TableFile(path, load)


def _saved(datasets: Any, folder: str, split: str) -> Any:
    dataset = datasets.load_from_disk(folder)
    if isinstance(dataset, datasets.DatasetDict):
        return dataset[split or "train"]
    if split:
        raise ValueError(f"it has no splits, so it has no {split!r}")
    return dataset


def _read_parquet(file: Path) -> Iterator[Located]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            converters = _converters_of(table.schema_arrow)
            number = 0
            for batch in table.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    origin = f"{file} row {number}"
                    yield origin, _convert_columns(converters, row, origin)
                    number += 1
    except pyarrow.ArrowException as error:
        raise ConfigError(f"dataset {file} is not a whole Parquet file: {error}") from None
    except ValueError as error:
        raise ConfigError(f"dataset {file} cannot be read: {error}.") from None


def _converters_of(schema: Any) -> dict[str, Convert | None]:
    """Column -> how its values become plain ones. Raises ValueError: two columns have one name."""
    check_column_names(schema.names)
    return {field.name: converter_of(field.type) for field in schema}


def _convert_columns(
    converters: Mapping[str, Convert | None], columns: Mapping[str, Any], origin: str
) -> dict[str, Any]:
    """The columns of a row as plain values. Raises ConfigError: one of them is damaged."""
    plain = {}
    for name, value in columns.items():
        try:
            plain[name] = convert(converters[name], value)
        except ValueError as error:
            raise ConfigError(f"{origin}: column {name!r} cannot be read: {error}.") from None
    return plain
