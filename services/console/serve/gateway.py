"""Appends the samples of another trainer to the stream of trajectories, and returns their scores to it.

Guarantees: every sample gets a score with a status, also where its trajectory is dead-lettered; a failure has
no value but the one that the config gives. A sample that Redis loses is appended again under its own key,
and the first score of a key counts. Redis holds what is in flight and what is not archived yet.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog
from pydantic import BaseModel, Field

from tidemill.common.archive import stream_folder
from tidemill.common.archive.manifest import Manifest
from tidemill.common.process.json_api import BusyError, TooLargeError
from tidemill.common.process.programs import Program, run_own
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import (
    OffsetReader,
    append_encoded,
    id_after,
    id_before,
    id_order,
    last_id,
    newest_begin,
    trim_before,
)
from tidemill.common.streams.departed import DepartedProcesses
from tidemill.common.streams.entries import START, Entry
from tidemill.common.streams.group_results import delete_results
from tidemill.common.wire.keys import StreamName
from tidemill.common.wire.messages import DeadLetter, Lane, Score, ScoreStatus, TrajectoryKey
from tidemill.services.console.serve.intake import IncomingRequest, SmallRequest
from tidemill.services.console.serve.samples import Batch, EncodedSample, SampleIn
from tidemill.services.console.up.reward_run import RewardRun

log = structlog.get_logger(__name__)

MAX_WAITING = 1 << 16
"""Samples that may wait for a score at once; further requests are refused for now, larger ones for good."""
ANSWERED_AT_ONCE = 512
"""Most answers that are made without a turn of other requests."""
BUSY_RETRY_S = 1.0
READ_COUNT = 1024
BLOCK_S = 1.0
WATCH_S = 5.0
"""Seconds between two checks of whether Redis has lost entries, and what may be trimmed."""
SERVED_FIELD = "served"
"""Field of the run's state in Redis: tickets below this number may be in use."""
TICKETS_AT_ONCE = 4096
"""Tickets that are reserved with one write of that field."""
GROUP_IS_DROPPED = "a sample of its group failed, and the config drops its group (on_failure: drop_group)"


class ScoreOut(BaseModel):
    """The reward of one sample."""

    status: ScoreStatus
    value: float | None = Field(description="null where it failed; never a 0 that the config does not give")
    components: dict[str, float | None]
    detail: dict[str, Any]
    error: str
    attempts: int


@dataclass(slots=True)
class _WaitingSample:
    """A sample that has no score yet."""

    encoded: EncodedSample
    score: "asyncio.Future[Score]"
    older_id: str
    """Id of an entry before its own in the stream."""
    entry_id: str = ""
    """Its own; empty until it is known to be appended."""

    @property
    def first_needed_id(self) -> str:
        """Nothing from this id on may be trimmed."""
        return self.entry_id or self.older_id


