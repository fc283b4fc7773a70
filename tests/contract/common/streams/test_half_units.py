"""Redis's file ends in the middle of a script's effects: the first half of them comes back a restart later.

A server that finds such an end drops the half command and starts with what was there before the script; but
the whole commands before it stay in the file, after their MULTI. What is written then comes behind them, and
the next server does both.
"""

import os
import shutil

import pytest

from tests.chaos.mortal_redis import append_only_file
from tests.conftest import SERVERS
from tests.support.consumers import samples_of, take_ticket
from tests.support.letters import make_ticket
from tests.support.numbered import append_numbered
from tests.support.trajectories import make_trajectory
from tidemill.common import streams
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.wire.keys import ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import Trajectory
from tidemill.services.trainer.batch.reconciler import Reconciler
from tidemill.services.trainer.batch.scheduler import Scheduler

SIZE = 4


@pytest.fixture(params=sorted(SERVERS))
def server(request, tmp_path):
    """One of a test's own, not started. It never syncs, because it may put off writing while it does."""
    return EmbeddedRedis(tmp_path / "redis", "no", SERVERS[request.param])


async def publish(server: EmbeddedRedis, keys: Keys, first: int, last: int) -> None:
    """Publish samples of ticket 0 as a worker does that holds it and dies."""
    broker = await Broker.connect(server.url)
    prompts = keys.prompts()
    await streams.ensure_group(broker, prompts, ROLLOUT_GROUP)
    for held in await streams.pending_ids(broker, prompts, ROLLOUT_GROUP, "-", "+", 10):
        await broker.execute("XCLAIM", prompts, ROLLOUT_GROUP, "nobody", 0, held, "IDLE", 2 * 3_600_000)
    consumer, delivery = await take_ticket(broker, keys)
    for index in range(first, last):
        sample = make_trajectory(0, index, group_size=SIZE)
        await consumer.publish_sample(delivery, keys.trajectories(), keys.progress(0), sample)
    await broker.close()


async def found(server: EmbeddedRedis, keys: Keys) -> tuple[list[int], set[int]]:
    """Indices that the stream holds, and those that the group's progress names."""
    broker = await Broker.connect(server.url)
    samples = await samples_of(broker, keys)
    noted = {int(name) for name in await broker.execute("HKEYS", keys.progress(0))}
    await broker.close()
    return samples, noted


async def begin(server: EmbeddedRedis, keys: Keys) -> None:
    server.start()
    broker = await Broker.connect(server.url)
    await append_numbered(broker, keys.prompts(), [(0, make_ticket(0, group_size=SIZE))])
    await broker.close()
    await publish(server, keys, 0, 1)


def cuts(data: bytes, begin: int) -> list[int]:
    """A place in the middle of each command of the file from `begin` on, but the first."""
    starts = [index for index in range(begin, len(data)) if data.startswith(b"\r\n*", index)]
    return [index + 4 for index in starts]


async def test_no_index_is_noted_whose_sample_is_not_there(server, keys, tmp_path):
    """Else the ticket would be acknowledged without that sample, and its group would never be complete."""
    await begin(server, keys)
    path = append_only_file(server.data_dir)
    begun = path.stat().st_size
    await publish(server, keys, 1, 2)
    server.kill()
    whole = path.read_bytes()
    is_half = []
    for end in cuts(whole, begun):
        folder = tmp_path / f"cut-{end}"
        shutil.copytree(server.data_dir, folder)
        os.truncate(append_only_file(folder), end)
        cut = EmbeddedRedis(folder, "no", server.executable)
        cut.start()
        assert (await found(cut, keys))[0] in ([0], [0, 1])
        await publish(cut, keys, 2, 3)
        cut.kill()
        cut.start()
        samples, noted = await found(cut, keys)
        is_half.append(set(samples) != noted)
        assert noted <= set(samples), f"cut at {end - begun} bytes: {noted} noted of {samples}"
        await publish(cut, keys, 0, SIZE)
        assert sorted(set((await found(cut, keys))[0])) == list(range(SIZE))
        cut.stop()
    # Valkey leaves out the whole unit.
    assert any(is_half) != ("valkey" in server.executable), "without a half this test proves nothing"


async def test_the_trainer_has_the_file_written_anew_when_another_server_answers(server, keys):
    """So what the half would do, when the file is read again, is gone with it."""
    await begin(server, keys)
    broker = await Broker.connect(server.url)
    reconciler = Reconciler(broker, keys, Scheduler.__new__(Scheduler))
    assert not await reconciler.check_server()
    path = append_only_file(server.data_dir)
    begun = path.stat().st_size
    await publish(server, keys, 1, 2)
    server.kill()
    halves = [end for end in cuts(path.read_bytes(), begun)]
    middle = path.read_bytes().index(b"XADD", begun) + 60
    os.truncate(path, next(end for end in halves if end > middle))
    server.start()
    assert await reconciler.check_server()
    await streams.append(broker, keys.trajectories(), make_trajectory(9, 0, group_size=SIZE))
    await _until_written(broker)
    server.kill()
    server.start()
    read = await streams.read_range(broker, keys.trajectories(), Trajectory)
    assert [(entry.message.ticket, entry.message.index) for entry in read] == [(0, 0), (9, 0)]
    await broker.close()
    server.stop()


async def _until_written(broker: Broker) -> None:
    while (facts := await broker.info("persistence"))["aof_rewrite_in_progress"] == "1":
        pass
    assert facts["aof_last_bgrewrite_status"] == "ok"
