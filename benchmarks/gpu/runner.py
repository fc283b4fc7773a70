"""Runs the parts of the proof one after the other, and keeps the result of each in `proof.json`.

Guarantees: every part ends within its limit, and all that it started with it; what failed or took too long is
written down with the end of its output, and the next one goes on; what is done is not done again.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu.parts import DID_NOT_START, LIMIT_S, Part, missing
from tidemill.common.files import write_atomically

ROOT = Path(__file__).parents[2]
JSON_FILE = "proof.json"
DONE = "done"
MISSING = "missing"
FAILED = "failed"
LATE = "late"
TAIL_LINES = 40
TAIL_CHARACTERS = 4000
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
        self.folder = folder
        self.facts = facts
        self.dry = dry
        self.limit_s = limit_s
        self.records: dict[str, Record] = {}
        """Results of the parts that were tried, by name."""
        with suppress(OSError, ValueError):
            self.records = json.loads((folder / JSON_FILE).read_text())["parts"]

    def unfinished(self, parts: Sequence[Part]) -> list[Part]:
        """Parts that are not done: those not tried yet, then those without a result."""
        not_done = [piece for piece in parts if self.records.get(piece.name, {}).get("state") != DONE]
        return sorted(not_done, key=lambda piece: piece.name in self.records)

    def run(self, piece: Part) -> Record:
        """Run a part, or say what is missing for it; the record is kept."""
        wrong, too_little = missing(piece, self.facts, self.dry)
        if wrong or too_little:
            record = {"state": MISSING, "missing": [*wrong, *too_little], "can_be_set_right": bool(wrong)}
        else:
            record = self._execute(piece)
        self.records[piece.name] = {"dry": self.dry, "commit": _commit(), **record}
        tree = {"dry": self.dry, "facts": dict(self.facts), "parts": self.records}
        write_atomically(self.folder / JSON_FILE, json.dumps(tree, indent=1) + "\n")
        return self.records[piece.name]

    def _execute(self, piece: Part) -> Record:
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / f"{piece.name}.log"
        command = [sys.executable, *piece.words(self.dry)]
        variables = os.environ | OWN_VARIABLES | ({DRY_VARIABLE: "1"} if self.dry else {})
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        started = time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=variables, stdout=output, start_new_session=True, **pipes
            )
            try:
                is_late = not _ends_within(process, self.limit_s)
            finally:
                end_all(process)
        record: Record = {
            "command": " ".join(["python", *command[1:]]),
            "seconds": time.monotonic() - started,
        }
        result = None
        if not is_late and process.returncode == 0:
            result = tests_passed(log) if piece.is_tests else last_json(log)
        if result is None:
            state = LATE if is_late else FAILED
            return record | {"state": state, "exit": process.returncode, "tail": tail_of(log)}
        # The reason why an engine did not start is in the output of vLLM's processes.
        tail = {"tail": tail_of(log, "Error")} if DID_NOT_START in result else {}
        return record | {"state": DONE, "result": result} | tail


def _ends_within(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)
    return process.poll() is not None


def end_all(process: subprocess.Popen[bytes]) -> None:
    """End a process: by SIGTERM, so that it can tidy up, and after `GRACE_S` by force. Then end by force all
    that it has started, also in other sessions."""
    started: list[psutil.Process] = []
    if process.poll() is None:
        started = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        _ends_within(process, GRACE_S)
    for descendant in started:
        with suppress(psutil.NoSuchProcess):
            descendant.kill()  # unless its number is another process's by now
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tests_passed(log: Path) -> dict[str, str] | None:
    """What pytest says at its end; None where no test passed, though none failed."""
    summary = tail_of(log, " passed")
    return {"tests": summary.splitlines()[-1]} if summary else None


def last_json(log: Path) -> Any:
    """The map in the last line that holds one; None where there is none."""
    for line in reversed(log.read_text(errors="replace").splitlines()):
        with suppress(ValueError):
            if isinstance(tree := json.loads(line), dict):
                return tree
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
