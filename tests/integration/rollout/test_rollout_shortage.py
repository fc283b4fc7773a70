"""Rollout workers and hosts of agents whose machine is short of processes or descriptors.

Limits of descriptors are real ones, set for running processes. As root no limit of processes holds: `EAGAIN`
comes from an `os.fork` that the agent's file replaces in the process that forks.
"""

import asyncio
import errno
import resource
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.support.environments import THIS
from tests.support.rollout_worker import issue
from tests.support.runs import ServiceRun, simulated_config
from tests.support.scripted_model import ScriptedModel, agent_player, make_ticket
from tests.support.training import messages
from tests.support.waiting import wait_until
from tidemill.common.config.environment import EnvironmentConfig
from tidemill.common.errors import EnvironmentFaultError, MachineFaultError
from tidemill.common.process import children
from tidemill.common.process.heartbeats import Heartbeat, read_heartbeats
from tidemill.common.process.shortage import SHORT, make_fault
from tidemill.common.wire.messages import DeadLetter, SamplingParams, Trajectory
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.environments import load, stages
from tidemill.services.rollout.environments.environment import Design
from tidemill.services.rollout.environments.stages import ProcessStage

TICKET = make_ticket()
ROW = {"prompt": "Play.", "ground_truth": 7}
NO_MORE = 3
"""A limit of open files at which no further one can be opened; those that are open stay so."""
NUM_TICKETS = 4
SIZE = 4


def limit_files(pid: int, count: int | None = None) -> None:
    """Limit the open files of a running process; None: as many as it may have at most."""
    _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most if count is None else count, most))


def first_free(pid: int) -> int:
    """The number that the next descriptor of a process would get."""
    used = {int(file.name) for file in Path(f"/proc/{pid}/fd").iterdir()}
    return next(number for number in range(len(used) + 1) if number not in used)


class WaitingModel(ScriptedModel):
    """Answers once the test lets it."""

    def __init__(self, *lines: str) -> None:
        super().__init__(*lines)
        self.was_asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def ask(self, ids: Sequence[int], sampling: SamplingParams) -> Generation:
        self.was_asked.set()
        await self.may_answer.wait()
        return await super().ask(ids, sampling)


FORKLESS = """
    import errno, os
    from pathlib import Path

    HOST, FLAG = os.getpid(), Path({flag!r})
    fork = os.fork

    def refused():
        if FLAG.exists() and (FLAG.read_text() == "host") == (os.getpid() == HOST):
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return fork()

    os.fork = refused
    from tests.support.agents import twice as agent
"""


@pytest.mark.parametrize("who", ["host", "session"])
async def test_a_fork_that_fails_is_no_attempt_and_the_sessions_beside_it_go_on(
    tmp_path: Path, who: str
) -> None:
    flag = tmp_path / "flag"
    file = tmp_path / "mine.py"
    file.write_text(dedent(FORKLESS).format(flag=str(flag)))
    async with agent_player(f"{file}:agent") as player:
        host = player._program._host
        assert host is not None
        model = WaitingModel("2", "yes")
        beside = asyncio.create_task(player.play(TICKET, "beside", model.ask))
        await asyncio.wait_for(model.was_asked.wait(), 60)
        flag.write_text(who)
        with pytest.raises(MachineFaultError) as caught:
            await player.play(TICKET, "refused", ScriptedModel("2", "yes").ask)
        assert caught.value.number == errno.EAGAIN and "ulimit -u" in str(caught.value)
        flag.unlink()
        model.may_answer.set()
        played = await beside
        assert played.session is not None and played.session.reward == 1.0
        again = await player.play(TICKET, "again", ScriptedModel("2", "yes").ask)
        assert again.session is not None and again.session.reward == 1.0
        assert player._program._host is host and not player.num_faults


async def test_a_host_at_its_limit_of_descriptors_answers_and_lives_on() -> None:
    async with agent_player("tests.support.agents:twice") as player:
        host = player._program._host
        assert host is not None
        limit_files(host.pid, first_free(host.pid))
        with pytest.raises(MachineFaultError) as caught:
            await asyncio.wait_for(player.play(TICKET, "refused", ScriptedModel("2", "yes").ask), 60)
        assert caught.value.number == errno.EMFILE
        limit_files(host.pid)
        played = await player.play(TICKET, "again", ScriptedModel("2", "yes").ask)
        assert played.session is not None and played.session.reward == 1.0
        assert player._program._host is host and not player.num_faults


