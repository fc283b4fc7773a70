"""Sends a run's records to one tracker, each once, without ever holding up or stopping the run.

`logger-<name>.json` in the run's folder says what was sent and which run of the tracker it went to. A trainer
that resumes sends what metrics.jsonl has beyond that, and nothing twice. Of steps that are trained again, the
tracker keeps the first values, metrics.jsonl the last.
"""

import json
import os
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import structlog

from common.run.records import STEP, Record
from services.trainer.metrics.loggers.trackers import TrackedRun, Tracker

log = structlog.get_logger(__name__)

MAX_QUEUED = 10_000
"""Records that wait for a slow tracker; sending one frees its place. With more it is switched off."""
CLOSE_S = 20.0
"""How long the end of a run waits for what is not sent yet."""
FIELDS_OF_RECORD = frozenset(("kind", "step", "version", "time", "set"))


@dataclass(slots=True)
class Position:
    """What a tracker has."""

    next_step: int = 0
    evaluations: dict[str, int] = field(default_factory=dict)
    """Newest version sent, by dataset."""
    state: dict[str, str] = field(default_factory=dict)
    """The tracker's own."""

    def has(self, record: Record) -> bool:
        """Whether the record was sent."""
        if record["kind"] == STEP:
            return bool(record["step"] < self.next_step)
        return bool(record["version"] <= self.evaluations.get(record["set"], -1))

    def add(self, record: Record) -> None:
        """Note that it was sent."""
        if record["kind"] == STEP:
            self.next_step = record["step"] + 1
        else:
            self.evaluations[record["set"]] = record["version"]


class Sender:
    """One tracker with its thread. `send` never waits; `close` waits at most `CLOSE_S`."""

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[TrackedRun], Tracker],
        run: TrackedRun,
        records: Iterable[Record],
    ) -> None:
        """`records` are all that are on record; those that the tracker lacks are sent first."""
        self.name, self._open, self._run = name, open_tracker, run
        self._path = run.run_dir / f"logger-{name}.json"
        self._position = _read_position(self._path)
        run.state.update(self._position.state)
        self._backlog = [record for record in records if not self._position.has(record)]
        self._queue: queue.Queue[Record | None] = queue.Queue(MAX_QUEUED)
        self._is_off = False
        # A daemon: a tracker that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"logger-{name}", daemon=True)
        self._thread.start()

    def send(self, record: Record) -> None:
        """Queue a record."""
        if self._is_off:
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._switch_off("it is too slow, and too many records wait for it")

    def close(self) -> None:
        """Wait for what is queued, then leave."""
        if not self._is_off:
            self._queue.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("logger has not finished; metrics.jsonl has everything", logger=self.name)

    def _work(self) -> None:
        try:
            tracker = self._open(self._run)
            self._write_position()  # at once: a restart must find the tracker's run again
            for record in self._backlog:
                self._send_one(tracker, record)
            while not self._is_off and (next_record := self._queue.get()) is not None:
                self._send_one(tracker, next_record)
            tracker.close()
        except Exception as error:
            # The one broad except of the loggers: whatever a tracker's library raises, the run goes on.
            self._switch_off(f"{type(error).__name__}: {error}")

    def _send_one(self, tracker: Tracker, record: Record) -> None:
        if self._position.has(record):
            return
        is_step = record["kind"] == STEP
        prefix = "" if is_step else f"eval/{record['set']}/"
        numbers = {
            prefix + name: float(value)
            for name, value in record.items()
            if name not in FIELDS_OF_RECORD and isinstance(value, int | float)
        }
        tracker.log(numbers, record["step"] if is_step else record["version"])
        self._position.add(record)
        self._write_position()

    def _write_position(self) -> None:
        """Without fsync: after a crash of the machine a record may be sent again, which does no harm."""
        self._position.state = dict(self._run.state)
        aside = self._path.with_suffix(".tmp")
        aside.write_text(json.dumps(asdict(self._position)), encoding="utf-8")
        os.replace(aside, self._path)

    def _switch_off(self, reason: str) -> None:
        if not self._is_off:
            self._is_off = True
            log.warning(
                "logger is off until the trainer starts again, which sends what is missing; the run goes on",
                logger=self.name,
                reason=reason,
            )


def _read_position(path: Path) -> Position:
    try:
        tree = json.loads(path.read_bytes())
        return Position(int(tree["next_step"]), dict(tree["evaluations"]), dict(tree["state"]))
    except FileNotFoundError:
        return Position()
    except (OSError, ValueError, KeyError, TypeError):
        log.warning("what was sent to the logger is not known; sending all again", path=str(path))
        return Position()
