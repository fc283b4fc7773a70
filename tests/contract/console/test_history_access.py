"""Who wants to look at a run finds its history: in its Redis, in what that left, or is told what to do."""

from pathlib import Path

import pytest

from tests.support.archives import archive
from tests.support.trajectories import make_config, make_trajectory
from tidemill.common.archive import mark_whole
from tidemill.common.history import StreamName
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.run.state import publish_config
from tidemill.common.streams import append
from tidemill.common.wire.keys import Keys
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.console.run.history import MissingHistoryError, open_history


async def write_run(broker: Broker, folder: RunFolder) -> None:
    config = make_config(run_id=folder.run_id)
    folder.create(config)
    await publish_config(broker, Keys(folder.run_id), config)
    await append(broker, Keys(folder.run_id).trajectories(), make_trajectory(3))


async def num_trajectories(run: str, runs: Path) -> int:
    async with open_history(run, runs) as access:
        assert access.config is not None
        return len([record async for record in access.history.scan(StreamName.TRAJECTORIES)])


@pytest.fixture(autouse=True)
def no_server_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDEMILL_REDIS_URL", raising=False)


async def test_a_live_run_is_read_from_its_redis(
    broker: Broker, keys: Keys, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path, keys.run_id)
    await write_run(broker, folder)
    folder.write_address(redis_server.url)
    async with open_history(None, tmp_path) as access:
        assert (access.run_id, access.source) == (keys.run_id, "Redis")
    assert await num_trajectories(keys.run_id, tmp_path) == 1


async def test_a_finished_run_is_read_from_the_data_of_its_redis_or_from_an_archive_that_has_everything(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path, "one")
    server = EmbeddedRedis(folder.redis_data)
    server.start()
    broker = await Broker.connect(server.url)
    await write_run(broker, folder)
    await archive(broker, Keys("one"), folder.path)
    await append(broker, Keys("one").trajectories(), make_trajectory(4))
    await broker.close()
    server.stop()
    for _ in range(2):
        assert await num_trajectories("one", tmp_path) == 2, "the archive lacks what came after it"
    server.start()  # it refuses while another process serves the data
    server.stop()
    mark_whole(folder.path, True)
    async with open_history("one", tmp_path) as access:
        assert access.history.broker is None and access.is_over, "no Redis is started"
    mark_whole(folder.path, False)  # the run goes on
    assert await num_trajectories("one", tmp_path) == 2


async def test_where_nothing_is_left_it_says_what_to_do(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    RunFolder(tmp_path, "one").create(make_config(run_id="one"))
    with pytest.raises(MissingHistoryError, match="run one"):
        await num_trajectories("one", tmp_path)
    monkeypatch.setenv("TIDEMILL_REDIS_URL", redis_server.url)
    with pytest.raises(MissingHistoryError, match="does not know it"):
        await num_trajectories("nothing", tmp_path)
