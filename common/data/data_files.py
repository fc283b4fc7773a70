"""Reads rows from files, datasets of the Hugging Face hub, and Python code.

JSON is read here, Parquet and datasets of the hub by `arrow_tables.py`, CSV by `text_tables.py`, and Python
code by `users_rows.py`.

Each row comes with its origin (such as file and line), for messages. JSONL, datasets of the hub
(`hub:OWNER/NAME`, optionally with `/CONFIG` and `@SPLIT`, split `train` otherwise) and folders of
`save_to_disk` (with `@SPLIT`) can be read in any order, and their rows are not held in memory, only 16 bytes
for each line of a JSONL file. `my_env.py:MyEnv.rows` names a list of rows, or a function that returns them,
so that an environment may own its data.
"""

import glob
import json
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tidemill.common.data.row_file import Located, RowFile, in_words, parse_json
from tidemill.common.errors import ConfigError
from tidemill.common.files import did_you_mean

JSONL = (".jsonl", ".ndjson", ".json")
TABLES = {".csv": ",", ".tsv": "\t"}
"""File suffix -> separator between values."""
PARQUET = (".parquet", ".pq")
EXPECTED = ".jsonl, .json, .csv, .tsv or .parquet"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Some Windows tools put one before the first line."""

HUB = "hub:"
SAVED = ("dataset_info.json", "dataset_dict.json")
"""One of these files is in a folder of `save_to_disk`: of one dataset, or of its splits."""
_USERS_ROWS = re.compile(r"\.py:[A-Za-z_][\w.]*$")


class JsonlFile(RowFile):
    """The lines of a JSONL file that are not empty, with an index of their offsets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begins = array("q")
        self._numbers = array("q")
        self._file = open(path, "rb")  # noqa: SIM115 (for as long as the run reads prompts)
        begin = 0
        for number, line in enumerate(self._file, 1):
            if line.removeprefix(BYTE_ORDER_MARK).strip():
                self._begins.append(begin)
                self._numbers.append(number)
            begin += len(line)
        self._written = self._when_written()

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: int) -> Located:
        """One line. Raises ConfigError: it is no JSON object, or the file was written since, so that lines
        moved."""
        if self._when_written() != self._written:
            raise ConfigError(f"dataset {self.path} was changed while the run reads it; start the run again.")
        self._file.seek(self._begins[index])
        line = self._file.readline()
        number = self._numbers[index]
        origin = f"{self.path} line {number}"
        return origin, _parse_line(line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line, origin)

    def _when_written(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_mtime_ns, status.st_size


def files_of(paths: str | Path | Sequence[str | Path]) -> list[str]:
    """One path or several as a list, with patterns such as `data/*.parquet` expanded, sorted by name.

    Raises:
        ConfigError: there is no path, or a pattern matches no file.
    """
    patterns = [paths] if isinstance(paths, str | Path) else list(paths)
    if not patterns:
        raise ConfigError("a dataset needs at least one file; got an empty list.")
    files: list[str] = []
    for path in map(str, patterns):
        if not glob.has_magic(path) or Path(path).exists() or is_hub_dataset(path):
            files.append(path)
            continue
        kinds = (*JSONL, *TABLES, *PARQUET)
        matches = sorted(file for file in glob.glob(path, recursive=True) if file.lower().endswith(kinds))
        if not matches:
            raise ConfigError(
                f"dataset {path}: no file has such a name and ends in {EXPECTED}. Relative paths in a config "
                "start at the config's folder."
            )
        files += matches
    return files


def open_rows(path: str, is_streamed: bool) -> Iterable[Located]:
    """The rows of one file; a `RowFile` where `is_streamed`.

    Raises:
        ConfigError: it is missing, damaged, of an unknown kind, or cannot be streamed.
        OSError: it cannot be read.
    """
    if is_hub_dataset(path):
        from tidemill.common.data.arrow_tables import open_hub_dataset, open_saved

        return open_hub_dataset(path) if path.startswith(HUB) else open_saved(path, *split_of(path))
    if _USERS_ROWS.search(path):
        from tidemill.common.data.users_rows import read_users_rows

        rows = read_users_rows(path)
    else:
        file = Path(path)
        suffix = _suffix_of(file)
        if suffix in JSONL and not (suffix == ".json" and _is_document(file)):
            return JsonlFile(file)
        if suffix in TABLES:
            from tidemill.common.data.text_tables import read_table

            rows = read_table(file, TABLES[suffix])
        elif suffix in PARQUET:
            from tidemill.common.data.arrow_tables import open_parquet

            return open_parquet(file, is_streamed)
        else:
            rows = _read_document(file)
    if is_streamed:
        raise ConfigError(
            f"dataset {path} cannot be read row by row, as data.stream wants it; make it .jsonl or .parquet."
        )
    return rows


def folder_of(path: str) -> Path:
    """The folder that paths in the rows of this file are relative to."""
    if path.startswith(HUB):
        return Path()
    file_or_folder = Path(split_of(path)[0])
    return file_or_folder if file_or_folder.is_dir() else file_or_folder.parent


def split_of(path: str) -> tuple[str, str]:
    """`folder@test` as folder and split; the split is empty where the path names none."""
    folder, at, split = path.rpartition("@")
    return (folder, split) if at and Path(folder).is_dir() else (path, "")


def is_hub_dataset(path: str) -> bool:
    """Whether the package `datasets` has to open this path."""
    folder = Path(split_of(path)[0])
    return path.startswith(HUB) or any((folder / name).is_file() for name in SAVED)


def _suffix_of(file: Path) -> str:
    if file.is_dir():
        raise ConfigError(f"dataset {file} is a folder; name the files in it, such as {file}/*.parquet.")
    if not file.exists():
        raise ConfigError(
            f"dataset {file} does not exist.{did_you_mean(file)} "
            "Relative paths in a config start at the config's folder."
        )
    suffix = file.suffix.lower()
    if suffix not in (*JSONL, *TABLES, *PARQUET):
        raise ConfigError(f"dataset {file} ends in {suffix or 'nothing'}; expected {EXPECTED}.")
    return suffix


def _is_document(file: Path) -> bool:
    """Whether a file is one JSON list. No line of a JSONL dataset begins like that: each is an object."""
    with open(file, "rb") as content:
        return content.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"["


def _parse_line(line: bytes, origin: str) -> dict[str, Any]:
    try:
        columns = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{origin} is not UTF-8 text (byte {error.start + 1} of the line).") from None
    except RecursionError:
        raise ConfigError(f"{origin} is nested too deep to be read.") from None
    except json.JSONDecodeError as error:
        where = f"{error.msg} at column {error.colno}"
        hint = " The file looks like one JSON document." if line.strip() in (b"[", b"{") else ""
        raise ConfigError(
            f"{origin} is not valid JSON: {where}.{hint} Expected one JSON object on each line."
        ) from None
    except ValueError as error:
        raise ConfigError(f"{origin} cannot be read: {error}.") from None
    if not isinstance(columns, dict):
        raise ConfigError(
            f"{origin} holds {in_words(columns)}; expected a JSON object with columns, one on each line."
        )
    return columns


def _read_document(file: Path) -> Iterator[Located]:
    try:
        rows = parse_json(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"dataset {file} is not valid JSON: {error}.") from None
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ConfigError(f"{file} row {number} is no JSON object; expected a list of objects.")
        yield f"{file} row {number}", row
