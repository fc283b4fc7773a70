"""Rows of CSV and TSV files."""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

from tidemill.common.data.row_file import Located, check_column_names
from tidemill.common.errors import ConfigError


def read_table(file: Path, separator: str) -> Iterator[Located]:
    """The rows of a CSV or TSV file, with their lines; all columns are text, and empty values become None."""
    csv.field_size_limit(sys.maxsize)  # a value may be a whole document
    with open(file, encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, delimiter=separator, strict=True)
        origin = f"{file} line 1"
        while True:
            try:
                if rows.fieldnames is not None:  # the first line is read now, if it was not
                    check_column_names(rows.fieldnames)
                    origin = f"{file} line {rows.line_num + 1}"
                row = next(rows, None)
            except UnicodeDecodeError as error:
                raise ConfigError(f"{file} is not UTF-8 text: {error.reason}.") from None
            except csv.Error as error:
                raise ConfigError(f"{origin} is not valid CSV: {error}.") from None
            except ValueError as error:
                raise ConfigError(f"{file} line 1: {error}.") from None
            if row is None:
                return
            if None in row:
                raise ConfigError(f"{origin} has more values than the first line has names.")
            if None in row.values():  # an empty value is text
                raise ConfigError(
                    f"{origin} has fewer values than the first line has names; write a separator for each "
                    "value that is empty."
                )
            yield origin, {name: value or None for name, value in row.items()}
