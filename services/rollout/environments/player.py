"""Plays sessions with an environment: the model speaks, the environment answers, and so on to an end.

Guarantees: what the engine sampled is kept id by id, and never rendered; every wait has a limit of time; an
environment's fault never becomes a reward, for the session is played again; and the environment is closed in
every case, also when the play is cancelled because the lease is lost or the worker stops.

Limits of a session: turns, tokens, seconds. The first turn always runs to its end, so that there is something
to train on; a later one that the session's time cuts off is left out, with what the environment said before.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from tidemill.common.config.environment import EnvironmentConfig
from tidemill.common.config.run import RunConfig
from tidemill.common.wire.messages import Ticket
from tidemill.common.wire.segments import Session, SessionEnd
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.environments import load
from tidemill.services.rollout.environments.environment import (
    Act,
    Closing,
    Design,
    Environment,
    Kind,
    Row,
    Stage,
    invalid_call,
)
from tidemill.services.rollout.environments.local import LocalStage
from tidemill.services.rollout.environments.opening import prompt_ids, row_of
from tidemill.services.rollout.environments.processes import ProcessStage
from tidemill.services.rollout.sessions.chat import Call, ChatFormat, Parsed
from tidemill.services.rollout.sessions.player import Ask, Decode, OpenChat, Played, observe, play_again
from tidemill.services.rollout.sessions.recorder import SegmentRecorder
from tidemill.services.rollout.sessions.template_chat import content_text


def build_stage(config: EnvironmentConfig) -> Stage:
    """Load the environment, and choose where it runs: blocking ones never block the worker's loop.

    Raises:
        ConfigError: it cannot be loaded, or a tool cannot be described.
    """
    loaded = load(config)
    if not isinstance(loaded, Design):
        return loaded
    _ = loaded.kinds  # a tool that cannot be described is refused now
    return LocalStage(loaded, config.call_timeout_s) if loaded.is_async else ProcessStage(loaded, config)


class EnvironmentPlayer:
    """Plays the sessions of one worker."""

    def __init__(
        self,
        config: RunConfig,
        decode: Decode,
        open_chat: OpenChat,
        make_stage: Callable[[EnvironmentConfig], Stage] = build_stage,
    ) -> None:
        self.config, self.section, self.decode = config, config.rollout.environment, decode
        self._make_stage, self._open_chat = make_stage, open_chat
        self._stage: Stage | None = None
        self._chat: ChatFormat | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def stage(self) -> Stage:
        """What sets up the environments, once it is started."""
        assert self._stage is not None, "the player was never started"
        return self._stage

    @property
    def chat(self) -> ChatFormat:
        """The model's chat format, once it is loaded."""
        assert self._chat is not None, "the player was never started"
        return self._chat

    async def start(self) -> None:
        """Load the environment and the tokenizer. Raises ConfigError: one of them cannot be used."""
        self._stage = self._make_stage(self.section)
        self._chat = await asyncio.to_thread(self._open_chat)

    async def play(self, ticket: Ticket, name: str, ask: Ask) -> Played:
        """Play one sample, again where its environment fails.

        Raises:
            EnvironmentFaultError: it failed in every attempt.
            ValueError: the prompt is too long, or the chat template refuses what the environment says.
        """
        return await play_again(
            lambda num_faults: self._play_once(ticket, ask, num_faults), self.section.attempts, name
        )

    async def close(self) -> None:
        """Close what is still open, and end what was started."""
        if self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)
        if self._stage is not None:
            await self._stage.close()

    async def _play_once(self, ticket: Ticket, ask: Ask, num_faults: int) -> Played:
        row = row_of(ticket)
        kind = self.stage.kind_of(row)
        # The session's time includes making its environment.
        deadline = time.monotonic() + self.section.session_timeout_s
        environment = await self.stage.open(row)
        try:
            return await Play(self, kind, environment, deadline).play(ticket, row, ask, num_faults)
        finally:
            # A task of its own: this one may be cancelled, and the environment is closed nevertheless.
            closing = asyncio.create_task(environment.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


class Play:
    """One session while it is played."""

    def __init__(
        self, player: EnvironmentPlayer, kind: Kind, environment: Environment, deadline: float
    ) -> None:
        self._player, self._kind, self._environment, self._deadline = player, kind, environment, deadline
        self._section, self._chat = player.section, player.chat
        self._max_model_len = player.config.model.max_model_len
        self._messages: list[dict[str, Any]] = []
        self._answers: list[dict[str, Any]] = []
        self._turn_rewards: list[float] = []

    async def play(self, ticket: Ticket, row: Row, ask: Ask, num_faults: int) -> Played:
        """Play it to its end.

        Raises:
            EnvironmentFaultError: the environment failed.
            ValueError: the prompt leaves no room, or the chat template refuses what the environment says.
        """
        opening = await self._environment.reset(row)
        ids = prompt_ids(ticket, opening, self._kind.tools, self._chat, self._player.config.data)
        recorder = SegmentRecorder(ids)
        if self._room(recorder) <= 0:
            raise ValueError(
                f"a prompt of {len(ids)} tokens, with what the environment added, leaves no "
                f"room within model.max_model_len {self._max_model_len}"
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
        text = self._player.decode(recorder.completion_ids)
        played = Played(segment, text, "stop" if end == "done" else "length", session)
        observe(played)
        return played

    async def _take_turns(self, ticket: Ticket, recorder: SegmentRecorder, ask: Ask) -> SessionEnd:
        context: list[int] = []
        while True:
            room = self._room(recorder) - len(context)
            if room <= 0:
                return "max_tokens"
            sampling, begun = ticket.sampling, time.monotonic()
            if sampling.max_tokens > room:
                sampling = sampling.model_copy(update={"max_tokens": room})
            try:
                async with asyncio.timeout(self._left_s() if recorder.turns else None):
                    generation = await ask([*recorder.ids, *context], sampling)
            except TimeoutError:
                return "timeout"
            recorder.add_context(context)
            recorder.add_turn(generation, engine_s=time.monotonic() - begun)
            if (end := await self._hear(generation, recorder)) is not None:
                return end
            if len(recorder.turns) >= self._section.max_turns:
                return "max_turns"
            context = self._chat.extend(generation.token_ids, True, self._answers, self._kind.tools)

    async def _hear(self, generation: Generation, recorder: SegmentRecorder) -> SessionEnd | None:
        """What the environment says to it goes to `_answers`; returns how the session ends, if it does."""
        is_cut = generation.finish == "length"
        parsed = self._chat.parse(generation.token_ids, self._kind.tools, is_cut)
        self._messages.append(parsed.message)
        if is_cut and not self._kind.takes_text:
            return "max_tokens"  # a truncated call is not executed
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
        if call.error:
            return invalid_call(call.error)
        if call.name not in names:
            return invalid_call(f"there is no tool {call.name!r}; there is {', '.join(names)}")
        return await self._environment.call(call.name, call.arguments)

    def _room(self, recorder: SegmentRecorder) -> int:
        """Tokens by which the completion may grow."""
        num_prompt = len(recorder.prompt_ids)
        most = min(self._section.max_tokens or self._max_model_len, self._max_model_len - num_prompt)
        return most - len(recorder.completion_ids)

    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _cut(self, message: dict[str, Any]) -> dict[str, Any]:
        """A long answer loses its middle."""
        limit = self._section.max_result_tokens
        if not limit or not isinstance(message.get("content"), str):
            return message
        return message | {"content": self._chat.shorten(message["content"], limit)}

    def _reward(self, closing: Closing) -> float | None:
        """The reward that the environment gave at the end, else the sum over its turns."""
        if closing.reward is not None:
            return closing.reward
        return sum(self._turn_rewards) if self._turn_rewards else None
