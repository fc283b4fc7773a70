"""One session while it is played.

Its limits: turns, tokens, seconds. The first turn always runs to its end, so that there is something to train
on; a later one that the session's time cuts off is left out, with what the environment said before it.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from tidemill.common.config.data import DataConfig
from tidemill.common.telemetry import metrics
from tidemill.common.wire.messages import Ticket
from tidemill.common.wire.segments import Segment, Session, SessionEnd
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.environments.budget import Budget, fitted
from tidemill.services.rollout.environments.environment import Act, Closing, Environment, Kind, Row
from tidemill.services.rollout.environments.opening import prompt_ids
from tidemill.services.rollout.sessions.chat import Call, ChatFormat, Parsed
from tidemill.services.rollout.sessions.player import Ask, Played
from tidemill.services.rollout.sessions.recorder import SegmentRecorder
from tidemill.services.rollout.sessions.template_chat import content_text


class Playing:
    """The play of one session with its environment."""

    def __init__(
        self, kind: Kind, environment: Environment, chat: ChatFormat, budget: Budget, started: float
    ) -> None:
        self._kind, self._environment, self._chat, self._budget = kind, environment, chat, budget
        self._started = started
        self._messages: list[dict[str, Any]] = []
        self._answers: list[dict[str, Any]] = []
        self._turn_rewards: list[float] = []

    async def play(
        self,
        ticket: Ticket,
        row: Row,
        ask: Ask,
        decode: Callable[[Sequence[int]], str],
        data: DataConfig,
        num_faults: int = 0,
    ) -> Played:
        """Play it to its end.

        Raises:
            EnvironmentFaultError: the environment failed.
            ValueError: the prompt leaves no room, or the chat template refuses what the environment says.
        """
        opening = await self._environment.reset(row)
        recorder = SegmentRecorder(prompt_ids(ticket, opening, self._kind.tools, self._chat, data))
        if self._budget.room(len(recorder.prompt_ids), 0) <= 0:
            raise ValueError(
                f"a prompt of {len(recorder.prompt_ids)} tokens, with what the environment added, leaves no "
                f"room within model.max_model_len {self._budget.max_model_len}"
            )
        end = await self._take_turns(ticket, recorder, ask)
        closing = await self._environment.finish()
        segment = recorder.segment()
        session = Session(
            environment=self._kind.name,
            turns=segment.turns,
            messages=tuple(self._messages),
            end=end,
            reward=self._reward(closing),
            metrics=dict(closing.metrics),
            num_faults=num_faults,
        )
        observe(session, segment)
        return Played(
            segment, decode(recorder.completion_ids), "stop" if end == "done" else "length", session
        )

    async def _take_turns(self, ticket: Ticket, recorder: SegmentRecorder, ask: Ask) -> SessionEnd:
        context: list[int] = []
        while True:
            room = self._budget.room(len(recorder.prompt_ids), len(recorder.completion_ids) + len(context))
            if room <= 0:
                return "max_tokens"
            begun = time.monotonic()
            try:
                async with asyncio.timeout(self._left_s() if recorder.turns else None):
                    generation = await ask([*recorder.ids, *context], fitted(ticket.sampling, room))
            except TimeoutError:
                return "timeout"
            recorder.add_context(context)
            recorder.add_turn(generation, engine_s=time.monotonic() - begun)
            if (end := await self._hear(generation, recorder)) is not None:
                return end
            if len(recorder.turns) >= self._budget.max_turns:
                return "max_turns"
            context = self._chat.extend(generation.token_ids, True, self._answers, self._kind.tools)

    async def _hear(self, generation: Generation, recorder: SegmentRecorder) -> SessionEnd | None:
        """What the environment says to it goes to `_answers`; returns how the session ends, if it does."""
        is_cut = generation.finish == "length"
        parsed = self._chat.parse(generation.token_ids, self._kind.tools, is_cut)
        self._messages.append(parsed.message)
        if is_cut and not self._kind.takes_text:
            return "max_tokens"  # half a call is none
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self._left_s()):
                acts = await self._answer(parsed)
        except TimeoutError:
            return "timeout"
        rewards = [act.reward for act in acts if act.reward is not None]
        self._turn_rewards += rewards
        recorder.describe_last_turn(
            num_calls=len(parsed.calls),
            num_wrong_calls=sum(act.is_wrong for act in acts),
            reward=sum(rewards) if rewards else None,
            environment_s=time.monotonic() - begun,
        )
        self._answers = [self._cut(dict(message)) for act in acts for message in act.messages]
        self._messages += self._answers
        if is_cut:
            return "max_tokens"
        return "done" if any(act.is_done for act in acts) or not self._answers else None

    async def _answer(self, parsed: Parsed) -> list[Act]:
        """The environment's answers; calls in order, one after the other."""
        if not parsed.calls and self._kind.takes_text:
            return [await self._environment.step(content_text(parsed.message.get("content")))]
        acts = []
        for number, call in enumerate(parsed.calls):
            act = await self._make(call)
            link = {"role": "tool", "name": call.name or "unknown", "tool_call_id": f"call_{number}"}
            acts.append(
                Act([{**link, **message} for message in act.messages], act.reward, act.is_done, act.is_wrong)
            )
        return acts

    async def _make(self, call: Call) -> Act:
        names = [tool["function"]["name"] for tool in self._kind.tools]
        error = call.error
        if not error and call.name not in names:
            error = f"there is no tool {call.name!r}; there is {', '.join(names)}"
        if error:
            return wrong(error)
        return await self._environment.call(call.name, call.arguments)

    def _left_s(self) -> float:
        return max(0.0, self._started + self._budget.session_timeout_s - time.monotonic())

    def _cut(self, message: dict[str, Any]) -> dict[str, Any]:
        """A long answer loses its middle."""
        limit = self._budget.max_result_tokens
        if not limit or not isinstance(message.get("content"), str):
            return message
        return message | {"content": self._chat.shorten(message["content"], limit)}

    def _reward(self, closing: Closing) -> float | None:
        """The environment's last word, else the sum over its turns."""
        if closing.reward is not None:
            return closing.reward
        return sum(self._turn_rewards) if self._turn_rewards else None