async def test_a_command_that_cannot_be_started_is_no_attempt(tmp_path: Path, monkeypatch: Any) -> None:
    """The shell says in words that it cannot fork; the worker finds out whether that is so."""
    words = "sh: 1: Cannot fork: Resource temporarily unavailable"
    async with agent_player(f"$ echo '{words}' >&2; exit 2") as player:
        with pytest.raises(EnvironmentFaultError):
            await player.play(TICKET, "s", ScriptedModel().ask)
        short = make_fault(errno.EAGAIN, "a process could not be started", "BlockingIOError")
        monkeypatch.setattr(stages, "find_shortage", lambda: short)
        with pytest.raises(MachineFaultError):
            await player.play(TICKET, "s", ScriptedModel().ask)


def stage_of(use: str, processes: int) -> ProcessStage:
    config = EnvironmentConfig(use=use, processes=processes)
    design = load(config)
    assert isinstance(design, Design)
    return ProcessStage(design, config)


async def test_without_any_process_a_session_is_no_attempt_and_with_one_it_is_played_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    stage = stage_of(f"{THIS}:Guess", processes=2)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(children.subprocess, "Popen", fail)
            with pytest.raises(MachineFaultError):
                await stage.open(ROW)
        first = await stage.open(ROW)
        with monkeypatch.context() as patch:
            patch.setattr(children.subprocess, "Popen", fail)
            second = await stage.open(ROW)
        assert len(stage.num_sessions) == 1
        await second.reset(ROW)
        assert (await second.step("7")).is_done
        await asyncio.gather(first.close(), second.close())
    finally:
        await stage.close()


async def test_a_process_of_environments_at_its_limit_refuses_a_session_and_keeps_the_others() -> None:
    stage = stage_of(f"{THIS}:Guess", processes=1)
    try:
        first = await stage.open(ROW)
        await first.reset(ROW)
        (process,) = stage.num_sessions
        limit_files(process.pid, NO_MORE)
        with pytest.raises(MachineFaultError) as caught:
            await asyncio.wait_for(stage.open(ROW), 30)
        assert caught.value.number == errno.EMFILE
        assert (await first.step("7")).is_done
        await first.close()
    finally:
        await stage.close()


async def beat_of(run: ServiceRun, name: str, is_short: bool) -> Heartbeat:
    async def find_beat() -> Heartbeat | None:
        beats = {beat.name: beat for beat in await read_heartbeats(run.broker, run.keys)}
        beat = beats.get(name)
        # It reports its groups once it has imported all that it needs.
        is_ready = beat is not None and "groups_train" in beat.counts
        return beat if is_ready and bool(beat.counts.get(SHORT)) == is_short else None

    return await wait_until(find_beat)


async def test_a_worker_without_descriptors_gives_its_tickets_to_a_healthy_one(tmp_path: Path) -> None:
    config = simulated_config(
        tmp_path,
        rollout__environment={"use": f"{THIS}:Guess", "max_turns": 2, "attempts": 1},
        rollout__simulated={"tokens": 4, "vocab_size": 32},
        model__max_model_len=256,
        streams__lease_s=2.0,
        streams__max_attempts=1,
    )
    async with ServiceRun(tmp_path, config) as run:
        sick = run.start("rollout", "sick")
        await beat_of(run, "sick", is_short=False)
        limit_files(sick.pid, NO_MORE)
        await issue(run.broker, run.keys)
        beat = await beat_of(run, "sick", is_short=True)
        assert "ulimit -n" in beat.detail and beat.failures
        assert await messages(run.broker, run.keys.dead, DeadLetter) == []
        run.start("rollout", "healthy")

        async def find_samples() -> list[Trajectory] | None:
            samples = await messages(run.broker, run.keys.trajectories(), Trajectory)
            return samples if len(samples) >= NUM_TICKETS * SIZE else None

        samples = await wait_until(find_samples)
        keys = sorted((sample.ticket, sample.index) for sample in samples)
        assert keys == [(ticket, index) for ticket in range(NUM_TICKETS) for index in range(SIZE)]
        assert {sample.worker for sample in samples} == {"healthy"}
        assert not any(sample.fault for sample in samples)
        assert await messages(run.broker, run.keys.dead, DeadLetter) == []
        limit_files(sick.pid)
        await beat_of(run, "sick", is_short=False)
