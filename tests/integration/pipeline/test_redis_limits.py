"""Redis with little memory, with a pair that fails over, and with several runs on it: no run notices more
than a pause."""

import asyncio
import resource
from pathlib import Path

import pytest

from tests.support.runs import ServiceRun, simulated_config
from tests.support.servers import RedisServer, SentinelPair, newest_server
from tests.support.training import assert_full_steps, commits_of, num_commits
from tests.support.waiting import wait_until
from tidemill.common.history import History, StreamName
from tidemill.common.wire.keys import RUNS
from tidemill.common.wire.messages import Commit
from tidemill.services.console.status.snapshot import SnapshotReader

GROUPS = 4
TOKENS = 2000

pytestmark = pytest.mark.skipif(not newest_server(), reason="no redis-server")


async def test_a_run_survives_the_failover_of_a_sentinel_pair(tmp_path: Path) -> None:
    """The replica is behind when its master dies, so the tail of every stream is lost as well."""
    steps = 30
    config = simulated_config(
        tmp_path,
        trainer__steps=steps,
        trainer__checkpoint_every=10,
        rollout__simulated={"tokens": 8, "vocab_size": 32, "group_s": 0.1},
        trainer__simulated={"group_s": 0.02},
        streams__lease_s=1.0,
        trainer__reissue_after_s=5.0,
    )
    with SentinelPair(tmp_path / "pair", down_after_ms=1000) as pair:
        async with ServiceRun(tmp_path, config, url=pair.url) as run:
            run.start_all()

            await run.reach(5)
            pair.replica.kill()  # what the master takes now never reaches it
            before = pair.master.client.xlen(run.keys.trajectories())
            await wait_until(lambda: pair.master.client.xlen(run.keys.trajectories()) > before + 8)
            known = pair.master.client.xlen(run.keys.trajectories())
            pair.master.kill()
            await asyncio.to_thread(pair.replica.start)
            await wait_until(lambda: pair.replica.client.role()[0] == b"master")
            assert pair.replica.client.xlen(run.keys.trajectories()) < known, "nothing was lost: no test"
            assert await run.wait("trainer") == 0, run.log_of("trainer")
            commits = await commits_of(run.broker, run.keys)
            assert [commit.step for commit in commits] == list(range(steps))
            assert_full_steps(commits, GROUPS)
            await run.stop_all("rollout", "reward")


async def test_two_runs_on_one_redis_never_touch_each_other(tmp_path: Path) -> None:
    """At once, under the same roof and with the same names of workers."""
    folders = {name: tmp_path / name for name in ("one", "two")}
    with RedisServer(tmp_path / "redis") as server:
        async with asyncio.TaskGroup() as both:
            for steps, (name, folder) in zip((6, 9), folders.items(), strict=True):
                folder.mkdir()
                both.create_task(whole_run(folder, name, server.url, steps))
        keys = {key.decode() for key in server.client.scan_iter()}
        assert server.client.smembers(RUNS) == {b"one", b"two"}
        runs = [{key for key in keys if key.startswith(f"tidemill:{{{name}}}:")} for name in folders]
        assert keys == runs[0] | runs[1] | {RUNS}, "a key without the prefix of its run"
        assert {key.rpartition(":")[2] for key in runs[0]} == {key.rpartition(":")[2] for key in runs[1]}


async def whole_run(folder: Path, run_id: str, url: str, steps: int) -> None:
    config = simulated_config(folder, trainer__steps=steps)
    async with ServiceRun(folder, config, run_id, url) as run:
        run.start_all()
        await run.trained()
        await run.stop_all("rollout", "reward")


