"""The reward of code: whether it passes its tests, or which share of them; sandbox workers run them."""

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import structlog
from pydantic import (
    BaseModel,
    ConfigDict,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
)
from redis import exceptions as redis_errors
from rq import Queue, Retry
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from tidemill.common.config import NamedRewardConfig
from tidemill.common.config.reward_kinds import TEST_COLUMNS
from tidemill.common.process.programs import RUN_CODE
from tidemill.common.process.shortage import fault_in
from tidemill.common.redis.blocking_client import make_blocking_client
from tidemill.common.redis.broker import redis_url
from tidemill.common.telemetry import metrics
from tidemill.common.threads import BoundedThreads
from tidemill.common.wire.codec import pack
from tidemill.services.reward.answer_tag import answer_tag
from tidemill.services.reward.outcome import AttemptError, Reward, RewardOutcome, truth_error
from tidemill.services.reward.remote.dependencies import RewardDependencies
from tidemill.services.reward.sample import RewardSample

log = structlog.get_logger(__name__)

POLL_SHARE = 0.1
"""Pause between two looks for a result, as a share of the time waited so far."""
POLL_S = 0.03
"""Shortest pause."""
LONGEST_POLL_S = 1.0
EXAMINE_S = 2.0
LOST_S = 10.0
"""A job whose worker has not written for this long counts as lost; a busy worker writes every 2 s."""
JOB_MARGIN_S = 30
"""Time that a job may take beyond the code's own limit before RQ kills it."""
QUEUE_S = 300.0
"""How long a completion may wait for a free worker."""
FAILURE_TTL_S = 3600
RQ_RETRIES = 2
NUM_THREADS = 8
"""Calls of the queue at once."""
GONE = "gone"
OVER = (GONE, JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED)
"""States of a job that no worker will finish."""
FENCE = re.compile(
    r"(?:^(?P<before>[ \t>]*+(?:(?:[-*+]|\d{1,3}[.)])[ \t]++)?+)(?P<first>`{3,}+|~{3,}+)"
    r"|(?<!`)(?P<later>`{3,}+))"
    r"(?P<info>[^\n`]*+)(?P<end>\n|\Z)",
    re.MULTILINE,
)
"""Three or more backticks, or tildes, and the rest of their line; `first` on it, maybe in a list or
quotation."""
LANGUAGE = re.compile(r"[\w+-]+")
ONLY_LANGUAGE = re.compile(r"[\w+-]*+\s*+")
PYTHON = ("python", "python3", "py")


class _Failed(BaseModel):
    error: str
    is_final: bool


class _Ran(BaseModel):
    model_config = ConfigDict(extra="allow")

    passed: NonNegativeInt
    total: PositiveInt
    outcomes: list[str]
    wall_s: FiniteFloat
    first_failure: dict[str, Any] | None


RESULT: TypeAdapter[_Failed | _Ran] = TypeAdapter(_Failed | _Ran)
UNREADABLE = {"error": "a sandbox worker wrote a result that cannot be read", "is_final": False}


def _read(raw: bytes) -> dict[str, Any]:
    """A sandbox worker's result, validated: untrusted code runs on its machine."""
    try:
        result = RESULT.validate_json(raw)
        pack(result.model_dump())  # it goes into a score
    except (ValueError, OverflowError):  # a ValidationError is a ValueError
        return UNREADABLE
    if isinstance(result, _Ran) and result.passed > result.total:
        return UNREADABLE
    return result.model_dump()