def wrong(error: str) -> Act:
    """An answer that tells the model what was wrong with its call."""
    return Act([{"content": f"error: {error}"}], is_wrong=True)


def observe(session: Session, first: Segment) -> None:
    segments = (first, *session.forks)
    turns = [turn for segment in segments for turn in segment.turns]
    of_model = sum(turn.num_tokens for turn in turns)
    num_tokens = sum(len(segment.completion_ids) for segment in segments)
    metrics.SESSION_ENDS.labels(session.end).inc()
    metrics.SESSION_TURNS.observe(len(turns))
    metrics.SESSION_TOKENS.labels("model").inc(of_model)
    metrics.SESSION_TOKENS.labels("environment").inc(num_tokens - of_model)
    metrics.SESSION_SECONDS.labels("engine").observe(sum(turn.engine_s for turn in turns))
    metrics.SESSION_SECONDS.labels("environment").observe(sum(turn.environment_s for turn in turns))
    metrics.TOOL_CALLS.labels("made").inc(sum(turn.num_calls - turn.num_wrong_calls for turn in turns))
    metrics.TOOL_CALLS.labels("wrong").inc(sum(turn.num_wrong_calls for turn in turns))
    for turn in (turn for segment in segments for turn in segment.turns[1:]):
        if turn.num_cached_tokens >= 0:
            metrics.LATER_PROMPT_TOKENS.labels("cached").inc(turn.num_cached_tokens)
            metrics.LATER_PROMPT_TOKENS.labels("computed").inc(
                turn.num_prompt_tokens - turn.num_cached_tokens
            )
