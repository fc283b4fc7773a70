"""An engine that shares its device: it generates in its turn, and sleeps while the trainer or a reward model
has the device.

Asleep, its weights wait in the CPU's memory and its KV cache is gone. A request that has begun stands still,
and goes on with the same tokens in the next turn; of an engine that cannot do that, it is finished first.
Requests and weight updates that come later wait for the next turn.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from tidemill.common.errors import EngineError
from tidemill.common.process.gpu_sharing import GpuGate, GpuLock, GpuSharingError, lock_files
from tidemill.services.rollout.engines.engine import Engine, Generation, GenerationRequest, WeightUpdate


class SleepingEngine(Engine, Protocol):
    """An engine that can leave its device and come back with the same weights."""

    stands_still: bool
    """Whether it sleeps with requests running; they go on when it wakes."""

    async def sleep(self) -> None:
        """Give the device's memory back, after an update that is under way."""

    async def wake(self) -> None:
        """Take it again."""


class GpuSharingEngine:
    """`engine`, in its turns on the devices of this process."""

    def __init__(self, engine: SleepingEngine, turn_s: float, stall_s: float) -> None:
        """An engine that takes longer than `stall_s` to sleep or to wake hangs, while others wait."""
        self._engine, self._stall_s = engine, stall_s
        lock, still = GpuLock(lock_files()), engine.stands_still
        self._gate = GpuGate(lock, self._wake, self._sleep, turn_s, stands_still=still)
        self._is_started = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        """The version the engine computes with; -1 before `start`."""
        return self._engine.version

    @property
    def num_running(self) -> int:
        """Requests that are computed; those that wait for a turn are not among them."""
        return self._engine.num_running if self._gate.is_open else 0

    async def start(self) -> None:
        """Load the starting model in the first turn: the other one may have the device's memory now."""
        self._gate.start().add_done_callback(self._ended)
        async with self._turn():
            pass

    async def generate(self, request: GenerationRequest) -> Generation:
        """Generate one completion; raises as the engine does."""
        async with self._turn():
            return await self._engine.generate(request)

    @property
    def can_patch(self) -> bool:
        """Whether it is proven what the engine holds."""
        return self._engine.can_patch

    async def load(
        self, version: int, files: Sequence[Path], deltas: Sequence[Sequence[Path]] = (), digest: str = ""
    ) -> WeightUpdate:
        """Replace weights; raises as the engine does."""
        async with self._turn():
            return await self._engine.load(version, files, deltas, digest)

    async def score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[float]:
        async with self._turn():
            return await self._engine.score(prompt_ids, completion_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._engine.decode(token_ids)

    async def close(self) -> None:
        """Stop the engine, then give the device back."""
        await self._engine.close()
        await self._gate.close()

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """The gate, with its end as an error that restarts the worker."""
        try:
            async with self._gate.use():
                yield
        except GpuSharingError as error:
            raise EngineError(str(error)) from error

    async def _wake(self) -> None:
        if self._is_started:
            async with asyncio.timeout(self._stall_s):
                await self._engine.wake()
        else:
            await self._engine.start()
            self._is_started = True

    async def _sleep(self) -> None:
        async with asyncio.timeout(self._stall_s):
            await self._engine.sleep()

    def _ended(self, keeper: "asyncio.Task[None]") -> None:
        """What stands still would do so for ever: it fails, and the worker is started anew."""
        if not keeper.cancelled():
            self._closing = asyncio.create_task(self._engine.close())