class RewardGateway:
    """`score` may be called once `open` has returned; it is answered while `run` runs."""

    def __init__(self, run: RewardRun, broker: Broker) -> None:
        self._run = run
        self._broker = broker
        self._keys = run.keys
        self._reward = run.config.reward
        self._archive = run.config.streams.archive
        self._waiting: dict[Lane, dict[TrajectoryKey, _WaitingSample]] = {lane: {} for lane in Lane}
        self._tickets: dict[Lane, Counter[int]] = {lane: Counter() for lane in Lane}
        """By lane, the tickets of samples that wait, and how many of each."""
        self._num_coming = 0
        """Samples of requests that are let in, and do not wait yet."""
        self._next_ticket = 0
        self._reserved = 0
        self._positions = dict.fromkeys([*map(self._keys.scores, Lane), self._keys.dead], START)
        """By stream, the id of the last entry that was read."""
        self._newest = dict.fromkeys(Lane, START)
        """By lane, the id of the newest trajectory that is known to be appended."""
        self._server = ""
        """Which Redis process has answered last; empty before the first answer."""
        self._maybe_lost: list[_WaitingSample] = []
        """Samples that waited when another Redis process answered: it may not have them."""
        self._bytes_since_archive = 0
        self._departed = DepartedProcesses(broker, run.keys)

    async def score(self, samples: Sequence[SampleIn], num_bytes: int) -> list[ScoreOut]:
        """The scores of all samples, in their order; waits for the last one.

        Raises: as `submit`.
        """
        with self.registered() as waiting:
            await self.submit(SmallRequest(Batch(samples), num_bytes), waiting)
            return await self.scores_of(waiting, num_bytes)

    def check_room(self, num_samples: int = 1) -> None:
        """Raises BusyError: so many further samples cannot wait now. TooLargeError: they never can."""
        if num_samples > MAX_WAITING:
            raise TooLargeError(
                f"the request has {num_samples:,} samples, and at most {MAX_WAITING:,} may wait for a score: "
                "send it as several requests, with all samples of a group in one of them"
            )
        num_waiting = sum(map(len, self._waiting.values())) + self._num_coming
        if num_waiting + num_samples > MAX_WAITING:
            raise BusyError(f"{num_waiting} samples wait for a score already", BUSY_RETRY_S)

    @contextmanager
    def registered(self) -> Iterator[list[_WaitingSample]]:
        """Yields a list for `submit`; what is in it waits for scores until the end of the block."""
        waiting: list[_WaitingSample] = []
        try:
            yield waiting
        finally:
            for each in waiting:
                self._pop(each.encoded.lane, each.encoded.key)
                each.score.cancel()

    async def submit(self, request: IncomingRequest, waiting: list[_WaitingSample]) -> None:
        """Append the samples of a request, and add them to `waiting`, in their order.

        Raises:
            BusyError: too many wait already. TooLargeError: the request has more than may ever wait. Nothing
                was appended.
            UnavailableError: the request could not be read to its end.
        """
        self.check_room(request.num_samples)
        self._num_coming += request.num_samples
        num_registered = 0
        try:
            first_ticket = self._next_ticket
            self._next_ticket += request.num_groups
            if self._next_ticket > self._reserved:
                await self._reserve()
            async for encoded in request.encoded(first_ticket):
                added = [self._register(sample) for sample in encoded]
                waiting += added
                num_registered += len(added)
                self._num_coming -= len(added)
                await self._append(added)
        finally:
            # Of a request that was not read to its end, the others do not come.
            self._num_coming -= request.num_samples - num_registered

    async def scores_of(self, waiting: Sequence[_WaitingSample], num_bytes: int) -> list[ScoreOut]:
        """The scores of a request of so many bytes, once the last one is there."""
        scores = []
        for number, each in enumerate(waiting):
            scores.append(await each.score)
            if number % ANSWERED_AT_ONCE == 0:
                await asyncio.sleep(0)
        # Counted once they have scores: `_trim` sets the count back, and archives no sample that still waits.
        self._bytes_since_archive += num_bytes
        return await self._answers(scores)

    @classmethod
    async def open(cls, run: RewardRun, broker: Broker) -> "RewardGateway":
        """A gateway that continues the ticket numbers of an earlier process. It reads from the ends of the
        streams on: older scores are for requests to that process."""
        gateway = cls(run, broker)
        num_served = int(await broker.execute("HGET", run.keys.state, SERVED_FIELD) or 0)
        gateway._next_ticket = num_served
        gateway._reserved = num_served
        for key in gateway._positions:
            gateway._positions[key] = await last_id(broker, key)
        return gateway

    async def run(self) -> None:
        """Deliver scores, restore lost samples and trim, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for lane in Lane:
                tasks.create_task(self._take_scores(lane), name=f"scores {lane}")
            tasks.create_task(self._take_dead(), name="dead letters")
            tasks.create_task(self._watch(), name="watch")

    async def _reserve(self) -> None:
        """Reserve ticket numbers before anything is appended: a later process uses none of them."""
        reserved = self._next_ticket + TICKETS_AT_ONCE
        await self._broker.execute("HSET", self._keys.state, SERVED_FIELD, reserved)
        # Only now: a request that comes meanwhile must not use numbers that Redis does not have.
        self._reserved = reserved

    def _register(self, encoded: EncodedSample) -> _WaitingSample:
        score: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        sample = _WaitingSample(encoded, score, older_id=self._newest[encoded.lane])
        self._waiting[encoded.lane][encoded.key] = sample
        self._tickets[encoded.lane][encoded.key[0]] += 1
        return sample

    def _pop(self, lane: Lane, key: TrajectoryKey) -> _WaitingSample | None:
        sample = self._waiting[lane].pop(key, None)
        if sample is not None:
            tickets = self._tickets[lane]
            tickets[key[0]] -= 1
            if not tickets[key[0]]:
                del tickets[key[0]]
        return sample

    async def _append(self, samples: Sequence[_WaitingSample]) -> None:
        for lane in Lane:
            of_lane = [sample for sample in samples if sample.encoded.lane is lane]
            if not of_lane:
                continue
            key = self._keys.trajectories(lane)
            entries = [(sample.encoded.schema, sample.encoded.payload) for sample in of_lane]
            entry_ids = await append_encoded(self._broker, key, entries)
            for sample, entry_id in zip(of_lane, entry_ids, strict=True):
                sample.entry_id = entry_id
                self._newest[lane] = max(self._newest[lane], entry_id, key=id_order)

    async def _answers(self, scores: Sequence[Score]) -> list[ScoreOut]:
        default = self._reward.on_failure
        lost = {
            score.ticket
            for score in scores
            if score.value is None and (score.on_failure or default) == "drop_group"
        }
        answers = []
        for number, score in enumerate(scores):
            answers.append(self._answer(score, score.ticket in lost))
            if number % ANSWERED_AT_ONCE == 0:
                await asyncio.sleep(0)
        return answers

    def _answer(self, score: Score, is_group_dropped: bool) -> ScoreOut:
        status = score.status
        value = score.value
        error = score.error
        # Where it has failed itself, it keeps its own error.
        if is_group_dropped and value is not None:
            status = ScoreStatus.FAILED
            value = None
            error = GROUP_IS_DROPPED
        elif value is None and not score.on_failure:
            value = self._reward.failure_value
        return ScoreOut(
            status=status,
            value=value,
            components=score.components,
            detail=score.detail,
            error=error,
            attempts=score.attempts,
        )

    async def _take_scores(self, lane: Lane) -> None:
        key = self._keys.scores(lane)
        reader = OffsetReader(self._broker, key, Score, self._positions[key])
        while True:
            for entry in await reader.read(READ_COUNT, BLOCK_S):
                if isinstance(entry, Entry):
                    self._take(lane, entry.message)
            self._positions[key] = reader.position

    async def _take_dead(self) -> None:
        """Fail each dead-lettered trajectory, and the samples of its group that wait."""
        reader = OffsetReader(self._broker, self._keys.dead, DeadLetter, self._positions[self._keys.dead])
        origins = {self._keys.name_of(self._keys.trajectories(lane)): lane for lane in Lane}
        while True:
            for entry in await reader.read(READ_COUNT, BLOCK_S):
                if isinstance(entry, Entry) and entry.message.origin in origins:
                    self._fail_group(origins[entry.message.origin], entry.message)
            self._positions[self._keys.dead] = reader.position

    def _fail_group(self, lane: Lane, letter: DeadLetter) -> None:
        waiting = self._waiting[lane]
        # By its entry id where its key could not be decoded.
        tickets = {key[0] for key, sample in waiting.items() if sample.entry_id == letter.entry_id}
        tickets.add(letter.ticket)
        for ticket, index in [key for key in waiting if key[0] in tickets]:
            failed = Score(ticket=ticket, index=index, status=ScoreStatus.FAILED, error=letter.error)
            self._take(lane, failed)

    def _take(self, lane: Lane, score: Score) -> None:
        # A score that comes twice, after a takeover, counts once.
        sample = self._pop(lane, score.key)
        if sample is not None and not sample.score.done():
            sample.score.set_result(score)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            await self._notice_new_server()
            await self._restore_lost()
            await self._trim()
            for lane in Lane:
                await delete_results(self._broker, self._keys, lane, self._tickets[lane])
            await self._departed.forget()

    async def _notice_new_server(self) -> None:
        """Where another Redis process answers, or this one was emptied, register the run there, and doubt
        that it has the samples that wait."""
        process_id = (await self._broker.info("server"))["run_id"]
        is_emptied = not await self._broker.execute("EXISTS", self._keys.config)
        is_another = self._server not in ("", process_id)
        self._server = process_id
        if is_another or is_emptied:
            await self._run.register(self._broker)
            await self._reserve()
            self._maybe_lost = [sample for waiting in self._waiting.values() for sample in waiting.values()]

    async def _restore_lost(self) -> None:
        """Append again the samples that Redis does not have, of those that it may have lost."""
        unanswered = [sample for sample in self._maybe_lost if not sample.score.done()]
        # Samples that are just being appended are checked the next time: a part of them may be lost.
        self._maybe_lost = [sample for sample in unanswered if not sample.entry_id]
        appended = [sample for sample in unanswered if sample.entry_id]
        looks = [
            ("XRANGE", self._keys.trajectories(sample.encoded.lane), sample.entry_id, sample.entry_id)
            for sample in appended
        ]
        replies = await self._broker.pipeline(looks) if looks else []
        lost = [sample for sample, entries in zip(appended, replies, strict=True) if not entries]
        if lost:
            log.warning("Redis has lost samples: appended again", count=len(lost))
            await self._append(lost)

    async def _trim(self) -> None:
        """Trim what is scored and read, once it is archived."""
        below = await self._find_unneeded()
        if not below:
            return
        if self._archive.enabled:
            if self._bytes_since_archive < self._archive.segment_mb * (1 << 20):
                return
            self._bytes_since_archive = 0
            await self._archive_up_to(below)
        for stream, entry_id in below.items():
            if self._archive.enabled:
                archived = Manifest.load(stream_folder(self._run.folder.path, stream)).last_id
                entry_id = min(entry_id, id_after(archived), key=id_order)
            await trim_before(self._broker, stream.key(self._keys), entry_id)

    async def _find_unneeded(self) -> dict[StreamName, str]:
        """By stream, an id below which nothing is needed: trajectories with a score, scores that were read,
        all dead letters but the newest. Empty where the first samples of a lane are just being appended."""
        below: dict[StreamName, str] = {}
        for lane, waiting in self._waiting.items():
            # Read before `waiting` is looked at: what is appended in between has a higher id.
            newest = await last_id(self._broker, self._keys.trajectories(lane))
            needed = [sample.first_needed_id for sample in waiting.values()]
            first_needed = min(needed, key=id_order) if needed else id_after(newest)
            if first_needed == START:
                return {}
            below[StreamName.TRAJECTORIES.of(lane)] = first_needed
            below[StreamName.SCORES.of(lane)] = self._positions[self._keys.scores(lane)]
        unneeded = await newest_begin(self._broker, self._keys.dead)
        if unneeded != START:
            below[StreamName.DEAD] = min(unneeded, self._positions[self._keys.dead], key=id_order)
        return below

    async def _archive_up_to(self, below: dict[StreamName, str]) -> None:
        """Archive in a process of its own: compressing would delay the samples."""
        ends = [f"--until={stream}={id_before(entry_id)}" for stream, entry_id in below.items()]
        command = run_own(Program.ARCHIVE, self._keys.run_id, str(self._run.folder.path), *ends)
        log_file = self._run.folder.logs / "archive.log"
        with log_file.open("ab") as output:
            child = await asyncio.create_subprocess_exec(
                *command, env=self._run.env, stdout=output, stderr=output, stdin=asyncio.subprocess.DEVNULL
            )
            try:
                if await child.wait():
                    log.error("the streams are not archived, and stay in Redis", see=str(log_file))
            finally:
                if child.returncode is None:
                    child.kill()
