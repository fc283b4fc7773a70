"""Numbers of runs by step, column by column, from their metrics.jsonl: also of runs that are not open.

Guarantees: a file is read again only when it has changed, and only the columns that are asked for; a line
that a crash cut off is left out; of a step that was written twice, the last line stands.
"""

import contextlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json
from numpy.typing import NDArray

from tidemill.common.run.state import EVALUATION, METRICS_FILE, STEP, read_records
from tidemill.services.console.status.snapshot import StepPoint

Numbers = NDArray[np.float64]

EVALUATION_PREFIX = "eval/"
"""Names of an evaluation's numbers: `eval/<set>/<number>`, as loggers have them."""
STEP_FIELDS = frozenset({"step", "time", "kind"})
EVALUATION_FIELDS = frozenset({"version", "time", "kind", "set"})
NAMED_LINES = 24
"""Lines of a file, evenly spread, whose numbers have their names listed."""
MAX_KEPT_FILES = 64


@dataclass(frozen=True, slots=True)
class Series:
    """One number of a run: `x` are steps, or versions of an evaluation; `time` is in seconds."""

    x: Numbers
    y: Numbers
    time: Numbers

    @property
    def last(self) -> tuple[float, float, float] | None:
        """The newest `x`, `y` and `time`."""
        return (float(self.x[-1]), float(self.y[-1]), float(self.time[-1])) if len(self.x) else None


NO_SERIES = Series(np.empty(0), np.empty(0), np.empty(0))


@dataclass(slots=True)
class _File:
    signature: tuple[int, int] = (0, 0)
    names: list[str] | None = None
    series: dict[str, Series] = field(default_factory=dict)


class MetricFiles:
    """Reads and keeps columns of the files of many runs."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, _File] = OrderedDict()
        # The first conversion of a process imports pandas, where it is there: now, not while a visitor waits.
        pa.array([0.0]).to_numpy()

    def names(self, run_dir: Path) -> list[str]:
        """Names of everything that the file has numbers of, in order."""
        file = self._file(run_dir)
        if file.names is None:
            file.names = sorted(_names(_whole_lines(run_dir / METRICS_FILE)))
        return file.names

    def series(self, run_dir: Path, names: Sequence[str]) -> dict[str, Series]:
        """The named numbers; an empty series where the file has none."""
        file = self._file(run_dir)
        if missing := [name for name in names if name not in file.series]:
            file.series |= _read(run_dir / METRICS_FILE, missing)
        return {name: file.series[name] for name in names}

    def _file(self, run_dir: Path) -> _File:
        signature = (0, 0)
        with contextlib.suppress(OSError):
            stat = (run_dir / METRICS_FILE).stat()
            signature = (stat.st_mtime_ns, stat.st_size)
        file = self._files.pop(run_dir, None)
        if file is None or file.signature != signature:
            file = _File(signature)
        self._files[run_dir] = file
        while len(self._files) > MAX_KEPT_FILES:
            self._files.popitem(last=False)
        return file


def series_of_points(points: Iterable[StepPoint], names: Sequence[str]) -> dict[str, Series]:
    """The same, of a run that has no file here."""
    rows = sorted(points, key=lambda point: point.step)
    records = [{"kind": STEP, "step": p.step, "time": p.finished_at, **p.metrics} for p in rows]
    return _gather(_columns(records, names), names)


def _names(data: bytes) -> set[str]:
    found: set[str] = set()
    for start in _starts(data):
        with contextlib.suppress(ValueError):
            record = json.loads(data[start : data.find(b"\n", start)])
            if not isinstance(record, dict):
                continue
            is_step = record.get("kind") == STEP
            prefix = "" if is_step else f"{EVALUATION_PREFIX}{record.get('set', '')}/"
            others = STEP_FIELDS if is_step else EVALUATION_FIELDS
            found |= {
                prefix + name
                for name, value in record.items()
                if name not in others and isinstance(value, int | float) and not isinstance(value, bool)
            }
    return found


def _starts(data: bytes) -> set[int]:
    """Where some lines begin: evenly spread ones, the last one, and the last evaluations."""
    starts = {data.find(b"\n", len(data) * n // NAMED_LINES) + 1 for n in range(1, NAMED_LINES)}
    starts |= {0, data.rfind(b"\n", 0, -1) + 1}
    mark = b'{"kind": "%s"' % EVALUATION.encode()
    place = len(data)
    for _ in range(NAMED_LINES):
        if (place := data.rfind(mark, 0, max(0, place))) < 0:
            break
        starts.add(place)
    return starts


def _whole_lines(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError:
        return b""
    return data[: data.rfind(b"\n") + 1]


def _read(path: Path, names: Sequence[str]) -> dict[str, Series]:
    data = _whole_lines(path)
    if not data:
        return dict.fromkeys(names, NO_SERIES)
    texts = ("kind", "set")
    fields = dict.fromkeys((*texts, "step", "version", "time", *map(_field, names)))
    schema = pa.schema([(name, pa.string() if name in texts else pa.float64()) for name in fields])
    try:
        table = pyarrow.json.read_json(
            pa.BufferReader(data),
            parse_options=pyarrow.json.ParseOptions(schema, unexpected_field_behavior="ignore"),
        )
        columns = {name: table[name].to_numpy() for name in fields}
    except pa.ArrowException:  # a line that is no record, or text in place of a number: one by one, then
        columns = _columns(read_records(path), names)
    return _gather(columns, names)


def _columns(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    def number(value: Any) -> float:
        return float(value) if isinstance(value, int | float) else np.nan

    numbers = dict.fromkeys(("step", "version", "time", *map(_field, names)))
    columns: dict[str, Any] = {name: np.array([number(r.get(name)) for r in records]) for name in numbers}
    return columns | {name: np.array([r.get(name) for r in records], object) for name in ("kind", "set")}


def _field(name: str) -> str:
    """The record's field that holds a number."""
    return name.split("/", 2)[-1] if name.startswith(EVALUATION_PREFIX) else name


def _gather(columns: Mapping[str, Any], names: Sequence[str]) -> dict[str, Series]:
    times = columns["time"]
    began = np.nanmin(times) if np.isfinite(times).any() else 0.0
    is_step = columns["kind"] == STEP
    found = {}
    for name in names:
        y = columns[_field(name)].astype(np.float64)
        if name.startswith(EVALUATION_PREFIX):
            of_set = columns["set"] == name.split("/", 2)[1]
            mask, x = of_set & (columns["kind"] == EVALUATION), columns["version"]
        else:
            mask, x = is_step, columns["step"]
        mask = mask & np.isfinite(y) & np.isfinite(x)
        # The last of equal steps is the first of them from behind.
        _, places = np.unique(x[mask][::-1], return_index=True)
        found[name] = Series(*(column[mask][::-1][places] for column in (x, y, times - began)))
    return found
