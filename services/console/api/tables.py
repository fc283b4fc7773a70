"""Records as objects, as plain rows, and as tables of Arrow and pandas."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from tidemill.common.errors import ConfigError

if TYPE_CHECKING:
    import pandas
    import pyarrow

T = TypeVar("T")
Row = Mapping[str, Any]


class Records(Sequence[T], Generic[T]):
    """A list of records, each of which is also a row of a table."""

    def __init__(self, records: Iterable[T], as_row: Callable[[T], Row]) -> None:
        self._records, self._as_row = list(records), as_row

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, key: int) -> T: ...
    @overload
    def __getitem__(self, key: slice) -> "Records[T]": ...
    def __getitem__(self, key: int | slice) -> "T | Records[T]":
        """One record, or some of them."""
        return Records(self._records[key], self._as_row) if isinstance(key, slice) else self._records[key]

    def __repr__(self) -> str:
        kind = type(self._records[0]).__name__ if self._records else "nothing"
        return f"<{len(self)} records of {kind}; to_pandas(), to_arrow(), rows()>"

    def rows(self) -> list[dict[str, Any]]:
        """Every record as plain values by name."""
        return [dict(self._as_row(record)) for record in self._records]

    def to_arrow(self) -> "pyarrow.Table":
        """A table of Arrow; values that are of several kinds in one column become JSON texts."""
        import pyarrow

        rows = self.rows()
        names = list(dict.fromkeys(name for row in rows for name in row))
        return pyarrow.table({name: _column([row.get(name) for row in rows]) for name in names})

    def to_pandas(self) -> "pandas.DataFrame":
        """A data frame.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise ConfigError(
                "to_pandas() needs pandas, which is not installed here: pip install 'tidemill[pandas]'. "
                "to_arrow() and rows() do without"
            ) from None
        return pandas.DataFrame(self.rows())


def _column(values: list[Any]) -> Any:
    import pyarrow

    try:
        return pyarrow.array(values)
    except pyarrow.ArrowException:
        return pyarrow.array([None if value is None else json.dumps(value, default=str) for value in values])
