"""The judge of a run under chaos sees what it is there to see."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from tests.chaos import driver as driver_module
from tests.chaos.archive import Archive, StreamCopy
from tests.chaos.driver import Driver
from tests.chaos.environments import misjudged, num_faults
from tests.chaos.faults import KILLS, Fault, Kind, plan
from tests.chaos.mortal_redis import MortalRedis
from tests.chaos.verdict import judge
from tests.support.recorded_sessions import as_session
from tests.support.training import lose_tail, make_score
from tests.support.trajectories import make_config, make_trajectory
from tests.support.waiting import has_ended, wait_until
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import FINISHED
from tidemill.common.streams import append
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit, Trajectory

SIZE = 2
MAX_STALENESS = 1


def commit_of(step: int, *tickets: int, **fields: Any) -> Commit:
    keys = tuple((ticket, index) for ticket in tickets for index in range(SIZE))
    return Commit(
        **{"step": step, "version": step + 1, "mini_batches": ((keys,),), "groups": tickets, **fields}
    )


@pytest.fixture
def archive() -> Archive:
    """Four tickets, two in a step, each trained one step after its version."""
    archive = Archive(Broker.__new__(Broker), Keys("judged"))
    for ticket in range(4):
        for index in range(SIZE):
            sample = make_trajectory(ticket, index, group_size=SIZE, spans=((max(0, ticket // 2 - 1), 0),))
            archive.trajectories.entries[f"{ticket + 1}-{index}"] = sample
    put(archive, commit_of(0, 0, 1), commit_of(1, 2, 3))
    return archive


def put(archive: Archive, *commits: Commit) -> None:
    archive.commits.entries |= {f"{commit.step + 1}-0": commit for commit in commits}


def test_a_whole_history_is_clean(archive: Archive) -> None:
    verdict = judge(archive, SIZE, MAX_STALENESS)
    assert verdict.is_clean
    assert (verdict.steps, verdict.trained, verdict.max_staleness) == (2, 4 * SIZE, 1)


def test_a_ticket_that_no_commit_tells_of_is_lost(archive: Archive) -> None:
    put(archive, commit_of(1, 3))
    assert judge(archive, SIZE, MAX_STALENESS).lost == SIZE
    put(archive, commit_of(1, 3, dropped=((2, -1, "dead"),)))
    assert judge(archive, SIZE, MAX_STALENESS).is_clean


def test_a_sample_that_its_commit_does_not_account_for_is_lost(archive: Archive) -> None:
    keys = ((2, 0), (3, 0), (3, 1))
    put(archive, commit_of(1, 2, 3, mini_batches=((keys,),)))
    assert judge(archive, SIZE, MAX_STALENESS).lost == 1


def test_a_score_that_no_environment_gave_is_found(archive: Archive) -> None:
    config = make_config(rollout={"environment": {"use": "sums.py:Sums"}})
    played = as_session(make_trajectory(0, 0, group_size=SIZE), reward=0.75)
    archive.trajectories.entries["1-0"] = played
    values = {(0, 0): 0.75, (0, 1): 0.75, (1, 0): 0.0}
    for number, (key, value) in enumerate(values.items(), 1):
        archive.scores.entries[f"{number}-0"] = make_score(*key, value)
    failed = make_score(1, 1, None)
    archive.scores.entries["4-0"] = failed
    assert [words.partition(" has")[0] for words in misjudged(archive, config)] == ["(0, 1)", "(1, 0)"]
    assert misjudged(archive, make_config()) == [] and num_faults(archive) == 1


def test_a_sample_in_two_commits_is_duplicated(archive: Archive) -> None:
    put(archive, commit_of(2, 3))
    assert judge(archive, SIZE, 5).duplicated == SIZE


@pytest.mark.parametrize("spans", [((0, 0),), ((0, 0), (9, 1))])
def test_a_token_that_is_too_old_or_of_the_future_is_a_violation(archive: Archive, spans: Any) -> None:
    put(archive, commit_of(2), commit_of(3, 4))
    for index in range(SIZE):
        archive.trajectories.entries[f"5-{index}"] = make_trajectory(4, index, group_size=SIZE, spans=spans)
    assert judge(archive, SIZE, MAX_STALENESS).violations == SIZE


def test_a_trained_sample_that_nobody_has_seen_proves_nothing(archive: Archive) -> None:
    del archive.trajectories.entries["1-0"]
    assert judge(archive, SIZE, MAX_STALENESS).violations == 1


def test_a_hole_in_the_commits_is_found(archive: Archive) -> None:
    del archive.commits.entries["1-0"]
    assert judge(archive, SIZE, MAX_STALENESS).gaps == [0]


async def test_copies_keep_what_is_trimmed_and_tell_what_redis_has_lost(broker: Broker, keys: Keys) -> None:
    copy = StreamCopy(keys.trajectories(), Trajectory)
    ids = await append(broker, copy.key, *(make_trajectory(ticket) for ticket in range(5)))
    await copy.follow(broker)
    await broker.execute("XTRIM", copy.key, "MINID", ids[2])
    await lose_tail(broker, copy.key, ids[3])
    (late,) = await append(broker, copy.key, make_trajectory(9))
    await copy.compare(broker)
    assert list(copy.entries) == [*ids[:4], late]
    assert list(copy.lost) == [ids[4]]


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_has_every_kind_of_kill_and_is_that_of_its_seed(seed: int) -> None:
    faults = plan(seed, 21, steps=45)
    kinds = [fault.kind for fault in faults]
    assert [kinds.count(kind) for kind in KILLS] == [3] * 7
    assert kinds.count(Kind.JOIN) == kinds.count(Kind.LEAVE) >= 2
    assert max(fault.at_version for fault in faults) < 30, "the last third is left for kills that come late"
    assert faults == plan(seed, 21, steps=45) != plan(seed + 1, 21, steps=45)


def test_a_fault_whose_version_has_passed_comes_after_a_tenth_of_its_delay() -> None:
    fault = Fault(Kind.REDIS, at_version=8, delay_s=2.0)
    assert (fault.wait_s(version=8), fault.wait_s(version=9)) == (2.0, 0.2)


def driver_of(tmp_path: Path, redis: Any, fault: Fault) -> Driver:
    """It does the fault to a run without any process."""
    fleet: Any = SimpleNamespace(
        broker=Broker.__new__(Broker),
        keys=Keys("judged"),
        folder=tmp_path,
        run_dir=tmp_path,
        redis=redis,
    )
    return Driver(fleet, [fault], 0, lambda _: None)


async def test_a_failover_that_the_run_does_not_live_to_see_is_no_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun = asyncio.Event()

    async def never_follows(_: float) -> float:
        has_begun.set()
        await asyncio.Event().wait()
        return 0.0

    driver = driver_of(tmp_path, SimpleNamespace(fail_over=never_follows), Fault(Kind.FAILOVER, 0, 0.0))
    monkeypatch.setattr(driver, "_is_finished", AsyncMock(return_value=False))
    tormenting = asyncio.create_task(driver._torment())
    await has_begun.wait()
    tormenting.cancel()
    await asyncio.wait({tormenting})
    assert not driver.watch.events


async def test_nothing_is_done_to_a_run_that_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Redis that died as the trainer ends would stay dead, and the run would never be judged."""
    driver = driver_of(tmp_path, None, Fault(Kind.FAILOVER, 0, 0.0))
    monkeypatch.setattr(driver_module, "read_state", AsyncMock(return_value={"status": FINISHED}))
    await driver._torment()
    assert not driver.watch.events


async def test_a_replica_that_has_not_taken_over_ends_with_the_server(tmp_path: Path) -> None:
    server = MortalRedis(tmp_path)
    await server.start()
    failing_over = asyncio.create_task(server.fail_over(lag_s=3600.0))
    pid = await wait_until(lambda: server._replica and server._replica.pid)
    failing_over.cancel()
    await asyncio.wait({failing_over})
    await server.stop()
    assert has_ended(pid)
