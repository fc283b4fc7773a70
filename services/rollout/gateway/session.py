"""One session behind an address of its own: questions in, answers out, ids kept.

Invariants:

* A question that comes again gets the same answer: while that is being made, until it was delivered, and
  until anything has followed it. So a client's retry is no second turn. If the client says that it does not
  retry, a question whose answer was delivered gets another one.
* What no program has read, as far as the gateway knows (`Exchange.unread`), is in no segment: it stands in
  the record beside them.
* Segments are in the order of their last answers, so text and end of the session are those of the answer that
  was given last.
* A question beyond a limit gets an error, which is to end the agent's loop. The session counts as truncated
  from then on, unless a later question is answered.
* Once it is closed, nothing of it runs and nothing more is answered.
"""

import asyncio
import contextlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tidemill.common.config.environment import AGENT, EnvironmentConfig
from tidemill.common.errors import BrokenImageError, EnvironmentFaultError
from tidemill.common.process.shortage import run_on_thread
from tidemill.common.run.special_tokens import Reading
from tidemill.common.wire.images import Image
from tidemill.common.wire.messages import SamplingParams
from tidemill.common.wire.segments import Finish, Late, Session, SessionEnd, Unread, UnreadAnswer
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.gateway.dialogue import (
    SESSION_LIMIT,
    Answer,
    FinishReason,
    Message,
    Question,
    RequestError,
    digests_of,
)
from tidemill.services.rollout.gateway.histories import (
    Answered,
    Continuation,
    Histories,
    RecordedHistory,
    in_order,
    num_within,
)
from tidemill.services.rollout.gateway.pace import EnginePace
from tidemill.services.rollout.sessions.chat import ChatFormat, Parsed, call_of, num_shared
from tidemill.services.rollout.sessions.parts import pictures_of
from tidemill.services.rollout.sessions.picture_parts import pictures_in
from tidemill.services.rollout.sessions.player import Ask, Decode, Played, Read
from tidemill.services.rollout.sessions.recorder import choices_of, images_in

if TYPE_CHECKING:
    from tidemill.services.rollout.sessions.pictures import SessionPictures

BAD_REQUEST = 400
NOT_FOUND = 404
MAX_REPEATS = 8
"""How often one answer is given again. Clients retry twice; one that asks more often wants another answer."""
LONG_CHARACTERS = 20_000
"""Longer questions are rendered and tokenized on a thread: they would block the event loop."""
BODY_BYTES_PER_TOKEN = 32
MIN_BODY_BYTES = 1 << 20
"""Least limit of a request's size: it also has tools, and what a template leaves out of a history."""


@dataclass(eq=False)
class Exchange:
    """A question, and its answer, which is being made or was sent."""

    history: RecordedHistory
    repeats: "list[Exchange]"
    """Exchanges of the same question, in the order in which they were asked, this one among them, of which
    none was read before the next was asked: each may be the retry of those before it."""
    task: "asyncio.Task[Answer]" = field(init=False)
    asked_at: float = field(default_factory=time.monotonic)
    begun_at: float = 0.0
    """When the engine was asked; 0 while the turn waits for the tokens of other turns."""
    max_tokens: int = 0
    """Most tokens that its turn may have."""
    is_broken: bool = False
    """Whether a response has broken before it had brought the answer."""
    is_streamed: bool = False
    num_repeats: int = 0
    num_delivered: int = 0
    """How many responses have brought the answer to a client, as far as the gateway knows."""
    delivered_at: float = 0.0
    """When the last response with the answer began."""
    is_read: bool = False
    """Whether the client has gone on with the answer: it has the answer in a history."""
    is_cut: bool = False
    """Whether the client has gone on with a beginning of the answer."""
    begun_again: "list[Exchange]" = field(default_factory=list)
    """Exchanges by which the client has asked an earlier question of the history again, while calls of this
    answer were open."""

    @property
    def answer(self) -> Answer | None:
        """None where it is still being made, or has failed."""
        if not self.task.done() or self.task.cancelled() or self.task.exception() is not None:
            return None
        return self.task.result()

    @property
    def is_current(self) -> bool:
        """Whether the answer is still to come, or nothing has followed it: the client may have missed it."""
        return not self.task.done() or (self.answer is not None and self.history.last_answer is self.answer)

    @property
    def is_replaced(self) -> bool:
        """Whether another answer to the same question counts: one that was read, else the last one that was
        delivered."""
        is_other_read = any(exchange.is_read for exchange in self.repeats)
        # Without those that have no answer, or whose response broke: else no answer would count.
        delivered = [exchange for exchange in self.repeats if exchange.num_delivered]
        return not self.is_read and (is_other_read or delivered[-1:] != [self])

    @property
    def is_given_up(self) -> bool:
        """Whether the client has begun again in place of answering the calls: it may never have had them."""
        return any(exchange.num_delivered for exchange in self.begun_again)

    @property
    def unread(self) -> Unread | None:
        """Why no program has read the answer; None where one has, as far as the gateway knows."""
        if self.is_read or self.answer is None:
            return None
        if not self.num_delivered:
            return "not_delivered"
        if self.is_cut:
            return "cut"
        return "asked_again" if self.is_replaced or self.is_given_up else None


