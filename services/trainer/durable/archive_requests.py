"""Has a run's streams archived by whoever works for it, without the trainer waiting for it.

Guarantees: one request is under way at a time, and the newest wishes follow it. A request that no worker
takes, or that fails, is done by a process of the trainer's own: a run without an archiver is as safe.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import structlog
from redis.exceptions import RedisError

from tidemill.common.errors import BrokerError
from tidemill.common.process.programs import JobFunction, Program, run_own
from tidemill.common.process.service import ServiceContext
from tidemill.common.streams import memory_bytes
from tidemill.common.streams.selection import StreamName
from tidemill.services.trainer.durable.claim_files import claims_in

if TYPE_CHECKING:
    from rq.job import Job

log = structlog.get_logger(__name__)

MIB = 1 << 20
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
DONE, LOST, WAITING, WORKING = "done", "lost", "waiting", "working"
_STATES = {
    "finished": DONE,
    "queued": WAITING,
    "deferred": WAITING,
    "scheduled": WAITING,
    "created": WAITING,
    "started": WORKING,
}


class ArchiveJobs:
    """Asks for archiving; `on_progress` is called while and after it is done."""

    def __init__(self, context: ServiceContext, on_progress: Callable[[], Awaitable[object]]) -> None:
        self.context, self.on_progress = context, on_progress
        self._until: Mapping[StreamName, str] = {}
        self._is_urgent = False
        self._task: asyncio.Task[None] | None = None
        self._has_complained = False

    async def ask(self, until: Mapping[StreamName, str], is_urgent: bool) -> None:
        """Have these streams archived up to these ids, once that fills a file; at once if it is urgent."""
        if not is_urgent and not await self._may_fill_a_segment(until):
            return
        self._until, self._is_urgent = until, self._is_urgent or is_urgent
        if self._task is None or self._task.done():
            self._task = self.context.start(self._work(), "archive")

    async def close(self) -> None:
        """Wait for nothing any more; what was handed over goes on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

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
            until, self._until = self._until, {}
            is_urgent, self._is_urgent = self._is_urgent, False
            if not await self._through_a_worker(until, is_urgent):
                await self._by_ourselves(until, is_urgent)
            await self.on_progress()

    async def _through_a_worker(self, until: Mapping[StreamName, str], is_urgent: bool) -> bool:
        """Whether a worker did it. Redis is asked on a thread, and an error of it means no."""
        try:
            job = await asyncio.to_thread(self._enqueue, until, is_urgent)
            since = spoke_at = time.monotonic()
            last_seen = ("", "")
            while True:
                await asyncio.sleep(POLL_S)
                await self.on_progress()
                seen = await asyncio.to_thread(_state, job)
                if seen != last_seen:
                    last_seen, spoke_at = seen, time.monotonic()
                state, _ = seen
                if state in (DONE, LOST):
                    return state == DONE
                if state == WORKING and time.monotonic() - spoke_at > LOST_S:
                    return False
                patience_s = URGENT_PATIENCE_S if is_urgent or self._is_urgent else PATIENCE_S
                if state == WAITING and time.monotonic() - since > patience_s:
                    await asyncio.to_thread(_withdraw, job)
                    return False
        except (OSError, BrokerError, RedisError) as error:
            log.warning("archiving cannot be asked for", error=str(error))
            return False

    def _enqueue(self, until: Mapping[StreamName, str], is_urgent: bool) -> "Job":
        from rq import Queue
        from rq.serializers import JSONSerializer

        from tidemill.common.redis.broker import redis_url
        from tidemill.common.redis.client import make_blocking_client

        keys = self.context.keys
        queue = Queue(
            keys.jobs_queue,
            connection=make_blocking_client(redis_url(), keys.run_id),
            serializer=JSONSerializer,
        )
        arguments = (keys.run_id, str(self.context.run_dir), _plain(until), is_urgent)
        return queue.enqueue_call(
            JobFunction.ARCHIVE,
            args=arguments,
            job_id=keys.jobs_names + secrets.token_hex(8),
            timeout=JOB_TIMEOUT_S,
            result_ttl=600,
            failure_ttl=24 * 3600,
        )

    async def _by_ourselves(self, until: Mapping[StreamName, str], is_urgent: bool) -> None:
        """Archive in a child process, which ends with this one."""
        if not self._has_complained:
            self._has_complained = True
            log.warning(NO_WORKER.format(self.context.keys.run_id))
        command = run_own(Program.ARCHIVE, self.context.keys.run_id, str(self.context.run_dir))
        command += [part for item in _plain(until).items() for part in ("--until", "=".join(item))]
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
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
        if code != 0:
            log.error("archiving failed; nothing is lost, and Redis keeps what is not archived", code=code)


def _state(job: "Job") -> tuple[str, str]:
    """What became of a job, and the last sign of life of who works on it."""
    from rq.exceptions import NoSuchJobError

    try:
        job.refresh()  # type: ignore[no-untyped-call]
    except NoSuchJobError:
        return LOST, ""
    status: Any = job.get_status(refresh=False)
    return _STATES.get(str(getattr(status, "value", status)), LOST), str(job.last_heartbeat)


def _withdraw(job: "Job") -> None:
    """Take the job back, so that it is not done later for nothing."""
    from rq.exceptions import NoSuchJobError

    with contextlib.suppress(NoSuchJobError):
        job.delete()


def _plain(until: Mapping[StreamName, str]) -> dict[str, str]:
    return {str(stream): entry_id for stream, entry_id in until.items()}
