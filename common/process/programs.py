"""Programs of other services that a process of this project starts: the only place that names their modules.

Services do not import each other, so these names are strings; a test checks that each module exists.
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
    TRAINER_MEMORY = "tidemill.services.trainer.policy.memory.advice"
    """Computes what a run takes of GPUs and hosts."""
    TRAINER_MACHINE = "tidemill.services.trainer.machine"
    """Looks at the machine, and measures it."""
    TRAINER_PICTURES = "tidemill.services.trainer.picture_check"
    """Loads the image processor, and bounds the tokens of a picture."""
    REWARD_CHECK = "tidemill.services.reward.check"
    """Loads every reward, and calls those that are functions."""
    ROLLOUT_CHECK = "tidemill.services.rollout.check"
    """Loads the environment, and plays one session with a script in place of the model."""
    CONTAINERS = "tidemill.services.rollout.containers"
    """Removes what the sessions of an ended run have left in containers on this node."""
    TRAINER_RANK = "tidemill.services.trainer.policy.fsdp.rank_main"
    """A rank of a trainer, other than the first."""
    REPLAY = "tidemill.services.trainer.replay"
    REPLICA = "tidemill.services.reward.replica"
    """A server of a judge or reward model, and the process that keeps it alive."""
    MODEL_SERVER = "tidemill.services.reward.model_server"
    ARCHIVE = "tidemill.common.archive"
    """Writes entries of streams into their archive."""
    SANDBOX = "tidemill.services.reward.sandbox"
    SANDBOX_QUEUE = "tidemill.services.reward.sandbox.rq_worker"
    SANDBOX_CHECK = "tidemill.services.reward.sandbox.check"
    EXPORTER = "tidemill.services.console.exporter"
    NODE = "tidemill.services.console.up.node"
    """The part of a run on one node of a cluster."""
    FORK_SERVER = "tidemill.common.process.fork_server"
    """Becomes several services that compute with a model."""


SERVES = {
    Program.TRAINER: "tidemill.services.trainer.service",
    Program.ROLLOUT: "tidemill.services.rollout.service",
    Program.REWARD: "tidemill.services.reward.worker",
    Program.REPLICA: "tidemill.services.reward.remote.serving",
    Program.SANDBOX: "tidemill.services.reward.sandbox.worker",
}
"""The module with the `serve` of a service."""

SHARED_IMPORTS = (
    SERVES[Program.TRAINER],
    "tidemill.services.trainer.policy.transformers_policy",
    SERVES[Program.ROLLOUT],
    "tidemill.services.rollout.engines.decoding",
)
"""Modules that the fork server imports: torch, transformers, and our modules that need them."""

RUN_CODE = "tidemill.services.jobs.sandbox.job.run_code"
"""Function name in RQ jobs of the sandbox. A worker compares the name, and never imports it. It stays,
whatever moves: workers of other releases write and expect it."""


class Child(StrEnum):
    """Modules whose `main` runs in a process of its own, mostly for users' code (`children.py`)."""

    SCORING = "tidemill.services.reward.functions.child"
    ENVIRONMENTS = "tidemill.services.rollout.environments.stages"
    AGENTS = "tidemill.services.rollout.environments.agent_host"
    REQUESTS = "tidemill.services.console.serve.request_reader"


VLLM_EXTENSION = "tidemill.services.rollout.engines.vllm_worker.WeightLoader"
"""The class that vLLM loads by name in its own worker processes."""


def run_own(program: Program, *arguments: str) -> list[str]:
    """The command line that runs one of our modules.

    `-P` keeps `python -m NAME` from searching the working directory first, where modules may have any name.
    """
    safe = [] if _is_imported_from_here() else ["-P"]
    return [sys.executable, *safe, "-m", program.value, *arguments]


def import_from_here() -> None:
    """Let the user's modules in the working directory be imported, after all others and our own."""
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)


def _is_imported_from_here() -> bool:
    """Whether this project is imported from the working directory: `python -m tidemill` in a clone."""
    try:
        return sys.path[:1] in ([""], [str(ROOT)]) and Path.cwd() == ROOT
    except OSError:  # the folder has been removed
        return False


@contextmanager
def importing() -> Iterator[None]:
    """Without garbage collection, which takes a fifth of the time of heavy imports, such as torch. Later
    collections skip what was imported."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


T = TypeVar("T")


def run_main(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on an event loop of its own to its end, and return its result.

    `asyncio.run` binds its main task to the handler of Ctrl-C. When it removes that handler, Python's signal
    module makes its `repr`, with the task's whole result: for the records of a run, gigabytes of text. Here
    the main task has no result.
    """
    results: list[T] = []

    async def keep_result() -> None:
        results.append(await work)

    asyncio.run(keep_result())  # noqa: TID251
    (result,) = results
    return result


SHELL_OFFSET = 128
"""A shell whose command ended by a signal exits with this plus the signal's number."""


def ending_in_words(code: int) -> str:
    """Text for an exit code; negative ones are signals, as in `subprocess`: `exit code 3`, `SIGKILL`."""
    if is_illegal_instruction(code):
        return "SIGILL, an illegal instruction"
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def is_illegal_instruction(code: int) -> bool:
    """Whether the process ended on an instruction that the CPU lacks or may not use; a retry is useless."""
    return code in (-signal.SIGILL, SHELL_OFFSET + signal.SIGILL)
