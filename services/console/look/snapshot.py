"""The state of a run at one time, from its Redis, or from its folder alone where its Redis is gone."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tidemill.common.errors import BrokerError, ConfigError
from tidemill.common.history import StreamName
from tidemill.common.process.activity import LOAD
from tidemill.common.process.failures import Failure, added_up
from tidemill.common.process.heartbeats import BLOCKING, Heartbeat, read_heartbeats
from tidemill.common.redis.broker import Broker, MemoryUse
from tidemill.common.run.state import (
    EVALUATION,
    METRICS_FILE,
    STARTING,
    STEP,
    read_config,
    read_records,
    read_state,
)
from tidemill.common.run.weight_files import folder_versions
from tidemill.common.streams import OffsetReader, group_status, last_id, length, read_newest
from tidemill.common.streams.entries import Entry, entry_id_of, id_order
from tidemill.common.wire.keys import RQ_STATES, Keys
from tidemill.common.wire.messages import Commit, Lane, Ticket
from tidemill.services.console.look.bottleneck import (
    RATE_STEPS,
    ROLES,
    Bottleneck,
    find_bottleneck,
    gather_evidence,
)
from tidemill.services.console.look.series import NO_METRICS
from tidemill.services.console.run.end import RunEnd, parse_end, read_end
from tidemill.services.console.run.folder import RunFolder, nearest

JOB_QUEUE = "sandbox"
QUEUED = next(iter(RQ_STATES))
"""The state that RQ keeps in a list; the others are sorted sets."""
MAX_POINTS = 256
"""Steps kept for curves and rates. A reader that attaches to a long run reads only these."""
READ_COUNT = 64
SHOWN = (
    "run_id", "status", "at", "version", "steps", "max_staleness", "evaluations", "warnings",
    "config_warnings", "step_s", "eta_s", "tokens_per_s", "jobs",
)  # fmt: skip
"""Attributes that `as_dict` has unchanged."""


@dataclass(frozen=True, slots=True)
class StepPoint:
    """A committed step, without its samples.

    Example: `step` 3, `metrics` {"reward": 0.4, "loss": 0.02}, `groups` (12, 14), `num_dropped` 1.
    """

    step: int
    metrics: dict[str, float]
    finished_at: float = 0.0
    groups: tuple[int, ...] = ()
    num_dropped: int = 0

    @classmethod
    def of(cls, commit: Commit) -> "StepPoint":
        return cls(commit.step, dict(commit.metrics), commit.finished_at, commit.groups, len(commit.dropped))

    @property
    def record(self) -> dict[str, Any]:
        """The step as metrics.jsonl has it."""
        numbers = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        return {"kind": STEP, "step": self.step, "time": self.finished_at, **numbers}


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """A stream between two services: what waits to be taken, and what is held under a lease."""

    name: str
    length: int
    waiting: int | None
    held: int


@dataclass(slots=True)
class RunSnapshot:
    """A run at one moment, as its Redis or its folder has it.

    Example: `steps` 200, three `points` so far, `queues` with 4 tickets waiting and 12 held, the heartbeats
    of four `workers`: step 3 of 200 is under way, and `version` is 3.
    """

    run_id: str
    steps: int
    max_staleness: int
    at: float = field(default_factory=time.time)
    state: dict[str, Any] = field(default_factory=dict)
    points: list[StepPoint] = field(default_factory=list)
    queues: list[QueueDepth] = field(default_factory=list)
    workers: list[Heartbeat] = field(default_factory=list)
    num_dead: int = 0
    jobs: dict[str, dict[str, int]] = field(default_factory=dict)
    """Numbers of RQ's jobs by queue and state; only queues that hold any."""
    memory: MemoryUse = field(default_factory=lambda: MemoryUse(0, 0))
    """Memory of Redis; 0 of 0 where it was not read."""
    append_only_error: bool = False
    """Whether Redis cannot write its append-only file, and so refuses all writes."""
    config_warnings: list[str] = field(default_factory=list)
    """Settings that may spoil what the run learns, in words."""

    @property
    def version(self) -> int:
        return self.points[-1].step + 1 if self.points else int(self.state.get("version", 0))

    @property
    def status(self) -> str:
        """running, finished, failed, stopped or lost, as was last said of it; `starting` before that."""
        return str(self.state.get("status", "starting"))

    @property
    def end(self) -> RunEnd | None:
        """How the run ended, where its launcher has said so."""
        return parse_end(self.state.get("end"))

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        evaluations = self.state.get("evaluations") or []
        return sorted(evaluations, key=lambda item: (item.get("version", 0), str(item.get("set", ""))))

    @property
    def blocked(self) -> dict[str, str]:
        """By worker: which code holds up an event loop, so that samples wait for one another."""
        alive = (beat for beat in self.workers if beat.is_alive)
        return {beat.name: beat.detail for beat in alive if beat.counts.get(BLOCKING)}

    @property
    def failures(self) -> list[Failure]:
        """Attempts that failed in the processes that are alive, by what failed and its cause, the most
        frequent first."""
        return added_up(failure for beat in self.workers if beat.is_alive for failure in beat.failures)

    @property
    def warnings(self) -> list[dict[str, Any]]:
        """Warnings of the trainer that still hold, oldest first."""
        return [item for item in self.state.get("warnings") or [] if item.get("until_step") is None]

    def metric(self, name: str) -> float | None:
        return self.points[-1].metrics.get(name) if self.points else None

    def curve(self, name: str) -> list[float]:
        return [point.metrics[name] for point in self.points if name in point.metrics]

    @property
    def step_s(self) -> float | None:
        """Median time of the last steps, without the very first, which waits for engines to start."""
        times = [p.metrics["step_time_s"] for p in self.points if p.step > 0 and "step_time_s" in p.metrics]
        recent = sorted(times[-RATE_STEPS:])
        return recent[len(recent) // 2] if recent else None

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step, at the present pace."""
        return self.step_s * (self.steps - self.version) if self.step_s is not None else None

    @property
    def tokens_per_s(self) -> float | None:
        """Completion tokens trained per second, over the last steps."""
        recent = [p.metrics for p in self.points if p.step > 0 or len(self.points) == 1][-RATE_STEPS:]
        seconds = sum(metrics.get("step_time_s", 0.0) for metrics in recent)
        return sum(m.get("completion_tokens", 0.0) for m in recent) / seconds if seconds else None

    def idle_share(self, role: str) -> float | None:
        """Mean share of their time that the living processes of a role have waited."""
        shares = [beat.idle_share for beat in self.workers if beat.role == role and beat.is_alive]
        return sum(shares) / len(shares) if shares else None

    @property
    def bottleneck(self) -> Bottleneck | None:
        """Which stage makes the run slow; None without evidence, and until the first step while it starts."""
        is_loading = any(beat.role == "trainer" and beat.shares.get(LOAD) for beat in self.workers)
        if not self.points and (self.status == STARTING or is_loading):
            return None
        evidence = gather_evidence(
            [point.metrics for point in self.points if point.step > 0],
            self.workers,
            max_staleness=self.max_staleness,
            since_commit_s=self.at - self.points[-1].finished_at if self.points else 0.0,
        )
        return find_bottleneck(evidence)

    def as_dict(self) -> dict[str, Any]:
        """For programs: the last step's metrics, and everything that is not a curve."""
        verdict = self.bottleneck
        return {
            **{name: getattr(self, name) for name in SHOWN},
            "metrics": self.points[-1].metrics if self.points else {},
            "bottleneck": verdict.as_dict() if verdict else None,
            "end": asdict(self.end) if self.end else None,
            "idle": {role: self.idle_share(role) for role in ROLES},
            "failures": [asdict(failure) for failure in self.failures],
            "queues": [asdict(queue) for queue in self.queues],
            "dead_letters": self.num_dead,
            "redis": asdict(self.memory) | {"is_full": self.memory.is_full},
            "workers": [asdict(beat) | {"is_alive": beat.is_alive} for beat in self.workers],
        }


class SnapshotReader:
    """Takes snapshots of one run; reads each commit once."""

    def __init__(
        self,
        broker: Broker,
        keys: Keys,
        steps: int,
        max_staleness: int,
        config_warnings: Sequence[str] = (),
    ) -> None:
        self.broker = broker
        self.keys = keys
        self.steps = steps
        self.max_staleness = max_staleness
        self._config_warnings = list(config_warnings)
        self._points: deque[StepPoint] = deque(maxlen=MAX_POINTS)
        self._commits: OffsetReader[Commit] | None = None

    @classmethod
    async def attach(cls, broker: Broker, run_id: str) -> "SnapshotReader":
        """Attach to a run by its id.

        Raises:
            ConfigError: this Redis does not know it.
        """
        keys = Keys(run_id)
        config = await read_config(broker, keys)
        return cls(broker, keys, config.trainer.steps, config.trainer.max_staleness, config.warnings)

    async def read(self) -> RunSnapshot:
        await self._follow_commits()
        keys = self.keys
        broker = self.broker
        names = (StreamName.PROMPTS, StreamName.TRAJECTORIES, StreamName.SCORES)
        queues = [await self._queue(name) for name in names]
        evaluated = [await self._queue(name.of(Lane.EVAL)) for name in names[:2]]
        queues += [queue for queue in evaluated if queue.waiting or queue.held]
        return RunSnapshot(
            keys.run_id,
            self.steps,
            self.max_staleness,
            state=await read_state(broker, keys),
            points=list(self._points),
            queues=queues,
            workers=await read_heartbeats(broker, keys),
            num_dead=await length(broker, keys.dead),
            jobs=await self._jobs(),
            memory=await broker.memory(),
            append_only_error=await self._has_append_only_error(),
            config_warnings=self._config_warnings,
        )

    async def _has_append_only_error(self) -> bool:
        persistence = await self.broker.info("persistence")
        return persistence.get("aof_last_write_status", "ok") != "ok"

    async def _jobs(self) -> dict[str, dict[str, int]]:
        """Numbers of jobs by queue and state; empty where this Redis user may not read RQ's keys."""
        jobs: dict[str, int] = {}
        with contextlib.suppress(BrokerError):
            for state, key in RQ_STATES.items():
                command = "LLEN" if state == QUEUED else "ZCARD"
                count = int(await self.broker.execute(command, key.format(self.keys.sandbox_queue)))
                if count:
                    jobs[state] = count
        return {JOB_QUEUE: jobs} if jobs else {}

    async def _follow_commits(self) -> None:
        if self._commits is None:
            newest = await read_newest(self.broker, self.keys.commits, Commit)
            first = max(0, newest.message.step - MAX_POINTS) if newest else 0
            # Commits have their steps as entry ids, so that nothing before is read.
            position = entry_id_of(first - 1) if first else "0-0"
            self._commits = OffsetReader(self.broker, self.keys.commits, Commit, position)
        while entries := await self._commits.read(READ_COUNT):
            for entry in entries:
                if isinstance(entry, Entry):
                    self._points.append(StepPoint.of(entry.message))

    async def _queue(self, stream: StreamName) -> QueueDepth:
        key = stream.key(self.keys)
        num_entries = await length(self.broker, key)
        status = await group_status(self.broker, key, stream.group) if stream.group else None
        if status is None:
            return QueueDepth(stream.value, num_entries, num_entries if stream.group else None, 0)
        newest = await last_id(self.broker, key)
        if stream.message_type is Ticket:  # tickets are numbered by their entry ids: the lag is known
            waiting: int | None = id_order(newest)[0] - id_order(status.last_delivered)[0]
        else:
            # Redis knows no lag once entries within the stream were deleted; at its end there is none.
            waiting = 0 if status.last_delivered == newest else status.lag
        return QueueDepth(stream.value, num_entries, waiting, status.pending)


CHECKPOINTS_FOLDER = "checkpoints"


def read_folder(folder: RunFolder) -> tuple[RunSnapshot, str]:
    """A snapshot from metrics.jsonl and config.yaml, and what else there is, in words."""
    config = folder.config()
    if config is None:
        raise ConfigError(
            f"{folder.path} holds no run: it has no config.yaml. Give the folder of runs with --runs-dir."
        )
    records = read_records(folder.path / METRICS_FILE)
    evaluations = [record for record in records if record["kind"] == EVALUATION]
    end = read_end(folder)
    snapshot = RunSnapshot(
        folder.run_id,
        config.trainer.steps,
        config.trainer.max_staleness,
        state={"status": end.status, "evaluations": evaluations, "end": asdict(end)},
        points=points_of(records)[-MAX_POINTS:],
        config_warnings=config.warnings,
    )
    versions = folder_versions(folder.path / CHECKPOINTS_FOLDER)
    kept = f"newest checkpoint: version {versions[-1]}" if versions else "no checkpoint yet"
    return snapshot, f"read from {nearest(folder.path)}, as its Redis is not there ({METRICS_FILE}; {kept})"


def points_of(records: Iterable[Mapping[str, Any]]) -> list[StepPoint]:
    """All steps of metrics.jsonl. A resumed run may have written one twice: the last line counts."""
    points: dict[int, StepPoint] = {}
    for record in records:
        if record["kind"] == STEP:
            items = ((name, value) for name, value in record.items() if name not in NO_METRICS)
            numbers = {name: float(value) for name, value in items if isinstance(value, int | float)}
            points[int(record["step"])] = StepPoint(int(record["step"]), numbers, record.get("time", 0.0))
    return [points[step] for step in sorted(points)]
