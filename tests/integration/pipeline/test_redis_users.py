"""Every service works under a Redis user of its own, which may do what the service needs and nothing else."""

import asyncio
import contextlib
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.letters import make_ticket
from tests.support.numbered import append_numbered
from tests.support.preloaded import REPO
from tests.support.runs import ServiceRun, simulated_config
from tests.support.servers import (
    INFRA,
    RedisServer,
    command_lines,
    has_tls,
    make_certificate,
    newest_server,
    server_version,
    tls_options,
    users_file,
)
from tests.support.trajectories import make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.archive import ARCHIVE_FOLDER
from tidemill.common.config import RewardConfig, RunConfig, ServersConfig
from tidemill.common.errors import BrokerError
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import publish_config
from tidemill.common.streams import START, append, last_id
from tidemill.common.telemetry import metrics
from tidemill.common.wire.keys import ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import Commit, Lane, Message, Ticket, WeightManifest
from tidemill.services.console.exporter.exporter import MetricsReader
from tidemill.services.trainer.batch.unexpected_entries import remove_unexpected

USERS = ("trainer", "rollout", "reward", "sandbox", "jobs", "operator", "exporter")
SERVICES = ("trainer", "rollout", "reward")
PASSWORDS = {user: f"{user}-s3cret" for user in (*USERS, "admin", "replica", "sentinel")}

