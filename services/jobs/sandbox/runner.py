"""Runs the tests of one completion, each in a jail; nothing that the code does reaches beyond it."""

import time
from typing import Any

from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.services.jobs.sandbox.jail import SandboxError, run_program
from tidemill.services.jobs.sandbox.memory_group import memory_group
from tidemill.services.jobs.sandbox.programs import Case

LATE = {"outcome": "timeout", "code": None, "stdout": "", "stderr": "total_s is used up", "wall_s": 0.0}
PROBE = [Case("import random\nprint(6 * 7)", "", "42")]
REMEDY = (
    "Nothing is run without a jail (isolation: require). It takes bubblewrap and libseccomp (apt install "
    "bubblewrap libseccomp2) and user namespaces: the sysctls user.max_user_namespaces and "
    "kernel.apparmor_restrict_unprivileged_userns may forbid them; in Docker start the worker with "
    "--security-opt seccomp=unconfined (and apparmor=unconfined on Ubuntu). Or set sandbox.isolation: "
    "prefer, which runs code under limits alone and is for code that you do not fear."
)


def run_cases(
    cases: list[Case], config: SandboxConfig, *, namespaces: bool = True
) -> tuple[list[dict[str, Any]], bool]:
    """The result of each case (`jail.run_program`), and whether they had namespaces of their own.

    `namespaces=False` does without, as where there is no bubblewrap or the kernel refuses them.

    Raises:
        SandboxError: a jail could not be set up, or not as `isolation: require` asks.
    """
    deadline = time.monotonic() + config.total_s
    results: list[dict[str, Any]] = []
    with memory_group((config.memory_mb + config.file_mb) << 20) as group:
        for case in cases:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                results.append(LATE)
                continue
            arguments = (case.source, case.stdin, config, min(config.time_s, left_s), group)
            try:
                if not namespaces and config.isolation == "require":
                    raise SandboxError("without namespaces")
                results.append(run_program(*arguments, namespaces))
            except SandboxError as error:
                if config.isolation == "require" or not namespaces:
                    remedy = f". {REMEDY}" if config.isolation == "require" else ""
                    raise SandboxError(f"no jail can be set up here: {error}{remedy}") from None
                namespaces = False
                results.append(run_program(*arguments, namespaces))
    return results, namespaces


def probe(config: SandboxConfig) -> bool:
    """Whether code has namespaces of its own on this machine.

    Raises:
        SandboxError: no program can be run here at all, or not as `isolation: require` asks.
    """
    (result,), has_namespaces = run_cases(PROBE, config.model_copy(update={"time_s": 60.0, "total_s": 60.0}))
    if not PROBE[0].passed(result):
        raise SandboxError(f"the sandbox cannot run Python here: {result['stderr'] or result['outcome']}")
    return has_namespaces
