"""Appends the samples of another trainer to the stream of trajectories, and returns their scores to it.

Guarantees: every sample gets a score with a status, also where its trajectory is dead-lettered; a failure has
no value but the one that the config gives. A sample that Redis loses is appended again under its own key,
and the first score of a key counts. Redis holds what is in flight and what is not archived yet.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Any

import numpy as np
import structlog
from pydantic import BaseModel, ConfigDict, Field, field_validator

from tidemill.common.archive import stream_folder
from tidemill.common.archive.manifest import Manifest
from tidemill.common.process.json_api import BusyError
from tidemill.common.process.programs import Program, run_own
from tidemill.common.redis.broker import Broker
from tidemill.common.run.dataset import PROMPT
from tidemill.common.streams import OffsetReader, append, id_after, id_before, id_order, last_id, trim_before
from tidemill.common.streams.entries import START, Entry
from tidemill.common.wire.codec import pack
from tidemill.common.wire.keys import StreamName
from tidemill.common.wire.messages import DeadLetter, Lane, Score, ScoreStatus, Trajectory, TrajectoryKey
from tidemill.common.wire.segments import Session
from tidemill.services.console.launch.reward_run import RewardRun

log = structlog.get_logger(__name__)

MAX_WAITING = 1 << 16
"""Samples that may wait for a score at once; further requests are refused for now."""
BUSY_RETRY_S = 1.0
READ_COUNT, BLOCK_S = 1024, 1.0
WATCH_S = 5.0
"""Seconds between two checks of whether Redis has lost entries, and what may be trimmed."""
SERVED, RESERVED = "served", 4096
"""Field of the run's state: tickets below this number may be in use; and how many are reserved at once."""
GROUP_IS_DROPPED = "a sample of its group failed, and the config drops its group (on_failure: drop_group)"

Chat = list[dict[str, Any]]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class SampleIn(BaseModel):
    """One completion to score; prompt and completion are text, or chat messages."""

    model_config = ConfigDict(extra="forbid")
    completion: str | Chat
    prompt: str | Chat = ""
    ground_truth: Any = None
    data_source: str = ""
    extra_info: dict[str, Any] = Field(default_factory=dict, description="the row's further columns")
    completion_ids: list[TokenId] = Field(default_factory=list, description="for rewards that read token ids")
    group: str | int | None = Field(
        None, description="samples of a request with the same one are a group; without it each is its own"
    )
    step: int = Field(0, ge=0, description="of the trainer, for records")
    evaluation: bool = Field(False, description="scored before training, by the rewards of that lane")

    @field_validator("completion", "prompt", "ground_truth", "extra_info")
    @classmethod
    def _can_be_sent(cls, value: Any) -> Any:
        try:
            pack(value)
        except (OverflowError, ValueError) as error:
            raise ValueError(f"write numbers of more than 64 bits as text, and nest less: {error}") from None
        return value


class ScoreOut(BaseModel):
    """The reward of one sample."""

    status: ScoreStatus
    value: float | None = Field(description="null where it failed; never a 0 that the config does not give")
    components: dict[str, float | None]
    detail: dict[str, Any]
    error: str
    attempts: int


@dataclass(slots=True)
class _Waiting:
    lane: Lane
    trajectory: Trajectory
    score: "asyncio.Future[Score]"
    after: str
    """Id of an older entry: until its own id is known, nothing above this one may be trimmed."""
    entry_id: str = ""
    """Empty until it is known to be appended."""


