"""`use: agent`: sessions of a program that only knows an address and a key.

Guarantees: every play has an address of its own, and all ids, logprobs and versions that pass it are kept; a
program that fails or never asks the model is an environment's fault, and played again; one that never ends
once the model has answered is truncated; what a program started is killed as its play ends, however it ends.
"""

import asyncio
import os
import re
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import structlog

from tidemill.common.config.run import RunConfig
from tidemill.common.errors import EnvironmentFaultError
from tidemill.common.wire.messages import Ticket
from tidemill.services.rollout.environments.agent_programs import (
    Assignment,
    Result,
    end_leftovers,
    program_of,
)
from tidemill.services.rollout.environments.opening import row_of
from tidemill.services.rollout.gateway.program_errors import ProgramError
from tidemill.services.rollout.gateway.server import Gateway
from tidemill.services.rollout.gateway.session import GatewaySession, Limits
from tidemill.services.rollout.sessions.chat import ChatFormat
from tidemill.services.rollout.sessions.player import Ask, Decode, OpenChat, Played, observe, play_again

log = structlog.get_logger(__name__)

SWEEP_S = 5.0
START_S = 10.0
"""After so long, a program that has not asked yet is believed to wait for something else than a core."""
PROGRAM_ERROR = "program_error"
"""The session's metric: 1 where an error of the program ended it."""
NOT_IN_ALIAS = re.compile(r"[^A-Za-z0-9._-]+")
"""Clients read a slash or a colon in a model's name as the end of a provider's."""


class AgentPlayer:
    """Plays the sessions of one worker's agents."""

    def __init__(self, config: RunConfig, decode: Decode, open_chat: OpenChat) -> None:
        self._open_chat, self._decode = open_chat, decode
        section = self._section = config.rollout.environment
        model = alias_of(config.model.path)
        self._program = program_of(section.agent, model)
        self._limits = Limits(
            section.max_turns, section.max_tokens, config.model.max_model_len, section.max_segments
        )
        self._gateway = Gateway(model, section.gateway_host, section.structured_output == "refuse")
        self._chat: ChatFormat | None = None
        self._played: Counter[str] = Counter()
        """Names of the sessions that are played now."""
        self._starts = asyncio.Semaphore(len(os.sched_getaffinity(0)))
        self._starting: set[asyncio.Task[None]] = set()
        self._has_ended = asyncio.Event()
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the program and the tokenizer, and listen. Raises ConfigError: one of them cannot be used."""
        await asyncio.to_thread(end_leftovers)
        self._chat = await asyncio.to_thread(self._open_chat)
        await self._program.start()
        await self._gateway.start()
        self._sweeper = asyncio.create_task(self._sweep(), name="sweeper")

    async def play(self, ticket: Ticket, name: str, ask: Ask) -> Played:
        """Play one sample, again where its program fails.

        Raises:
            EnvironmentFaultError: it failed in every attempt.
        """
        self._played[name] += 1
        try:
            return await play_again(
                lambda faults: self._play_once(ticket, name, ask, faults),
                self._section.attempts,
                name,
            )
        finally:
            self._played[name] -= 1
            self._played += Counter()  # forget those that nobody plays
            self._has_ended.set()

    async def close(self) -> None:
        """Stop listening, and end what was started."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait({self._sweeper})
        await self._gateway.close()
        await self._program.close()
        await asyncio.to_thread(end_leftovers)

    async def _sweep(self) -> None:
        """Now and then end what left its group in time: a look at every process of the machine."""
        while True:
            await self._has_ended.wait()
            await asyncio.sleep(SWEEP_S)
            self._has_ended.clear()
            await asyncio.to_thread(end_leftovers, self._played)

    async def _play_once(self, ticket: Ticket, name: str, ask: Ask, num_faults: int) -> Played:
        assert self._chat is not None, "the player was never started"
        session = GatewaySession(self._chat, self._decode, ask, ticket.sampling, self._limits)
        try:
            with self._gateway.serving(session) as root:
                assignment = Assignment(name, row_of(ticket), root, session.key, self._gateway.model)
                program = await self._start(assignment, session)
                try:
                    result = await self._watched(program, session)
                finally:
                    program.cancel()
                    await asyncio.wait({program})
        finally:
            await session.close()
        if not session.histories.recorded:
            raise EnvironmentFaultError(
                "the agent ended without an answer of the model; it must ask at the address it is given "
                "(base_url or OPENAI_BASE_URL)",
                "start",
            )
        played = session.played(result.reward, result.metrics, num_faults)
        observe(played)
        return replace(played, finish="length") if result.is_truncated else played

    async def _start(self, assignment: Assignment, session: GatewaySession) -> "asyncio.Task[Result]":
        """Start the program, beside as many others that have not asked yet as there are cores: an interpreter
        and its libraries take seconds of one, and more at once run into their own limits of time."""
        if not self._program.is_heavy_to_start:
            return asyncio.create_task(self._program.run(assignment))
        await self._starts.acquire()
        session.active_at = time.monotonic()
        program = asyncio.create_task(self._program.run(assignment))
        asked = asyncio.create_task(session.asked.wait())

        async def release() -> None:
            try:
                await asyncio.wait({program, asked}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                asked.cancel()
                self._starts.release()

        starting = asyncio.create_task(release(), name="starting")
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        return program

    async def _watched(self, program: "asyncio.Task[Result]", session: GatewaySession) -> Result:
        """What the program came to, within the limits of time."""
        deadline = time.monotonic() + self._section.session_timeout_s
        while not program.done():
            now = time.monotonic()
            silent_s = 0.0 if session.num_running else now - session.active_at
            if silent_s >= self._section.call_timeout_s or now >= deadline:
                if session.histories.recorded:
                    # Once the model has answered, what runs may be its doing, and so is that it never ends:
                    # the session is truncated. It stays so, also if a turn ends before the program is killed.
                    session.reach("timeout" if session.end == "done" else session.end)
                    return Result(self._section.program_error_value)
                raise EnvironmentFaultError(
                    f"the agent neither asked the model nor ended for {silent_s:.0f} s "
                    "(rollout.environment.call_timeout_s, session_timeout_s)",
                    "timeout",
                )
            left_s = min(deadline - now, self._section.call_timeout_s - silent_s)
            both: set[asyncio.Future[Any]] = {program, session.failed}
            await asyncio.wait(both, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if session.failed.done():
                break
        if session.failed.done():
            session.failed.result()
        try:
            return program.result()
        except ProgramError as error:
            return self._ended_by(error, session)

    def _ended_by(self, error: ProgramError, session: GatewaySession) -> Result:
        """What a session comes to whose program failed. Raises ProgramError: it is played again."""
        if session.limit:  # one branch of the program met it, also where others went on
            session.reach(session.limit)
        value, is_cut = self._section.program_error_value, session.end != "done"
        is_replayed = self._section.on_program_error == "fault"
        is_models = error.cause == "model" or (not is_replayed and error.cause == "unknown")
        if not session.histories.recorded or error.cause == "machine" or not (is_models or is_cut):
            raise error
        log.warning(
            "a program ended with an error, at a limit or because the model was wrong",
            end=session.end,
            outcome="truncated" if value is None else "value",
            error=str(error).rstrip().splitlines()[-1],
        )
        if value is not None:
            return Result(value, {PROGRAM_ERROR: 1.0})
        return Result(metrics={PROGRAM_ERROR: 1.0}, is_truncated=True)


def alias_of(path: str) -> str:
    """What agents call the model: the last part of its path."""
    return NOT_IN_ALIAS.sub("-", path.rstrip("/").rpartition("/")[2]).strip("-") or "model"
