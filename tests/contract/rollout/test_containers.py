"""Containers of sessions: what is removed, and when; what never is. On a real Redis.

Where Docker is not, `tests/support/stand_in_docker.py` is the engine.
"""

import asyncio
import errno
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from rich.console import Console

from tests.support.containers import Containers, containers_in
from tests.support.rollout_worker import RUN_UID, Worker, issue, take_over
from tests.support.training import trainer_config
from tests.support.waiting import wait_until
from tidemill.common.errors import EnvironmentFaultError, MachineFaultError
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import keep_uid
from tidemill.common.streams import Delivery
from tidemill.common.wire.keys import ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import Lane, Ticket
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.console.up.local_run import LocalRun
from tidemill.services.rollout.containers import disk as disk_module
from tidemill.services.rollout.containers import reaper as reaper_module
from tidemill.services.rollout.containers.__main__ import remove_of_run
from tidemill.services.rollout.containers.command import ContainerCommand, EngineAwayError
from tidemill.services.rollout.containers.names import SessionName, read_name
from tidemill.services.rollout.containers.reaper import Reaper

Make = Callable[..., Any]
ENVIRONMENT = {"use": "agent", "agent": "$ true", "containers": "docker"}
SETTINGS: dict[str, Any] = {"rollout__environment": ENVIRONMENT}
LEASE_S = 60.0


@pytest.fixture
def containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Containers]:
    with containers_in(tmp_path / "containers", monkeypatch) as started:
        yield started


