"""Containers of sessions that are cancelled, and of workers that are killed.

Where Docker is not, `tests/support/stand_in_docker.py` is the engine.
"""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.containers import IMAGE, Containers, HangingRemoval, containers_in
from tests.support.rollout_worker import RUN_UID, issue
from tests.support.runs import ServiceRun, simulated_config
from tests.support.scripted_model import ScriptedModel, agent_player, make_ticket
from tests.support.training import messages
from tests.support.waiting import wait_until
from tidemill.common.run.state import UID, update_state
from tidemill.common.wire.messages import DeadLetter, Lane, Trajectory
from tidemill.services.rollout.containers.names import SessionName
from tidemill.services.rollout.sessions.parts import Recording

LEASE_S = 2.0
SIZE = 4
NUM_TICKETS = 4
SESSION = SessionName(RUN_UID, Lane.TRAIN, "1-0", "1a2b3c4d", 0, 0)
STARTS_ONE = f"docker run -d --network none --label verifiers.run=$VF_RUN_ID {IMAGE or 'image'} sleep 600"


@pytest.fixture
def containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Containers]:
    with containers_in(tmp_path / "containers", monkeypatch) as started:
        yield started


LATE = """
    import os, pathlib, signal, subprocess, sys, time

    folder = pathlib.Path(sys.argv[1])

    def end(*_):
        (folder / "asked_to_end").touch()
        sys.exit(1)

    signal.signal(signal.SIGTERM, end)
    subprocess.run(sys.argv[2], shell=True, check=True)
    names = ("VF_RUN_ID", "COMPOSE_PROJECT_NAME", "TIDEMILL_SESSION_NAME", "AGENTBOX_REAP_ORPHANS")
    (folder / "names").write_text("\\n".join(os.environ[name] for name in names))
    (folder / "begun").touch()
    time.sleep(600)
"""


async def test_the_program_of_a_cancelled_session_is_asked_to_end_and_its_containers_are_removed(
    tmp_path: Path, containers: Containers
) -> None:
    file = tmp_path / "late.py"
    file.write_text(dedent(LATE))
    agent = f"$ {sys.executable} {file} {tmp_path} '{STARTS_ONE}'"
    stays = containers.start(verifiers__run="of-somebody-else")
    async with agent_player(agent, containers="docker") as player:
        recording = Recording(ScriptedModel("yes").ask, session=SESSION)
        playing = asyncio.create_task(player.play(make_ticket(), "s", recording))
        await wait_until(lambda: playing.done() or (tmp_path / "begun").exists())
        assert len(containers.ids) == 2
        playing.cancel()
        await asyncio.wait({playing})
        assert (tmp_path / "asked_to_end").exists()
        names = (tmp_path / "names").read_text().split()
        assert names == [str(SESSION.numbered(1))] * 3 + ["0"]
        assert containers.ids == {stays}
        assert not player.containers.live


ENVIRONMENT = """
    import pathlib, subprocess, time

    FOLDER = pathlib.Path({folder!r})

    class Boxed:
        def reset(self, row):
            label = "tidemill.session=" + row["tidemill_session"]
            run = ["docker", "run", "-d", "--network", "none", "--label", label, {image!r}, "sleep", "600"]
            self.box = subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()

        def step(self, text):
            while not (FOLDER / "may_end").exists():
                time.sleep(0.05)
            return None, 1.0, True
"""


@pytest.mark.parametrize("is_reaper_killed", [False, True])
async def test_a_killed_worker_leaves_no_container_and_no_sample_is_lost(
    is_reaper_killed: bool, tmp_path: Path, containers: Containers
) -> None:
    """Also where the next worker is killed while it removes what the first has left."""
    file = tmp_path / "boxed.py"
    file.write_text(dedent(ENVIRONMENT).format(folder=str(tmp_path), image=IMAGE or "image"))
    config = simulated_config(
        tmp_path,
        rollout__environment={"use": f"{file}:Boxed", "containers": "docker", "processes": 8},
        rollout__simulated={"tokens": 4, "vocab_size": 32},
        rollout__max_groups_in_flight=1,
        model__max_model_len=256,
        streams__lease_s=LEASE_S,
    )
    of_another_run = SessionName("00000000", Lane.TRAIN, "1-0", "ab", 0, 0, 1)
    stay = {
        containers.start(verifiers__run="of-somebody-else"),
        containers.start(tidemill__session=str(of_another_run)),
    }
    async with ServiceRun(tmp_path, config) as run:
        killed = run.start("rollout", "killed")
        await update_state(run.broker, run.keys, **{UID: RUN_UID})  # as the trainer does
        await issue(run.broker, run.keys)

        async def boxes_of_a_group() -> set[str] | None:
            boxes = containers.ids - stay
            return boxes if len(boxes) >= SIZE else None

        lost = await wait_until(boxes_of_a_group)
        killed.kill()
        killed.wait()
        if is_reaper_killed:
            hanging = HangingRemoval(tmp_path)
            run.variables["rollout"] = {"PATH": hanging.path}
            reaper = run.start("rollout", "reaper")
            await wait_until(lambda: hanging.has_begun)
            reaper.kill()
            reaper.wait()
            hanging.end()
            del run.variables["rollout"]
            lost = containers.ids - stay
        run.start("rollout", "next")

        async def are_gone() -> bool:
            return not containers.ids & lost

        # The sessions of the other worker go on: only those of the lost leases are removed.
        await wait_until(are_gone)
        (tmp_path / "may_end").touch()

        async def find_samples() -> list[Trajectory] | None:
            samples = await messages(run.broker, run.keys.trajectories(), Trajectory)
            return samples if len(samples) >= NUM_TICKETS * SIZE else None

        samples = await wait_until(find_samples)
        keys = sorted((sample.ticket, sample.index) for sample in samples)
        assert keys == [(ticket, index) for ticket in range(NUM_TICKETS) for index in range(SIZE)]
        assert {sample.session.reward for sample in samples if sample.session} == {1.0}
        assert await messages(run.broker, run.keys.dead, DeadLetter) == []
        await run.stop_all("next")
        assert containers.ids == stay
