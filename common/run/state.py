"""A run besides its streams: in Redis its config and a small state, in its folder some files.

The state is the hash `Keys.state`. For files that several services share, names and readers are here. The
config's classes take a quarter of a second to import, and readers of streams need none: they are imported
late.
"""

import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.common.command_line import command_line
from tidemill.common.errors import ConfigError
from tidemill.common.files import write_atomically
from tidemill.common.redis import scripts
from tidemill.common.redis.broker import Broker
from tidemill.common.wire.keys import RUNS, Keys

if TYPE_CHECKING:
    from tidemill.common.config import RunConfig


STARTING = "starting"
RUNNING = "running"
FINISHED = "finished"
FAILED = "failed"
STOPPED = "stopped"
STATUSES = (STARTING, RUNNING, FINISHED, STOPPED, FAILED)
"""Values of the state's field `status`. A run that is stopped or has failed may be resumed."""


class UnknownRunError(ConfigError):
    """Redis does not have the run, or not yet."""


async def publish_config(broker: Broker, keys: Keys, config: "RunConfig") -> None:
    """Write the resolved config to Redis, in place of one that is there: a worker needs only the address and
    the run id."""
    # The config first: every run in the list has a config.
    await broker.execute("SET", keys.config, config.model_dump_json())
    await broker.execute("SADD", RUNS, keys.run_id)


async def read_config(broker: Broker, keys: Keys) -> "RunConfig":
    """The run's config.

    Raises:
        UnknownRunError: this Redis does not know the run; the message lists the runs it knows.
    """
    from tidemill.common.config import parse_recorded

    raw = await broker.execute("GET", keys.config)
    if raw is None:
        runs = await known_runs(broker)
        listing = f"it knows {', '.join(runs[:10])}" if runs else "it knows none yet"
        raise UnknownRunError(
            f"this Redis has no run {keys.run_id!r} ({listing}). Check the id, or start the run with "
            f"`{command_line('up', 'CONFIG')}` or the trainer."
        )
    return parse_recorded(json.loads(raw), f"the config of run {keys.run_id} in Redis")


async def register_config(broker: Broker, keys: Keys, config: "RunConfig") -> "RunConfig":
    """Publish the config of a run unless Redis has one, which must be the same. Returns the run's config.

    Safe against another process that does so at the same time.

    Raises:
        ConfigError: the run was started with another config.
    """
    config = config.model_copy(update={"run_id": keys.run_id})
    if await broker.execute("SET", keys.config, config.model_dump_json(), "NX"):
        await broker.execute("SADD", RUNS, keys.run_id)
        return config
    from tidemill.common.config.changes import changed_fields

    registered = await read_config(broker, keys)
    changes = changed_fields(registered, config)
    if changes:
        listing = "; ".join(map(str, changes[:5]))
        resume = command_line("up", "CONFIG", "--run-id", keys.run_id, "--resume")
        raise ConfigError(
            f"run {keys.run_id} was started with another config: {listing}. Give the "
            f"new run an id of its own; `{resume}` says which fields a run may change."
        )
    return registered


async def has_finished(broker: Broker, keys: Keys, steps: int) -> bool:
    """Whether the run has done all its steps, evaluations included."""
    state = await read_state(broker, keys)
    return state.get("status") == FINISHED and int(state.get("version", 0)) >= steps


async def run_exists(broker: Broker, keys: Keys) -> bool:
    """Whether this Redis has the run's config, commits or tickets."""
    return bool(await broker.execute("EXISTS", keys.config, keys.commits, keys.prompts()))


async def known_runs(broker: Broker) -> list[str]:
    return sorted(raw.decode() for raw in await broker.execute("SMEMBERS", RUNS))


async def update_state(broker: Broker, keys: Keys, **values: Any) -> None:
    """Set fields of the run's state; values are stored as JSON."""
    arguments: list[str] = []
    for name, value in values.items():
        arguments += [name, json.dumps(value)]
    await broker.execute("HSET", keys.state, *arguments)


async def finish_state(broker: Broker, keys: Keys, last_commit_id: str, **values: Any) -> bool:
    """Set fields of the state of a run that is over, if Redis has its last commit; returns whether it has.

    After a failover the server may lack that commit: then the run is not over yet.
    """
    fields = [(name, json.dumps(value)) for name, value in values.items()]
    return await scripts.finish(
        broker, commits=keys.commits, state=keys.state, last_commit_id=last_commit_id, fields=fields
    )


async def read_state(broker: Broker, keys: Keys) -> dict[str, Any]:
    """The run's state, empty for a run that has not started."""
    flat = await broker.execute("HGETALL", keys.state)
    names = flat[::2]
    values = flat[1::2]
    return {name.decode(): json.loads(value) for name, value in zip(names, values, strict=True)}


PICTURES_OF = "pictures_of"
"""Field of the state of a run that scores another one's history: the run that has the pictures."""


def folder_with_pictures(run_dir: Path, state: Mapping[str, Any]) -> Path:
    """The folder of the run whose pictures the run in `run_dir` uses: the one that its state names, else its
    own."""
    return run_dir.parent / str(state.get(PICTURES_OF, run_dir.name))


CONFIG_FILE = "config.yaml"
"""File in a run's folder: its resolved config, as in Redis."""
ADDRESS_FILE = "redis.url"
"""File in the run's folder with the address of the Redis that `tidemill up` keeps for it, while it runs."""
RUNS_DIR_VARIABLE = "TIDEMILL_RUNS_DIR"


def runs_dir() -> Path:
    return Path(os.environ.get(RUNS_DIR_VARIABLE, "runs")).resolve()


UID = "uid"
"""Field of the run's state: eight hexadecimal digits that no other run has, not even one with the same id."""
UID_FILE = "run.uid"
"""File in the run's folder with the same digits. The trainer writes it, and copies it into the state."""


def read_uid(run_dir: Path) -> str:
    """The uid of the run in this folder; empty where its trainer has not begun yet."""
    try:
        uid = (run_dir / UID_FILE).read_text().strip()
    except FileNotFoundError:
        return ""
    return uid if re.fullmatch("[0-9a-f]{8}", uid) else ""


def keep_uid(run_dir: Path) -> str:
    """The uid of the run in this folder, made where there is none.

    Raises:
        StorageError: the disk is full or read-only.
    """
    uid = read_uid(run_dir)
    if not uid:
        uid = secrets.token_hex(4)
        write_atomically(run_dir / UID_FILE, f"{uid}\n")
    return uid


PROFILES = "profiles"
"""Folder in the run's folder. The trainer profiles step n if `step-<n>` is there, and writes into that."""
METRICS_FILE = "metrics.jsonl"
"""File in the run's folder: a record for each step and evaluation."""
BEST_FILE = "best.json"
"""File in the run's folder: which evaluated version is the best, and where its weights are."""
STEP = "step"
EVALUATION = "evaluation"
REASON = "reason"
"""Field of an evaluation's record: why samples of it have no score; absent where all have one."""

Record = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """All whole records of a file, in order. A file that is not there has none."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    # Behind the last line break is nothing, or a line that a crash cut off.
    whole_lines = lines[:-1]
    return [record for record in map(parse_record, whole_lines) if record is not None]


def parse_record(line: bytes) -> Record | None:
    """The record in a line; None where it is no JSON, or of a kind that is not known."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and record.get("kind") in (STEP, EVALUATION) else None
