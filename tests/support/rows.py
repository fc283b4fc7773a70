"""Rows of files, without a run around them."""

from collections.abc import Mapping
from typing import Any

from tidemill.common.config.data import DataConfig
from tidemill.common.data.dataset import Row, read_rows


def read_dataset(
    paths: Any, names: Mapping[str, str] | None = None, max_rows: int | None = None, needs_truth: bool = True
) -> list[Row]:
    """The rows of one file or several."""
    data = DataConfig.model_validate({"train": "unused", "columns": names or {}})
    if not needs_truth:
        data.without_truth()
    return list(read_rows(paths, data, max_rows))
