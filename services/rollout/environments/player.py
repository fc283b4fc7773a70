"""Plays sessions with an environment: the model speaks, the environment answers, and so on to an end.

Guarantees: what the engine sampled is kept id by id, and never rendered; every wait has a limit of time; an
environment's fault never becomes a reward, for the session is played again; and the environment is closed in
every case, also when the play is cancelled because the lease is lost or the worker stops.

Limits of a session: turns, tokens, seconds. The first turn always runs to its end, so that there is something
to train on; a later one that the session's time cuts off is left out, with what the environment said before.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import structlog

from tidemill.common.config.environment import EnvironmentConfig
from tidemill.common.config.run import RunConfig
from tidemill.common.data.dataset import PROMPT
from tidemill.common.data.image_columns import TEXT_PART
from tidemill.common.errors import BrokenImageError, EnvironmentFaultError
from tidemill.common.wire.images import Image
from tidemill.common.wire.messages import Ticket
from tidemill.common.wire.segments import Finish, Late, Session, SessionEnd
from tidemill.services.rollout.containers.names import SessionName
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.environments import load
from tidemill.services.rollout.environments.environment import (
    Act,
    Closing,
    Design,
    Environment,
    Kind,
    Opening,
    Row,
    Stage,
    chat_of,
    invalid_call,
    row_of,
)
from tidemill.services.rollout.environments.picture_environment import PictureEnvironment
from tidemill.services.rollout.environments.recorded import DifferentAnswerError, RecordedEnvironment
from tidemill.services.rollout.environments.session_time import SessionTime
from tidemill.services.rollout.environments.stages import LocalStage, ProcessStage
from tidemill.services.rollout.sessions.chat import ChatFormat, ChatMessage, Parsed
from tidemill.services.rollout.sessions.parts import Recording
from tidemill.services.rollout.sessions.picture_parts import (
    fill_places,
    has_picture,
    joined_parts,
    references_in,
    size_of,
    with_rows_pictures,
)
from tidemill.services.rollout.sessions.player import Ask, Decode, OpenChat, Played, Player, Read
from tidemill.services.rollout.sessions.recorder import SegmentRecorder, choices_of, images_in
from tidemill.services.rollout.sessions.template_chat import content_text

if TYPE_CHECKING:
    from tidemill.services.rollout.sessions.pictures import SessionPictures

log = structlog.get_logger(__name__)

SESSION_COLUMN = "tidemill_session"
"""Column that a row gets where `containers` is set: the label for the session's containers."""
SHOWN = 200
"""Characters of an answer in the log."""


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


