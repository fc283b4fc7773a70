"""`Policy`: what the trainer needs of the model that it trains, whichever library implements it.

A mini-batch is: `accumulate` each micro-batch, then `update` once with their denominator; a step has one
mini-batch or several. Gradients accumulate unnormalised, so micro-batches may arrive one by one, before the
size of the mini-batch is known.

Guarantees of every policy: the same micro-batches in the same order, from the same state, give the same
digest; `zero` undoes every `accumulate` since the last update; a skipped update leaves the weights as they
were. Calls are blocking and not thread-safe: one at a time, from any thread.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, TypeVarTuple

import structlog
import torch
from torch import Tensor

from tidemill.common.process.activity import Activity
from tidemill.common.wire.messages import WeightFile
from tidemill.services.trainer.algorithm.losses.sums import Sums
from tidemill.services.trainer.groups.bins import Layout
from tidemill.services.trainer.groups.columns import SampleColumns
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy.state import PolicyState
from tidemill.services.trainer.policy.usage import Usage
from tidemill.services.trainer.weights.store import WeightState

if TYPE_CHECKING:
    from tidemill.common.process.gpu_sharing import GpuGate, GpuLock
    from tidemill.common.wire.routes import Routing
    from tidemill.services.trainer.algorithm.coefficients import Coefficients


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """`grad_norm` is after division by the denominator and before clipping. A skipped update left the weights
    as they were; `reason` says why.

    Example: `grad_norm` 0.42, `lr` 1e-6; or `grad_norm` 0.0, `skipped`, and `reason` "the update has no token
    to train on".
    """

    grad_norm: float
    lr: float
    skipped: bool = False
    reason: str = ""


class Policy(Protocol):
    """A model under training. Lifecycle: `load_state` at most once, then steps; no close."""

    @property
    def layout(self) -> Layout:
        """How samples of a forward pass lie beside each other."""

    @property
    def bins(self) -> tuple[int, int]:
        """Most tokens of a bin, and bins of a micro-batch; also where `auto` chose them."""

    @property
    def routing(self) -> "Routing | None":
        """The routers that are given the experts which the engine chose, so that samples need their routes;
        None where nothing is replayed."""

    @property
    def processor(self) -> str:
        """Name and digest of what makes pixels of pictures; empty in a run of text."""

    def accumulate(self, batch: MicroBatch) -> Sums:
        """Add the batch's gradient, unnormalised, to what has been accumulated; returns the batch's sums, its
        part of the denominator among them. After an exception the accumulated gradients are undefined: call
        `zero` and start the step again."""

    def update(self, denominator: float) -> UpdateResult:
        """Divide by the denominator, clip, and take one optimizer step; start to accumulate again. Skipped
        where there is nothing to train on (no gradient, or a denominator of 0), and where the gradient norm
        is not finite."""

    def coefficients(self) -> "Coefficients":
        """The coefficients that the next micro-batch is trained with. Called only where some are adaptive."""

    def adapt(self, kl: float, entropy: float, num_samples: float) -> None:
        """Move the adaptive coefficients at the end of a step, by its KL and entropy (means over tokens)."""

    def zero(self) -> None:
        """Discard what has been accumulated."""

    def precompute(self, samples: Sequence[Sample]) -> list[SampleColumns]:
        """Compute what the algorithm needs of samples before they are trained, under the weights at the start
        of the step: those that are held, else the current ones. Rewards and advantages are not read. Samples
        of a group are neighbours; the bits of its numbers do not depend on the other groups."""

    def hold_weights(self) -> None:
        """Keep a copy of the current weights for `precompute`, until `release_weights`."""

    def release_weights(self) -> None:
        """Drop the copy, if there is one."""

    def named_parameters_for_export(self) -> Iterator[tuple[str, Tensor]]:
        """The weights under their Hugging Face names, in the configured dtype; tied ones once."""

    def state(self) -> PolicyState:
        """What a checkpoint needs to continue bit by bit. Accumulated gradients are not part of it."""

    def stage_state(self) -> None:
        """Copy `state()` to host memory, once the copy before is written. Then the policy may change."""

    def begin_saving(self, folder: Path) -> Future[None]:
        """Start to write the staged copy into a folder; it may be called again if the result is a
        StorageError."""

    def load_state(self, folder: Path) -> None:
        """Continue from the state that was saved in a folder; accumulated gradients are discarded.
        Raises ConfigError: the state is of another model or policy."""

    def compare_weights(self) -> WeightState:
        """Digest and size of the current weights, and what has changed since the last call; once a step."""

    def begin_writing(self, folder: Path, version: int, parent: int) -> Future[tuple[WeightFile, ...]]:
        """Start to write what the last comparison found into a folder: in full, or as a delta to `parent`
        where that is not -1. The weights may change meanwhile. The result may be a StorageError."""

    def finish_writing(self) -> None:
        """Wait for what is being written, of weights and of a state."""

    def leave(self) -> None:
        """Between steps: give the device's memory back, until `enter`. Only states are saved meanwhile."""

    def enter(self) -> None:
        """Take the device's memory again; every bit is as it was."""

    def usage(self) -> Usage:
        """FLOPs of the model, and peak memory since the last call; once a step."""

    def profile(self, folder: Path | None) -> None:
        """Profile the calls from here on; with None, write the profile into that folder, one file a rank."""

    def digest(self) -> str:
        """128-bit sum over all weights, as in commits."""


