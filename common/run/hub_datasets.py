"""Datasets of the Hugging Face hub, and folders that `datasets` wrote, row by row.

`hub:OWNER/NAME`, with `/CONFIG` and `@SPLIT` where they are wanted (split `train` otherwise), or a folder of
`save_to_disk`, with `@SPLIT`. Rows are memory-mapped: any of them is read at once, and none is held.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tidemill.common.errors import ConfigError

HUB = "hub:"
SAVED = ("dataset_info.json", "dataset_dict.json")
"""One of these stands in a folder of `save_to_disk`: of one dataset, or of its splits."""

_NAME = re.compile(r"hub:(?P<name>[^/@]+(?:/[^/@]+)?)(?:/(?P<config>[^/@]+))?(?:@(?P<split>.+))?")


class Table(Protocol):
    """What is used of a `datasets.Dataset`."""

    def __len__(self) -> int:
        """Its rows."""

    def __getitem__(self, row: int) -> Any:
        """The columns of a row."""


def split_of(path: str) -> tuple[str, str]:
    """`folder@test` as folder and split; the split is empty where the path names none."""
    folder, at, split = path.rpartition("@")
    return (folder, split) if at and Path(folder).is_dir() else (path, "")


def is_hub_dataset(path: str) -> bool:
    """Whether `datasets` has to open this."""
    folder = Path(split_of(path)[0])
    return path.startswith(HUB) or any((folder / name).is_file() for name in SAVED)


def open_hub_dataset(path: str) -> Table:
    """Open a dataset of the hub, which is fetched where it is not cached, or a folder.

    Raises:
        ConfigError: the package is not installed, the name has another form, or it cannot be opened.
    """
    if not path.startswith(HUB):
        return _opened(path, lambda datasets: _saved(datasets, *split_of(path)))
    if (found := _NAME.fullmatch(path)) is None:
        raise ConfigError(
            f"dataset {path}: expected hub:OWNER/NAME, with /CONFIG and @SPLIT where they are wanted, such "
            "as hub:openai/gsm8k/main@train."
        )
    name, config, split = found["name"], found["config"], found["split"] or "train"
    return _opened(path, lambda datasets: datasets.load_dataset(name, config, split=split))


def open_parquet(path: str) -> Table:
    """A Parquet file as rows that can be read one by one; converted once, into the cache of `datasets`.
    Raises ConfigError: as `open_hub_dataset`."""
    return _opened(
        path, lambda datasets: datasets.load_dataset("parquet", data_files=str(path), split="train")
    )


def _saved(datasets: Any, folder: str, split: str) -> Table:
    found = datasets.load_from_disk(folder)
    if isinstance(found, datasets.DatasetDict):
        table: Table = found[split or "train"]
        return table
    if split:
        raise ValueError(f"it has no splits, so it has no {split!r}")
    return found  # type: ignore[no-any-return]


def _opened(path: str, open_it: Callable[[Any], Table]) -> Table:
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"dataset {path} needs the package datasets, which is not installed here: "
            "pip install 'tidemill[datasets]'"
        ) from None
    try:
        return open_it(datasets)
    except Exception as error:  # the library raises its own, OSErrors, and those of several HTTP clients
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"dataset {path} cannot be opened: {lines[0]}") from None
