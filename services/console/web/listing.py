"""The list of runs: where each stands and its main numbers, from its folder and from the Redis that has it.

Guarantees: reading changes nothing; a folder is read again only when its files have changed, and of a long
file of numbers only its two ends. Where a Redis does not answer within `KNOWN_RUNS_S`, the folder decides.
"""

import asyncio
import contextlib
import functools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import yaml

from tidemill.common.errors import TidemillError
from tidemill.common.history import History
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.client import URL_VARIABLE
from tidemill.common.run.state import (
    CONFIG_FILE,
    EVALUATION,
    FAILED,
    FINISHED,
    METRICS_FILE,
    STARTING,
    STEP,
    STOPPED,
    known_runs,
    parse_record,
    read_state,
    run_exists,
)
from tidemill.common.streams import read_newest
from tidemill.common.wire.keys import RUN_ID, Keys
from tidemill.common.wire.messages import Commit
from tidemill.services.console.look.report import mean_score, read_report
from tidemill.services.console.run.end import LOST, RunEnd, read_end
from tidemill.services.console.run.folder import RunFolder, connected

UNEXPECTED = "ended"
"""All steps are done, and the run did not do what its config expects."""
OVER = (FINISHED, FAILED, STOPPED, LOST, UNEXPECTED)
MAX_LISTED_RUNS = 500
KNOWN_RUNS_S = 3.0
HEAD_BYTES = 64 << 10
TAIL_BYTES = 4 << 20
"""Bytes at the end of a file of numbers among which the last step and evaluation are looked for."""
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class RunNumbers:
    """The numbers of a line; None where nothing says them."""

    steps: int | None = None
    """Committed steps."""
    reward_first: float | None = None
    reward_last: float | None = None
    evaluation: float | None = None
    """Mean score of the newest evaluated version, over its datasets."""


NO_NUMBERS = RunNumbers()


@dataclass(frozen=True, slots=True)
class ListedRun:
    run_id: str
    status: str
    numbers: RunNumbers = NO_NUMBERS
    all_steps: int | None = None
    """Steps that the run is to do."""
    reason: str = ""
    """Why it ended as it did, in one line."""
    changed_at: float = 0.0
    end: RunEnd | None = None
    """How it stands by its folder; None where there is no folder of it here."""


def runs_in_folder(runs: Path) -> list[ListedRun]:
    """A line for each run of the folder, by what its files say."""
    try:
        # `latest` is a link to one of the others.
        names = [path.name for path in runs.iterdir() if not path.is_symlink()]
    except OSError:
        return []
    folders = [RunFolder(runs, name) for name in names if RUN_ID.fullmatch(name)]
    return [_line_of(folder) for folder in folders if (folder.path / CONFIG_FILE).is_file()]


def _line_of(folder: RunFolder) -> ListedRun:
    changed_at = 0.0
    for name in (METRICS_FILE, CONFIG_FILE):
        with contextlib.suppress(OSError):
            changed_at = max(changed_at, (folder.path / name).stat().st_mtime)
    numbers = _numbers_in(folder.path / METRICS_FILE)
    end = read_end(folder)
    report = current_report(folder, numbers.steps) or {}
    if report:
        numbers = RunNumbers(
            report.get("steps"),
            report.get("reward_first"),
            report.get("reward_last"),
            report.get("eval_after"),
        )
    return ListedRun(
        folder.run_id,
        status_of(end, report),
        numbers,
        _all_steps(folder.path / CONFIG_FILE),
        end_reason(end, report),
        changed_at,
        end,
    )


def status_of(end: RunEnd, report: Mapping[str, Any]) -> str:
    """How a run stands by its folder; `report` is its summary, empty where there is none."""
    return UNEXPECTED if end.status == FINISHED and report and not report.get("ok") else end.status


def has_own_redis(folder: RunFolder) -> bool:
    """Whether the run's own Redis may be up. A killed `tidemill up` leaves the address of a socket that its
    guard has removed."""
    return folder.address_file.exists() and may_have_redis(folder)


def may_have_redis(folder: RunFolder) -> bool:
    """Whether there is a Redis to ask for the run, its own or the environment's."""
    url = folder.address() or ""
    return bool(url) and (not url.startswith("unix://") or Path(url.removeprefix("unix://")).exists())


def current_report(folder: RunFolder, steps: int | None) -> dict[str, Any] | None:
    """The run's summary; None where there is none, or the run has done more steps since."""
    report = read_report(folder)
    is_old = report is not None and steps is not None and steps > (report.get("steps") or 0)
    return None if is_old else report


def end_reason(end: RunEnd, report: Mapping[str, Any]) -> str:
    """Why a run ended as it did, in one line; empty where nothing says so, and while it goes on."""
    if end.status == FINISHED:
        return "; ".join(map(str, report.get("failures") or ()))
    return end.error or end.reason


def _numbers_in(path: Path) -> RunNumbers:
    try:
        status = path.stat()
    except OSError:
        return NO_NUMBERS
    return _read_numbers(path, status.st_ino, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=2 * MAX_LISTED_RUNS)
