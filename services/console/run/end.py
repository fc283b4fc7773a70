"""How a run ended, and why: `end.json` in the run's folder.

`tidemill up` writes it when it starts (`running`) and when it ends, each time as a whole. A launcher that was
killed cannot write its end: then the file still says `running`, and its process is gone. `read_end` tells the
two apart, so that every reader (status, web, the next `up`) says the same of a run.
"""

import contextlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tidemill.common.files import write_atomically
from tidemill.common.run.state import CONFIG_FILE, FINISHED, METRICS_FILE, RUNNING, STOPPED
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.console.text.formats import when

END_FILE = "end.json"
LOST = "lost"
"""Neither running nor ended in order: its launcher was killed, or its machine went down."""
FRESH_S = 60.0
"""A run of another machine whose files have changed within this time counts as running."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The state of a run as its folder has it.

    Example: a failed one, `RunEnd("failed", reason="trainer cannot do this run (exit code 2)",
    error="tidemill trainer: model.path /m/x does not exist", log="runs/a/logs/trainer.log", steps=0, ...)`.
    """

    status: str
    """running, finished, failed, stopped or lost."""
    reason: str = ""
    """Why it failed, in one line."""
    error: str = ""
    """The last error of the process that failed, in one line."""
    log: str = ""
    """The log that has more of it."""
    failing: tuple[str, ...] = ()
    """Of a run that has not finished: which rewards failed, how often and why, a line each."""
    steps: int = 0
    """Committed steps."""
    of_steps: int = 0
    exit_code: int = 0
    at: float = 0.0
    """When it ended; of a run that is running when it was started, of a lost one when it was last seen."""
    resume: str = ""
    """The command that continues it."""
    host: str = ""
    pid: int = 0
    """The launcher's machine and process."""
    pid_since: str = ""
    """When that process was started, as the kernel has it: numbers of processes are used again."""

    @property
    def is_over(self) -> bool:
        return self.status != RUNNING

    @property
    def lines(self) -> list[str]:
        """Status, reason, last error and what to do, a line each, for people."""
        if self.status == RUNNING:
            where = f", process {self.pid} on {self.host}" if self.pid else ""
            return [f"running since {when(self.at)}{where}"]
        if self.status == LOST:
            text = [f"ended without a word, last seen at {when(self.at)}: its launcher was killed"]
        else:
            done = f" after {self.steps} of {self.of_steps} steps" if self.of_steps else ""
            text = [f"{self.status}{done} at {when(self.at)}"]
        if self.reason:
            text.append(f"reason: {self.reason}")
        if self.error:
            text.append(f"last error: {self.error}")
        if self.log:
            text.append(f"log: {self.log}")
        text += [f"failing: {line}" for line in self.failing]
        if self.resume and self.status != FINISHED:
            text.append(f"continue with: {self.resume}")
        return text


def write_end(folder: RunFolder, end: RunEnd) -> None:
    """Replace the run's end.

    Raises:
        StorageError: the disk is full or read-only. What was there is as it was.
    """
    write_atomically(folder.path / END_FILE, json.dumps(asdict(end), indent=2) + "\n")


def started_now(resume: str, of_steps: int) -> RunEnd:
    """The entry of a run that this process starts."""
    pid = os.getpid()
    return RunEnd(
        RUNNING,
        of_steps=of_steps,
        at=time.time(),
        resume=resume,
        host=socket.gethostname(),
        pid=pid,
        pid_since=process_start(pid),
    )


def parse_end(values: object) -> RunEnd | None:
    """The end in a map, such as that of end.json; None where it is none. Unknown newer fields are ignored."""
    try:
        return TypeAdapter(RunEnd).validate_python(values)
    except ValidationError:
        return None


def read_end(folder: RunFolder) -> RunEnd:
    """The state of a run by its folder alone, also of a run that has no end.json."""
    end = _read_file(folder.path / END_FILE)
    if end is not None and end.status != RUNNING:
        return end
    seen_at = last_seen_at(folder)
    is_fresh = time.time() - seen_at < FRESH_S
    if end is None:
        # Of an older release, or its services were started one by one: nobody wrote its end.
        if folder.summary.exists():
            return RunEnd(FINISHED, at=seen_at)
        if is_fresh or _has_socket(folder):
            return RunEnd(RUNNING, at=seen_at)
        # An orderly end removes the address of the run's own Redis.
        return RunEnd(LOST if folder.address_file.exists() else STOPPED, at=seen_at)
    is_here = end.host == socket.gethostname()
    is_running = process_start(end.pid) == end.pid_since if is_here else is_fresh
    return end if is_running else replace(end, status=LOST, at=seen_at)


def _has_socket(folder: RunFolder) -> bool:
    """Whether the run's own Redis is there: a launcher that was killed leaves an address without a socket."""
    if not folder.address_file.exists():
        return False
    url = folder.address() or ""
    return not url.startswith("unix://") or Path(url.removeprefix("unix://")).exists()


def last_seen_at(folder: RunFolder) -> float:
    """When anything of the run was written last; 0 where there is nothing."""
    newest = 0.0
    files = [folder.path / CONFIG_FILE, folder.path / METRICS_FILE]
    for folder_of_files in (folder.logs, folder.redis_data, folder.redis_data / "appendonlydir"):
        with contextlib.suppress(OSError):
            files += [path for path in folder_of_files.iterdir() if path.is_file()]
    for path in files:
        with contextlib.suppress(OSError):
            newest = max(newest, path.stat().st_mtime)
    return newest


def _read_file(path: Path) -> RunEnd | None:
    try:
        return parse_end(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def process_start(pid: int) -> str:
    """When a process was started, by the kernel's clock; empty where there is no such process."""
    try:
        # The name in parentheses may hold spaces; the time is the 22nd field, the 20th behind the name.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        pass
    if Path("/proc/self").exists() or pid <= 0:
        return ""
    try:  # macOS has no /proc
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "unknown"
