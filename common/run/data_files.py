"""The files of a dataset: patterns, kinds by their names, and those that are read as a whole (CSV, JSON)."""

import csv
import glob
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tidemill.common.errors import ConfigError
from tidemill.common.run.hub_datasets import is_hub_dataset

JSONL = (".jsonl", ".ndjson", ".json")
TABLES = {".csv": ",", ".tsv": "\t"}
"""With what stands between two values."""
KINDS = (*JSONL, *TABLES, ".parquet", ".pq")
EXPECTED = ".jsonl, .json, .csv, .tsv or .parquet"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def files_of(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """One path or several as a list; the files of a pattern such as `data/*.parquet` by their names.

    Raises:
        ConfigError: there is none.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    if not given:
        raise ConfigError("a dataset needs at least one file; got an empty list.")
    files: list[Path] = []
    for path in map(str, given):
        if not glob.has_magic(path) or Path(path).exists() or is_hub_dataset(path):
            files.append(Path(path))
            continue
        found = sorted(file for file in glob.glob(path, recursive=True) if Path(file).suffix.lower() in KINDS)
        if not found:
            raise ConfigError(
                f"dataset {path}: no file has such a name and ends in {EXPECTED}. Relative paths in a config "
                "start at the config's folder."
            )
        files += map(Path, found)
    return files


def suffix_of(file: Path) -> str:
    """How the name of a data file ends. Raises ConfigError: there is no such file, or of no kind known."""
    if file.is_dir():
        raise ConfigError(f"dataset {file} is a folder; name the files in it, such as {file}/*.parquet.")
    if not file.exists():
        raise ConfigError(
            f"dataset {file} does not exist. Relative paths in a config start at the config's folder."
        )
    suffix = file.suffix.lower()
    if suffix not in KINDS:
        raise ConfigError(f"dataset {file} ends in {suffix or 'nothing'}; expected {EXPECTED}.")
    return suffix


def is_document(file: Path) -> bool:
    """Whether a file is one JSON list. No line of a JSONL dataset begins like that: each is an object."""
    if file.suffix.lower() != ".json":
        return False
    with open(file, "rb") as content:
        return content.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"["


def read_document(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each object of a JSON list stands, and its columns. Raises ConfigError: it is no such list."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"dataset {file} is not valid JSON: {error}.") from None
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ConfigError(f"{file} row {number} is no JSON object; expected a list of objects.")
        yield f"{file} row {number}", row


def read_table(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each row of a CSV file begins, and its columns, all of them text; an empty value is none.

    Raises:
        ConfigError: it is not UTF-8, or a row has more values than the first line has names.
    """
    csv.field_size_limit(sys.maxsize)  # a value may be a whole document
    with open(file, encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, delimiter=TABLES[file.suffix.lower()], strict=True)
        origin = f"{file} line 1"
        while True:
            try:
                if rows.fieldnames is not None:  # the first line is read now, if it was not
                    origin = f"{file} line {rows.line_num + 1}"
                row = next(rows, None)
            except UnicodeDecodeError as error:
                raise ConfigError(f"{file} is not UTF-8 text: {error.reason}.") from None
            except csv.Error as error:
                raise ConfigError(f"{origin} is not valid CSV: {error}.") from None
            if row is None:
                return
            if None in row:
                raise ConfigError(f"{origin} has more values than the first line has names.")
            yield origin, {name: value or None for name, value in row.items()}
