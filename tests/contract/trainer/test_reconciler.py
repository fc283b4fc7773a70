"""After Redis lost its tail, or a worker its work, the streams hold again what they should."""

import asyncio
from unittest.mock import AsyncMock

import pytest

from tests.support.training import (
    commits_of,
    lose_tail,
    make_context,
    make_parts,
    make_score,
    messages,
    publish_group,
    reading,
    trainer_config,
)
from tests.support.trajectories import make_commit, make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.run.state import UID, read_state, read_uid
from tidemill.common.streams import append, ensure_group, entry_id_of, id_after, last_id
from tidemill.common.streams.consumer import Consumer
from tidemill.common.streams.selection import StreamName
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP
from tidemill.common.wire.messages import Ticket, Trajectory, WeightManifest
from tidemill.services.trainer.batch.reconciler import Reconciler
from tidemill.services.trainer.durable.commits import CommitJournal, append_commit, restore_commits
from tidemill.services.trainer.durable.trimming import Trimmer

DIGEST = "0" * 32


def manifest_of(version: int) -> WeightManifest:
    return WeightManifest(version=version, folder=f"v{version:08d}", files=(), digest=DIGEST)


@pytest.fixture
def parts(broker, keys):
    scheduler, join = make_parts(broker, keys, trainer_config(max_staleness=2))
    return scheduler, join, Reconciler(broker, keys, scheduler)


class TestLostTails:
    @pytest.mark.parametrize("num_left", [0, 1, 2])
    async def test_the_tail_of_prompts_commits_and_weights_comes_back(
        self, parts, broker, keys, num_left, tmp_path
    ):
        """Of weights the newest version alone; and nothing where nothing is missing."""
        scheduler, _, reconciler = parts
        journal = CommitJournal(tmp_path)
        await scheduler.admit(0)
        commits = [make_commit(step, digest=DIGEST) for step in range(3)]
        for commit in commits:
            await append_commit(broker, keys, commit)
            journal.append(commit)
        for version in (2, 3):
            assert await reconciler.announce(manifest_of(version))
        for key in (keys.prompts(), keys.commits, keys.weights):
            if num_left:
                await lose_tail(broker, key, entry_id_of(num_left - 1))
            else:
                await broker.execute("DEL", key)
        for _ in range(2):
            await reconciler.restore_lost()
            await restore_commits(broker, keys, journal)
            assert not await reconciler.announce()
            assert [t.ticket for t in await messages(broker, keys.prompts(), Ticket)] == list(range(6))
            assert await commits_of(broker, keys) == commits
            assert [m.version for m in await messages(broker, keys.weights, WeightManifest)] == [3]

    async def test_a_run_has_its_uid_again_after_redis_and_trainer_are_lost_and_no_other_folder_has_it(
        self, parts, broker, keys, tmp_path
    ):
        scheduler, _, _ = parts
        uids = []
        for name in ("a", "a", "b"):
            await broker.execute("DEL", keys.state, keys.config)
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            context = make_context(broker, keys, trainer_config(), folder)
            reconciler = Reconciler(broker, keys, scheduler)
            await reconciler.begin(context)
            uids.append((await read_state(broker, keys))[UID])
            await broker.execute("DEL", keys.state)
            assert await reconciler._register_if_lost()
            assert (await read_state(broker, keys))[UID] == uids[-1] == read_uid(folder)
        assert uids[0] == uids[1] != uids[2]

    async def test_a_restarted_server_is_noticed_once(self, parts, broker, monkeypatch):
        _, _, reconciler = parts
        assert not await reconciler.take_restart()
        assert not await reconciler.take_restart()
        assert not reconciler.needs_checkpoint

        async def info(section):
            return {"run_id": "another"}

        monkeypatch.setattr(broker, "info", info)
        assert await reconciler.take_restart()
        assert reconciler.needs_checkpoint
        assert not await reconciler.take_restart()

    async def test_a_restart_is_known_to_all_though_the_one_that_found_it_waits_for_an_answer(
        self, parts, broker, monkeypatch
    ):
        _, _, reconciler = parts
        run_id = "a"
        answered = asyncio.Event()

        async def info(section):
            if section == "persistence":
                await answered.wait()
            return {"run_id": run_id, "master_replid": "r"}

        monkeypatch.setattr(broker, "info", info)
        assert not await reconciler.check_server()
        run_id = "b"
        first = asyncio.create_task(reconciler.check_server())
        await asyncio.sleep(0.05)
        assert await reconciler.check_server(), "what was trained on may be lost"
        answered.set()
        assert await first and reconciler.epoch == 1

    async def test_nothing_is_trimmed_by_ids_of_another_history(self, parts, broker, keys, monkeypatch):
        """A server whose clock is behind has given lower ids to what is needed."""
        _, _, reconciler = parts
        trimmer = Trimmer(make_context(broker, keys, trainer_config()), reconciler)
        await reconciler.check_server()
        epoch = trimmer.epoch
        for index in range(2):
            await append(broker, keys.trajectories(), make_trajectory(0, index, group_size=2))
        below = {StreamName.TRAJECTORIES: id_after(await last_id(broker, keys.trajectories()))}
        with monkeypatch.context() as patch:
            patch.setattr(reconciler, "_identity", AsyncMock(return_value="another"))
            await trimmer.release(below, epoch)
            assert await broker.execute("XLEN", keys.trajectories()) == 2
            assert not trimmer.is_waiting
            patch.setattr(reconciler, "check_server", lambda: broker.execute("DEL", keys.state))
            await trimmer.release(below, trimmer.epoch)
            assert await broker.execute("XLEN", keys.trajectories()) == 2
        monkeypatch.setattr(reconciler, "_identity", AsyncMock(return_value="another"))
        await trimmer.release(below, trimmer.epoch)
        assert await broker.execute("XLEN", keys.trajectories()) == 0


