"""Mixed into vLLM's workers: new weights reach the model from here, inside the process that computes.

An update has two halves. `tidemill_stage` works on a thread of its own while generation goes on: of a full
version it maps the files, whose pages all ranks of a machine share; of deltas it reads the changes of this
rank's part onto the device, and says how they change the digest of what the engine holds. `tidemill_apply`
writes them while generation is paused, through vLLM's own loader, and reads back what parameters hold now.

Nothing is raised: after a call that failed on one rank alone, vLLM's answers would lag behind by one call.
Every method returns a map instead, with `error` where something went wrong.
"""

import contextlib
import json
import os
import select
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from tidemill.common.files import write_atomically
from tidemill.services.rollout.engines.vllm_launch import OWNER_VARIABLE


def answers(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return what goes wrong as `error`."""

    @wraps(method)
    def answer(*args: Any, **named: Any) -> dict[str, Any]:
        try:
            return {"error": ""} | method(*args, **named)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    return answer


class WeightLoader:
    """Methods that vLLM adds to its worker class; `collective_rpc` calls them on every rank."""

    model_runner: Any
    vllm_config: Any
    rank: int
    _tidemill: Any = None

    @answers
    def tidemill_open(self) -> dict[str, Any]:
        """Follow the model's loader once; `refuse` says why no update could be right, `unread` why what the
        engine holds cannot be read back."""
        from tidemill.services.rollout.engines.vllm_weights import RankWeights

        self._tidemill = RankWeights(self.model_runner.get_model(), self.vllm_config)
        opened: dict[str, Any] = self._tidemill.open()
        return opened

    @answers
    def tidemill_stage(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Start to stage `files` and `deltas`; returns at once. The result is written as JSON into the folder
        `report`, because asking for it by a call would hold up the engine's core."""
        threading.Thread(target=self._tidemill_stage, args=(job,), daemon=True, name="stage").start()
        return {}

    @answers
    def tidemill_apply(self) -> dict[str, Any]:
        """Write what was staged. `wrong`: how many values are not held afterwards; `traced`: whether
        `tidemill_keys` has changed; `no_patch`: why deltas over this version could not be proven."""
        before = self._tidemill.held
        wrong = self._tidemill.apply()
        is_traced = before is not self._tidemill.held
        return {"wrong": wrong, "traced": is_traced, "no_patch": self._tidemill.no_patch}

    @answers
    def tidemill_keys(self) -> dict[str, Any]:
        """Which positions this rank holds, piece by piece."""
        return {"keys": [list(piece.key) for piece in self._tidemill.held]}

    @answers
    def tidemill_disown(self, pieces: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Of each rank the pieces, by place in `tidemill_keys`, that a lower one counts in the digest."""
        self._tidemill.disown(pieces[self.rank])
        return {}

    def _tidemill_stage(self, job: Mapping[str, Any]) -> None:
        stage = answers(lambda: self._tidemill.stage(job["files"], job["deltas"]))
        with contextlib.suppress(OSError):
            write_atomically(Path(job["report"]) / f"{self.rank}.json", json.dumps(stage()))


def _end_with(owner: int) -> None:
    """End this process, and the engine's core above it, when the process `owner` ends.

    vLLM's processes survive a killed parent: they would keep the GPU's memory from the next worker.
    """
    core = os.getppid()
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        poll = select.poll()
        poll.register(os.pidfd_open(owner), select.POLLIN)
        poll.poll()
    if core not in (owner, 1) and os.getppid() == core:
        os.kill(core, signal.SIGKILL)
    os._exit(1)


if OWNER_VARIABLE in os.environ:
    threading.Thread(
        target=_end_with, args=(int(os.environ[OWNER_VARIABLE]),), daemon=True, name="owner"
    ).start()
    from tidemill.services.rollout.engines.vllm_layers import keep_parameters

    keep_parameters()