class GatewaySession:
    def __init__(
        self,
        chat: ChatFormat,
        decode: Decode,
        ask: Ask,
        sampling: SamplingParams,
        limits: EnvironmentConfig,
        max_model_len: int,
        read: Read | None = None,
        pace: EnginePace | None = None,
        pictures: "SessionPictures | None" = None,
    ) -> None:
        """`limits` hold for all segments together; `max_tokens` 0 is no limit but the model's length.
        `pictures` takes in those of requests, where the run has pictures."""
        # Two secrets: the token is a part of the address, which programs log.
        self.token = secrets.token_urlsafe(24)
        self.key = secrets.token_urlsafe(24)
        self.histories = Histories(chat, decode, pictures)
        self.counts: Counter[str] = Counter()
        self.num_turns = 0
        self.active_at = time.monotonic()
        self.asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once its program has asked a question."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with the engine's error: the session cannot go on after that."""
        self._pictures = pictures
        self._num_taking_in = 0
        """Requests whose pictures are being taken in, or read for the engine."""
        self._taking_in_since = 0.0
        """Since when there is one."""
        self._taken_in_s = 0.0
        self._pace = pace or EnginePace()
        self._last_asked: Exchange | None = None
        self._chat = chat
        self._decode = decode
        self._ask = ask
        self._read: Read = read or (lambda ids, mask, prompt_ids: Reading(decode(ids)))
        self._sampling = sampling
        self._limits = limits
        self._max_model_len = max_model_len
        self._exchanges: dict[bytes, list[Exchange]] = {}
        """Key of a question -> its exchanges that are current."""
        self._repeats: dict[bytes, list[Exchange]] = {}
        """Request key of a question -> the last of its `Exchange.repeats`."""
        self._by_answer: dict[str, Exchange] = {}
        """Id of an answer -> its exchange."""
        self._not_seen: dict[bytes, list[Exchange]] = {}
        """Digest of a history that ends with an answer -> exchanges whose answer no client has sent back;
        empty once a client has sent back one of them."""
        self._running: set[Exchange] = set()
        self._has_ended = asyncio.Event()
        """Set when a turn has ended and the tokens that it had reserved are free."""
        self._reserved_tokens = 0
        self._finding = asyncio.Lock()
        """Held while the history that a question continues is found, rendered and tokenized."""
        self._num_histories = 0
        self._is_closed = False
        self.late: Late = ""
        """The limit of time that was exceeded; empty: none."""
        self.reached: list[SessionEnd] = []
        """The limits that were reached, in order: by refused questions, or by the session as a whole."""
        self._num_passed = 0
        """Number of these that no longer count, because a question that was asked later was answered."""
        self._refusals: set[tuple[SessionEnd, str]] = set()
        """The limits that have refused a question since the last answer, and what they refuse. Not for each
        history: a refused one is forgotten, so a program that begins new ones would never be stopped."""

    @property
    def max_body_bytes(self) -> int:
        """Largest request that may hold a history that the model can read, however it is written as JSON."""
        num_bytes = max(MIN_BODY_BYTES, self._max_model_len * BODY_BYTES_PER_TOKEN)
        if self._pictures is not None:
            # Base64 writes three bytes as four characters.
            num_bytes += self._pictures.max_per_prompt * self._pictures.max_file_bytes * 4 // 3
        return num_bytes

    @property
    def _is_sampling(self) -> bool:
        """Whether the agent asks the same several times on purpose."""
        return self._limits.repeated_requests == "sample"

    @property
    def num_running(self) -> int:
        """Questions that wait for an answer of the model."""
        return len(self._running)

    @property
    def taken_in_s(self) -> float:
        """How long pictures of requests were taken in or read so far. That is no time of the program: a store
        that is away is waited for."""
        now_s = time.monotonic() - self._taking_in_since if self._num_taking_in else 0.0
        return self._taken_in_s + now_s

    @property
    def is_taking_in(self) -> bool:
        """Whether pictures of a request are being taken in or read."""
        return self._num_taking_in > 0

    @property
    def end(self) -> SessionEnd:
        """The session's end: the last limit that it reached, if that still counts, else of its last
        answer."""
        recorded = self.read_histories
        if len(self.reached) > self._num_passed:
            return self.reached[-1]
        return recorded[-1].end if recorded else "done"

    async def answer(self, question: Question, is_retry: bool | None = None) -> Answer:
        """One turn. `is_retry` is None for clients that do not count their retries.

        Raises:
            RequestError: it cannot be answered.
        """
        self._check_open()
        if not self.asked.done():
            self.asked.set_result(None)
        question = await self._take_in(question, is_asked=True)
        key = question.key
        # One at a time: two equal questions would each find no answer, and the model would be asked twice.
        async with self._finding:
            self._note_read(question)
            current = [exchange for exchange in self._exchanges.get(key, ()) if exchange.is_current]
            repeatable = [exchange for exchange in current if self._is_repeated(exchange, is_retry)]
            if not repeatable and self.num_turns >= self._limits.max_turns and not self._is_sampling:
                # Better the answer again, which the client may have missed, than the end of the session.
                repeatable = [exchange for exchange in current if exchange.num_repeats < MAX_REPEATS]
            # If several wait for the same, each retry takes an answer of its own, the newest first.
            exchange = min(reversed(repeatable), key=lambda exchange: exchange.num_repeats, default=None)
            if exchange is None:
                exchange = await self._start(question)
                self._exchanges[key] = [*current, exchange]
            else:
                exchange.num_repeats += 1
            exchange.is_streamed |= question.is_streamed
        # A client that gives up must not stop what its retry will ask for.
        answer = await asyncio.shield(exchange.task)
        exchange.num_delivered += 1
        exchange.delivered_at = time.monotonic()
        return answer

    async def _take_in(self, question: Question, is_asked: bool) -> Question:
        """The question with references in place of its pictures. One that is too much for the model is a
        limit of the session only if it `is_asked`.

        Raises:
            RequestError: a picture is none that is taken, there are too many, or the model reads text only.
        """
        pictures = self._pictures
        parts = [item for message in question.messages for item in pictures_in(message)]
        if pictures is None:
            if parts:
                raise RequestError(f"{parts[0]['where']} has a picture; this model reads text only")
            return question
        if not isinstance(question.prompt, str | None):
            try:
                pictures.check_ids(question.prompt)
            except ValueError as error:
                raise RequestError(str(error)) from None
        if not parts:
            return question
        if len(parts) > pictures.max_per_prompt:
            raise self._too_many(len(parts), pictures.max_per_prompt, is_asked)
        with self._taking_in():
            try:
                messages = [await self._taken(message, pictures) for message in question.messages]
            except RequestError:
                raise
            except Exception as error:  # the disk or the store: no fault of the program's
                if not self.failed.done():
                    self.failed.set_exception(error)
                raise
        self._check_open()
        return replace(question, messages=tuple(messages))

    @contextlib.contextmanager
    def _taking_in(self) -> Iterator[None]:
        """The block is work of ours: while the store of pictures is away, the program is not silent, and its
        time stands still."""
        if not self._num_taking_in:
            self._taking_in_since = time.monotonic()
        self._num_taking_in += 1
        try:
            yield
        finally:
            self._num_taking_in -= 1
            self.active_at = time.monotonic()
            if not self._num_taking_in:
                self._taken_in_s += self.active_at - self._taking_in_since

    async def _taken(self, message: Message, pictures: "SessionPictures") -> Message:
        try:
            return await pictures.take_message(message)
        except BrokenImageError as error:
            where = pictures_in(message)[0]["where"]
            raise RequestError(f"{where}: a picture cannot be used: {error}", "broken_image") from None

    def note_lost(self, answer: Answer) -> None:
        """Note that a response broke before it had brought the answer to its client."""
        exchange = self._by_answer[answer.id]
        exchange.num_delivered -= 1
        exchange.is_broken = True

    def find_fault(self, is_late: bool) -> EnvironmentFaultError | None:
        """Why the program's result says nothing of the model; None where it may.

        `is_late` says that its time was over.
        """
        last = self._last_asked
        now = time.monotonic()
        for exchange in self._running:
            # A program that ends by itself may have done without answers that it asked for earlier.
            is_missed = is_late or exchange is last
            # The time before `begun_at` is the session's own: it waits for tokens of its other turns.
            if is_missed and exchange.begun_at and not exchange.task.done():
                engine_s = now - exchange.begun_at
                # By all that it may have, not by how long turns were: a policy that does not stop makes turns
                # longer than any before, and is the cause of its lateness.
                if self._pace.is_slow(exchange.max_tokens, engine_s):
                    return EnvironmentFaultError(
                        f"the program ended while the engine was slow: no answer after {engine_s:.0f} s",
                        "engine",
                    )
        if last is None or (last.task.done() and last.answer is None):
            return None
        if not is_late and self._is_lost(last):
            return EnvironmentFaultError(
                "the program ended after its last request had failed: no answer of the model has reached it",
                "lost",
            )
        turns = [turn for history in self.histories.recorded for turn in history.recorder.turns]
        num_tokens = sum(turn.num_tokens for turn in turns)
        engine_s = sum(turn.engine_s for turn in turns)
        if is_late and self._pace.is_slow(num_tokens, engine_s):
            return EnvironmentFaultError(
                f"the time was over, and the engine was slow: {engine_s:.0f} s for {num_tokens} tokens",
                "engine",
            )
        return None

    def _is_lost(self, last: Exchange) -> bool:
        """Whether the response to a request broke, and none has brought an answer since it was asked."""
        is_any_delivered = any(
            exchange.num_delivered and exchange.delivered_at >= last.asked_at
            for exchange in self._by_answer.values()
        )
        return last.is_broken and not last.num_delivered and not is_any_delivered

    def _is_repeated(self, exchange: Exchange, is_retry: bool | None) -> bool:
        """Whether a question that comes again gets this answer again."""
        if self._is_sampling:
            # Not only undelivered: that is also an answer whose response is about to be sent.
            is_broken = exchange.is_broken and not exchange.num_delivered
            return is_broken or (bool(is_retry) and exchange.num_repeats < MAX_REPEATS)
        if not exchange.num_delivered:
            return True
        return is_retry is not False and exchange.num_repeats < MAX_REPEATS

    def _note_read(self, question: Question) -> None:
        """Note which answers the client has: those that its history holds."""
        for digest in question.digests if self._not_seen else ():
            exchanges = self._not_seen.get(digest)
            if exchanges:
                # Of equal answers the newest, whose history goes on (`Histories.find`).
                exchanges[-1].is_read = True
                # Later questions have the same beginning, and show nothing of the others.
                exchanges.clear()

    def _note_continued(self, continuation: Continuation, question: Question) -> None:
        """Note what the question shows of answers before it: whose history it extends, and which it has only
        a beginning of."""
        last = continuation.history.last_answer
        if last is not None:
            self._by_answer[last.id].is_read = True
        elif continuation.kind == "forked":
            for history in self.histories.all:
                last = history.last_answer
                if last is not None and self.histories.has_lost_end(history, question.identities):
                    exchange = self._by_answer[last.id]
                    exchange.is_cut = exchange.is_streamed

    def _note_begun_again(self, question: Question, exchanges: list[Exchange]) -> None:
        """Note which answers the client has given up by going back to the question, of which these are the
        new exchanges: answers whose calls are open. One without calls was the end of what an agent was asked,
        and agents are asked the same twice."""
        for history in self.histories.all:
            last = history.last_answer
            if last is not None and last.calls and history.begins_with(question.identities):
                self._by_answer[last.id].begun_again = exchanges

    async def close(self) -> None:
        """Stop what is being generated; nothing more is answered."""
        # First: a question that waits for the lock finds it closed, and starts no turn that would run on.
        self._is_closed = True
        running = list(self._running)
        for exchange in running:
            exchange.task.cancel()
        # The caller reads the histories next: no turn may write into them by then.
        await asyncio.gather(*(exchange.task for exchange in running), return_exceptions=True)
        if not self.failed.cancel() and not self.failed.cancelled():
            self.failed.exception()  # retrieved, or asyncio logs that it never was

    async def count_tokens(self, question: Question) -> int:
        """Tokens of the question's prompt. Raises RequestError: it is too long; this does not count as a
        limit of the session, because the model was not asked."""
        number = len(question.messages)
        if number > self._max_model_len:
            raise self.too_long(f"{number} messages", is_asked=False)
        question = await self._take_in(question, is_asked=False)
        async with self._finding:
            return len((await self._find(question)).ids)

    def too_long(self, content: str, is_asked: bool) -> RequestError:
        """The error for a history that the model cannot read; a limit of the session only if `is_asked`."""
        # By these words clients know that the history is to be made shorter.
        problem = f"prompt is too long: the history has {content}, and this model's maximum context length "
        problem += f"is {self._max_model_len} tokens (model.max_model_len)"
        if not is_asked:
            return RequestError(problem, SESSION_LIMIT)
        return self._limit("max_tokens", problem, refused=content)

    def _too_many(self, num_pictures: int, most: int, is_asked: bool) -> RequestError:
        """The error for a history with more pictures than a prompt may have; a limit of the session only if
        `is_asked`."""
        problem = f"prompt is too long: the history has {num_pictures} pictures, and a prompt may have "
        problem += f"{most} (images.max_per_prompt)"
        if not is_asked:
            return RequestError(problem, SESSION_LIMIT)
        return self._limit("max_tokens", problem, refused="pictures")

    def played(
        self,
        reward: float | None,
        metrics: Mapping[str, float],
        num_faults: int = 0,
        row_images: tuple[Image, ...] = (),
    ) -> Played:
        """The session as it was played. Raises ValueError: the model never answered."""
        histories = self.read_histories
        recorders = [history.recorder for history in histories]
        segments = [recorder.segment() for recorder in recorders]
        first, *forks = segments
        session = Session(
            environment=AGENT,
            turns=first.turns,
            forks=tuple(forks),
            messages=tuple(self._said(histories)),
            end=self.end,
            late=self.late if self.end == "timeout" else "",
            reward=reward,
            metrics=dict(metrics),
            histories=dict(self.counts),
            unread=tuple(self._unread_answers()),
            num_faults=num_faults,
            # The first segment may be of a helper, which sees other pictures than the row's, or none.
            row_images=row_images if self._pictures is not None else None,
        )
        last = recorders[-1]
        reading = self._read(last.completion_ids, last.mask, last.prompt_ids)
        finish: Finish = "stop" if self.end == "done" else "length"
        choices = choices_of(recorders)
        images = images_in(recorders)
        return Played(first, reading.text, finish, session, choices, reading.thought, images)

    @property
    def read_histories(self) -> list[RecordedHistory]:
        """The histories that are trained, in the order of their last answers: without answers that no program
        has read. Such an answer is the last one of its history, for nobody went on with it."""
        histories = []
        for history in self.histories.recorded:
            last = history.last_answer
            is_unread = last is not None and self._by_answer[last.id].unread is not None
            read = history.without_last_answer() if is_unread else history
            if read is not None:
                histories.append(read)
        return in_order(histories)

    def _unread_answers(self) -> Iterator[UnreadAnswer]:
        for exchange in self._by_answer.values():
            answer = exchange.answer
            why = exchange.unread
            if answer is not None and why is not None:
                turn = exchange.history.recorder.turns[-1]
                yield UnreadAnswer(
                    why=why, message=answer.message, num_tokens=turn.num_tokens, engine_s=turn.engine_s
                )

    def _said(self, recorded: Sequence[RecordedHistory]) -> list[Message]:
        """All messages after the first prompt, segment by segment, without those that an earlier one has."""
        said: list[Message] = []
        opening = min(recorded, key=lambda history: history.number, default=None)
        for number, history in enumerate(recorded):
            start = history.num_prompt_messages if history is opening else 0
            shared = [num_shared(history.identities, earlier.identities) for earlier in recorded[:number]]
            begun = max([start, *shared])
            messages = history.messages[begun:]
            if history is opening and begun == start and history.prefill:  # a part of the prompt
                messages[0] = messages[0] | {"content": messages[0]["content"].removeprefix(history.prefill)}
            said += messages
        return said

    def _check_open(self) -> None:
        if self._is_closed:
            raise RequestError("the session is over", "session_over", 404)

    def _limit(self, end: SessionEnd, problem: str, refused: str = "") -> RequestError:
        """The error for a question beyond a limit; `refused` says which questions it refuses, if not all.

        Some programs ask again for minutes after a status of 400, and after one of 404 none does: the first
        refusal lets a client go on with less, the same one again ends its loop.
        """
        self.reached.append(end)
        refusal = (end, refused)
        status = NOT_FOUND if refusal in self._refusals else BAD_REQUEST
        self._refusals.add(refusal)
        return RequestError(f"{problem}; it ends here", SESSION_LIMIT, status)

    async def _find(self, question: Question) -> Continuation:
        """The history that the question continues; a long question is tokenized on a thread."""
        if question.num_characters < LONG_CHARACTERS:
            return self.histories.find(question)
        return await run_on_thread(self.histories.find, question)

    async def _start(self, question: Question) -> Exchange:
        limits = self._limits
        if self.num_turns >= limits.max_turns:
            raise self._limit("max_turns", f"the session has had its {limits.max_turns} turns (max_turns)")
        number = len(question.messages)
        if number > self._max_model_len:
            raise self.too_long(f"{number} messages", is_asked=True)
        continuation = await self._find(question)
        # Again: the session may have been closed while a long question was tokenised.
        self._check_open()
        self._note_continued(continuation, question)
        history = continuation.history
        if continuation.kind in ("new", "forked"):
            most = limits.max_segments
            if len(self.histories.all) >= most:
                problem = f"the session has {most} histories already (max_segments)"
                raise self._limit("max_tokens", problem, refused="new histories")
            self._num_histories += 1
            history.number = self._num_histories
            self.histories.all.append(history)
        # Before the task runs: until its turn ends no other question may continue this history.
        history.is_busy = True
        self.num_turns += 1
        exchange = self._begin_exchange(history, question)
        task = asyncio.create_task(self._generate(continuation, question, exchange))
        exchange.task = task
        self._running.add(exchange)

        def ended(task: "asyncio.Task[Answer]") -> None:
            history.is_busy = False
            self._running.discard(exchange)
            # Its task is done, so the tokens that it had reserved are free, which `_room` waits for.
            self._has_ended.set()
            self.active_at = time.monotonic()
            # Nothing was said in it: no later question may continue it, and it is no segment.
            if not history.recorder.turns:
                self.histories.all.remove(history)
            error = None if task.cancelled() else task.exception()
            if isinstance(error, RequestError):
                # A refused question is no turn of the model: the program may go on with a shorter history.
                self.num_turns -= 1
                self._forget(exchange, question)
            elif error and not self.failed.done():
                self.failed.set_exception(error)

        task.add_done_callback(ended)
        return exchange

    def _forget(self, exchange: Exchange, question: Question) -> None:
        """Keep nothing of a question that was refused: a program may ask in a loop, which no limit ends."""
        exchange.repeats.remove(exchange)
        key = question.key
        current = [kept for kept in self._exchanges.pop(key, ()) if kept is not exchange]
        if current:
            self._exchanges[key] = current

    def _begin_exchange(self, history: RecordedHistory, question: Question) -> Exchange:
        request_key = question.request_key
        repeats = self._repeats.get(request_key, [])
        if self._is_sampling:
            repeats = []
        elif any(exchange.is_read for exchange in repeats):
            repeats = []
            self._note_begun_again(question, repeats)
        exchange = Exchange(history, repeats)
        repeats.append(exchange)
        self._repeats[request_key] = repeats
        self._last_asked = exchange
        return exchange

    async def _generate(self, continuation: Continuation, question: Question, exchange: Exchange) -> Answer:
        # Before it waits: its answer passes the limits met before it was asked, not those met meanwhile.
        num_reached = len(self.reached)
        max_tokens = await self._room(continuation, question.max_tokens)
        # No await between `_room`'s last look and this: two turns would be given the same tokens.
        exchange.max_tokens = max_tokens
        exchange.begun_at = time.monotonic()
        reserved = continuation.num_added + max_tokens
        self._reserved_tokens += reserved
        try:
            answer = await self._say(continuation, question, max_tokens)
        finally:
            self._reserved_tokens -= reserved
        self._num_passed = max(self._num_passed, num_reached)
        self._refusals.clear()
        # No await since the history holds the answer: each last answer has its exchange.
        self._by_answer[answer.id] = exchange
        digests = digests_of(continuation.history.identities)
        # Where a client has sent back an equal answer, later questions show nothing of this one.
        if digests and self._not_seen.get(digests[-1]) != []:
            self._not_seen.setdefault(digests[-1], []).append(exchange)
        return answer

    async def _room(self, continuation: Continuation, asked: int | None) -> int:
        """Tokens that the turn may have. If turns that run may use up the session's tokens, wait for their
        end: no turn is refused, or cut, for tokens that another one may leave unused."""
        limit = self._limits.max_tokens
        num_prompt = len(continuation.ids)
        room = min(self._sampling.max_tokens, self._max_model_len - num_prompt)
        if room < 1:
            raise self.too_long(f"{num_prompt} tokens", is_asked=True)
        room = min(room, asked or room)
        while limit:
            num_left = limit - self.histories.num_tokens - self._reserved_tokens - continuation.num_added
            if num_left >= room:
                break
            if not self._reserved_tokens:
                if num_left < 1:
                    raise self._limit("max_tokens", f"the session has used its {limit} tokens (max_tokens)")
                return num_left
            # No await between the look above and this, so no end of a turn is missed.
            self._has_ended.clear()
            await self._has_ended.wait()
        return room

    async def _say(self, continuation: Continuation, question: Question, max_tokens: int) -> Answer:
        ids = continuation.ids
        images = continuation.images
        if images:
            assert self._pictures is not None, "only it takes pictures in"
            # Of a long session some may no longer be in memory, where the engine's turn then finds them.
            with self._taking_in():
                await self._pictures.read(images)
        started = time.monotonic()
        history = continuation.history
        sampling = self._sampling.model_copy(update={"max_tokens": max_tokens, "stop": question.stop})
        try:
            asking = history.recorder.asking(sampling, continuation.num_kept)
            whole = await self._ask(ids, asking, **pictures_of(images))
        except ValueError as error:
            raise RequestError(f"the engine refuses the prompt: {error}") from None
        if continuation.kind != "new":
            self.counts[continuation.kind] += 1
        generation, stop_sequence = _cut_at(whole, question.stop, self._decode)
        if history.recorder.turns:
            history.recorder.describe_last_turn(environment_s=started - history.answered_at)
        engine_s = time.monotonic() - started
        self._pace.note(len(whole.token_ids), engine_s)
        continuation.record(generation, engine_s)
        # If it was cut, the token that ends a turn is missing: what follows has to close it.
        history.is_closed = generation is whole and whole.finish == "stop"
        runs = min(self._sampling.max_tokens, self._max_model_len - len(ids))
        is_clients_limit = max_tokens == question.max_tokens and max_tokens < runs
        is_truncated = generation.finish == "length" and not is_clients_limit
        history.answered.append(Answered(time.monotonic(), "max_tokens" if is_truncated else "done"))
        # A call is complete only if the model ended its turn, not a limit or a client's stop sequence.
        is_cut = not history.is_closed
        parsed = Parsed({})
        if question.messages:
            parsed = self._chat.parse(generation.token_ids, question.tools, is_cut)
        history.recorder.describe_last_turn(
            finish="length" if is_truncated else "stop",
            num_calls=len(parsed.calls),
            num_wrong_calls=sum(1 for call in parsed.calls if call.error),
        )
        answer = _answer_of(question, generation, parsed, self._decode, len(ids), stop_sequence)
        history.hold(question, answer)
        return answer


