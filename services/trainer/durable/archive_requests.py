"""Has a run's streams archived by a process beside the trainer, which does not wait for it.

Guarantees: one such process runs at a time, and the newest request is next. What it fails to do is requested
again at the next checkpoint.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import structlog

from tidemill.common.errors import BrokerError
from tidemill.common.process.programs import Program, run_own
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Entry, ReadSize, decoded, memory_bytes, read_raw
from tidemill.common.wire.codec import PAYLOAD_FIELD
from tidemill.common.wire.keys import StreamName
from tidemill.common.wire.messages import NAMES_A_CLAIM, Claim, Trajectory

log = structlog.get_logger(__name__)

MIB = 1 << 20
READ_COUNT = 256
POLL_S = 1.0


class ArchiveRequests:
    """Requests archiving; `on_progress` is called during and after it."""

    def __init__(self, context: ServiceContext, on_progress: Callable[[], Awaitable[object]]) -> None:
        self.context = context
        self.on_progress = on_progress
        self._until: dict[str, str] = {}
        self._is_urgent = False
        self._task: asyncio.Task[None] | None = None

    async def ask(self, until: Mapping[StreamName, str], is_urgent: bool) -> None:
        """Have these streams archived up to these ids, once that fills a file; at once if it is urgent."""
        if not is_urgent and not await self._may_fill_a_segment(until):
            return
        self._until = {str(stream): entry_id for stream, entry_id in until.items()}
        # Not assigned: an urgent request that still waits stays urgent.
        self._is_urgent |= is_urgent
        if self._task is None or self._task.done():
            self._task = self.context.start(self._work(), "archive")

    async def close(self) -> None:
        """At the end of a run, wait for what was requested: no later trainer would request it. A trainer that
        is stopped ends the process, and the next one requests it."""
        if self._task is None:
            return
        if not self._task.done() and not self.context.stopping.is_set():
            log.info("waiting until what the run has left is archived")
        stopped = asyncio.create_task(self.context.stopping.wait())
        await asyncio.wait((self._task, stopped), return_when=asyncio.FIRST_COMPLETED)
        for task in (self._task, stopped):
            task.cancel()
        await asyncio.gather(self._task, stopped, return_exceptions=True)

    async def _may_fill_a_segment(self, until: Mapping[StreamName, str]) -> bool:
        """Whether some stream is large enough, by Redis's own estimate, or with the payloads beside it."""
        streams = self.context.config.streams
        wanted = streams.archive.segment_mb * MIB
        broker = self.context.broker
        keys = self.context.keys
        try:
            sizes = [await memory_bytes(broker, stream.key(keys)) for stream in until]
        except BrokerError:
            return True  # this user may not ask Redis; the archiver decides by itself
        may_claim = streams.claim_check_bytes > 0 and StreamName.TRAJECTORIES in until
        if max(sizes, default=0) < wanted and may_claim:  # last, because it reads all entries
            last = until[StreamName.TRAJECTORIES]
            key = keys.trajectories()
            sizes.append(sum([claim.num_bytes async for claim in claims_in(broker, key, last)]))
        return max(sizes, default=0) >= wanted

    async def _work(self) -> None:
        while self._until:
            # Taken before the work: requests that come meanwhile are for the next round.
            until = self._until
            self._until = {}
            is_urgent = self._is_urgent
            self._is_urgent = False
            await self._archive(until, is_urgent)
            await self.on_progress()

    async def _archive(self, until: Mapping[str, str], is_urgent: bool) -> None:
        command = run_own(Program.ARCHIVE, self.context.keys.run_id, str(self.context.run_dir))
        for stream, last_id in until.items():
            command += ["--until", f"{stream}={last_id}"]
        command += ["--rest"] if is_urgent else []
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
        )
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        code = await asyncio.shield(process.wait())
                    break
                await self.on_progress()
        finally:
            # When cancelled: else the child would go on beside the next trainer.
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):  # it has just ended, and asyncio does not know
                    os.kill(process.pid, signal.SIGTERM)
        if code != 0:
            log.error("archiving failed; nothing is lost, and Redis keeps what is not archived", code=code)


async def claims_in(broker: Broker, key: str, last: str = "+") -> AsyncIterator[Claim]:
    """The claims of a stream's entries up to an id. Entries without one are not decoded: they may be many."""
    first = "-"
    size = ReadSize(broker.max_bytes)
    while entries := await read_raw(broker, key, first, last, size.limit(READ_COUNT)):
        size.saw(fields.values() for _, fields in entries)
        for entry_id, fields in entries:
            if NAMES_A_CLAIM in fields.get(PAYLOAD_FIELD, b""):
                record = decoded(entry_id.encode(), fields, Trajectory)
                if isinstance(record, Entry):
                    for claim in record.message.claims:
                        yield claim
        first = f"({entries[-1][0]}"
