"""Starts a jail for one completion and reads its answer; nothing that the code does reaches beyond it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from typing import Any

from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.errors import TidemillError
from tidemill.common.process.programs import ROOT
from tidemill.services.jobs.sandbox.emptying import empty
from tidemill.services.jobs.sandbox.programs import Case

JAIL = (
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
    "from tidemill.services.jobs.sandbox.jail import main; main()"
)
START_S = 10.0
"""What the jail itself may take beside its programs."""
LIMITS = {"time_s", "cpu_s", "total_s", "memory_mb", "file_mb", "max_processes", "output_kb", "packages"}
PROBE = [Case("print(6 * 7)", "", "42")]
REMEDY = (
    "Allow this worker user namespaces: the sysctls user.max_user_namespaces and "
    "kernel.apparmor_restrict_unprivileged_userns may forbid them; in Docker start it with --security-opt "
    "seccomp=unconfined --security-opt systempaths=unconfined (and apparmor=unconfined on Ubuntu). Or set "
    "sandbox.isolation: prefer, which runs code under limits alone and is for code that you do not fear."
)


class SandboxError(TidemillError):
    """The jail failed, which says nothing about the code in it."""


def run_cases(
    cases: list[Case], config: SandboxConfig, *, namespaces: bool = True
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The result of each case, and what isolation there was. See `jail.py` for both.

    `namespaces=False` does without, as on a kernel that refuses them.

    Raises:
        SandboxError: the jail did not come to an answer.
    """
    folder = tempfile.mkdtemp(prefix="tidemill-jail-")
    os.chmod(folder, 0o711)
    try:
        return _run(cases, config, folder, namespaces)
    finally:
        empty(folder)
        shutil.rmtree(folder, ignore_errors=True)


def probe(config: SandboxConfig) -> dict[str, Any]:
    """What isolation this machine allows.

    Raises:
        SandboxError: no program can be run here at all, or not as `isolation: require` asks.
    """
    (result,), isolation = run_cases(PROBE, config.model_copy(update={"time_s": 60.0, "total_s": 60.0}))
    if not PROBE[0].passed(result):
        raise SandboxError(f"the sandbox cannot run Python here: {result['stderr'] or result['outcome']}")
    if config.isolation == "require" and not is_whole(isolation):
        raise _refused(isolation)
    return isolation


def is_whole(isolation: dict[str, Any]) -> bool:
    """Whether code has a world of its own: no network, no files, no processes, few system calls."""
    return all(isolation.get(part) for part in ("namespaces", "files", "seccomp"))


def _refused(isolation: dict[str, Any]) -> SandboxError:
    why = f" ({isolation['why']})" if "why" in isolation else ""
    missing = ", ".join(part for part in ("namespaces", "files", "seccomp") if not isolation.get(part))
    return SandboxError(
        f"the kernel allows no sandbox here: no {missing}{why}. Nothing is run without (isolation: require). "
        + REMEDY
    )


def _run(
    cases: list[Case], config: SandboxConfig, folder: str, namespaces: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    order = {
        "folder": folder,
        "namespaces": namespaces,
        "require": config.isolation == "require",
        "python": os.path.realpath(sys.executable),
        "shown": _shown(config),
        "programs": [{"source": case.source, "stdin": case.stdin} for case in cases],
        **config.model_dump(include=LIMITS),
    }
    process = subprocess.Popen(
        [order["python"], "-I", "-S", "-c", JAIL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
        start_new_session=True,
    )
    try:
        answer, errors = process.communicate(json.dumps(order).encode(), config.total_s + START_S)
    except subprocess.TimeoutExpired:
        raise SandboxError(f"the jail gave no answer within {config.total_s + START_S:g} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    try:
        found = json.loads(answer)
    except ValueError:
        said = errors.decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
        raise SandboxError(f"the jail ended with {process.returncode} and said: {said[0]}") from None
    if len(found["results"]) < len(cases):
        raise _refused(found["isolation"])
    return found["results"], found["isolation"]


def _shown(config: SandboxConfig) -> list[str]:
    """What the interpreter needs besides the system's folders."""
    shown = {os.path.realpath(sys.base_prefix)}
    if config.packages:
        shown |= {os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    return sorted(folder for folder in shown if not folder.startswith("/usr/") and folder != "/usr")
