"""One session behind an address of its own: questions in, answers out, ids kept.

Invariants: a question that comes again while its answer is being made, or before anything followed it, gets
the same answer, so a client's retry is no second turn; where it says that it does not retry, an answered one
gets a new answer. Whatever limit is reached ends the loop of the agent with an error in words; the session
counts as truncated from then on, unless it goes on with a shorter history.
"""

import asyncio
import secrets
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tidemill.common.config.environment import AGENT
from tidemill.common.wire.messages import SamplingParams
from tidemill.common.wire.segments import Session, SessionEnd
from tidemill.services.rollout.gateway.dialogue import (
    SESSION_LIMIT,
    Answer,
    Message,
    Question,
    RequestError,
)
from tidemill.services.rollout.gateway.histories import Continuation, Histories, History, num_shared
from tidemill.services.rollout.gateway.reading import Decode, cut_at, read
from tidemill.services.rollout.sessions.chat import ChatFormat
from tidemill.services.rollout.sessions.player import Ask, Played

MAX_REPEATS = 8
"""How often one answer is given again. Clients retry twice; who asks more often wants another answer."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one session, all segments together; `max_tokens` 0 leaves it to the model's length."""

    max_turns: int
    max_tokens: int
    max_model_len: int


@dataclass
class _Given:
    """An answer that is being made, or was."""

    task: "asyncio.Task[Answer]"
    history: History
    num_repeats: int = 0


