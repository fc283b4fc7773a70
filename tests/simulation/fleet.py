"""The processes of a run, started as the services start themselves and kept alive as `tidemill up` does.

A process that dies is started again after a pause; one that says that the user made a mistake (exit code 2),
or that dies early too often, ends the run with its error.
"""

import argparse
import contextvars
import importlib
import signal
import traceback
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.process import Process
from tests.simulation.world import World
from tidemill.common.errors import ConfigError, TidemillError, first_cause
from tidemill.common.process import service
from tidemill.common.process.programs import SERVES, Program
from tidemill.common.run.state import FINISHED
from tidemill.services.console.up.supervisor import (
    FIRST_PAUSE_S,
    HEALTHY_AFTER_S,
    LONGEST_PAUSE_S,
    MAX_EARLY_DEATHS,
)

KILLED = -9


async def serve_as(role: str, options: argparse.Namespace) -> int:
    module = SERVES[Program(f"tidemill.services.{role}")]
    return await service._serve(role, options, lambda: importlib.import_module(module).serve)


@dataclass
class Member:
    """One process of the run, over its restarts."""

    name: str
    role: str
    process: Process | None = None
    early_deaths: int = 0
    wall_offset_s: float = 0.0


@dataclass
class Fleet:
    """`outcome` is empty while the run goes on, then `finished` or why it ended."""

    world: World
    members: dict[str, Member] = field(default_factory=dict)
    outcome: str = ""
    exit_errors: list[str] = field(default_factory=list)
    """Errors in plain words with which processes ended by themselves."""
    crashes: list[str] = field(default_factory=list)
    """Tracebacks of errors that are no `TidemillError`."""

    def add(self, name: str, role: str) -> None:
        self.members[name] = Member(name, role)
        self._start(self.members[name])

    def find(self, target: str) -> Process | None:
        """The living process of this name; None while there is none."""
        member = self.members.get(target)
        return member.process if member and member.process and not member.process.is_dead else None

    def terminate(self, target: str) -> None:
        if process := self.find(target):
            self.world.tell(target, "gets SIGTERM")
            self.world.signal(process, signal.SIGTERM)

    @property
    def is_finished(self) -> bool:
        """Whether the run's state in Redis says so."""
        state = self.world.cluster.server.space.values.get(self.world.keys.state.encode(), {})
        return bool(state.get(b"status", b"").decode() == f'"{FINISHED}"')

    def _start(self, member: Member) -> None:
        if self.outcome:
            return
        options = argparse.Namespace(
            run=self.world.run_id, name=member.name, metrics_port=0, set=[], config=None
        )

        async def main() -> int:
            return await serve_as(member.role, options)

        member.process = self.world.start(member.name, member.role, main, self._ended, member.wall_offset_s)

    def _ended(self, process: Process, code: int, error: BaseException | None) -> None:
        member = self.members[process.name]
        cause = first_cause(error) if error is not None else None
        if isinstance(cause, TidemillError):
            code = cause.exit_code
            self.exit_errors.append(f"{process.role}: {type(cause).__name__}: {cause}")
        elif cause is not None:
            self.crashes.append(f"{process.name}: {''.join(traceback.format_exception(cause))}")
        self.world.tell(
            process.name, f"ended with {code} {type(cause).__name__}: {cause}" if cause else f"ended {code}"
        )
        if self.outcome:
            return
        if code == 0 and process.role == "trainer" and self.is_finished:
            self.outcome = FINISHED
            return
        if code == ConfigError.exit_code:
            self.outcome = f"failed: {process.role} cannot do this run: {cause}"
            return
        is_young = self.world.loop.now - process.started_at < HEALTHY_AFTER_S
        if code not in (KILLED, 0):
            member.early_deaths = member.early_deaths + 1 if is_young else 1
        if member.early_deaths > MAX_EARLY_DEATHS:
            self.outcome = f"failed: {process.role} died {member.early_deaths} times in a row: {cause}"
            return
        pause_s = min(FIRST_PAUSE_S * 2 ** max(0, member.early_deaths - 1), LONGEST_PAUSE_S)
        self.world.loop.call_later(pause_s, self._start, member, context=contextvars.Context())


def names(config: Any) -> list[tuple[str, str]]:
    """Name and role of every process of a run."""
    rollouts = [(f"rollout-{index}", "rollout") for index in range(config.rollout.workers)]
    rewards = [(f"reward-{index}", "reward") for index in range(config.reward.workers)]
    return [("trainer", "trainer"), *rollouts, *rewards]