async def test_a_run_that_needs_trimming_goes_on_in_little_memory_and_stays_flat(tmp_path: Path) -> None:
    """The next regular checkpoint would come long after Redis is full; and memory stays level."""
    steps, maxmemory = 60, 5 << 20
    config = simulated_config(
        tmp_path,
        trainer__steps=steps,
        trainer__checkpoint_every=1000,
        streams__trim=True,
        **large_messages(tmp_path),
    )
    with RedisServer(tmp_path / "redis", "--maxmemory", str(maxmemory)) as server:
        async with ServiceRun(tmp_path, config, url=server.url) as run:
            written = 0.0
            run.start_all()
            lengths: list[int] = []
            while run.processes["trainer"].poll() is None:
                lengths.append(server.client.xlen(run.keys.trajectories()))
                await asyncio.sleep(0.2)
            assert run.processes["trainer"].returncode == 0, run.log_of("trainer")
            commits = await all_commits(run)
            written = sum(commit.metrics["completion_tokens"] for commit in commits) * 8
            assert written > 2 * maxmemory, "or nothing had to be trimmed"
            assert "Redis runs low on memory" in run.log_of("trainer")
            assert len(commits) == steps
            assert_full_steps(commits, GROUPS)
            assert max(lengths) < steps * GROUPS * 4 / 2
            assert server.client.info("stats")["evicted_keys"] == 0


def large_messages(folder: Path) -> dict[str, object]:
    """16 kB a trajectory, so that a step is 256 kB and more."""
    return {
        "model__max_model_len": TOKENS + 16,
        "rollout__sampling": {"max_tokens": TOKENS},
        "rollout__simulated": {"tokens": TOKENS, "vocab_size": 32},
        "trainer__micro_batch_tokens": 8 * TOKENS,
    }


async def test_where_trimming_cannot_help_the_log_says_what_to_change_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    config = simulated_config(tmp_path, trainer__steps=3, streams__trim=True, **large_messages(tmp_path))
    with RedisServer(tmp_path / "redis", "--maxmemory", "1600kb") as server:
        async with ServiceRun(tmp_path, config, url=server.url) as run:
            run.start_all()
            await wait_until(lambda: "Redis is full and holds only" in run.log_of("trainer"))
            await wait_until(lambda: "waiting for Redis" in run.log_of("rollout"))
            reader = await SnapshotReader.attach(run.broker, run.keys.run_id)
            assert (await reader.read()).memory.is_full
            server.client.config_set("maxmemory", "100mb")
            assert await run.wait("trainer") == 0, run.log_of("trainer")
            assert_full_steps(await commits_of(run.broker, run.keys), GROUPS)


async def all_commits(run: ServiceRun) -> list[Commit]:
    """From Redis, and from the journal what Redis has trimmed."""
    history = History(run.keys.run_id, run.run_dir, run.broker)
    return [commit async for commit in history.messages(StreamName.COMMITS, Commit)]


async def test_a_disk_that_takes_no_more_is_waited_out_and_nothing_half_written_is_announced(
    tmp_path: Path,
) -> None:
    """The trainer may write no file as large as its weights, as on a full disk; then it may again."""
    steps = 12
    config = simulated_config(tmp_path, trainer__steps=steps, trainer__policy="transformers")
    async with ServiceRun(tmp_path, config) as run:
        run.start_all()

        await run.reach(2)
        trainer = run.processes["trainer"].pid
        _, hard = resource.prlimit(trainer, resource.RLIMIT_FSIZE)
        resource.prlimit(trainer, resource.RLIMIT_FSIZE, (weights_bytes(run) - 1, hard))
        await wait_until(lambda: "waiting for the disk" in run.log_of("trainer"))
        stopped_at = await num_commits(run.broker, run.keys)
        announced = await run.broker.execute("XLEN", run.keys.weights)
        written = len(list((run.run_dir / "weights").glob("v*")))
        await asyncio.sleep(1.0)
        assert await num_commits(run.broker, run.keys) == stopped_at < steps
        assert await run.broker.execute("XLEN", run.keys.weights) == announced
        assert len(list((run.run_dir / "weights").glob("v*"))) == written
        resource.prlimit(trainer, resource.RLIMIT_FSIZE, (hard, hard))
        await run.trained()
        assert "torn" not in run.log_of("rollout")


def weights_bytes(run: ServiceRun) -> int:
    """Size of one version; the trainer's log is far smaller."""
    files = list((run.run_dir / "weights").glob("v*/model.safetensors"))
    size = files[0].stat().st_size
    assert size > 4 * len(run.log_of("trainer").encode())
    return size