class TestAbandonedGroups:
    @pytest.fixture
    async def tickets(self, broker, keys):
        consumer = Consumer(
            broker, keys.prompts(), ROLLOUT_GROUP, "w", Ticket, lease_s=60, dead_key=keys.dead
        )
        async with consumer:
            yield consumer

    @pytest.fixture
    async def samples(self, broker, keys):
        key = keys.trajectories()
        consumer = Consumer(broker, key, REWARD_GROUP, "r", Trajectory, lease_s=60, dead_key=keys.dead)
        async with consumer:
            yield consumer

    async def test_a_group_is_not_abandoned_while_its_ticket_waits_or_is_held(self, parts, tickets):
        scheduler, join, reconciler = parts
        assert await reconciler.find_abandoned(join.groups.values()) == []
        await scheduler.admit(0)
        assert await reconciler.find_abandoned(join.groups.values()) == []
        await tickets.fetch(3, 1.0)
        assert await reconciler.find_abandoned(join.groups.values()) == []

    async def test_without_any_rollout_worker_ever_nothing_is_abandoned(self, parts):
        scheduler, join, reconciler = parts
        await scheduler.admit(0)
        assert await reconciler.find_abandoned(join.groups.values()) == []

    async def test_a_ticket_that_was_acknowledged_without_its_trajectories_is_abandoned(
        self, parts, tickets, broker, keys
    ):
        scheduler, join, reconciler = parts
        await scheduler.admit(0)
        held = await tickets.fetch(2, 1.0)
        await tickets.complete([(held[0], None)], keys.trajectories())
        assert await reconciler.find_abandoned(join.groups.values()) == [0]

    async def test_a_group_waits_for_scores_while_one_of_its_trajectories_waits_or_is_held(
        self, parts, tickets, samples, broker, keys
    ):
        scheduler, join, reconciler = parts
        await scheduler.admit(0)
        await tickets.complete([(held, None) for held in await tickets.fetch(1, 1.0)], keys.trajectories())
        await append(broker, keys.trajectories(), *(make_trajectory(0, i, group_size=2) for i in (0, 1)))
        async with reading(join):
            await wait_until(lambda: len(join.groups[0].trajectories) == 2)
            assert await reconciler.find_abandoned([join.groups[0]]) == []
            first = (await samples.fetch(1, 1.0))[0]
            await samples.complete([(first, make_score(0, 0))], keys.scores())
            assert await reconciler.find_abandoned([join.groups[0]]) == []
            second = (await samples.fetch(1, 1.0))[0]
            assert await reconciler.find_abandoned([join.groups[0]]) == []
            await samples.complete([(second, None)], keys.scores())
            await wait_until(lambda: join.groups[0].scores)
            assert await reconciler.find_abandoned([join.groups[0]]) == [0]

    async def test_a_complete_group_is_never_abandoned(self, parts, tickets, broker, keys):
        scheduler, join, reconciler = parts
        await scheduler.admit(0)
        await tickets.complete([(held, None) for held in await tickets.fetch(9, 1.0)], keys.trajectories())
        await publish_group(broker, keys, 3)
        async with reading(join):
            await wait_until(lambda: join.complete == [3])
        assert await reconciler.find_abandoned(join.groups.values()) == [0, 1, 2, 4, 5]


async def test_started_versions_are_learnt_for_incomplete_groups_only(parts, broker, keys):
    scheduler, join, reconciler = parts
    await scheduler.admit(0)
    await ensure_group(broker, keys.prompts(), ROLLOUT_GROUP)
    for ticket, version in ((1, 4), (2, 5), (5, 6)):
        await broker.execute("HSET", keys.progress(ticket), "version", version)
    # Five of six are delivered: nobody can have started the last one, and nobody asks for it.
    await broker.execute(
        "XREADGROUP", "GROUP", ROLLOUT_GROUP, "w", "COUNT", 5, "STREAMS", keys.prompts(), ">"
    )
    await publish_group(broker, keys, 2)
    async with reading(join):
        await wait_until(lambda: join.complete == [2])
    await reconciler.learn_started_versions(join.groups.values())
    assert [group.started_version for group in join.groups.values()] == [-1, 4, -1, -1, -1, -1]
    assert await last_id(broker, keys.prompts()) == entry_id_of(5)