class RewardGateway:
    """`score` may be called once `open` has returned; it is answered while `run` runs."""

    def __init__(self, run: RewardRun, broker: Broker) -> None:
        self._run, self._broker, self._keys = run, broker, run.keys
        self._reward, self._archive = run.config.reward, run.config.streams.archive
        self._waiting: dict[Lane, dict[TrajectoryKey, _Waiting]] = {lane: {} for lane in Lane}
        self._next_ticket = self._reserved = 0
        self._positions = dict.fromkeys([*map(self._keys.scores, Lane), self._keys.dead], START)
        """By stream, the entry id below which all has been read."""
        self._newest = dict.fromkeys(Lane, START)
        """By lane, the id of the newest trajectory that is known to be appended."""
        self._server = ""
        self._maybe_lost: list[_Waiting] = []
        """Samples that Redis may have lost, since another server process has answered."""
        self._bytes_since_archive = 0

    async def score(self, samples: Sequence[SampleIn], num_bytes: int) -> list[ScoreOut]:
        """The scores of all samples, in their order; waits for the last one.

        Raises:
            BusyError: too many wait already. Nothing was appended.
        """
        num_waiting = sum(map(len, self._waiting.values()))
        if num_waiting + len(samples) > MAX_WAITING:
            raise BusyError(f"{num_waiting} samples wait for a score already", BUSY_RETRY_S)
        trajectories = self._numbered(samples)
        if self._next_ticket > self._reserved:
            await self._reserve()
        with self._registered(samples, trajectories) as waiting:
            await self._append(waiting)
            scores = await asyncio.gather(*(one.score for one in waiting))
        self._bytes_since_archive += num_bytes
        return self._answers(scores)

    @classmethod
    async def open(cls, run: RewardRun, broker: Broker) -> "RewardGateway":
        """A gateway that continues the ticket numbers of an earlier process. It reads from the ends of the
        streams on: older scores are for requests to that process."""
        gateway = cls(run, broker)
        gateway._next_ticket = gateway._reserved = int(
            await broker.execute("HGET", run.keys.state, SERVED) or 0
        )
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

    def _numbered(self, samples: Sequence[SampleIn]) -> list[Trajectory]:
        """Trajectories of new tickets: one for each group, and one for each sample without a group."""
        groups: dict[Any, list[int]] = {}
        for place, sample in enumerate(samples):
            own = (place,) if sample.group is None else sample.group
            groups.setdefault((own, sample.evaluation), []).append(place)
        made: dict[int, Trajectory] = {}
        for places, ticket in zip(groups.values(), count(self._next_ticket), strict=False):
            for index, place in enumerate(places):
                made[place] = _trajectory(samples[place], ticket, index, len(places))
        self._next_ticket += len(groups)
        return [made[place] for place in range(len(samples))]

    async def _reserve(self) -> None:
        """Reserve ticket numbers before anything is appended: a later process uses none of them."""
        reserved = self._next_ticket + RESERVED
        await self._broker.execute("HSET", self._keys.state, SERVED, reserved)
        # Only now: a request that comes meanwhile must not use numbers that Redis does not have.
        self._reserved = reserved

    @contextmanager
    def _registered(
        self, samples: Sequence[SampleIn], trajectories: Sequence[Trajectory]
    ) -> Iterator[list[_Waiting]]:
        loop, waiting = asyncio.get_running_loop(), []
        for sample, trajectory in zip(samples, trajectories, strict=True):
            lane = Lane.EVAL if sample.evaluation else Lane.TRAIN
            waiting.append(_Waiting(lane, trajectory, loop.create_future(), self._newest[lane]))
            self._waiting[lane][trajectory.key] = waiting[-1]
        try:
            yield waiting
        finally:
            for one in waiting:
                self._waiting[one.lane].pop(one.trajectory.key, None)
                one.score.cancel()

    async def _append(self, waiting: Sequence[_Waiting]) -> None:
        for lane in Lane:
            own = [one for one in waiting if one.lane is lane]
            if not own:
                continue
            key = self._keys.trajectories(lane)
            ids = await append(self._broker, key, *(one.trajectory for one in own))
            for one, entry_id in zip(own, ids, strict=True):
                one.entry_id = entry_id
                self._newest[lane] = max(self._newest[lane], entry_id, key=id_order)

    def _answers(self, scores: Sequence[Score]) -> list[ScoreOut]:
        default = self._reward.on_failure
        lost = {
            score.ticket
            for score in scores
            if score.value is None and (score.on_failure or default) == "drop_group"
        }
        return [self._answer(score, score.ticket in lost) for score in scores]

    def _answer(self, score: Score, is_group_dropped: bool) -> ScoreOut:
        status, value, error = score.status, score.value, score.error
        if is_group_dropped and value is not None:
            status, value, error = ScoreStatus.FAILED, None, GROUP_IS_DROPPED
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
                if not isinstance(entry, Entry) or (lane := origins.get(entry.message.origin)) is None:
                    continue
                letter, waiting = entry.message, self._waiting[lane]
                # By its entry id where its key could not be decoded.
                tickets = {key[0] for key, one in waiting.items() if one.entry_id == letter.entry_id}
                tickets.add(letter.ticket)
                for ticket, index in [key for key in waiting if key[0] in tickets]:
                    failed = Score(ticket=ticket, index=index, status=ScoreStatus.FAILED, error=letter.error)
                    self._take(lane, failed)

    def _take(self, lane: Lane, score: Score) -> None:
        # A score that comes twice, after a takeover, counts once.
        one = self._waiting[lane].pop(score.key, None)
        if one is not None and not one.score.done():
            one.score.set_result(score)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            await self._restore_lost()
            await self._trim()

    async def _restore_lost(self) -> None:
        """Append again the samples that a new or emptied Redis server does not have."""
        identity = (await self._broker.info("server"))["run_id"]
        is_emptied = not await self._broker.execute("EXISTS", self._keys.config)
        before, self._server = self._server, identity
        if before not in ("", identity) or is_emptied:
            await self._run.register(self._broker)
            await self._reserve()
            self._maybe_lost = [one for waiting in self._waiting.values() for one in waiting.values()]
        left = [one for one in self._maybe_lost if not one.score.done()]
        # Samples that are just being appended are checked the next time: a part of them may be lost.
        self._maybe_lost = [one for one in left if not one.entry_id]
        sent = [one for one in left if one.entry_id]
        looks = [("XRANGE", self._keys.trajectories(one.lane), one.entry_id, one.entry_id) for one in sent]
        found = await self._broker.pipeline(looks) if looks else []
        if lost := [one for one, entries in zip(sent, found, strict=True) if not entries]:
            log.warning("Redis has lost samples: appended again", count=len(lost))
            await self._append(lost)

    async def _trim(self) -> None:
        """Trim what is scored and read, once it is archived."""
        below: dict[StreamName, str] = {}
        for lane, waiting in self._waiting.items():
            appended = await last_id(self._broker, self._keys.trajectories(lane))
            unscored = [one.entry_id or one.after for one in waiting.values()]
            oldest = min(unscored, key=id_order) if unscored else id_after(appended)
            if oldest == START:  # the first of all are just being appended
                return
            below[StreamName.TRAJECTORIES.of(lane)] = oldest
            below[StreamName.SCORES.of(lane)] = self._positions[self._keys.scores(lane)]
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


