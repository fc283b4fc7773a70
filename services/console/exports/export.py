"""`tidemill export`: hands a version to an RQ worker of the run, or does it here where there is none; without
an output, lists the versions."""

import json
import secrets
import subprocess
import time
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError
from rich.console import Console
from rq import Queue, Worker
from rq.job import JobStatus
from rq.serializers import JSONSerializer

from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.process.programs import JobFunction, Program, run_own
from tidemill.common.redis.client import make_blocking_client
from tidemill.common.run.state import CONFIG_FILE
from tidemill.common.wire.keys import Keys
from tidemill.services.console.exports.weights import list_versions
from tidemill.services.console.options import ExportOptions
from tidemill.services.console.run.folder import RunFolder, find_run, nearest

JOB_TIMEOUT_S = 3600
POLL_S = 0.2


def export(options: ExportOptions) -> int:
    if options.output is None:
        if options.version != "last" or options.now:
            raise ConfigError("--version and --now are of a folder to write: name it with -o FOLDER")
        return list_versions(options)
    if options.verify or options.as_json:
        raise ConfigError("--verify and --json are of the list of versions: leave out -o")
    folder = find_run(options.run_id, options.runs_dir)
    if (config := folder.config()) is None:
        raise ConfigError(
            f"{nearest(folder.path)} has no {CONFIG_FILE}: no such run here. Name the run, and its folder of "
            "runs with --runs-dir."
        )
    arguments: dict[str, Any] = {
        "run_dir": str(folder.path.absolute()),
        "model": config.model.path,
        "dtype": config.model.dtype,
        "version": options.version,
        "output": str(options.output.resolve()),
    }
    if config.model.overrides:  # workers of older releases know no such argument
        arguments["overrides"] = config.model.overrides
    queue = None if options.now else _queue_with_worker(folder)
    result = _export_here(arguments) if queue is None else _export_by_job(queue, folder.run_id, arguments)
    where, num_bytes = nearest(Path(result["folder"])), result["num_bytes"]
    Console(highlight=False).print(
        f"version {result['version']} of {folder.run_id} is in [bold]{where}[/] ({num_bytes:,} bytes)",
        soft_wrap=True,
    )
    return 0


def _queue_with_worker(folder: RunFolder) -> Queue | None:
    """The run's queue of jobs, None where no worker takes from it."""
    url = folder.address()
    if url is None:
        return None
    try:
        connection = make_blocking_client(url, folder.run_id)
        queue = Queue(Keys(folder.run_id).jobs_queue, connection=connection, serializer=JSONSerializer)
        return queue if Worker.count(queue=queue) else None
    except (TidemillError, RedisError):
        return None  # its Redis is gone, as after every finished run; the files are here


def _export_by_job(queue: Queue, run_id: str, arguments: dict[str, Any]) -> dict[str, Any]:
    job_id = Keys(run_id).jobs_names + secrets.token_hex(8)
    job = queue.enqueue_call(JobFunction.EXPORT, kwargs=arguments, job_id=job_id, timeout=JOB_TIMEOUT_S)
    while (status := job.get_status(refresh=True)) not in (JobStatus.FINISHED, JobStatus.FAILED):
        if status in (JobStatus.STOPPED, JobStatus.CANCELED, None):
            raise TidemillError(f"the export was {status}; try again with --now")
        time.sleep(POLL_S)
    result = job.latest_result()
    if status is JobStatus.FAILED or result is None or result.return_value is None:
        lines = ((result.exc_string if result else "") or "").strip().splitlines()
        raise TidemillError(f"the export failed: {lines[-1] if lines else 'its worker ended'}")
    return dict(result.return_value)


def _export_here(arguments: dict[str, Any]) -> dict[str, Any]:
    command = run_own(Program.EXPORT, arguments["run_dir"])
    for name in ("model", "dtype", "version", "output"):
        command += [f"--{name}", arguments[name]]
    if overrides := arguments.get("overrides"):
        command += ["--overrides", json.dumps(overrides)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip() or f"it ended with {done.returncode}"
        raise (ConfigError if done.returncode == ConfigError.exit_code else TidemillError)(reason)
    return dict(json.loads(done.stdout.splitlines()[-1]))
