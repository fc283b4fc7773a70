"""Jobs under the users of Redis: code is run under two of them, and no user reaches the queue of another."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from rq import Queue, Retry
from rq.serializers import JSONSerializer

from tests.support.preloaded import REPO
from tests.support.rewards import code_reward
from tests.support.servers import INFRA, RedisServer, newest_server, server_version
from tests.support.trajectories import make_config
from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.process.heartbeats import Heartbeat, publish_heartbeat, read_heartbeats
from tidemill.common.redis.broker import URL_VARIABLE, Broker
from tidemill.common.redis.client import make_blocking_client
from tidemill.common.run.state import publish_config
from tidemill.common.wire.keys import Keys

KEYS, OTHER = Keys("first.1"), Keys("second")
LIMITS = SandboxConfig(time_s=30.0, total_s=60.0)

pytestmark = pytest.mark.skipif(
    not newest_server() or server_version(newest_server()) < (7, 0),
    reason="permissions on reading and writing a key need Redis 7",
)


class Users:
    """A server with the users that `make_users.py` makes."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        command = [sys.executable, str(INFRA / "make_users.py"), str(folder), *options]
        subprocess.run(command, check=True, cwd=REPO, stdout=subprocess.DEVNULL)
        self.server = RedisServer(folder / "redis", "--aclfile", str(folder / "users.acl"))

    def variables(self, user: str) -> dict[str, str]:
        run, _, role = user.rpartition(".")
        text = (self.folder / f"{run or 'passwords'}.env").read_text()
        passwords = dict(line.split("=", 1) for line in text.splitlines())
        return {
            URL_VARIABLE: self.server.url,
            "TIDEMILL_REDIS_USERNAME": user,
            "TIDEMILL_REDIS_PASSWORD": passwords[f"{role.upper()}_PASSWORD"],
        }

    def client(self, user: str) -> redis.Redis:
        found = self.variables(user)
        return redis.Redis(
            port=self.server.port, username=user, password=found["TIDEMILL_REDIS_PASSWORD"], protocol=2
        )

    def refusals(self) -> list[tuple[str, str]]:
        log: list[dict[str, str]] = self.client("admin").acl_log()
        return [(entry["username"], entry["object"]) for entry in log]


@pytest.fixture
def users(tmp_path: Path) -> Iterator[Users]:
    users = Users(tmp_path)
    with users.server:
        yield users


def become(monkeypatch: pytest.MonkeyPatch, users: Users, user: str) -> None:
    for name, value in users.variables(user).items():
        monkeypatch.setenv(name, value)


def start_worker(environment: dict[str, str], folder: Path) -> "subprocess.Popen[bytes]":
    command = [
        sys.executable,
        "-m",
        "tidemill.services.jobs.sandbox",
        "--run",
        KEYS.run_id,
        "--name",
        "sandbox-0",
    ]
    with open(folder / "worker.log", "wb") as log:
        return subprocess.Popen(command, cwd=REPO, env=environment, stdout=log, stderr=log)


