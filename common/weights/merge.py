"""Several deltas as one: of every element the value that was written last."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from tidemill.common.errors import WeightsError
from tidemill.common.weights.bits import TensorInfo
from tidemill.common.weights.delta import WINDOW, DeltaReader, Patch, Record


def merge(deltas: Sequence[Sequence[Path]]) -> Iterator[Patch]:
    """Patches by tensor name and window; the files of each delta, oldest delta first.

    One window is in memory at a time, and where every record lies.

    Raises:
        WeightsError: a file is damaged, or two deltas disagree about a tensor's shape or dtype.
    """
    windows: dict[tuple[str, int], list[tuple[DeltaReader, Record]]] = defaultdict(list)
    infos: dict[str, TensorInfo] = {}
    with ExitStack() as stack:
        for path in [path for paths in deltas for path in paths]:
            reader = stack.enter_context(DeltaReader(path))
            for record in reader.records(check=False):
                known = infos.setdefault(record.info.name, record.info)
                if known != record.info:
                    raise WeightsError(f"{path}: {record.info} was {known} in an earlier delta.")
                windows[record.info.name, record.window].append((reader, record))
        for key in sorted(windows):
            yield _merged([reader.read(record) for reader, record in windows[key]])


def _merged(patches: Sequence[Patch]) -> Patch:
    if len(patches) == 1:
        return patches[0]
    info, first = patches[0].info, patches[0].window * WINDOW
    length = min(WINDOW, info.num_elements - first)
    values, is_written = np.empty(length, info.bits_dtype), np.zeros(length, np.bool_)
    for patch in patches:
        place = (
            slice(patch.start - first, patch.start - first + len(patch.values))
            if patch.positions is None
            else patch.positions - first
        )
        values[place], is_written[place] = patch.values, True
    found = np.flatnonzero(is_written)
    if len(found) == found[-1] - found[0] + 1:
        return Patch(info, first + int(found[0]), values[found])
    return Patch(info, first + int(found[0]), values[found], found + first)
