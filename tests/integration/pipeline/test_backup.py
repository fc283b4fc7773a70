"""A backup of a run in progress brings the run back, on another server and in another folder."""

import asyncio
import shutil
from pathlib import Path

import pytest
import redis

from tests.support.runs import ServiceRun, simulated_config
from tests.support.servers import RedisServer, newest_server, server_version
from tests.support.training import assert_full_steps, commits_of, messages, num_commits
from tests.support.waiting import wait_until
from tidemill.common.run.weight_files import WEIGHTS_FOLDER, version_name
from tidemill.common.wire.messages import WeightManifest

pytestmark = pytest.mark.skipif(
    not newest_server() or server_version(newest_server()) < (7, 0),
    reason="no redis-server that keeps its AOF in a folder",
)

STEPS = 18
GROUPS = 4


async def test_a_run_goes_on_from_a_backup_of_its_folder_and_its_redis(tmp_path: Path) -> None:
    """The drill of docs/operations/redis.md: first Redis, then the folder, while the run goes on."""
    config = simulated_config(
        tmp_path, trainer__steps=STEPS, trainer__checkpoint_every=3, trainer__simulated={"update_s": 0.1},
        streams__trim=True,
    )  # fmt: skip
    backup = tmp_path / "backup"
    restored = tmp_path / "restored"
    with RedisServer(tmp_path / "redis") as server:
        async with ServiceRun(tmp_path, config, url=server.url) as run:
            run.start_all()
            await run.reach(8)
            await asyncio.to_thread(copy_redis, server.client, tmp_path / "redis", backup / "redis")
            await run.reach(10)
            await asyncio.to_thread(copy_folder, run.run_dir, backup / "test")
    shutil.copytree(backup, restored)
    with RedisServer(restored / "redis") as server:
        async with ServiceRun(restored, config, url=server.url) as run:
            assert await num_commits(run.broker, run.keys) >= 8
            run.start("trainer")  # what the folder's checkpoint has beyond Redis, it appends
            await wait_until(lambda: has_newest_weights(run))
            for role in ("rollout", "reward"):
                run.start(role)
            assert await run.wait("trainer") == 0, run.log_of("trainer")
            commits = await commits_of(run.broker, run.keys)
            assert [commit.step for commit in commits] == list(range(STEPS))
            assert_full_steps(commits, GROUPS)


async def has_newest_weights(run: ServiceRun) -> bool:
    """Whether the weights that workers would load are in the folder."""
    newest = (await messages(run.broker, run.keys.weights, WeightManifest))[-1].version
    is_last = newest == await num_commits(run.broker, run.keys)
    return is_last and (run.run_dir / WEIGHTS_FOLDER / version_name(newest)).exists()


def copy_folder(folder: Path, target: Path) -> None:
    """As rsync does: files that vanish while it copies are left out."""
    try:
        shutil.copytree(folder, target, symlinks=True)
    except shutil.Error as error:
        still_there = [source for source, *_ in error.args[0] if Path(source).exists()]
        assert not still_there, still_there


def copy_redis(client: redis.Redis, folder: Path, target: Path) -> None:
    """What an operator does: no rewrite of the AOF while it is copied."""
    before = client.config_get("auto-aof-rewrite-percentage")["auto-aof-rewrite-percentage"]
    client.config_set("auto-aof-rewrite-percentage", 0)
    try:
        assert not client.info("persistence")["aof_rewrite_in_progress"]
        target.mkdir(parents=True)
        shutil.copytree(folder / "appendonlydir", target / "appendonlydir")
    finally:
        client.config_set("auto-aof-rewrite-percentage", before)
