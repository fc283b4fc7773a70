"""Players of samples: one completion, a session with an environment, or an agent program's session."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from tidemill.common.config.run import RunConfig
from tidemill.common.errors import EnvironmentFaultError
from tidemill.common.process.failures import FailureLog
from tidemill.common.run.special_tokens import NUM_TAIL_TOKENS, Reading
from tidemill.common.telemetry import metrics
from tidemill.common.wire.choices import ROUTES, Rows
from tidemill.common.wire.images import Image
from tidemill.common.wire.messages import LOGPROBS_FAULT, Choices, Ticket
from tidemill.common.wire.routes import find_routes_fault
from tidemill.common.wire.segments import Finish, Segment, Session
from tidemill.services.rollout.containers.sessions import SessionContainers
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.sessions.chat import ChatFormat
from tidemill.services.rollout.sessions.parts import Recording

if TYPE_CHECKING:
    from tidemill.services.rollout.sessions.pictures import SessionPictures

log = structlog.get_logger(__name__)

PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
"""Longest pause before a session is played again, and its bound; doubles each time."""

Ask = Callable[..., Awaitable[Generation]]
"""One generation: the engine continues token ids, with these `SamplingParams` and, by the name `images`, the
pictures of the ids where there are some. Cancelling it aborts the request."""
Decode = Callable[[Sequence[int]], str]
"""The whole text of ids."""
Read = Callable[[Sequence[int], Sequence[bool] | None, Sequence[int]], Reading]
"""What rewards read of a completion: of its ids, which of these the model wrote (None: all), and the ids of
its prompt."""
OpenChat = Callable[[], ChatFormat]
"""Loads the model's chat format; it blocks."""


@dataclass(frozen=True, slots=True)
class Played:
    """A played sample: its first segment, and the rest of it.

    Example: a single turn: `first` with the ids of "4" and the end of the text, `text` "4", `finish` "stop",
    no `session`.
    """

    first: Segment
    text: str
    finish: Finish = "stop"
    session: Session | None = None
    choices: dict[str, Rows] = field(default_factory=dict)
    thought: str | None = None
    """What the model thought, where the run parts that from its text."""
    images: tuple[Image, ...] = ()
    """Pictures of all segments."""

    def fields(self) -> dict[str, Any]:
        names = ("prompt_ids", "completion_ids", "logprobs", "loss_mask", "spans")
        fields = {name: getattr(self.first, name) for name in names}
        choices = Choices(rows=self.choices) if self.choices else None
        return fields | {
            "text": self.text,
            "thought": self.thought,
            "finish": self.finish,
            "session": self.session,
            "choices": choices,
            "images": self.images,
        }


def find_engine_fault(played: Played) -> str:
    """Why the engine's numbers for a sample cannot be right, as a sentence; empty where they may be.

    Such a sample is published as failed: it is not scored, and never trained.
    """
    session = played.session
    segments = [played.first, *(session.forks if session else ())]
    logprobs = np.concatenate([np.asarray(segment.logprobs, dtype=np.float32) for segment in segments])
    is_broken = ~np.isfinite(logprobs)
    if is_broken.any():
        first = int(np.argmax(is_broken))
        return (
            f"{LOGPROBS_FAULT}are not finite at {int(is_broken.sum())} of {len(logprobs)} tokens (first: "
            f"token {first}, {logprobs[first]}): the engine computed NaN. Its weights are damaged, or its "
            "numbers too large for model.dtype: set it to float32, or take another model"
        )
    return find_routes_fault(played.choices[ROUTES]) if ROUTES in played.choices else ""


