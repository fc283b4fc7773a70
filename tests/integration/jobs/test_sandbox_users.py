"""Code rewards under Redis users of their own, which may do what RQ needs and nothing else."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.support.preloaded import REPO
from tests.support.rewards import code_reward
from tests.support.samples import make_sample
from tests.support.servers import RedisServer, newest_server, server_version, users_file
from tests.support.trajectories import make_config
from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.redis.broker import URL_VARIABLE, Broker
from tidemill.common.run.state import publish_config
from tidemill.common.wire.keys import Keys

KEYS = Keys("secured")
CONFIG = SandboxConfig(time_s=30.0, total_s=60.0)
PASSWORDS = {
    user: f"{user}-s3cret"
    for user in (
        "trainer",
        "rollout",
        "reward",
        "sandbox",
        "operator",
        "exporter",
        "admin",
        "replica",
        "sentinel",
    )
}

pytestmark = pytest.mark.skipif(
    not newest_server() or server_version(newest_server()) < (7, 0),
    reason="permissions on reading and writing a key need Redis 7",
)


async def test_code_is_scored_without_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users = users_file(tmp_path, PASSWORDS)
    with RedisServer(tmp_path / "redis", "--aclfile", str(users)) as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        _as(monkeypatch, "admin")
        admin = await Broker.connect(url)
        section = {"rewards": {"code": {"sandbox": CONFIG.model_dump()}}}
        await publish_config(admin, KEYS, make_config(run_id=KEYS.run_id, reward=section))
        await admin.close()
        worker = _start(url, tmp_path)
        _as(monkeypatch, "reward")
        broker = await Broker.connect(url)
        monkeypatch.setenv(URL_VARIABLE, url)
        reward = code_reward(broker, KEYS, CONFIG)
        sample = make_sample((0, 0), False, "code", "print(1)", {"inputs": [""], "outputs": ["1"]})
        try:
            outcome = await asyncio.wait_for(reward.score(sample), 120)
        finally:
            worker.send_signal(signal.SIGTERM)
            code = await asyncio.to_thread(worker.wait, 120)
            await reward.close()
            await broker.close()
        assert (outcome.value, code) == (1.0, 0), (tmp_path / "log").read_text()
        watching = redis.Redis(
            "127.0.0.1", server.port, username="admin", password=PASSWORDS["admin"], protocol=2
        )
        refused = [(entry["username"], entry["object"]) for entry in watching.acl_log()]
        watching.close()
        assert refused == []


def _as(monkeypatch: pytest.MonkeyPatch, user: str) -> None:
    monkeypatch.setenv("TIDEMILL_REDIS_USERNAME", user)
    monkeypatch.setenv("TIDEMILL_REDIS_PASSWORD", PASSWORDS[user])


def _start(url: str, folder: Path) -> "subprocess.Popen[Any]":
    user = {"TIDEMILL_REDIS_USERNAME": "sandbox", "TIDEMILL_REDIS_PASSWORD": PASSWORDS["sandbox"]}
    command = [
        sys.executable,
        "-m",
        "tidemill.services.jobs.sandbox",
        "--run",
        KEYS.run_id,
        "--name",
        "sandbox-0",
    ]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            command, cwd=REPO, env=os.environ | {URL_VARIABLE: url} | user, stdout=log, stderr=log
        )