async def run_code(
    users: Users, prefix: str, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> dict[str, Any]:
    """What comes of code that a reward worker asks for and a sandbox worker runs, each as its own user."""
    become(monkeypatch, users, f"{prefix}trainer")
    trainer = await Broker.connect()
    rewards = {"code": {"sandbox": LIMITS.model_dump()}}
    await publish_config(trainer, KEYS, make_config(run_id=KEYS.run_id, reward={"rewards": rewards}))
    await trainer.close()
    become(monkeypatch, users, f"{prefix}reward")
    worker = start_worker(os.environ | users.variables(f"{prefix}sandbox"), folder)
    broker = await Broker.connect()
    reward = code_reward(broker, KEYS, LIMITS)
    try:
        tests = {"inputs": ["1"], "outputs": ["2"]}
        found = await asyncio.wait_for(reward.run("print(int(input()) * 2)", tests), 120)
    finally:
        await reward.close()
        await broker.close()
        worker.terminate()
        await asyncio.to_thread(worker.wait, 60)
    return found


def test_a_reward_worker_cannot_give_the_head_a_job(
    users: Users, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The attack that worked: its credentials, RQ's own client, and a function of the standard library."""
    mark = tmp_path / "was-here"
    for user in ("reward", "sandbox", "rollout"):
        become(monkeypatch, users, user)
        connection = make_blocking_client(users.server.url)
        queue = Queue(KEYS.jobs_queue, connection=connection, serializer=JSONSerializer)
        for job_id in (f"{KEYS.jobs_names}1", f"{KEYS.sandbox_names}1", None):
            with pytest.raises(redis.exceptions.NoPermissionError):
                queue.enqueue_call(
                    "subprocess.getoutput", args=(f"touch {mark}",), job_id=job_id, retry=Retry(2)
                )
    subprocess.run(
        [sys.executable, "-m", "tidemill.services.jobs", KEYS.run_id, "--burst"],
        cwd=REPO,
        env=os.environ | users.variables("jobs"),
        check=True,
        timeout=120,
    )
    assert not mark.exists()


@pytest.mark.parametrize("job_id", [b"\xff", b"any", b"", f"{KEYS.jobs_names}1".encode()])
async def test_an_id_of_no_job_in_the_queue_ends_no_worker(
    isolated: None, users: Users, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, job_id: bytes
) -> None:
    """Reward workers may write the queue. The worker may not look at jobs of other names."""
    users.client("reward").rpush(f"rq:queue:{KEYS.sandbox_queue}", job_id)
    found = await run_code(users, "", monkeypatch, tmp_path)
    assert found["passed"] == 1
    assert users.refusals() == []
    assert users.client("admin").llen(f"rq:queue:{KEYS.sandbox_queue}") == 0
    assert users.client("sandbox").lrange(f"rq:queue:{KEYS.sandbox_queue}:intermediate", 0, -1) in (
        [],
        [job_id],
    )


async def test_a_heartbeat_is_told_for_its_own_role_only(
    users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, users, "rollout")
    rollout = await Broker.connect()
    await publish_heartbeat(rollout, KEYS, Heartbeat("rollout-0", "rollout", state="generate"))
    lie = users.client("reward")
    lie.hset(KEYS.workers("reward"), "rollout-0", '{"name": "rollout-0", "role": "rollout", "state": "dead"}')
    lie.hset(KEYS.workers("reward"), "a", '{"name": "b", "role": "reward"}')
    become(monkeypatch, users, "operator")
    operator = await Broker.connect()
    (beat,) = await read_heartbeats(operator, KEYS)
    assert (beat.name, beat.role, beat.state) == ("rollout-0", "rollout", "generate")
    await operator.close()
    await rollout.close()


async def test_users_of_one_run_reach_no_other(
    isolated: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = Users(tmp_path, "--run", KEYS.run_id, "--run", OTHER.run_id)
    with users.server:
        found = await run_code(users, f"{KEYS.run_id}.", monkeypatch, tmp_path)
        assert found["passed"] == 1
        assert users.refusals() == []
        admin = users.client("admin")
        assert not any("on" in admin.acl_getuser(name)["flags"] for name in ("trainer", "rollout", "reward"))
        for role, command in {
            "rollout": ("GET", OTHER.config),
            "reward": ("XADD", OTHER.scores(), "*", "p", "x"),
            "trainer": ("HSET", OTHER.state, "a", "b"),
            "sandbox": ("HSET", f"rq:job:{OTHER.sandbox_names}1", "a", "b"),
            "jobs": ("LPOP", f"rq:queue:{OTHER.jobs_queue}"),
        }.items():
            with pytest.raises(redis.exceptions.NoPermissionError):
                users.client(f"{KEYS.run_id}.{role}").execute_command(*command)
