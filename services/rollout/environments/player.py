"""Plays sessions with an environment: the engine's turn, the environment's answer, and so on to an end.

Guarantees: what the engine sampled is kept id by id, and never rendered; every wait has a limit of time; an
environment's fault never becomes a reward, for the session is played again; and the environment is closed in
every case, also when the play is cancelled because the lease is lost or the worker stops.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import structlog

from tidemill.common.config.data import DataConfig
from tidemill.common.errors import EnvironmentFaultError
from tidemill.common.telemetry import metrics
from tidemill.common.wire.messages import Ticket
from tidemill.services.rollout.environments.budget import Budget
from tidemill.services.rollout.environments.environment import Stage
from tidemill.services.rollout.environments.opening import row_of
from tidemill.services.rollout.environments.session import Playing
from tidemill.services.rollout.sessions.chat import ChatFormat
from tidemill.services.rollout.sessions.player import Ask, Played

log = structlog.get_logger(__name__)

PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
"""Before a session is played again; doubles each time."""


async def play_again(play_once: Callable[[int], Awaitable[Played]], attempts: int, name: str) -> Played:
    """Play a session, again where its environment fails; `play_once` is told how often it has failed.

    Raises:
        EnvironmentFaultError: it failed in every attempt.
    """
    num_faults = 0
    metrics.SESSIONS_HELD.inc()
    try:
        while True:
            try:
                return await play_once(num_faults)
            except EnvironmentFaultError as fault:
                num_faults += 1
                metrics.ENVIRONMENT_FAULTS.labels(fault.kind).inc()
                is_last = num_faults >= attempts
                log.warning("an environment failed", sample=name, error=str(fault), again=not is_last)
                if is_last:
                    raise
            await asyncio.sleep(min(LONGEST_PAUSE_S, PAUSE_S * 2**num_faults))
    finally:
        metrics.SESSIONS_HELD.dec()


class EnvironmentPlayer:
    """Plays the sessions of one worker."""

    def __init__(
        self,
        stage: Callable[[], Stage],
        open_chat: Callable[[], ChatFormat],
        decode: Callable[[Sequence[int]], str],
        budget: Budget,
        data: DataConfig,
    ) -> None:
        self._make_stage, self._open_chat = stage, open_chat
        self.decode, self.budget, self.data = decode, budget, data
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
        self._stage = self._make_stage()
        self._chat = await asyncio.to_thread(self._open_chat)

    async def play(self, ticket: Ticket, name: str, ask: Ask) -> Played:
        """Play one sample, again where its environment fails.

        Raises:
            EnvironmentFaultError: it failed in every attempt.
            ValueError: the prompt is too long, or the chat template refuses what the environment says.
        """
        return await play_again(
            lambda faults: self._play_once(ticket, ask, faults), self.budget.attempts, name
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
        started = time.monotonic()
        environment = await self.stage.open(row)
        try:
            playing = Playing(kind, environment, self.chat, self.budget, started)
            return await playing.play(ticket, row, ask, self.decode, self.data, num_faults)
        finally:
            # A task of its own: this one may be cancelled.
            closing = asyncio.create_task(environment.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