class SandboxReward(Reward):
    def __init__(self, _: str, config: NamedRewardConfig, dependencies: RewardDependencies) -> None:
        assert config.sandbox is not None
        self.config = config.sandbox
        self._broker = dependencies.broker
        self._keys = dependencies.keys
        connection = make_blocking_client(redis_url(), self._keys.run_id)
        self._queue = Queue(self._keys.sandbox_queue, connection=connection, serializer=JSONSerializer)
        self._threads = BoundedThreads("sandbox queue", NUM_THREADS)
        self._jobs: dict[str, asyncio.Task[dict[str, Any]]] = {}
        """Job id -> task that waits for its result; samples with the same code and tests share it."""

    async def score(self, sample: RewardSample) -> RewardOutcome:
        """Run the completion's code against the tests in its ground truth."""
        code = extract_code(sample.trajectory.text)
        if not code.strip():
            metrics.SANDBOX_JOBS.labels("no_code").inc()
            return RewardOutcome(0.0, {"passed": 0.0}, {"sandbox": "the completion has no code"})
        with metrics.SANDBOX_SECONDS.time():
            result = await self.run(code, sample.trajectory.ground_truth, sample.trajectory.extra)
        share = result["passed"] / result["total"]
        outcome = next((name for name in result["outcomes"] if name != "done"), "done")
        metrics.SANDBOX_JOBS.labels(outcome).inc()
        value = share if self.config.score == "fraction" else float(share == 1.0)
        detail = {"outcomes": result["outcomes"], "first_failure": result["first_failure"]}
        return RewardOutcome(value, {"passed": share, "wall_s": result["wall_s"]}, {"sandbox": detail})

    async def run(self, code: str, tests: Any, row: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The result of the code's tests, see `run_tests` in `services/reward/sandbox/job.py`; `row` are
        further columns, some of which say how the tests are meant.

        Raises:
            AttemptError: no worker took it in time, its workers died, or the sandbox failed.
        """
        limits = self.config.model_dump(mode="json")
        columns = {name: row[name] for name in TEST_COLUMNS if row and row.get(name)}
        text = json.dumps([self._keys.run_id, code, tests, limits, columns], sort_keys=True, default=str)
        digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
        # Named by what is run: a restarted worker finds the job of its predecessor.
        job_id = self._keys.sandbox_names + digest
        job = self._jobs.get(job_id)
        if job is None:
            work = self._awaited(job_id, (self._keys.run_id, job_id, code, tests, limits, columns))
            job = asyncio.create_task(work, name=job_id)
            self._jobs[job_id] = job
            job.add_done_callback(partial(self._forget, job_id))
        result = await asyncio.shield(job)
        if "error" in result:
            # Deleted, or the next attempt would find this failure instead of running anything.
            await self._broker.execute("DEL", self._keys.sandbox_result(job_id))
            if result["is_final"]:
                raise truth_error(result["error"], kind="sandbox")
            raise AttemptError(result["error"], kind="sandbox")
        return result

    def _forget(self, job_id: str, job: asyncio.Task[dict[str, Any]]) -> None:
        del self._jobs[job_id]
        if not job.cancelled():
            job.exception()  # or asyncio logs it where every caller was cancelled

    async def close(self) -> None:
        """Stop waiting; queued jobs go on."""
        jobs = list(self._jobs.values())
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        await self._threads.run(self._queue.connection.close)

    async def _awaited(self, job_id: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
        """The result of a job; one that is lost with its worker is queued again."""
        limit_s = QUEUE_S + self.config.total_s + JOB_MARGIN_S
        started = time.monotonic()
        examined = started
        since = started
        state = ""
        is_queued = False
        while (now := time.monotonic()) < started + limit_s:
            # Looked for before it is queued: another worker may have asked, or this one before it was killed.
            result = await self._stored(job_id)
            if result is not None:
                return result
            if not is_queued:
                await self._rq(self._enqueue, job_id, arguments)
                state = ""
                since = now
                is_queued = True
            if now - examined > EXAMINE_S:
                examined = now
                seen = await self._rq(self._state_of, job_id)
                if seen != state:
                    state = seen
                    since = now
                is_silent = now - since > LOST_S and state != JobStatus.QUEUED
                if is_silent or state in OVER:  # it is looked for once more before it is queued again
                    log.warning("a sandboxed run was lost with its worker; asking again", job=job_id)
                    is_queued = False
            await asyncio.sleep(min(max(POLL_S, POLL_SHARE * (now - started)), LONGEST_POLL_S))
        raise AttemptError(
            f"no sandbox worker had a result within {limit_s:g} s; are there any (sandbox.workers), and "
            "enough of them?",
            is_timeout=True,
        )

    async def _stored(self, job_id: str) -> dict[str, Any] | None:
        raw = await self._broker.execute("GET", self._keys.sandbox_result(job_id))
        return _read(raw) if raw is not None else None

    async def _rq(self, call: Any, *arguments: Any) -> Any:
        """Run one blocking call of RQ on a thread."""
        try:
            return await self._threads.run(call, *arguments)
        except redis_errors.RedisError as error:
            fault = fault_in(error, "the sandbox queue cannot be reached")
            if fault is not None:
                raise fault from error
            raise AttemptError(f"the sandbox queue cannot be reached: {error}", kind="sandbox") from None

    def _enqueue(self, job_id: str, arguments: tuple[Any, ...]) -> None:
        self._queue.enqueue_call(
            RUN_CODE,
            args=arguments,
            job_id=job_id,
            timeout=int(self.config.total_s) + JOB_MARGIN_S,
            # The job itself has written its result; RQ need not keep one.
            result_ttl=0,
            failure_ttl=FAILURE_TTL_S,
            retry=Retry(max=RQ_RETRIES),
        )

    def _state_of(self, job_id: str) -> str:
        """The job's status, and while it runs the last heartbeat of its worker. Nothing else of the job is
        read, because sandbox workers may write it."""
        key = Job.key_for(job_id)
        connection = self._queue.connection
        status: Any = connection.hget(key, "status")
        if status is None:
            return GONE
        beat = connection.hget(key, "last_heartbeat")
        state = str(status.decode(errors="replace"))
        return f"{state}:{beat!r}" if state == JobStatus.STARTED else state


def extract_code(text: str) -> str:
    """The last block fenced as Python, else the last fenced block, else what the last `<answer>` holds, else
    the whole text."""
    blocks = list(_blocks(text))
    marked = [body for language, body in blocks if language.lower() in PYTHON]
    if marked:
        return marked[-1]
    return blocks[-1][1] if blocks else answer_tag(text)


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language and body of each fenced block; the last one may lack its end.

    A block ends at a fence that ends its line; one with a language begins another block. Other backticks
    belong to the code.
    """
    opened: re.Match[str] | None = None
    for fence in FENCE.finditer(text):
        has_info = bool(fence["info"].strip())
        if opened is None or (has_info and _can_open(fence) and not _is_inside(fence, opened)):
            if opened is not None:
                yield _block(text, opened, _end_without_fence(text, opened, fence.start()))
            opened = fence if fence["end"] and _can_open(fence) else None
        elif not has_info and not _is_inside(fence, opened):
            yield _block(text, opened, fence.start("first") if fence["first"] else fence.start("later"))
            opened = None
    if opened is not None:
        yield _block(text, opened, _end_without_fence(text, opened, len(text)))


def _end_without_fence(text: str, opened: re.Match[str], limit: int) -> int:
    """Where a block ends that no fence at the end of a line ends: at any such marks, or at the limit."""
    end = text.find(opened["first"] or opened["later"], opened.end(), limit)
    return limit if end < 0 else end


def _can_open(fence: re.Match[str]) -> bool:
    return bool(fence["first"]) or ONLY_LANGUAGE.fullmatch(fence["info"]) is not None


def _is_inside(fence: re.Match[str], opened: re.Match[str]) -> bool:
    """Whether it belongs to the code of a block that longer, or other, marks have opened."""
    marks = fence["first"] or fence["later"]
    opening = opened["first"] or opened["later"]
    return marks[0] != opening[0] or len(marks) < len(opening)


def _block(text: str, opened: re.Match[str], end: int) -> tuple[str, str]:
    language = LANGUAGE.search(opened["info"])
    body = text[opened.end() : end]
    if opened["before"]:  # in a list or quotation, whose lines begin so too
        body = re.sub(rf"^[ \t>]{{1,{len(opened['before'])}}}", "", body, flags=re.MULTILINE)
    return language[0] if language else "", body