pytestmark = pytest.mark.skipif(
    not newest_server() or server_version(newest_server()) < (7, 0),
    reason="permissions on reading and writing a key need Redis 7",
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    users = users_file(tmp_path, PASSWORDS)
    with RedisServer(tmp_path / "redis", "--aclfile", str(users)) as server:
        yield server


@pytest.fixture
def admin(server: RedisServer) -> redis.Redis:
    return client_of(server, "admin")


def client_of(server: RedisServer, user: str, **options: Any) -> redis.Redis:
    options |= {"username": user, "password": PASSWORDS[user], "protocol": 2}
    return redis.Redis("127.0.0.1", server.port, **options)


def with_user(monkeypatch: pytest.MonkeyPatch, user: str) -> None:
    monkeypatch.setenv("TIDEMILL_REDIS_USERNAME", user)
    monkeypatch.setenv("TIDEMILL_REDIS_PASSWORD", PASSWORDS[user])


def refusals(admin: redis.Redis) -> list[tuple[str, str]]:
    """Who was refused what, as the server has noted it."""
    return [(entry["username"], entry["object"]) for entry in admin.acl_log()]


def may(admin: redis.Redis, user: str, *command: Any) -> bool:
    """Whether the user may run the command; nothing is run."""
    answer = admin.execute_command("ACL", "DRYRUN", user, *command)
    return answer in (b"OK", "OK", True)


@pytest.mark.skipif(not has_tls(), reason="this redis-server was built without TLS, or openssl is missing")
async def test_a_whole_run_works_over_tls_with_each_service_under_its_own_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that uses a key: evaluation, trimming, a takeover, a dead letter. No password leaks."""
    certificate, key = make_certificate(tmp_path / "tls")
    users = users_file(tmp_path, PASSWORDS)
    options = ["--aclfile", str(users), *tls_options(certificate, key)]
    with_user(monkeypatch, "operator")
    monkeypatch.setenv("TIDEMILL_REDIS_CA", str(certificate))
    config = users_config(tmp_path)
    with RedisServer(tmp_path / "redis", *options) as server:
        admin = client_of(server, "admin", ssl=True, ssl_ca_certs=str(certificate))
        async with ServiceRun(tmp_path, config, url=server.url, is_forked=False) as run:
            for role in SERVICES:
                run.variables[role] = {
                    "TIDEMILL_REDIS_USERNAME": role,
                    "TIDEMILL_REDIS_PASSWORD": PASSWORDS[role],
                }
            # Workers that come before the trainer has loaded the scripts ask once whether they may.
            run.start("trainer")
            await wait_until(lambda: admin.exists(run.keys.prompts()))
            for role in SERVICES[1:]:
                run.start(role)
            start_worker_of_jobs(run)
            admin.xadd(run.keys.trajectories(), {"p": b"poison"})
            await wait_until(lambda: admin.xlen(run.keys.commits) > 0)
            shown = command_lines([process.pid for process in run.processes.values()])
            run.kill("rollout")
            run.start("rollout", "second-rollout")
            assert await run.wait("trainer") == 0, run.log_of("trainer")
            await run.stop_all("second-rollout", "reward", "jobs")
            archive = await asyncio.to_thread(archive_the_rest, run)
        assert archive.returncode == 0, archive.stderr
        assert refusals(admin) == [], "a service has used a command or key that its user lacks"
        assert admin.xlen(run.keys.commits) == config.trainer.steps
        assert admin.xlen(run.keys.dead) > 0
        assert "tidemill.services.trainer" in shown
        assert list((run.run_dir / ARCHIVE_FOLDER).rglob("*.parquet"))
        assert secrets_in(shown) == secrets_in(everything_in(admin)) == set()
    assert leaky_files(tmp_path) == []


def start_worker_of_jobs(run: ServiceRun) -> None:
    """Under its own user."""
    with open(run.folder / "jobs.log", "ab") as log:
        run.processes["jobs"] = subprocess.Popen(
            [sys.executable, "-m", "tidemill.services.jobs", run.keys.run_id],
            cwd=REPO,
            env=as_jobs(run),
            stdout=log,
            stderr=log,
        )


def archive_the_rest(run: ServiceRun) -> "subprocess.CompletedProcess[str]":
    """What such a worker does for the trainer."""
    command = [
        sys.executable,
        "-m",
        "tidemill.services.jobs.archive",
        run.keys.run_id,
        str(run.run_dir),
        "--rest",
    ]
    return subprocess.run(command, cwd=REPO, env=as_jobs(run), capture_output=True, text=True, timeout=120)


def as_jobs(run: ServiceRun) -> dict[str, str]:
    user = {"TIDEMILL_REDIS_USERNAME": "jobs", "TIDEMILL_REDIS_PASSWORD": PASSWORDS["jobs"]}
    return os.environ | {"TIDEMILL_REDIS_URL": run.url} | user


def leaky_files(folder: Path) -> list[str]:
    """Names of files with a password: logs, the run's folder, the server's data."""
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert folder / "trainer.log" in written
    return [path.name for path in written if secrets_in(path.read_bytes().decode(errors="replace"))]


def secrets_in(text: str) -> set[str]:
    return {password for password in PASSWORDS.values() if password in text}


def everything_in(admin: redis.Redis) -> str:
    """All keys and values of the server."""
    return "\n".join(f"{key!r} {admin.dump(key)!r}" for key in admin.scan_iter())


def users_config(folder: Path) -> RunConfig:
    evaluation = folder / "eval.jsonl"
    evaluation.write_text('{"prompt": "w1 w2", "reward_model": {"ground_truth": "1"}}\n')
    return simulated_config(
        folder,
        trainer__steps=6,
        trainer__checkpoint_every=2,
        trainer__evaluation={"every": 2},
        data__eval={"held": str(evaluation)},
        streams__trim=True,
        streams__lease_s=1.0,
        streams__archive={"enabled": True},
    )


RUN = Keys("r1")
WRITES = f"""
    trainer: XADD {RUN.prompts()} * p x; XADD {RUN.prompts(Lane.EVAL)} * p x; XADD {RUN.commits} * p x
    trainer: XADD {RUN.weights} * p x; SET {RUN.config} {{}}; HSET {RUN.state} status 1
    trainer: HSET {RUN.workers("trainer")} a 1; XTRIM {RUN.trajectories()} MINID 5-0
    trainer: XTRIM {RUN.commits} MINID 5-0
    rollout: XADD {RUN.trajectories()} * p x; HSETNX {RUN.progress(3)} 0 x; HSET {RUN.workers("rollout")} a 1
    reward: XADD {RUN.scores()} * p x; HSET {RUN.results(3)} 0 x; HSET {RUN.reward_cache[0]} 0 x
    reward: HSET {RUN.limits("judge")} tokens 1; HSET {RUN.workers("reward")} a 1
    reward: XACK {RUN.trajectories()} reward 1-0
    sandbox: HSET {RUN.workers("jobs.sandbox")} a 1; SET {RUN.sandbox_result("a")} {{}}
    sandbox: LMOVE rq:queue:{RUN.sandbox_queue} rq:queue:{RUN.sandbox_queue} LEFT RIGHT
    trainer reward: DEL {RUN.results(3)}; HDEL {RUN.workers("reward")} a
    trainer rollout: XACK {RUN.prompts()} rollout 1-0
    trainer rollout reward: XADD {RUN.dead} * p x
    trainer jobs: HSET rq:job:{RUN.jobs_names}1 data x; RPUSH rq:queue:{RUN.jobs_queue} x
    trainer jobs: XADD rq:results:{RUN.jobs_names}1 * a b; SREM rq:workers:{RUN.jobs_queue} x
    trainer jobs: SADD rq:job:{RUN.jobs_names}1:dependents x
    reward sandbox: HSET rq:job:{RUN.sandbox_names}1 data x; RPUSH rq:queue:{RUN.sandbox_queue} x
    : DEL {RUN.trajectories()}; HSET rq:job:1 data x; SET rq:suspended 1; SET something 1
"""
"""Who may, and what."""


def test_who_may_write(admin: redis.Redis) -> None:
    for line in WRITES.strip().splitlines():
        users, _, commands = line.strip().partition(": ")
        for command in map(str.split, commands.split(";")):
            operator = {"operator"} if command[1].startswith("tidemill:") else set()
            allowed = {user for user in USERS if may(admin, user, *command)}
            assert allowed == set(users.split()) | operator, command


NOBODY = f"""
    FLUSHALL; FLUSHDB; KEYS *; CONFIG SET maxmemory-policy allkeys-lru; CONFIG GET requirepass; EVAL return 0
    FUNCTION LOAD x; FUNCTION FLUSH; FCALL f 0; CLIENT LIST; CLIENT NO-EVICT on; CLIENT KILL TYPE normal
    PUBLISH rq:pubsub:jobs-1 x; PUBSUB CHANNELS; SUBSCRIBE channel; LATENCY HISTORY command; SLOWLOG GET
    SCRIPT FLUSH; ACL SETUSER trainer +@all; ACL LIST; DEBUG SLEEP 1; SHUTDOWN; SAVE; MONITOR; SWAPDB 0 1
    REPLICAOF somewhere 6379; MIGRATE host 6379 {RUN.commits} 0 1000; RENAME other {RUN.commits}
    SORT {RUN.scores()}
"""
NO_WORKER = f"""
    SCAN 0; RANDOMKEY; DBSIZE; SCRIPT LOAD return; SCRIPT EXISTS {"0" * 40}; SCRIPT KILL; WAIT 1 0
    LCS {RUN.limits("a")} {RUN.limits("b")}; SETRANGE {RUN.limits("a")} 500000000 x; GETDEL {RUN.config}
    COPY {RUN.config} {RUN.limits("a")}; ZUNIONSTORE {RUN.limits("a")} 1 {RUN.limits("b")}
"""


def test_what_nobody_may_and_what_no_worker_may(admin: redis.Redis) -> None:
    for commands, users in ((NOBODY, USERS), (NO_WORKER, ("rollout", "reward", "sandbox", "jobs"))):
        for command in commands.replace("\n", ";").split(";"):
            if command.strip():
                assert [user for user in users if may(admin, user, *command.split())] == [], command


def test_nobody_is_let_in_without_a_password(server: RedisServer) -> None:
    once = Retry(NoBackoff(), 0)
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=server.port, retry=once).ping()
    for user in (*USERS, "default"):
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=server.port, username=user, password="", protocol=2, retry=once).ping()


def test_the_operator_ends_a_script_that_does_not_end(server: RedisServer, admin: redis.Redis) -> None:
    admin.config_set("lua-time-limit", 50)
    failure: list[Exception] = []

    def loop() -> None:
        try:
            client_of(server, "admin").eval("while true do end", 0)
        except redis.ResponseError as error:
            failure.append(error)

    looping = threading.Thread(target=loop)
    looping.start()
    operator = client_of(server, "operator")
    deadline = time.monotonic() + 60
    while looping.is_alive():
        assert time.monotonic() < deadline
        with contextlib.suppress(redis.ResponseError):  # it has not started, or is not long enough at work
            operator.script_kill()
        looping.join(0.05)
    assert "killed" in str(failure[0])


async def test_workers_wait_for_the_trainer_to_load_what_a_new_server_lacks(
    server: RedisServer, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart of Redis: nobody but the trainer's user may bring the scripts back."""
    with_user(monkeypatch, "reward")
    reward = await Broker.connect(server.url)
    call = asyncio.create_task(
        reward.script(
            "store_result", [RUN.trajectories(), RUN.results(0), RUN.result_tickets()], [*"0123456"]
        )
    )
    await wait_until(lambda: ("reward", "script|load") in refusals(admin))
    assert not call.done()
    with_user(monkeypatch, "trainer")
    trainer = await Broker.connect(server.url)
    await trainer.keep_scripts(RUN.state)
    with contextlib.suppress(redis.ResponseError):  # NOGROUP: it has run
        await asyncio.wait_for(call, 120)
    assert {user for user, _ in refusals(admin)} == {"reward"}
    await reward.close()
    await trainer.close()


async def test_scripts_may_not_do_what_their_user_may_not(server: RedisServer, admin: redis.Redis) -> None:
    reward = client_of(server, "reward")
    sha = admin.script_load("return redis.call('XADD', KEYS[1], '*', 'p', 'x')")
    assert reward.evalsha(sha, 1, RUN.scores())
    for key in (RUN.trajectories(), RUN.prompts(), RUN.commits):
        with pytest.raises(redis.ResponseError):
            reward.evalsha(sha, 1, key)
    assert admin.exists(RUN.trajectories(), RUN.prompts(), RUN.commits) == 0


async def test_a_key_outside_its_patterns_ends_a_service_in_plain_words(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_user(monkeypatch, "reward")
    broker = await Broker.connect(server.url)
    with pytest.raises(BrokerError, match="lacks a permission"):
        await broker.execute("HSET", RUN.state, "a", "b")
    with pytest.raises(BrokerError, match="lacks a permission"):
        await broker.pipeline([("GET", RUN.config), ("XLEN", RUN.commits)])
    await broker.close()


def test_passwords_are_made_once_and_the_server_gets_their_hashes(tmp_path: Path) -> None:
    command = [sys.executable, str(INFRA / "make_users.py"), str(tmp_path)]
    subprocess.run(command, check=True, cwd=REPO)
    first = (tmp_path / "passwords.env").read_text()
    subprocess.run(command, check=True, cwd=REPO)
    assert (tmp_path / "passwords.env").read_text() == first
    assert (tmp_path / "passwords.env").stat().st_mode & 0o077 == 0
    passwords = dict(line.split("=", 1) for line in first.splitlines())
    users = (tmp_path / "users.acl").read_text()
    assert not [password for password in passwords.values() if password in users]
    assert hashlib.sha256(passwords["REWARD_PASSWORD"].encode()).hexdigest() in users
    with RedisServer(tmp_path / "redis", "--aclfile", str(tmp_path / "users.acl")) as server:
        client = redis.Redis(
            port=server.port, username="reward", password=passwords["REWARD_PASSWORD"], protocol=2
        )
        assert client.ping()


async def test_the_exporter_reads_a_run_as_a_user_that_may_write_nothing(
    server: RedisServer, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_user(monkeypatch, "operator")
    broker = await Broker.connect(server.url)
    rewards = {"strict": {"judge": {"servers": "judge", "template": "x"}}}
    await publish_config(broker, RUN, users_config(tmp_path).model_copy(update=judged(rewards)))
    await append(broker, RUN.trajectories(), make_trajectory(0, 0), make_trajectory(0, 1))
    await append_numbered(broker, RUN.prompts(), [(0, make_ticket(0))])
    for key, group in ((RUN.trajectories(), "reward"), (RUN.prompts(), "rollout")):
        admin.xgroup_create(key, group, "0")
        admin.xreadgroup(group, "c", {key: ">"}, count=1)
    await broker.close()
    with_user(monkeypatch, "exporter")
    exporter = await Broker.connect(server.url)
    reading = await MetricsReader(exporter, RUN).read()
    await exporter.close()
    assert reading.replicas == {"judge": []}
    gauges = {(gauge, labels): value for gauge, labels, value in reading.gauges}
    for where, lag in ((("trajectories", "reward"), 1), (("prompts", "rollout"), 0)):
        assert (gauges[metrics.STREAM_LAG, where], gauges[metrics.STREAM_PENDING, where]) == (lag, 1)
    assert refusals(admin) == []


def judged(rewards: dict[str, Any]) -> dict[str, Any]:
    servers = {"judge": ServersConfig(model="m")}
    return {"reward": RewardConfig.model_validate({"rewards": rewards}), "servers": servers}


async def test_the_trainer_may_move_unexpected_entries_aside(
    server: RedisServer, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: dict[str, type[Message]] = {
        RUN.prompts(): Ticket,
        RUN.weights: WeightManifest,
        RUN.commits: Commit,
    }
    with_user(monkeypatch, "trainer")
    broker = await Broker.connect(server.url)
    for key, kind in streams.items():
        admin.xgroup_create(key, ROLLOUT_GROUP, mkstream=True)
        admin.xadd(key, {"by": "hand"})
        admin.xreadgroup(ROLLOUT_GROUP, "w", {key: ">"})
        assert await remove_unexpected(broker, RUN, key, kind) == 1
        assert await last_id(broker, key) == START
    await broker.close()
    assert refusals(admin) == []
    assert admin.xlen(RUN.dead) == len(streams)