class GatewaySession:
    """Answers the questions of one session's programs."""

    def __init__(
        self, chat: ChatFormat, decode: Decode, ask: Ask, sampling: SamplingParams, limits: Limits
    ) -> None:
        self.token, self.key = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        self.histories = Histories(chat)
        self.counts: Counter[str] = Counter()
        self.end: SessionEnd = "done"
        self.num_turns = 0
        self.num_running = 0
        self.active_at = time.monotonic()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails as the engine fails: nothing the session does can mend that."""
        self._chat, self._decode, self._ask = chat, decode, ask
        self._sampling, self._limits = sampling, limits
        self._given: dict[Any, _Given] = {}
        self._reserved_tokens = 0

    async def answer(self, question: Question, is_retry: bool | None = None) -> Answer:
        """One turn. Clients that count their retries say whether this is one; of others it is None.

        Raises:
            RequestError: it cannot be answered.
        """
        key = question.key
        given = self._given.get(key)
        if given is None or not _is_current(given, is_retry) or given.num_repeats >= MAX_REPEATS:
            self._check_turns()
            found = self.histories.find(question)
            max_tokens = self._room(found, question.max_tokens)
            if found.kind in ("new", "forked"):
                self.histories.all.append(found.history)
            if found.kind != "new":
                self.counts[found.kind] += 1
            given = self._given[key] = _Given(self._start(found, question, max_tokens), found.history)
        else:
            given.num_repeats += 1
        # A client that gives up must not stop what its retry will ask for.
        return await asyncio.shield(given.task)

    async def close(self) -> None:
        """Stop what is being generated."""
        tasks = [given.task for given in self._given.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self.failed.cancel() and not self.failed.cancelled():
            self.failed.exception()  # seen, also where nobody waits any more

    def count_tokens(self, question: Question) -> int:
        """Tokens of the prompt that the question would have."""
        return len(self.histories.find(question).ids)

    def played(self, reward: float | None, metrics: dict[str, float], num_faults: int = 0) -> Played:
        """What the session came to. Raises ValueError: the model was never asked."""
        first, *forks = (history.recorder.segment() for history in self.histories.recorded)
        last = self.histories.recorded[-1].recorder
        session = Session(
            environment=AGENT,
            turns=first.turns,
            forks=tuple(forks),
            messages=tuple(self._said()),
            end=self.end,
            reward=reward,
            metrics=metrics,
            histories=dict(self.counts),
            num_faults=num_faults,
        )
        text = self._decode(last.completion_ids)
        return Played(first, text, "stop" if self.end == "done" else "length", session)

    def _said(self) -> list[Message]:
        """All messages after the first prompt; of a further segment, those that no earlier one has."""
        said: list[Message] = []
        recorded = self.histories.recorded
        for number, history in enumerate(recorded):
            shared = [num_shared(history.identities, earlier.identities) for earlier in recorded[:number]]
            said += history.messages[max(shared) if shared else history.num_prompt_messages :]
        return said

    def _start(self, found: Continuation, question: Question, max_tokens: int) -> "asyncio.Task[Answer]":
        found.history.is_busy = True
        self.num_turns += 1
        self.num_running += 1
        reserved = found.num_added + max_tokens
        self._reserved_tokens += reserved
        task = asyncio.create_task(self._generate(found, question, max_tokens))

        def ended(task: "asyncio.Task[Answer]") -> None:
            found.history.is_busy = False
            self.num_running -= 1
            self._reserved_tokens -= reserved
            self.active_at = time.monotonic()
            if not found.history.recorder.turns:
                self.histories.all.remove(found.history)
            error = None if task.cancelled() else task.exception()
            if error and not isinstance(error, RequestError) and not self.failed.done():
                self.failed.set_exception(error)

        task.add_done_callback(ended)
        return task

    def _check_turns(self) -> None:
        if self.num_turns >= self._limits.max_turns:
            raise self._limit(
                "max_turns", f"the session has had its {self._limits.max_turns} turns (max_turns)"
            )

    def _room(self, found: Continuation, wanted: int | None) -> int:
        """Tokens that the turn may have."""
        num_prompt = len(found.ids)
        room = min(self._sampling.max_tokens, self._limits.max_model_len - num_prompt)
        if room < 1:
            raise self._limit(
                "max_tokens",
                f"the history has {num_prompt} tokens, and the model reads {self._limits.max_model_len} "
                "(model.max_model_len)",
            )
        if self._limits.max_tokens:
            used = self.histories.num_tokens + self._reserved_tokens + found.num_added
            room = min(room, self._limits.max_tokens - used)
        if room < 1:
            limit = self._limits.max_tokens
            raise self._limit("max_tokens", f"the session has used its {limit} tokens (max_tokens)")
        return min(room, wanted) if wanted else room

    def _limit(self, end: SessionEnd, what: str) -> RequestError:
        self.end = end
        return RequestError(f"{what}; it ends here", SESSION_LIMIT)

    async def _generate(self, found: Continuation, question: Question, max_tokens: int) -> Answer:
        started = time.monotonic()
        ids, history = found.ids, found.history
        sampling = self._sampling.model_copy(update={"max_tokens": max_tokens})
        try:
            whole = await self._ask(ids, sampling)
        except ValueError as error:
            raise RequestError(f"the engine refuses the prompt: {error}") from None
        generation = cut_at(whole, question.stop, self._decode)
        if history.recorder.turns:
            history.recorder.describe_last_turn(environment_s=started - history.answered_at)
        found.record(generation, time.monotonic() - started)
        history.answered_at = time.monotonic()
        history.is_closed = generation is whole and whole.finish == "stop"
        is_own_limit = max_tokens == question.max_tokens and max_tokens < self._sampling.max_tokens
        is_truncated = generation.finish == "length" and not is_own_limit
        self.end = "max_tokens" if is_truncated else "done"
        answer, parsed = read(generation, question, self._chat, self._decode, len(ids))
        num_wrong = sum(1 for call in parsed.calls if call.error)
        history.recorder.describe_last_turn(num_calls=len(parsed.calls), num_wrong_calls=num_wrong)
        history.hold(question, answer)
        return answer


def _is_current(given: _Given, is_retry: bool | None) -> bool:
    """Whether the answer is still to come, or nothing has followed it and the client may have missed it."""
    if not given.task.done():
        return True
    if is_retry is False:
        return False
    failed = given.task.cancelled() or given.task.exception() is not None
    return not failed and given.history.last_answer is given.task.result()