class Player:
    """Plays samples, many at once; made once for each worker process."""

    def __init__(
        self,
        config: RunConfig,
        decode: Decode,
        open_chat: OpenChat,
        read: Read | None = None,
        pictures: "SessionPictures | None" = None,
    ) -> None:
        """`pictures` takes in what sessions show, where the run has pictures."""
        self.config = config
        self.pictures = pictures
        self.section = config.rollout.environment
        self.decode = decode
        self.open_chat = open_chat
        self.read: Read = read or (lambda ids, mask, prompt_ids: Reading(decode(ids)))
        self.containers = SessionContainers(self.section)
        self.num_faults: Counter[str] = Counter()
        """Faults of environments so far, by kind."""
        self.log = FailureLog()
        """Faults of environments by cause, with the reason of the last one."""

    @property
    def environment(self) -> str:
        """Name of the environment in the config."""
        return self.section.agent or self.section.use

    async def start(self) -> None:
        """Load what it needs. Raises ConfigError: the environment cannot be used as configured."""

    async def play(self, ticket: Ticket, name: str, ask: Ask) -> Played:
        """Play one sample of the ticket to its end; if its environment fails, play it again. `name` is unique
        among the samples that run.

        Raises:
            EnvironmentFaultError: the environment failed in every attempt: no fault of the model's.
            ValueError: the engine refuses the prompt, or the chat template the environment's messages.
        """
        num_faults = 0
        metrics.SESSIONS_HELD.inc()
        try:
            while True:
                try:
                    played = await self.play_once(ticket, name, ask, num_faults)
                    break
                except EnvironmentFaultError as fault:
                    num_faults += 1
                    self.num_faults[fault.kind] += 1
                    self.log.note(f"environment {self.environment}", fault.kind, str(fault))
                    metrics.ENVIRONMENT_FAULTS.labels(fault.kind).inc()
                    is_last = num_faults >= self.section.attempts
                    log.warning("an environment failed", sample=name, error=str(fault), again=not is_last)
                    if is_last:
                        raise
                longest_s = min(LONGEST_PAUSE_S, PAUSE_S * 2**num_faults)
                # Random: when an environment's server fails, all its sessions fail at the same moment.
                await asyncio.sleep(longest_s * random.uniform(0.5, 1.0))
        finally:
            metrics.SESSIONS_HELD.dec()
        _observe(played)
        return played

    async def play_once(self, ticket: Ticket, name: str, ask: Ask, num_faults: int) -> Played:
        """One attempt, after `num_faults` that have failed."""
        # Abstract. No ABC: a player that cannot fail, as SingleTurn, overrides `play` and has no attempts.
        raise NotImplementedError

    async def close(self) -> None:
        """End what it started: processes, servers, environments."""


class SingleTurn(Player):
    """The smallest environment: one completion, and nothing that answers it."""

    async def play(self, ticket: Ticket, name: str, ask: Ask) -> Played:
        prompt_ids = ticket.prompt_ids.tolist()
        generation = await Recording.of(ask).turn(prompt_ids, ticket.sampling, ticket.images)
        # Not validated here: the trajectory that is made of it is, and doing it twice would cost time.
        sampled: dict[str, Any] = {
            "prompt_ids": ticket.prompt_ids,
            "completion_ids": generation.token_ids,
            "logprobs": generation.logprobs,
            "spans": generation.spans,
        }
        segment = Segment.model_construct(**sampled)
        reading = self.read(generation.token_ids, None, ticket.prompt_ids[-NUM_TAIL_TOKENS:].tolist())
        return Played(
            segment,
            reading.text,
            generation.finish,
            choices=generation.choices,
            thought=reading.thought,
            images=ticket.images,
        )


def _observe(played: Played) -> None:
    session = played.session
    assert session is not None
    segments = (played.first, *session.forks)
    turns = [turn for segment in segments for turn in segment.turns]
    of_model = sum(turn.num_tokens for turn in turns)
    num_tokens = sum(len(segment.completion_ids) for segment in segments)
    metrics.SESSION_ENDS.labels(session.end, session.late).inc()
    metrics.SESSION_TURNS.observe(len(turns))
    metrics.SESSION_TOKENS.labels("model").inc(of_model)
    metrics.SESSION_TOKENS.labels("environment").inc(num_tokens - of_model)
    metrics.SESSION_SECONDS.labels("engine").observe(sum(turn.engine_s for turn in turns))
    metrics.SESSION_SECONDS.labels("environment").observe(sum(turn.environment_s for turn in turns))
    for answer in session.unread:
        metrics.UNREAD_TOKENS.labels(answer.why).inc(answer.num_tokens)
    metrics.TOOL_CALLS.labels("made").inc(sum(turn.num_calls - turn.num_wrong_calls for turn in turns))
    metrics.TOOL_CALLS.labels("wrong").inc(sum(turn.num_wrong_calls for turn in turns))
    for turn in (turn for segment in segments for turn in segment.turns[1:]):
        if (cached := turn.num_cached_tokens) >= 0:
            metrics.LATER_PROMPT_TOKENS.labels("cached").inc(cached)
            metrics.LATER_PROMPT_TOKENS.labels("computed").inc(turn.num_prompt_tokens - cached)
