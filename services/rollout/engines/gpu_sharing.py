"""An engine that shares its GPUs: it generates while it holds their lock, and sleeps while the trainer or a
reward model has them.

Asleep, its weights wait in the CPU's memory and its KV cache is gone. A request that has begun stands still,
and goes on with the same tokens when the engine wakes; where an engine cannot do that, it is finished first.
Requests and weight updates that come later wait until then.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tidemill.common.errors import EngineError
from tidemill.common.process.gpu_sharing import GpuGate, GpuLock, GpuSharingError, lock_files
from tidemill.common.run.special_tokens import Reading
from tidemill.services.rollout.engines.engine import (
    Engine,
    EngineReport,
    Generation,
    GenerationRequest,
    WeightUpdate,
)


class GpuSharingEngine(Engine):
    """`engine`, while this process holds the lock of its GPUs."""

    def __init__(self, engine: Engine, turn_s: float, stall_s: float) -> None:
        """An engine that takes longer than `stall_s` to sleep or to wake fails: others wait for the GPU."""
        self._engine = engine
        self.is_reporting = engine.is_reporting
        if engine.is_reporting:
            engine.on_report = self._report
        self._stall_s = stall_s
        lock = GpuLock(lock_files())
        still = engine.stands_still
        self._gate = GpuGate(lock, self.wake, self.sleep, turn_s, stands_still=still)
        self._is_started = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def num_running(self) -> int:
        """Requests that are computed; those that wait for the GPU are not among them."""
        return self._engine.num_running if self._gate.is_open else 0

    @property
    def can_patch(self) -> bool:
        return self._engine.can_patch

    async def start(self) -> None:
        """Load the starting model once the GPU is free: the trainer may have its memory now."""
        self._gate.start().add_done_callback(self._ended)
        # The gate starts the engine when it first opens (`wake`): this waits for that.
        async with self._on_gpu():
            pass

    async def generate(self, request: GenerationRequest) -> Generation:
        async with self._on_gpu():
            return await self._engine.generate(request)

    async def load(
        self, version: int, files: Sequence[Path], deltas: Sequence[Sequence[Path]] = (), digest: str = ""
    ) -> WeightUpdate:
        async with self._on_gpu():
            return await self._engine.load(version, files, deltas, digest)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._engine.decode(token_ids)

    def read(
        self, token_ids: Sequence[int], mask: Sequence[bool] | None = None, prompt_ids: Sequence[int] = ()
    ) -> Reading:
        return self._engine.read(token_ids, mask, prompt_ids)

    async def sleep(self) -> None:
        """Called only by the gate, like `wake`."""
        async with asyncio.timeout(self._stall_s):
            await self._engine.sleep()
        self.num_sleeps += 1

    async def wake(self) -> None:
        """Start the engine the first time that the GPU is free."""
        if self._is_started:
            async with asyncio.timeout(self._stall_s):
                await self._engine.wake()
        else:
            # Without the limit: a first start reads the model and may compile for minutes.
            await self._engine.start()
            self._is_started = True

    async def close(self) -> None:
        # The engine first: the next process on the GPU needs its memory.
        await self._engine.close()
        await self._gate.close()

    @asynccontextmanager
    async def _on_gpu(self) -> AsyncIterator[None]:
        """Wait for the gate. If the gate has failed, the error is one that restarts the worker."""
        try:
            async with self._gate.use():
                yield
        except GpuSharingError as error:
            raise EngineError(str(error)) from error

    def _report(self, report: EngineReport) -> None:
        if self.on_report is not None:
            self.on_report(report)

    def _ended(self, keeper: "asyncio.Task[None]") -> None:
        """The gate has failed: requests that stand still would wait for ever, so the engine is closed."""
        if not keeper.cancelled():
            # Kept, for the event loop alone would not keep the task from the garbage collector.
            self._closing = asyncio.create_task(self._engine.close())
