"""Runs the parts of the proof one after the other, and keeps the result of each in `proof.json`.

Guarantees: every part ends within its limit, and all that it started with it; what failed or took too long is
written down with the end of its output, and the next one goes on; what is done is not done again.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu.parts import DID_NOT_START, LIMIT_S, Part, missing
from tidemill.common.files import write_atomically

ROOT = Path(__file__).parents[2]
JSON_FILE = "proof.json"
DONE, MISSING, FAILED, LATE = "done", "missing", "failed", "late"
TAIL_LINES, TAIL_CHARACTERS = 40, 4000
GRACE_S = 15.0
"""Seconds from SIGTERM to SIGKILL."""
DRY_VARIABLE = "TIDEMILL_GPU_TESTS_DRY"
"""Variable with which the tests compute on the CPU what does not need a GPU's own kernels."""
OWN_VARIABLES = {
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1",
    "TYPER_STANDARD_TRACEBACK": "1",
    "COLUMNS": "110",
}

Record = dict[str, Any]


class Proof:
    """One folder of results, of this machine."""

    def __init__(self, folder: Path, facts: Mapping[str, Any], dry: bool, limit_s: float = LIMIT_S) -> None:
        self.folder, self.facts, self.dry, self.limit_s = folder, facts, dry, limit_s
        self.records: dict[str, Record] = {}
        """Results of the parts that were tried, by name."""
        with suppress(OSError, ValueError):
            self.records = json.loads((folder / JSON_FILE).read_text())["parts"]

    def order(self, parts: Sequence[Part]) -> list[Part]:
        """Parts that are not done: those not tried yet, then those without a result."""
        left = [part for part in parts if self.records.get(part.name, {}).get("state") != DONE]
        return sorted(left, key=lambda part: part.name in self.records)

    def run(self, part: Part) -> Record:
        """Run a part, or say what is missing for it; the record is kept."""
        wrong, too_little = missing(part, self.facts, self.dry)
        record: Record = {"dry": self.dry, "commit": _commit()}
        if wrong or too_little:
            record |= {"state": MISSING, "missing": [*wrong, *too_little], "can_be_set_right": bool(wrong)}
        else:
            record |= self._execute(part)
        self.records[part.name] = record
        tree = {"dry": self.dry, "facts": dict(self.facts), "parts": self.records}
        write_atomically(self.folder / JSON_FILE, json.dumps(tree, indent=1) + "\n")
        return record

    def _execute(self, part: Part) -> Record:
        self.folder.mkdir(parents=True, exist_ok=True)
        log, words = self.folder / f"{part.name}.log", part.words(self.dry)
        started = time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                env=os.environ | OWN_VARIABLES | ({DRY_VARIABLE: "1"} if self.dry else {}),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(self.limit_s)
            finally:
                is_late = process.poll() is None
                end_all(process)
        found: Record = {"command": " ".join(["python", *words]), "seconds": time.monotonic() - started}
        result = None
        if not is_late and process.returncode == 0:
            result = tests_passed(log) if part.is_tests else last_json(log)
        if result is None:
            state = LATE if is_late else FAILED
            return found | {"state": state, "exit": process.returncode, "tail": tail_of(log)}
        # The reason why an engine did not start is in the output of vLLM's processes.
        tail = {"tail": tail_of(log, "Error")} if DID_NOT_START in result else {}
        return found | {"state": DONE, "result": result} | tail


def end_all(process: subprocess.Popen[bytes]) -> None:
    """End a session's leader and every process of the session that is left: asked first, then by force."""
    left = list(_members(process.pid))
    for member in left:
        with suppress(psutil.NoSuchProcess):
            member.terminate()
    until = time.monotonic() + GRACE_S
    while time.monotonic() < until and any(_members(process.pid)):
        process.poll()
        time.sleep(0.05)
    for member in {*left, *_members(process.pid)}:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def _members(session: int) -> Iterator[psutil.Process]:
    """Processes of the session, and what they have started in sessions of their own."""
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                yield process
                yield from process.children(recursive=True)


def tests_passed(log: Path) -> dict[str, str] | None:
    """What pytest says at its end; None where no test passed, though none failed."""
    summary = tail_of(log, " passed")
    return {"tests": summary.splitlines()[-1]} if summary else None


def last_json(log: Path) -> Any:
    """The map in the last line that holds one; None where there is none."""
    for line in reversed(log.read_text(errors="replace").splitlines()):
        with suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                return found
    return None


def tail_of(log: Path, word: str = "") -> str:
    """The end of the output, of the lines with `word`, without what progress bars have overwritten."""
    lines = [line.rpartition("\r")[2].rstrip() for line in log.read_text(errors="replace").split("\n")]
    kept = [line for line in lines if line and word in line]
    return "\n".join(kept[-TAIL_LINES:])[-TAIL_CHARACTERS:]


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    with suppress(OSError):
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return ""