class EnvironmentPlayer(Player):
    stage: Stage | None = None
    chat: ChatFormat

    def __init__(
        self,
        config: RunConfig,
        decode: Decode,
        open_chat: OpenChat,
        read: Read | None = None,
        pictures: "SessionPictures | None" = None,
    ) -> None:
        super().__init__(config, decode, open_chat, read, pictures)
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Load the environment and the tokenizer. Raises ConfigError: one of them cannot be used."""
        self.stage = build_stage(self.section)
        self.chat = await asyncio.to_thread(self.open_chat)

    async def close(self) -> None:
        # First: environments close through the processes that the stage ends.
        await asyncio.gather(*self._closing, return_exceptions=True)
        if self.stage is not None:
            await self.stage.close()

    async def play_once(self, ticket: Ticket, name: str, ask: Ask, num_faults: int) -> Played:
        row = row_of(ticket)
        session = ask.session if isinstance(ask, Recording) else None
        assert self.stage is not None, "it was never started"
        kind = self.stage.kind_of(row)
        recording = Recording.of(ask) if kind.resumes else Recording(ask)
        recording.begin()
        try:
            return await self._play(ticket, row, kind, recording, num_faults, session)
        except DifferentAnswerError as error:
            log.warning("a session begins again: its environment is another one", answer=str(error)[:SHOWN])
            recording.forget()
            return await self._play(ticket, row, kind, recording, num_faults, session)

    async def _play(
        self,
        ticket: Ticket,
        row: Row,
        kind: Kind,
        recording: Recording,
        num_faults: int,
        session: SessionName | None,
    ) -> Played:
        assert self.stage is not None
        # The session's time includes making its environment. One that repeats takes its time all over again.
        spent_s = recording.elapsed_s if kind.resumes == "restore" else 0.0
        session_time = SessionTime(self.section.session_timeout_s - spent_s, recording)
        name = await self.containers.begin(session)
        if name:
            row = {**row, SESSION_COLUMN: name}
        try:
            environment: Environment = await self.stage.open(row)
        except BaseException:
            await self.containers.end(name)
            raise
        # Before answers are recorded: pixels are never in Redis.
        environment = PictureEnvironment(environment, self.pictures, session_time)
        if kind.resumes:
            environment = RecordedEnvironment(environment, recording, kind.resumes)
        try:
            played = await Play(self, kind, environment, session_time).play(
                ticket, row, recording, num_faults
            )
            # Before it is closed, which removes its containers.
            await self.containers.check(name, played.session.reward if played.session else None)
            return played
        finally:
            # A task of its own: this one may be cancelled, and the environment is closed nevertheless.
            closing = asyncio.create_task(self._close(environment, name))
            # Kept, for the event loop alone would not keep the task from the garbage collector.
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _close(self, environment: Environment, name: str) -> None:
        """Close an environment, then remove containers that its session has left."""
        try:
            await environment.close()
        finally:
            await self.containers.end(name)


class Play:
    def __init__(
        self, player: EnvironmentPlayer, kind: Kind, environment: Environment, session_time: SessionTime
    ) -> None:
        self._player = player
        self._kind = kind
        self._environment = environment
        self._time = session_time
        self._section = player.section
        self._chat = player.chat
        self._max_model_len = player.config.model.max_model_len
        self._messages: list[dict[str, Any]] = []
        self._answers: list[dict[str, Any]] = []
        self._turn_rewards: list[float] = []
        self._late: Late = ""

    async def play(self, ticket: Ticket, row: Row, recording: Recording, num_faults: int) -> Played:
        """Play the session to its end.

        Raises:
            EnvironmentFaultError: the environment failed.
            ValueError: the prompt leaves no room, or the chat template refuses what the environment says.
        """
        opening = await self._environment.reset(row)
        await self._player.containers.note_started(row.get(SESSION_COLUMN, ""))
        ids, images = await self._prompt(ticket, row, opening)
        recorder = SegmentRecorder(ids, images)
        if self._room(recorder) <= 0:
            raise ValueError(
                f"a prompt of {len(ids)} tokens, with what the environment added, leaves no "
                f"room within model.max_model_len {self._max_model_len}"
            )
        end = await self._take_turns(ticket, recorder, recording)
        await self._player.containers.note_finishing(row.get(SESSION_COLUMN, ""))
        closing = await self._finish()
        if self._late:
            end = "timeout"
        reward = closing.reward  # of the whole session; else the sum over its turns
        if reward is None and self._turn_rewards:
            reward = sum(self._turn_rewards)
        segment = recorder.segment()
        session = Session(
            environment=self._kind.name,
            turns=segment.turns,
            messages=tuple(self._messages),
            end=end,
            late=self._late,
            reward=reward,
            metrics=dict(closing.metrics),
            num_faults=num_faults,
        )
        reading = self._player.read(recorder.completion_ids, recorder.mask, recorder.prompt_ids)
        finish: Finish = "stop" if end == "done" else "length"
        choices = choices_of([recorder])
        images = images_in([recorder])
        return Played(segment, reading.text, finish, session, choices, reading.thought, images)

    async def _finish(self) -> Closing:
        """The environment's result. Raises EnvironmentFaultError: it fails, not because of the policy."""
        try:
            # Outside the session's time: it is asked however it ended. The call has its own limit.
            return await self._environment.finish()
        except EnvironmentFaultError as fault:
            # A call that was late may have ended the environment. Faults in opening and reset are always
            # raised: the policy has said nothing by then.
            if not self._section.truncates_late or not (self._late or fault.kind == "timeout"):
                raise
        self._late = self._late or "reward"
        return Closing()

    async def _prompt(
        self, ticket: Ticket, row: Row, opening: Opening
    ) -> tuple[list[int], tuple[Image, ...]]:
        """Ids of the first prompt, and its pictures: the ticket's, unless there are tools to describe or the
        environment adds something. Then the row's chat is rendered once more, with the run's system prompt
        and suffix.

        Raises:
            EnvironmentFaultError: the environment shows more pictures than a prompt may have.
        """
        chat = self._chat
        ids: list[int] = ticket.prompt_ids.tolist()
        has_tools = bool(self._kind.tools) and chat.has_template
        if not opening.added and opening.messages is None and not has_tools:
            return ids, ticket.images
        if not chat.has_template:
            if opening.messages is not None:
                return chat.render(opening.messages), ()
            return ids + chat.extend([], True, [{"role": "user", "content": opening.added}]), ()
        messages = self._first_messages(ticket, row, opening)
        ids = chat.render(messages, self._kind.tools)
        pictures = self._player.pictures
        if pictures is None:
            return ids, ()
        ids, images = await _expanded(pictures, ids, messages, 0, "reset")
        if len(images) > pictures.max_per_prompt:
            raise EnvironmentFaultError(
                f"the first prompt has {len(images)} pictures, more than images.max_per_prompt "
                f"({pictures.max_per_prompt})",
                "reset",
            )
        return ids, images

    def _first_messages(self, ticket: Ticket, row: Row, opening: Opening) -> list[ChatMessage]:
        """The chat of the first prompt; in a run with pictures, with references to those of the row."""
        data = self._player.config.data
        messages: Sequence[ChatMessage]
        if opening.messages is not None:
            messages = opening.messages
            if self._player.pictures is not None:
                try:
                    messages = fill_places(messages, ticket.images)
                except BrokenImageError as error:
                    raise EnvironmentFaultError(f"the environment's chat: {error}", "reset") from error
        else:
            messages = chat_of(row[PROMPT])
            if self._player.pictures is not None:
                messages = with_rows_pictures(messages, ticket.images)
            messages = _appended(messages, data.prompt_suffix)
            if data.system_prompt and messages[0].get("role") != "system":
                messages = [{"role": "system", "content": data.system_prompt}, *messages]
        return _appended(messages, opening.added)

    async def _take_turns(
        self, ticket: Ticket, recorder: SegmentRecorder, recording: Recording
    ) -> SessionEnd:
        context: list[int] = []
        new_images: tuple[Image, ...] = ()
        while True:
            room = self._room(recorder) - len(context)
            images = [*recorder.images, *new_images]
            if room <= 0 or self._has_too_many(images):
                return "max_tokens"
            await self._read_shown(ticket, images)
            sampling = recorder.asking(ticket.sampling, len(recorder.completion_ids))
            begun = time.monotonic()
            if sampling.max_tokens > room:
                sampling = sampling.model_copy(update={"max_tokens": room})
            try:
                async with asyncio.timeout(self._time.left_s if recorder.turns else None):
                    generation = await recording.turn([*recorder.ids, *context], sampling, images)
            except TimeoutError:
                self._late = "session"
                return "timeout"
            await recording.keep_new()
            # Only with the turn that followed it: a session ends with tokens of the model.
            recorder.add_context(context, new_images)
            recorder.add_turn(generation, engine_s=time.monotonic() - begun)
            if (end := await self._hear(generation, recorder)) is not None:
                return end
            await recording.keep_new()
            if len(recorder.turns) >= self._section.max_turns:
                return "max_turns"
            context = self._chat.extend(generation.token_ids, True, self._answers, self._kind.tools)
            if self._player.pictures is not None:
                context, new_images = await _expanded(
                    self._player.pictures, context, self._answers, len(recorder.ids), "step"
                )

    async def _read_shown(self, ticket: Ticket, images: Sequence[Image]) -> None:
        """Read what the environment has shown, which another worker may have stored. The engine's turn then
        finds it in memory, and takes none of the session's time for a store that is away."""
        of_ticket = {image.digest for image in ticket.images}
        new_images = [image for image in images if image.digest not in of_ticket]
        if new_images:
            assert self._player.pictures is not None, "only it takes in what is shown"
            with self._time.stopped():
                await self._player.pictures.read(new_images)

    async def _hear(self, generation: Generation, recorder: SegmentRecorder) -> SessionEnd | None:
        """Have the environment answer a turn, into `_answers`. Returns how the session ends, if it does."""
        is_cut = generation.finish == "length"
        parsed = self._chat.parse(generation.token_ids, self._kind.tools, is_cut)
        self._messages.append(parsed.message)
        if is_cut and not self._kind.takes_text:
            return "max_tokens"  # a truncated call is not executed
        begun = time.monotonic()
        acts = list[Act]()
        try:
            async with self._time.limiting():
                acts = await self._answer(parsed)
        except TimeoutError:
            self._late = "session"
        except EnvironmentFaultError as fault:
            if fault.kind != "timeout" or not self._section.truncates_late:
                raise
            self._late = "call"
        rewards = [act.reward for act in acts if act.reward is not None]
        self._turn_rewards += rewards
        recorder.describe_last_turn(
            num_calls=len(parsed.calls),
            num_wrong_calls=sum(act.is_wrong for act in acts),
            reward=sum(rewards) if rewards else None,
            environment_s=time.monotonic() - begun,
        )
        if self._late:
            return "timeout"
        self._answers = [dict(message) for act in acts for message in act.messages]
        # A long answer loses its middle. Without a limit, what the model could never read: the model decides
        # what its tools write, and a sample that is too large to be sent would end its whole group.
        limit = self._section.max_result_tokens or self._max_model_len
        for message in self._answers:
            if isinstance(message.get("content"), str):
                message["content"] = self._chat.shorten(message["content"], limit)
            elif isinstance(message.get("content"), list):
                message["content"] = [self._shortened(item, limit) for item in message["content"]]
        self._messages += self._answers
        if is_cut:
            return "max_tokens"
        return "done" if any(act.is_done for act in acts) or not self._answers else None

    async def _answer(self, parsed: Parsed) -> list[Act]:
        """The environment's answers; calls in order, one after the other."""
        if not parsed.calls and self._kind.takes_text:
            return [await self._environment.step(content_text(parsed.message.get("content")))]
        names = [tool["function"]["name"] for tool in self._kind.tools]
        acts = []
        for number, call in enumerate(parsed.calls):
            if call.error:
                act = invalid_call(call.error)
            elif call.name not in names:
                act = invalid_call(f"there is no tool {call.name!r}; there is {', '.join(names)}")
            else:
                act = await self._environment.call(call.name, call.arguments)
            link = {"role": "tool", "name": call.name or "unknown", "tool_call_id": f"call_{number}"}
            acts.append(replace(act, messages=[{**link, **message} for message in act.messages]))
        return acts

    def _shortened(self, item: Mapping[str, Any], limit: int) -> dict[str, Any]:
        """A part of an answer with pictures, a long text without its middle."""
        if item["type"] != TEXT_PART:
            return dict(item)
        return {**item, "text": self._chat.shorten(item["text"], limit)}

    def _has_too_many(self, images: Sequence[Image]) -> bool:
        """Whether a history has more pictures than the engine takes: the policy's calls decide how many."""
        pictures = self._player.pictures
        return pictures is not None and len(images) > pictures.max_per_prompt

    def _room(self, recorder: SegmentRecorder) -> int:
        """Tokens by which the completion may grow."""
        num_prompt = len(recorder.prompt_ids)
        most = min(self._section.max_tokens or self._max_model_len, self._max_model_len - num_prompt)
        return most - len(recorder.completion_ids)


async def _expanded(
    pictures: "SessionPictures", ids: Sequence[int], messages: Sequence[ChatMessage], first: int, kind: str
) -> tuple[list[int], tuple[Image, ...]]:
    """As `SessionPictures.expand`. Raises EnvironmentFaultError: the chat template has no place for each."""
    # Counted already, but for those of the row and those that another worker has taken in.
    await pictures.count_tokens([size_of(reference) for reference in references_in(messages)])
    try:
        return pictures.expand(ids, messages, first)
    except ValueError as error:
        raise EnvironmentFaultError(f"what the environment shows: {error}", kind) from error


def _appended(messages: Sequence[ChatMessage], text: str) -> list[Mapping[str, Any]]:
    """The messages with `text` at the end of the last user message, without a separator, as in TRL."""
    changed = list(messages)
    if not text:
        return changed
    for index in reversed(range(len(changed))):
        if changed[index].get("role") == "user":
            content: Any = changed[index].get("content")
            if has_picture(content):
                content = joined_parts([*content, {"type": TEXT_PART, "text": text}])
            else:
                content = content_text(content) + text
            changed[index] = {**changed[index], "content": content}
            return changed
    return [*changed, {"role": "user", "content": text}]