def _cut_at(generation: Generation, stops: Sequence[str], decode: Decode) -> tuple[Generation, str]:
    """The generation up to the first of a client's stop sequences, and which one that is; the same object and
    "" if there is none."""
    ids = generation.token_ids
    text = decode(ids) if stops else ""
    positions = {stop: text.find(stop) for stop in stops if stop in text}
    if not positions:
        return generation, ""
    first = min(positions, key=lambda stop: positions[stop])
    # One token at least: the stop sequence may begin within the first, and a turn has to have one.
    return generation.cut(max(1, num_within(ids, positions[first], decode))), first


def _answer_of(
    question: Question,
    generation: Generation,
    parsed: Parsed,
    decode: Decode,
    num_prompt_tokens: int,
    stop_sequence: str,
) -> Answer:
    """The client's answer, without invalid calls. If there are no others, it gets all that the model wrote as
    text: its own loop answers the model."""
    ids = generation.token_ids
    valid_calls = [call for call in parsed.calls if not call.error and question.tool_choice != "none"]
    message: Message = {"role": "assistant", "content": str(parsed.message.get("content") or "")}
    if not question.messages or (parsed.calls and not valid_calls):
        message["content"] = decode(ids)
    elif reasoning := parsed.message.get("reasoning_content"):
        message["reasoning_content"] = reasoning
    if valid_calls:
        message["tool_calls"] = [
            call_of(f"call_{secrets.token_hex(12)}", call.name, json.dumps(call.arguments))
            for call in valid_calls
        ]
    texts = (decode([token]) for token in ids) if question.has_logprobs else ()
    finish: FinishReason = "stop"
    if generation.finish == "length":
        finish = "length"
    elif valid_calls:
        finish = "tool_calls"
    return Answer(
        secrets.token_hex(12),
        message,
        finish,
        num_prompt_tokens,
        len(ids),
        # -1 if the engine does not say; clients add these numbers up.
        max(0, generation.num_cached_tokens),
        tuple(zip(texts, generation.logprobs, strict=False)),
        stop_sequence,
    )