T = TypeVar("T")
Ts = TypeVarTuple("Ts")


log = structlog.get_logger(__name__)

WAIT_DEVICE = ("wait:device", "an engine or a reward model has its turn on the GPU")
ENTER_AGAIN_S = 1.0
ENTER_ATTEMPTS = 60
"""Memory of a process that has died may be freed later than its lock."""


class PolicyThread:
    """Runs the policy's calls one at a time; where GPUs are used in turn, while this process has the GPU.

    The trainer asks for the GPU with the first call of a step, keeps it until the version is being written
    (`hold`, `release`), and leaves it when another process wants it. Between `hold` and `release` it must not
    wait for an engine or a reward model: these cannot work then.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="policy")
        self._gate: GpuGate | None = None
        self._activity: Activity | None = None
        self._is_held = False
        self._leave: Callable[[], None] | None = None
        self.policy: Policy | None = None
        """The policy, which leaves the GPU when another process wants it; None until it is loaded."""

    @asynccontextmanager
    async def taking_turns(self, lock: "GpuLock", activity: Activity) -> AsyncIterator[None]:
        """Within the block calls wait for the GPU."""
        from tidemill.common.process.gpu_sharing import GpuGate

        # `inf`: others wait until the step is over, however long it takes.
        self._gate = GpuGate(lock, self._enter, self._exit, math.inf)
        self._activity = activity
        self._gate.start()
        try:
            yield
        finally:
            await self._gate.close()

    @property
    def takes_turns(self) -> bool:
        """Whether other processes use the GPU too."""
        return self._gate is not None

    async def call(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run one call to its end, also when the caller is cancelled; where GPUs are used in turn, with the
        GPU. Raises GpuSharingError: the policy could not enter the GPU or leave it."""
        if self._gate is None or self._activity is None:
            return await self.call_anywhere(function, *args)
        waiting = nullcontext() if self._gate.is_open else self._activity.during(*WAIT_DEVICE)
        async with AsyncExitStack() as turn:
            with waiting:
                await turn.enter_async_context(self._gate.use())
            if self._is_held and self._leave is None:
                # While this call has the GPU: at no moment can another process take it.
                self._leave = self._gate.stay()
            return await self.call_anywhere(function, *args)

    async def call_anywhere(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Like `call`, for what needs no GPU: saving a state, and closing the policy."""
        return await asyncio.shield(
            asyncio.get_running_loop().run_in_executor(self._executor, function, *args)
        )

    def submit(self, function: Callable[[*Ts], T], *args: *Ts) -> Future[T]:
        """Like `call_anywhere`, for a caller in another thread."""
        return self._executor.submit(function, *args)

    def hold(self) -> None:
        """From the next call on keep the GPU until `release`."""
        self._is_held = True

    def release(self) -> None:
        leave = self._leave
        self._leave = None
        self._is_held = False
        if leave is not None:
            leave()

    async def _enter(self) -> None:
        if self.policy is None:
            return  # it is loaded now
        for attempt in range(ENTER_ATTEMPTS):
            try:
                return await self.call_anywhere(self.policy.enter)
            except torch.OutOfMemoryError as error:
                if attempt == ENTER_ATTEMPTS - 1:
                    raise
                log.warning("waiting for the GPU's memory", reason=str(error).partition(".")[0])
            await asyncio.sleep(ENTER_AGAIN_S)

    async def _exit(self) -> None:
        if self.policy is not None:
            await self.call_anywhere(self.policy.leave)
