"""An engine that shares its device: it generates in its turn, and sleeps while a reward model has the device.

Asleep, its weights wait in the CPU's memory and its KV cache is gone. A request that has begun is finished
before the device is handed over; requests and weight updates that come later wait for the next turn.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from tidemill.common.errors import EngineError
from tidemill.common.process.gpu_sharing import GpuGate, GpuLock, GpuSharingError, lock_files
from tidemill.services.rollout.engines.engine import Engine, Generation, GenerationRequest, WeightUpdate


class SleepingEngine(Engine, Protocol):
    """An engine that can leave its device and come back with the same weights."""

    async def sleep(self) -> None:
        """Give the device's memory back. No request is running."""

    async def wake(self) -> None:
        """Take it again."""


class GpuSharingEngine:
    """`engine`, in its turns on the devices of this process."""

    def __init__(self, engine: SleepingEngine, turn_s: float) -> None:
        self._engine = engine
        self._gate = GpuGate(GpuLock(lock_files()), self._wake, engine.sleep, turn_s)
        self._is_started = False

    @property
    def version(self) -> int:
        """The version the engine computes with; -1 before `start`."""
        return self._engine.version

    @property
    def num_running(self) -> int:
        """Requests that are computed; those that wait for a turn are not among them."""
        return self._engine.num_running

    async def start(self) -> None:
        """Load the starting model in the first turn: the other one may have the device's memory now."""
        self._gate.start()
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
        """Logprobs of a completion."""
        async with self._turn():
            return await self._engine.score(prompt_ids, completion_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion."""
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
            await self._engine.wake()
        else:
            await self._engine.start()
            self._is_started = True