def _read_numbers(path: Path, inode: int, changed_ns: int, size: int) -> RunNumbers:
    """Numbers of the first step, and of the last step and evaluation among the last `TAIL_BYTES`."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            file.seek(max(0, size - TAIL_BYTES))
            tail = file.read()
    except OSError:
        return NO_NUMBERS
    # Behind the last line break is a line that is being written.
    first = _first_step(head.split(b"\n")[:-1])
    last_lines = tail.split(b"\n")[:-1]
    last = _first_step(reversed(last_lines))
    # Most lines are long ones of steps, which need not be parsed.
    evaluations = [parse_record(line) for line in last_lines if EVALUATION.encode() in line[:200]]
    return RunNumbers(
        int(last["step"]) + 1 if last else None,
        finite(first.get("reward")),
        finite(last.get("reward")),
        newest_score([record for record in evaluations if record and record["kind"] == EVALUATION]),
    )


def _first_step(lines: Iterable[bytes]) -> dict[str, Any]:
    """The first of these lines that is a step's; empty where none is."""
    for line in lines:
        record = parse_record(line)
        if record is not None and record["kind"] == STEP and isinstance(record.get("step"), int):
            return record
    return {}


def newest_score(evaluations: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean score of the newest version that was evaluated; None without evaluations."""
    versions = [item["version"] for item in evaluations if isinstance(item.get("version"), int)]
    return finite(mean_score(evaluations, max(versions))) if versions else None


def finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _all_steps(path: Path) -> int | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return _read_all_steps(path, status.st_ino, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=2 * MAX_LISTED_RUNS)
def _read_all_steps(path: Path, inode: int, changed_ns: int, size: int) -> int | None:
    """`trainer.steps` of a config, whichever release wrote it."""
    try:
        loader = _Loader(path.read_bytes())
        try:
            return _steps_of(loader.get_single_data())
        finally:
            loader.dispose()
    except (OSError, ValueError, yaml.YAMLError):
        return None


def _steps_of(config: Any) -> int | None:
    trainer = config.get("trainer") if isinstance(config, dict) else None
    steps = trainer.get("steps") if isinstance(trainer, dict) else None
    return steps if isinstance(steps, int) else None


async def with_redis(runs: Path, lines: Sequence[ListedRun]) -> list[ListedRun]:
    """The lines with what each run's Redis says of it, and lines of runs that only Redis knows."""
    by_run = {line.run_id: line for line in lines}
    addresses = {line.run_id: _own_address(RunFolder(runs, line.run_id)) for line in lines}
    asked = [_ask(url, [by_run[run_id]]) for run_id, url in addresses.items() if url]
    shared = os.environ.get(URL_VARIABLE)
    if shared:
        asked.append(_ask(shared, [line for line in lines if not addresses[line.run_id]], lists_more=True))
    for answer in await asyncio.gather(*asked):
        by_run |= {line.run_id: line for line in answer}
    return list(by_run.values())


def _own_address(folder: RunFolder) -> str | None:
    return folder.address() if has_own_redis(folder) else None


async def _ask(url: str, lines: Sequence[ListedRun], *, lists_more: bool = False) -> list[ListedRun]:
    """These lines with what a Redis says of their runs, and with `lists_more` a line for every run that it
    knows; none where it does not answer soon."""
    by_run = {line.run_id: line for line in lines}
    try:
        async with asyncio.timeout(KNOWN_RUNS_S), connected(url) as broker:
            broker.is_stopping = True  # an outage ends the reading at once
            names = await runs_in_redis(broker) if lists_more else list(by_run)
            answers = (_line_in_redis(broker, name, by_run.get(name)) for name in names)
            answered = await asyncio.gather(*answers, return_exceptions=True)
    except (TidemillError, TimeoutError):
        return []
    # A user of Redis may see the names of runs whose keys it may not read.
    return [line for line in answered if isinstance(line, ListedRun)]


async def runs_in_redis(broker: Broker) -> list[str]:
    """The runs that a Redis has."""
    names = [run_id for run_id in await known_runs(broker) if RUN_ID.fullmatch(run_id)]
    # A trainer's user may name any run there, and has keys of its own run only.
    are_there = await asyncio.gather(*(run_exists(broker, Keys(name)) for name in names))
    return list(compress(names, are_there))


async def _line_in_redis(broker: Broker, run_id: str, of_folder: ListedRun | None) -> ListedRun:
    """A run's line with the status that Redis has, and with its numbers where the folder has none."""
    state = await read_state(broker, Keys(run_id))
    status = str(state.get("status", STARTING))
    if of_folder is not None and (of_folder.status == LOST or status in OVER):
        # Redis says `running` of a run whose launcher was killed; whether a finished run did what was
        # expected of it is in its summary.
        status = of_folder.status if of_folder.status in OVER else status
    line = of_folder or ListedRun(run_id, status)
    if line.numbers.steps is None:
        line = replace(line, **await _numbers_in_redis(broker, run_id, state))
    return replace(line, status=status, reason=line.reason if status in OVER else "")


async def _numbers_in_redis(broker: Broker, run_id: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a line, by the run's state and its first and last commit."""
    newest = await read_newest(broker, Keys(run_id).commits, Commit)
    last = newest.message if newest else None
    first = await History(run_id, None, broker).commit(0) if last else None
    numbers = RunNumbers(
        last.step + 1 if last else None,
        finite(first.metrics.get("reward")) if first else None,
        finite(last.metrics.get("reward")) if last else None,
        newest_score(state.get("evaluations") or ()),
    )
    fields: dict[str, Any] = {"numbers": numbers}
    config = await broker.execute("GET", Keys(run_id).config)
    if config:
        fields["all_steps"] = _steps_of(json.loads(config))
    return fields | ({"changed_at": last.finished_at} if last else {})


async def is_in_redis(run_id: str) -> bool:
    """Whether the environment's Redis has the run; it has not where it does not answer soon."""
    url = os.environ.get(URL_VARIABLE)
    if not url:
        return False
    try:
        async with asyncio.timeout(KNOWN_RUNS_S), connected(url) as broker:
            return run_id in await known_runs(broker) and await run_exists(broker, Keys(run_id))
    except (TidemillError, TimeoutError):
        return False
