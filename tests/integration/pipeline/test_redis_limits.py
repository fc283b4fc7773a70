"""Redis with little memory: no run notices more than a pause."""

import asyncio
from pathlib import Path

import pytest

from tests.support.runs import ServiceRun, simulated_config
from tests.support.servers import RedisServer, newest_server
from tests.support.training import assert_full_steps, commits_of
from tests.support.waiting import wait_until
from tidemill.common.history import History, StreamName
from tidemill.common.wire.messages import Commit
from tidemill.services.console.look.snapshot import SnapshotReader

GROUPS = 4
TOKENS = 2000

pytestmark = pytest.mark.skipif(not newest_server(), reason="no redis-server")


async def test_a_run_that_needs_trimming_goes_on_in_little_memory_and_stays_flat(tmp_path: Path) -> None:
    """The next regular checkpoint would come long after Redis is full; and memory stays level."""
    steps = 60
    maxmemory = 5 << 20
    config = simulated_config(
        tmp_path, trainer__steps=steps, trainer__checkpoint_every=1000, streams__trim=True,
        **large_messages(tmp_path),
    )  # fmt: skip
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


async def test_where_trimming_cannot_help_the_log_says_what_to_change_and_nothing_is_lost(tmp_path):
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
