"""Has a run's streams archived by a worker of the jobs service, without the trainer waiting for it.

Guarantees: one request is under way at a time, and the newest wishes follow it. A request that no worker
takes, or that fails, is done by a process of the trainer's own: a run without an archiver is as safe.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

import structlog
from redis.exceptions import RedisError

from tidemill.common.errors import BrokerError
from tidemill.common.process.programs import JobFunction, Program, run_own
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.store import NAMES_A_CLAIM
from tidemill.common.streams import Entry, ReadSize, decoded, memory_bytes, read_raw
from tidemill.common.streams.selection import StreamName
from tidemill.common.wire.codec import PAYLOAD_FIELD
from tidemill.common.wire.messages import Claim, Trajectory

if TYPE_CHECKING:
    from rq.job import Job

log = structlog.get_logger(__name__)

MIB = 1 << 20
READ_COUNT = 256
POLL_S = 1.0
PATIENCE_S = 120.0
"""How long a request may wait for a worker that is busy, or away."""
URGENT_PATIENCE_S = 3.0
"""The same, while memory runs low."""
LOST_S = 30.0
"""A live worker reports every few seconds; one that has not for this long is dead."""
JOB_TIMEOUT_S = 3600
NO_WORKER = (
    "no worker archives this run, so the trainer has it done in a process of its own; start one with "
    "`python -m tidemill.services.jobs {}` where the folder of runs is, or set streams.archive.enabled: false"
)


class ArchiveJobs:
    """Asks for archiving; `on_progress` is called while and after it is done."""

    def __init__(self, context: ServiceContext, on_progress: Callable[[], Awaitable[object]]) -> None:
        self.context, self.on_progress = context, on_progress
        self._until: dict[str, str] = {}
        self._is_urgent = False
        self._task: asyncio.Task[None] | None = None
        self._has_complained = False

    async def ask(self, until: Mapping[StreamName, str], is_urgent: bool) -> None:
        """Have these streams archived up to these ids, once that fills a file; at once if it is urgent."""
        if not is_urgent and not await self._may_fill_a_segment(until):
            return
        self._until = {str(stream): entry_id for stream, entry_id in until.items()}
        # Not assigned: an urgent wish that still waits for its turn stays urgent.
        self._is_urgent |= is_urgent
        if self._task is None or self._task.done():
            self._task = self.context.start(self._work(), "archive")

    async def close(self) -> None:
        """Wait for nothing any more; what was handed over goes on, and where the run is over, so does what
        still waits for its turn: no trainer comes that would ask for it again."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._until and not self._has_complained and not self.context.stopping.is_set():
            with contextlib.suppress(OSError, BrokerError, RedisError):
                await asyncio.to_thread(self._enqueue, self._until, self._is_urgent)

    async def _may_fill_a_segment(self, until: Mapping[StreamName, str]) -> bool:
        """Whether some stream is large enough, by Redis's own estimate, or with the payloads beside it."""
        streams = self.context.config.streams
        wanted = streams.archive.segment_mb * MIB
        broker, keys = self.context.broker, self.context.keys
        try:
            sizes = [await memory_bytes(broker, stream.key(keys)) for stream in until]
        except BrokerError:
            return True  # this user may not ask; the archiver looks for itself
        may_claim = streams.claim_check_bytes > 0 and StreamName.TRAJECTORIES in until
        if max(sizes, default=0) < wanted and may_claim:  # all entries are read for it
            last, key = until[StreamName.TRAJECTORIES], keys.trajectories()
            sizes.append(sum([claim.num_bytes async for claim in claims_in(broker, key, last)]))
        return max(sizes, default=0) >= wanted

    async def _work(self) -> None:
        while self._until:
            # Taken before the work: wishes that come meanwhile are for the next round.
            until, self._until = self._until, {}
            is_urgent, self._is_urgent = self._is_urgent, False
            if not await self._through_a_worker(until, is_urgent):
                await self._by_ourselves(until, is_urgent)
            await self.on_progress()

    async def _through_a_worker(self, until: Mapping[str, str], is_urgent: bool) -> bool:
        """Returns whether a worker did it. Redis is asked on a thread, and an error of it means no."""
        from rq.exceptions import NoSuchJobError
        from rq.job import JobStatus

        try:
            try:
                job = await asyncio.to_thread(self._enqueue, until, is_urgent)
            except asyncio.CancelledError:  # perhaps before it was enqueued; twice does no harm
                self._until = {**until, **self._until}
                raise
            last_seen: object = None
            changed_at = time.monotonic()
            while True:
                await asyncio.sleep(POLL_S)
                # While it is under way: what is archived by now frees memory that writers may be waiting for.
                await self.on_progress()
                await asyncio.to_thread(job.refresh)
                status = job.get_status(refresh=False)
                if status not in (JobStatus.QUEUED, JobStatus.STARTED):
                    return status == JobStatus.FINISHED
                if (seen := (status, job.last_heartbeat)) != last_seen:
                    last_seen, changed_at = seen, time.monotonic()
                is_started = status == JobStatus.STARTED
                patience_s = URGENT_PATIENCE_S if is_urgent or self._is_urgent else PATIENCE_S
                if time.monotonic() - changed_at > (LOST_S if is_started else patience_s):
                    if not is_started:  # it must not be done later for nothing
                        await asyncio.to_thread(job.delete)
                    return False
        except NoSuchJobError:
            return False
        except (OSError, BrokerError, RedisError) as error:
            log.warning("archiving cannot be asked for", error=str(error))
            return False

    def _enqueue(self, until: Mapping[str, str], is_urgent: bool) -> "Job":
        from rq import Queue
        from rq.serializers import JSONSerializer

        from tidemill.common.redis.broker import redis_url
        from tidemill.common.redis.client import make_blocking_client

        keys = self.context.keys
        queue = Queue(
            keys.jobs_queue,
            connection=make_blocking_client(redis_url(), keys.run_id),
            # Not rq's own, which is pickle: whoever may write to Redis could run code in a worker.
            serializer=JSONSerializer,
        )
        return queue.enqueue_call(
            JobFunction.ARCHIVE,
            args=(keys.run_id, str(self.context.run_dir), until, is_urgent),
            job_id=keys.jobs_names + secrets.token_hex(8),
            timeout=JOB_TIMEOUT_S,
            result_ttl=600,
            failure_ttl=24 * 3600,
        )

    async def _by_ourselves(self, until: Mapping[str, str], is_urgent: bool) -> None:
        """Archive in a child process, which ends with this one."""
        if not self._has_complained:
            self._has_complained = True
            log.warning(NO_WORKER.format(self.context.keys.run_id))
        command = run_own(Program.ARCHIVE, self.context.keys.run_id, str(self.context.run_dir))
        command += [part for item in until.items() for part in ("--until", "=".join(item))]
        command += ["--rest"] if is_urgent else []
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
        )
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    code = await asyncio.wait_for(asyncio.shield(process.wait()), POLL_S)
                    break
                await self.on_progress()
        finally:
            # Cancelled: the child would go on beside the trainer that comes next.
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):  # it has just ended, and nobody was told yet
                    os.kill(process.pid, signal.SIGTERM)
        if code != 0:
            log.error("archiving failed; nothing is lost, and Redis keeps what is not archived", code=code)


async def claims_in(broker: Broker, key: str, last: str = "+") -> AsyncIterator[Claim]:
    """The claims of a stream's entries up to an id. Other entries are not decoded: they may be many."""
    first, size = "-", ReadSize(broker.max_bytes)
    while entries := await read_raw(broker, key, first, last, size.limit(READ_COUNT)):
        size.saw(fields.values() for _, fields in entries)
        for entry_id, fields in entries:
            if NAMES_A_CLAIM in fields.get(PAYLOAD_FIELD, b""):
                record = decoded(entry_id.encode(), fields, Trajectory)
                if isinstance(record, Entry):
                    for claim in record.message.claims:
                        yield claim
        first = f"({entries[-1][0]}"