class Clock:
    """The monotonic time that the reaper reads; the test sets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(reaper_module, "time", SimpleNamespace(monotonic=lambda: self.now_s))


def reaper_of(worker: Worker) -> Reaper:
    return Reaper(worker.context, worker.player.containers)


def name_of(worker: Worker, delivery: Delivery[Ticket], index: int = 0) -> SessionName:
    return worker.lane._session_of(delivery, index).numbered(index + 1)


async def age(broker: Broker, keys: Keys, delivery: Delivery[Ticket], worker: Worker, idle_s: float) -> None:
    """Make it as if the worker had not renewed its lease for so long."""
    lease = (keys.prompts(), ROLLOUT_GROUP, worker.consumer.name, 0, delivery.entry_id)
    await broker.execute("XCLAIM", *lease, "IDLE", int(1000 * idle_s))


async def test_a_name_says_whose_lease_it_is(broker: Broker, keys: Keys, make: Make) -> None:
    await issue(broker, keys)
    async with make(**SETTINGS) as worker:
        delivery = await worker.fetch()
        name = name_of(worker, delivery, 2)
        assert read_name(str(name)) == read_name(f"{name}__env") == name
        assert (name.entry_id, name.ticket, name.index) == (delivery.entry_id, delivery.message.ticket, 2)
        assert worker.consumer.name.endswith(f".{name.consumer}")
        for other_name in (f"x{name}", f"{name}x", f"{name}_default", "tidemill", "", str(name).upper()):
            assert read_name(other_name) is None


async def test_only_containers_of_lost_leases_of_this_run_are_removed(
    broker: Broker, keys: Keys, make: Make, containers: Containers
) -> None:
    await issue(broker, keys)
    async with make("w1", **SETTINGS) as worker, make("w2", **SETTINGS) as beside:
        held = await beside.fetch()
        lost = await beside.fetch()
        stays = {
            containers.start(verifiers__run=str(name_of(beside, held))),
            containers.start(verifiers__run=str(name_of(beside, lost)).replace("tidemill-", "tidemill-x")),
            containers.start(verifiers__run="a1b2c3"),
            containers.start(),
        }
        of_another_run = SessionName("00000000", name_of(beside, lost).lane, "1-0", "ab", 0, 0, 1)
        stays.add(containers.start(tidemill__session=str(of_another_run)))
        goes = containers.start(tidemill__session=str(name_of(beside, lost)))
        project = containers.start(com__docker__compose__project=str(name_of(beside, lost, 1)))
        reaper = reaper_of(worker)
        await reaper.look()
        assert containers.ids == stays | {goes, project}
        await take_over(broker, keys, lost, worker)
        await reaper.look()
        assert containers.ids == stays
        # Also where its holder has published all: nobody plays it any more.
        await broker.execute("XACK", keys.prompts(), ROLLOUT_GROUP, held.entry_id)
        await reaper.look()
        assert len(containers.ids) == len(stays) - 1


async def test_a_silent_worker_keeps_its_containers_until_its_lease_has_ended_for_sure(
    broker: Broker, keys: Keys, make: Make, containers: Containers, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    await issue(broker, keys)
    async with make("w1", **SETTINGS) as worker:
        silent = Worker(broker, keys, Path(), "w2", **SETTINGS)
        delivery = await silent.fetch()
        container = containers.start(verifiers__run=str(name_of(silent, delivery)))
        reaper = reaper_of(worker)
        await age(broker, keys, delivery, silent, LEASE_S - 10)
        # The next look comes as the lease ends.
        assert 8 < await reaper.look() < 11
        await age(broker, keys, delivery, silent, LEASE_S + 1)
        await reaper.look()
        # It was only late: it renews, and is silent again.
        await age(broker, keys, delivery, silent, 0)
        clock.now_s += LEASE_S / 2
        await reaper.look()
        await age(broker, keys, delivery, silent, LEASE_S + 1)
        await reaper.look()
        assert containers.ids == {container}
        clock.now_s += LEASE_S / 2
        await reaper.look()
        assert containers.ids == set()


async def test_after_an_outage_of_redis_holders_get_a_lease_to_renew(
    broker: Broker, keys: Keys, make: Make, containers: Containers, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    await issue(broker, keys)
    async with make("w1", **SETTINGS) as worker:
        silent = Worker(broker, keys, Path(), "w2", **SETTINGS)
        delivery = await silent.fetch()
        container = containers.start(verifiers__run=str(name_of(silent, delivery)))
        await age(broker, keys, delivery, silent, LEASE_S + 1)
        reaper = reaper_of(worker)
        await reaper.look()
        monkeypatch.setattr(worker.context.broker, "waited_s", worker.context.broker.waited_s + 5)
        for _ in range(3):
            clock.now_s += 0.3 * LEASE_S
            await reaper.look()
            assert containers.ids == {container}
        clock.now_s += LEASE_S
        await reaper.look()
        assert containers.ids == set()


async def test_a_worker_removes_what_its_ended_sessions_left_and_keeps_what_it_plays(
    broker: Broker, keys: Keys, make: Make, containers: Containers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await issue(broker, keys)
    async with make(**SETTINGS) as worker:
        delivery = await worker.fetch()
        sessions = worker.player.containers
        ended = await sessions.begin(name_of(worker, delivery, 0))
        goes_on = await sessions.begin(name_of(worker, delivery, 0))
        assert ended != goes_on
        containers.start(verifiers__run=ended)
        stays = containers.start(verifiers__run=goes_on)
        reaper = reaper_of(worker)
        await reaper.look()
        assert len(containers.ids) == 2
        with containers.engine_away(monkeypatch):
            await sessions.end(ended)
            with pytest.raises(EngineAwayError):
                await reaper.look()
        assert len(containers.ids) == 2
        await reaper.look()
        assert containers.ids == {stays}
        await sessions.end(goes_on)
        assert containers.ids == set()


async def test_at_its_limit_or_without_its_engine_a_node_starts_no_session(
    broker: Broker, keys: Keys, make: Make, containers: Containers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await issue(broker, keys)
    if containers.ids:
        pytest.fail("this engine has containers of others")
    async with make(rollout__environment=ENVIRONMENT | {"max_containers": 2}) as worker:
        delivery = await worker.fetch()
        sessions = worker.player.containers
        foreign = SessionName("00000000", name_of(worker, delivery).lane, "1-0", "ab", 0, 0, 1)
        of_another_run = containers.start(verifiers__run=str(foreign))
        containers.start()  # counts for nothing: it is no session's
        # A session that has begun counts, before its container is there and while it is.
        begun = await sessions.begin(name_of(worker, delivery))
        with pytest.raises(MachineFaultError, match=r"holds 2 .* may hold 2"):
            await sessions.begin(name_of(worker, delivery))
        containers.start(verifiers__run=begun)
        monkeypatch.setattr("tidemill.services.rollout.containers.sessions.LISTING_AGE_S", 0.0)
        assert await sessions.find_fault() is not None
        containers.docker("rm", "-f", of_another_run)
        assert await sessions.find_fault() is None
        with containers.engine_away(monkeypatch), pytest.raises(MachineFaultError, match="cannot start"):
            await sessions.begin(name_of(worker, delivery))
        await sessions.end(begun)
        assert len(containers.ids) == 1


async def test_the_limit_counts_the_newest_list_whoever_has_asked_for_it(
    broker: Broker, keys: Keys, make: Make, containers: Containers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.services.rollout.containers.sessions.LISTING_AGE_S", 60.0)
    async with make(rollout__environment=ENVIRONMENT | {"max_containers": 1}) as worker:
        sessions = worker.player.containers
        assert await sessions.find_fault() is None
        foreign = SessionName("00000000", Lane.TRAIN, "1-0", "ab", 0, 0, 1)
        containers.start(verifiers__run=str(foreign))
        await reaper_of(worker).look()
        assert await sessions.find_fault() is not None


async def test_sessions_that_start_at_once_ask_a_hung_engine_once(
    broker: Broker, keys: Keys, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    await issue(broker, keys)
    async with make(**SETTINGS) as worker:
        sessions = worker.player.containers
        name = name_of(worker, await worker.fetch())
        num_asked = 0

        async def list_containers() -> None:
            nonlocal num_asked
            num_asked += 1
            await asyncio.sleep(0.01)
            raise EngineAwayError("docker ps has not ended after 30 s")

        monkeypatch.setattr(sessions.command, "list_containers", list_containers)
        starts = await asyncio.gather(*(sessions.begin(name) for _ in range(8)), return_exceptions=True)
        assert [type(start) for start in starts] == [MachineFaultError] * 8
        assert num_asked == 1 and not sessions.live


async def test_the_end_of_a_run_removes_its_containers_and_no_others(
    broker: Broker, keys: Keys, make: Make, containers: Containers
) -> None:
    await issue(broker, keys)
    async with make(**SETTINGS) as worker:
        name = name_of(worker, await worker.fetch())
    containers.start(verifiers__run=str(name))
    stays = {
        containers.start(verifiers__run=str(replace(name, run_uid="00000000"))),
        containers.start(verifiers__run="a1b2c3"),
    }
    assert await remove_of_run("docker", RUN_UID) == 1
    assert containers.ids == stays


async def test_runs_of_one_id_in_two_folders_keep_each_others_containers(
    broker: Broker, keys: Keys, make: Make, containers: Containers, tmp_path: Path
) -> None:
    await issue(broker, keys)
    uid = keep_uid(tmp_path)
    async with make("w1", **SETTINGS) as worker, make("w2", **SETTINGS) as beside:
        for each in (worker, beside):
            each.player.containers.run_uid = uid
        name = name_of(beside, await beside.fetch())
        folder = tmp_path / "another"
        folder.mkdir()
        # The other run's Redis has its lease; this one knows nothing of it.
        of_another_run = replace(name, run_uid=keep_uid(folder), entry_id="1-0")
        stays = containers.start(tidemill__session=str(of_another_run))
        await reaper_of(worker).look()
        containers.start(tidemill__session=str(name))
        assert await remove_of_run("docker", uid) == 1
        assert containers.ids == {stays}


@pytest.mark.parametrize("is_short", [False, True])
async def test_up_removes_what_its_run_has_left_and_ends_where_it_cannot(
    is_short: bool, tmp_path: Path, containers: Containers, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = trainer_config(**SETTINGS).model_copy(update={"run_id": "test"})
    folder = RunFolder(tmp_path, config.run_id)
    folder.path.mkdir()
    name = SessionName(keep_uid(folder.path), Lane.TRAIN, "1-0", "ab", 0, 0, 1)
    goes = containers.start(tidemill__session=str(name))
    stays = containers.start(tidemill__session=str(replace(name, run_uid="00000000")))
    output = io.StringIO()
    console = Console(file=output, width=200)
    run = LocalRun(config, folder, [], console, is_live=False, resume_command="")

    async def start(*_: Any, **__: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        if is_short:
            patch.setattr(asyncio, "create_subprocess_exec", start)
        await run._remove_containers()
    assert containers.ids == ({goes, stays} if is_short else {stays})
    assert ("may be left on this node" if is_short else "removed 1 containers") in output.getvalue()


async def test_a_reward_of_nothing_is_not_believed_where_a_container_was_lost(
    broker: Broker, keys: Keys, make: Make, containers: Containers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await issue(broker, keys)
    async with make(**SETTINGS) as worker:
        delivery = await worker.fetch()
        sessions = worker.player.containers

        async def begin() -> tuple[str, str]:
            name = await sessions.begin(name_of(worker, delivery))
            container_id = containers.start(verifiers__run=name)
            await sessions.note_started(name)
            return name, container_id

        sound, of_sound = await begin()
        removed, of_removed = await begin()
        killed, of_killed = await begin()
        without = await sessions.begin(name_of(worker, delivery))
        await sessions.note_started(without)
        containers.docker("rm", "-f", of_removed)
        containers.docker("kill", of_killed)
        for name in (sound, removed, killed, without):
            await sessions.note_finishing(name)
        # It may remove its container itself as it computes its reward.
        containers.docker("rm", "-f", of_sound)
        for name in (sound, without):
            await sessions.check(name, 0.0)
        await sessions.check(removed, 1.0)
        for name, reason in ((removed, "was removed"), (killed, "exit code 137")):
            for reward in (0.0, None):
                with pytest.raises(EnvironmentFaultError, match=reason):
                    await sessions.check(name, reward)
        with containers.engine_away(monkeypatch):
            await sessions.check(sound, 1.0)
            with pytest.raises(EnvironmentFaultError, match="is not believed"):
                await sessions.check(sound, 0.0)
        for name in (sound, removed, killed, without):
            await sessions.end(name)
        assert not containers.ids and not sessions.live and not sessions._started


@pytest.mark.parametrize(
    ("field", "room", "lack"),
    [
        ("f_bavail", 4096, r"less than 16 MiB are free in /"),
        ("f_favail", 1000, r"fewer than 1000 files can be made in /"),
    ],
)
async def test_a_reward_of_nothing_is_not_believed_where_the_disk_of_the_containers_was_full(
    field: str,
    room: int,
    lack: str,
    broker: Broker,
    keys: Keys,
    make: Make,
    containers: Containers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = SimpleNamespace(f_bavail=1 << 20, f_frsize=4096, f_files=1 << 20, f_favail=1 << 20)
    monkeypatch.setattr(disk_module.os, "statvfs", lambda _: disk)
    monkeypatch.setattr(disk_module, "LOOK_S", 0.01)
    monkeypatch.setattr("tidemill.services.rollout.containers.sessions.LISTING_AGE_S", 0.0)
    await issue(broker, keys)
    async with make(**SETTINGS) as worker:
        sessions = worker.player.containers
        name = name_of(worker, await worker.fetch())
        before = await sessions.begin(name)
        await sessions.check(before, 0.0)
        setattr(disk, field, room - 1)
        # Seen by the watch alone.
        await wait_until(lambda: sessions._disk._full_at > 0)
        with pytest.raises(MachineFaultError, match=rf"is full \({lack}"):
            await sessions.begin(name)
        setattr(disk, field, room)
        after = await sessions.begin(name)
        await sessions.check(after, 0.0)
        await sessions.check(before, 1.0)
        with pytest.raises(EnvironmentFaultError, match="the disk of the containers was full"):
            await sessions.check(before, 0.0)
        # Also where it is full since the last look of the watch.
        monkeypatch.setattr(disk_module, "LOOK_S", 60.0)
        await asyncio.sleep(0.05)
        setattr(disk, field, room - 1)
        with pytest.raises(EnvironmentFaultError, match="the disk of the containers was full"):
            await sessions.check(after, 0.0)
        for each in (before, after):
            await sessions.end(each)
        await sessions.close()


async def test_an_engine_that_does_not_say_where_its_data_are_is_asked_now_and_then(
    broker: Broker, keys: Keys, make: Make, containers: Containers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await issue(broker, keys)
    async with make(**SETTINGS) as worker:
        sessions = worker.player.containers
        name = name_of(worker, await worker.fetch())
        num_asked = 0

        async def read_data_folder() -> Path:
            nonlocal num_asked
            num_asked += 1
            await asyncio.sleep(0.01)
            if num_asked == 1:
                raise EngineAwayError("docker info ended with exit code 1: Forbidden")
            return Path("/not/on/this/machine")

        monkeypatch.setattr(sessions.command, "read_data_folder", read_data_folder)
        begun = await asyncio.gather(*(sessions.begin(name) for _ in range(8)))
        assert num_asked == 1
        monkeypatch.setattr(disk_module, "ASK_AGAIN_S", 0.0)
        with structlog.testing.capture_logs() as logs:
            begun += await asyncio.gather(*(sessions.begin(name) for _ in range(8)))
        assert num_asked == 2
        assert [entry["reason"] for entry in logs] == [
            "this machine has no /not/on/this/machine: the engine is on another one"
        ]
        for each in begun:
            await sessions.end(each)
        await sessions.close()


async def test_what_the_engine_says_in_place_of_a_folder_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(EngineAwayError, match="docker info: expected the folder of its data, got ''"):
        await ContainerCommand("docker").read_data_folder()


async def test_a_machine_that_can_start_no_process_is_no_fault_of_the_session(
    broker: Broker, keys: Keys, make: Make, containers: Containers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await issue(broker, keys)
    async with make(**SETTINGS) as worker:
        sessions = worker.player.containers
        name = await sessions.begin(name_of(worker, await worker.fetch()))

        async def start(*_: Any, **__: Any) -> None:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "create_subprocess_exec", start)
            with pytest.raises(MachineFaultError, match="short of processes"):
                await sessions.check(name, 0.0)
        await sessions.end(name)


@pytest.mark.parametrize("output", ["WARN: no cgroups\n[]", "{}x", '[{"State": "running"}]', "[3]", "7"])
async def test_what_podman_says_in_place_of_a_list_is_no_end_of_the_reaper(
    output: str, broker: Broker, keys: Keys, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "said"
    said.write_text(output)
    podman = tmp_path / "podman"
    podman.write_text(f"#!/bin/sh\ncat {said}\n")
    podman.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    async with make(rollout__environment=ENVIRONMENT | {"containers": "podman"}) as worker:
        reaper = reaper_of(worker)
        with pytest.raises(EngineAwayError, match="podman ps: expected a list in JSON, got "):
            await reaper.look()
        said.write_text("")
        await reaper.look()


async def test_a_second_ctrl_c_ends_the_removal_of_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = tmp_path / "docker"
    docker.write_text(f"#!/bin/sh\ntouch {tmp_path}/begun\nexec sleep 600\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    config = trainer_config(**SETTINGS).model_copy(update={"run_id": "test"})
    folder = RunFolder(tmp_path, config.run_id)
    folder.path.mkdir()
    uid = keep_uid(folder.path)
    output = io.StringIO()
    console = Console(file=output, width=200)
    run = LocalRun(config, folder, [], console, is_live=False, resume_command="")
    run._stop()
    removal = asyncio.create_task(run._remove_containers())
    await wait_until((tmp_path / "begun").exists)
    run._stop()
    async with asyncio.timeout(20):
        await removal
    assert f"containers --uid {uid} --command docker` removes them" in output.getvalue()


async def test_a_line_break_in_the_label_of_somebody_elses_container_hides_no_other(
    broker: Broker, keys: Keys, make: Make, containers: Containers
) -> None:
    await issue(broker, keys)
    async with make(**SETTINGS) as worker:
        name = str(name_of(worker, await worker.fetch()))
        stays = containers.start(com__docker__compose__project="a\nb")
        containers.start(tidemill__session=name)
        await reaper_of(worker).look()
        assert containers.ids == {stays}


async def test_a_look_that_ends_as_it_is_cancelled_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    said = asyncio.get_running_loop().create_future()

    class Process:
        returncode = 0

        async def communicate(self) -> tuple[bytes, bytes]:
            return await said

    async def start(*_: Any, **__: Any) -> Process:
        return Process()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    listing = asyncio.create_task(ContainerCommand("docker").list_containers())
    await asyncio.sleep(0.01)
    said.set_result((b"", b""))
    listing.cancel()
    with pytest.raises(asyncio.CancelledError):  # else a worker that stops would wait for its reaper for ever
        await listing
