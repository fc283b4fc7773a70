"""What a process of this project starts of another service, and how: the one place that names their modules.

Services do not import each other, so these names are strings; a test finds every one of them.
"""

import asyncio
import gc
import signal
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import tidemill

ROOT = Path(tidemill.__file__).absolute().parents[1]
"""The folder that holds `tidemill`: a clone, or the site-packages that it is installed in."""


class Program(StrEnum):
    """Modules to run with `python -m`."""

    TRAINER = "tidemill.services.trainer"
    ROLLOUT = "tidemill.services.rollout"
    REWARD = "tidemill.services.reward"
    TRAINER_CHECK = "tidemill.services.trainer.check"
    """Loads and tries a user's own advantage and loss."""
    TRAINER_MEMORY = "tidemill.services.trainer.policy.memory.fit"
    """Computes what a run takes of GPUs and hosts."""
    TRAINER_MACHINE = "tidemill.services.trainer.machine"
    """Looks at the machine, and measures it."""
    REWARD_CHECK = "tidemill.services.reward.check"
    """Loads every reward, and calls those that are functions."""
    ROLLOUT_CHECK = "tidemill.services.rollout.check"
    """Loads the environment, and plays one session with a script in place of the model."""
    TRAINER_RANK = "tidemill.services.trainer.policy.fsdp.rank_main"
    """Every rank of a trainer but the first."""
    REPLAY = "tidemill.services.trainer.replay"
    REPLICA = "tidemill.services.reward.replica"
    """A server of a judge or reward model, and the process that looks after it."""
    MODEL_SERVER = "tidemill.services.reward.model_server"
    ARCHIVE = "tidemill.common.archive"
    """Writes what streams hold into their archive."""
    SANDBOX = "tidemill.services.jobs.sandbox"
    SANDBOX_QUEUE = "tidemill.services.jobs.sandbox.rq_worker"
    SANDBOX_CHECK = "tidemill.services.jobs.sandbox.check"
    EXPORTER = "tidemill.services.console.exporter"
    NODE = "tidemill.services.console.cluster"
    """What one node of a cluster does of a run."""
    FORK_SERVER = "tidemill.common.process.fork_server"
    """Becomes several services that compute with a model."""


SERVES = {
    Program.TRAINER: "tidemill.services.trainer.service",
    Program.ROLLOUT: "tidemill.services.rollout.service",
    Program.REWARD: "tidemill.services.reward.worker",
    Program.REPLICA: "tidemill.services.reward.remote.serving",
    Program.SANDBOX: "tidemill.services.jobs.sandbox.worker",
}
"""The module with the `serve` of a service."""

SHARED_IMPORTS = (
    SERVES[Program.TRAINER],
    "tidemill.services.trainer.policy.transformers_policy",
    SERVES[Program.ROLLOUT],
    "tidemill.services.rollout.engines.decoding",
)
"""What the fork server imports: torch, transformers, and what of our own needs them."""

RUN_CODE = "tidemill.services.jobs.sandbox.job.run_code"
"""What RQ jobs of the sandbox ask for. A worker compares the name, and never imports it."""


class Child(StrEnum):
    """Modules whose `main` runs users' code in a process of its own (`children.py`)."""

    SCORING = "tidemill.services.reward.functions.child"
    ENVIRONMENTS = "tidemill.services.rollout.environments.stages"
    AGENTS = "tidemill.services.rollout.environments.agent_host"


VLLM_EXTENSION = "tidemill.services.rollout.engines.vllm_worker.WeightLoader"
"""The class that vLLM loads by name in its own worker processes."""


def run_own(program: Program, *arguments: str) -> list[str]:
    """The command line that runs one of our modules.

    `python -m NAME` looks into the working directory first, where modules may be called like anything; `-P`
    keeps it from doing so.
    """
    safe = [] if _is_imported_from_here() else ["-P"]
    return [sys.executable, *safe, "-m", program.value, *arguments]


def import_from_here() -> None:
    """Let the user's modules in the working directory be imported, after all others and our own."""
    if (folder := str(Path.cwd())) not in sys.path and "" not in sys.path:
        sys.path.append(folder)


def _is_imported_from_here() -> bool:
    """Whether the working directory is what makes us importable: `python -m tidemill` in a clone."""
    try:
        return sys.path[:1] in ([""], [str(ROOT)]) and Path.cwd() == ROOT
    except OSError:  # the folder has been removed
        return False


@contextmanager
def importing() -> Iterator[None]:
    """For imports of torch and its like: modules are no garbage, and Python spends a fifth of the time on
    looking through them for some. They are left out of every later look too."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


T = TypeVar("T")


def run_main(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on an event loop of its own to its end, and return its result.

    `asyncio.run` gives its main task to the handler of Ctrl-C. When it takes that handler away again,
    Python's signal module puts it into words, and with it the task's whole result: for the records of a run
    these are gigabytes. Here the main task has no result.
    """
    results: list[T] = []

    async def keep_result() -> None:
        results.append(await work)

    asyncio.run(keep_result())  # noqa: TID251
    (result,) = results
    return result


SHELL_OFFSET = 128
"""A shell whose command ended by a signal ends with the signal's number and this."""


def ending_in_words(code: int) -> str:
    """An exit code in words; negative ones are signals, as Python has them: `exit code 3`, `SIGKILL`."""
    if is_illegal_instruction(code):
        return "SIGILL, an illegal instruction"
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def is_illegal_instruction(code: int) -> bool:
    """Whether it ended on an instruction that its CPU lacks or may not use, as it will every time."""
    return code in (-signal.SIGILL, SHELL_OFFSET + signal.SIGILL)