def _trajectory(sample: SampleIn, ticket: int, index: int, group_size: int) -> Trajectory:
    ids = np.asarray(sample.completion_ids, dtype=np.int32)
    chat, said = (
        [_with_text(message) for message in given] if isinstance(given, list) else None
        for given in (sample.prompt, sample.completion)
    )
    answers = [
        str(message.get("content") or "") for message in said or () if message.get("role") == "assistant"
    ]
    text = (answers[-1] if answers else "") if said is not None else str(sample.completion)
    thoughts = [message["reasoning_content"] for message in said or () if "reasoning_content" in message]
    prompt = "" if chat is not None else str(sample.prompt)
    now = time.time()
    return Trajectory(
        ticket=ticket,
        index=index,
        step=sample.step,
        group_size=group_size,
        data_source=sample.data_source,
        ground_truth=sample.ground_truth,
        extra=sample.extra_info | ({PROMPT: chat} if chat is not None else {}),
        prompt_text=prompt,
        own_text=prompt,
        prompt_ids=np.empty(0, dtype=np.int32),
        completion_ids=ids,
        logprobs=np.zeros(len(ids), dtype=np.float32),
        spans=((0, 0),),
        text=text,
        thought=str(thoughts[-1] or "") if thoughts else None,
        worker="serve-rewards",
        started_at=now,
        finished_at=now,
        # More than one message is a session: calls of tools and their results.
        session=Session(environment="", messages=tuple(said)) if said is not None and len(said) > 1 else None,
    )


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the text of its parts as content, where it has parts."""
    if not isinstance(parts := message.get("content"), list):
        return message
    texts = (str(part.get("text", "")) for part in parts if isinstance(part, dict))
    return {**message, "content": "".join(texts)}
