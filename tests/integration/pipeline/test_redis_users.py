"""Every service works under a Redis user of its own, which may do what the service needs and nothing else.

Code is run under two of them, and no user reaches the queue of another.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.letters import make_ticket
from tests.support.numbered import append_numbered
from tests.support.preloaded import start_plain
from tests.support.rewards import code_reward
from tests.support.runs import ServiceRun, simulated_config
from tests.support.servers import (
    ServerWithUsers,
    command_lines,
    has_tls,
    make_certificate,
    newest_server,
    server_version,
    tls_options,
)
from tests.support.trajectories import make_config, make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.archive import ARCHIVE_FOLDER
from tidemill.common.config import RewardConfig, RunConfig
from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.config.servers import ServersConfig
from tidemill.common.errors import BrokerError
from tidemill.common.process.heartbeats import Heartbeat, publish_heartbeat, read_heartbeats
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import publish_config
from tidemill.common.streams import START, append, last_id
from tidemill.common.telemetry import metrics
from tidemill.common.wire.keys import ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import Commit, Lane, Message, Ticket, WeightManifest
from tidemill.services.console.look.exporter import read_run
from tidemill.services.console.look.snapshot import SnapshotReader
from tidemill.services.trainer.batch.unexpected_entries import remove_unexpected

USERS = ("trainer", "rollout", "reward", "sandbox", "operator", "exporter")
SERVICES = ("trainer", "rollout", "reward")

pytestmark = pytest.mark.skipif(
    not newest_server() or server_version(newest_server()) < (7, 0),
    reason="permissions on reading and writing a key need Redis 7",
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerWithUsers]:
    with ServerWithUsers(tmp_path) as server:
        yield server


@pytest.fixture
def admin(server: ServerWithUsers) -> redis.Redis:
    return server.client_of("admin")


def become(monkeypatch: pytest.MonkeyPatch, server: ServerWithUsers, user: str) -> None:
    for name, value in server.variables(user).items():
        monkeypatch.setenv(name, value)


async def connected(server: ServerWithUsers, monkeypatch: pytest.MonkeyPatch, user: str) -> Broker:
    become(monkeypatch, server, user)
    return await Broker.connect(server.url)


def may(admin: redis.Redis, user: str, *command: Any) -> bool:
    """Whether the user may run the command; nothing is run."""
    answer = admin.execute_command("ACL", "DRYRUN", user, *command)
    return answer in (b"OK", "OK", True)


@pytest.mark.skipif(not has_tls(), reason="this redis-server was built without TLS, or openssl is missing")
async def test_a_whole_run_works_over_tls_with_each_service_under_its_own_user(tmp_path, monkeypatch):
    """With all that uses a key: evaluation, trimming, a takeover, a dead letter. No password leaks."""
    certificate, key = make_certificate(tmp_path / "tls")
    monkeypatch.setenv("TIDEMILL_REDIS_CA", str(certificate))
    config = users_config(tmp_path)
    with ServerWithUsers(tmp_path, *tls_options(certificate, key)) as server:
        become(monkeypatch, server, "operator")
        admin = server.client_of("admin")
        async with ServiceRun(tmp_path, config, url=server.url, is_forked=False) as run:
            run.variables = {role: server.variables(role) for role in SERVICES}
            # Workers that come before the trainer has loaded the scripts ask once whether they may.
            run.start("trainer")
            await wait_until(lambda: admin.exists(run.keys.prompts()))
            for role in SERVICES[1:]:
                run.start(role)
            admin.xadd(run.keys.trajectories(), {"p": b"poison"})
            await wait_until(lambda: admin.xlen(run.keys.commits) > 0)
            lines = command_lines([process.pid for process in run.processes.values()])
            run.kill("rollout")
            run.start("rollout", "second-rollout")
            assert await run.wait("trainer") == 0, run.log_of("trainer")
            await wait_until(lambda: list((run.run_dir / ARCHIVE_FOLDER).rglob("*.parquet")))
            await run.stop_all("second-rollout", "reward")
        assert server.refusals() == [], "a service has used a command or key that its user lacks"
        assert admin.xlen(run.keys.commits) == config.trainer.steps
        assert admin.xlen(run.keys.dead) > 0
        everything = "\n".join(f"{key!r} {admin.dump(key)!r}" for key in admin.scan_iter())
    texts = texts_below(tmp_path) | {"command lines": lines, "Redis": everything}
    assert "trainer.log" in texts and "tidemill.services.trainer" in lines
    passwords = server.passwords().values()
    leaky = {name for name, text in texts.items() for password in passwords if password in text}
    assert leaky == {"passwords.env"}


def texts_below(folder: Path) -> dict[str, str]:
    """Logs, the run's folder, the server's data."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.name: path.read_bytes().decode(errors="replace") for path in files}


def users_config(folder: Path) -> RunConfig:
    evaluation = folder / "eval.jsonl"
    evaluation.write_text('{"prompt": "w1 w2", "reward_model": {"ground_truth": "1"}}\n')
    return simulated_config(
        folder,
        trainer__steps=6,
        trainer__checkpoint_every=2,
        trainer__evaluation={"every": 2},
        # Long enough that what is asked for at a checkpoint is in the queue before the trainer ends.
        trainer__simulated={"group_s": 0.2},
        data__eval={"held": str(evaluation)},
        streams__trim=True,
        streams__lease_s=1.0,
        streams__archive={"enabled": True, "segment_mb": 0.004},
    )


RUN = Keys("r1")
WRITES = f"""
    trainer: XADD {RUN.prompts()} * p x; XADD {RUN.prompts(Lane.EVAL)} * p x; XADD {RUN.commits} * p x
    trainer: XADD {RUN.weights} * p x; SET {RUN.config} {{}}; HSET {RUN.state} status 1
    trainer: HSET {RUN.workers("trainer")} a 1; XTRIM {RUN.trajectories()} MINID 5-0
    trainer: XTRIM {RUN.commits} MINID 5-0
    rollout: XADD {RUN.trajectories(Lane.EVAL)} * p x; HSETNX {RUN.progress(3)} 0 x
    rollout: HSET {RUN.workers("rollout")} a 1
    reward: XADD {RUN.scores()} * p x; HSET {RUN.results(3)} 0 x; HSET {RUN.reward_cache[0]} 0 x
    reward: HSET {RUN.limits("judge")} tokens 1; HSET {RUN.workers("reward")} a 1
    reward: XACK {RUN.trajectories()} reward 1-0
    sandbox: HSET {RUN.workers("sandbox")} a 1; SET {RUN.sandbox_result("a")} {{}}
    sandbox: LMOVE rq:queue:{RUN.sandbox_queue} rq:queue:{RUN.sandbox_queue} LEFT RIGHT
    trainer reward: DEL {RUN.results(3)}; HDEL {RUN.workers("reward")} a
    trainer rollout: XACK {RUN.prompts()} rollout 1-0; XADD {RUN.trajectories()} * p x
    trainer rollout reward: XADD {RUN.dead} * p x
    trainer exporter: XLEN {RUN.dead}
    sandbox: XADD rq:results:{RUN.sandbox_names}1 * a b; SREM rq:workers:{RUN.sandbox_queue} x
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
    PUBLISH rq:pubsub:sandbox-1 x; PUBSUB CHANNELS; SUBSCRIBE channel; LATENCY HISTORY command; SLOWLOG GET
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
    for commands, users in ((NOBODY, USERS), (NO_WORKER, ("rollout", "reward", "sandbox"))):
        for command in commands.replace("\n", ";").split(";"):
            if command.strip():
                assert [user for user in users if may(admin, user, *command.split())] == [], command
    assert may(admin, "operator", "SCRIPT", "KILL"), "somebody ends a script that does not end"


def test_nobody_is_let_in_without_a_password(server: ServerWithUsers) -> None:
    once = Retry(NoBackoff(), 0)
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=server.port, retry=once).ping()
    for user in (*USERS, "default"):
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=server.port, username=user, password="", protocol=2, retry=once).ping()


def test_transactions_and_scripts_survive_a_restart(tmp_path):
    """Redis 7.0 and Valkey 9.1 replay those of their file as `default`, and drop what it may not do."""
    with ServerWithUsers(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as server:
        admin = server.client_of("admin")
        with admin.pipeline() as unit:
            unit.set("a", 1).set("b", 2).execute()
        admin.eval("redis.call('SET', KEYS[1], 1); redis.call('SET', KEYS[2], 2)", 2, "c", "d")
        server.kill()
        server.start()
        assert sorted(server.client_of("admin").keys()) == [b"a", b"b", b"c", b"d"]
        once = Retry(NoBackoff(), 0)
        for password in (None, "", "default"):
            with pytest.raises(redis.AuthenticationError):
                redis.Redis(port=server.port, username="default", password=password, retry=once).ping()


async def test_workers_wait_for_the_trainer_to_load_what_a_new_server_lacks(server, admin, monkeypatch):
    """As after a restart of Redis: nobody but the trainer's user may bring the scripts back."""
    reward = await connected(server, monkeypatch, "reward")
    call = asyncio.create_task(
        reward.script(
            "store_result", [RUN.trajectories(), RUN.results(0), RUN.result_tickets()], [*"0123456"]
        )
    )
    await wait_until(lambda: ("reward", "script|load") in server.refusals())
    assert not call.done()
    trainer = await connected(server, monkeypatch, "trainer")
    await trainer.keep_scripts(RUN.state)
    with contextlib.suppress(redis.ResponseError):  # NOGROUP: it has run
        await asyncio.wait_for(call, 120)
    assert {user for user, _ in server.refusals()} == {"reward"}
    await reward.close()
    await trainer.close()


async def test_a_key_outside_its_patterns_ends_a_service_in_plain_words(server, monkeypatch):
    broker = await connected(server, monkeypatch, "reward")
    with pytest.raises(BrokerError, match="lacks a permission"):
        await broker.execute("HSET", RUN.state, "a", "b")
    with pytest.raises(BrokerError, match="lacks a permission"):
        await broker.pipeline([("GET", RUN.config), ("XLEN", RUN.commits)])
    await broker.close()


async def test_the_exporter_reads_a_run_as_a_user_that_may_write_nothing(
    server, admin, monkeypatch, tmp_path
):
    broker = await connected(server, monkeypatch, "operator")
    rewards = {"strict": {"judge": {"servers": "judge", "template": "x"}}}
    await publish_config(broker, RUN, users_config(tmp_path).model_copy(update=judged(rewards)))
    await append(broker, RUN.trajectories(), make_trajectory(0, 0), make_trajectory(0, 1))
    await append_numbered(broker, RUN.prompts(), [(0, make_ticket(0))])
    for key, group in ((RUN.trajectories(), "reward"), (RUN.prompts(), "rollout")):
        admin.xgroup_create(key, group, "0")
        admin.xreadgroup(group, "c", {key: ">"}, count=1)
    await broker.close()
    exporter = await connected(server, monkeypatch, "exporter")
    reading = await read_run(SnapshotReader(exporter, RUN, 0, 0))
    await exporter.close()
    gauges = {(gauge, labels): value for gauge, labels, value in reading.gauges}
    for where, lag in ((("trajectories", "reward"), 1), (("prompts", "rollout"), 0)):
        assert (gauges[metrics.STREAM_LAG, where], gauges[metrics.STREAM_PENDING, where]) == (lag, 1)
    assert server.refusals() == []


def judged(rewards: dict[str, Any]) -> dict[str, Any]:
    servers = {"judge": ServersConfig(model="m")}
    return {"reward": RewardConfig.model_validate({"rewards": rewards}), "servers": servers}


async def test_the_trainer_may_move_unexpected_entries_aside(server, admin, monkeypatch):
    streams: dict[str, type[Message]] = {
        RUN.prompts(): Ticket,
        RUN.weights: WeightManifest,
        RUN.commits: Commit,
    }
    broker = await connected(server, monkeypatch, "trainer")
    for key, kind in streams.items():
        admin.xgroup_create(key, ROLLOUT_GROUP, mkstream=True)
        admin.xadd(key, {"by": "hand"})
        admin.xreadgroup(ROLLOUT_GROUP, "w", {key: ">"})
        assert await remove_unexpected(broker, RUN, key, kind) == 1
        assert await last_id(broker, key) == START
    await broker.close()
    assert server.refusals() == []
    assert admin.xlen(RUN.dead) == len(streams)


KEYS = Keys("first.1")
OTHER = Keys("second")
LIMITS = SandboxConfig(time_s=30.0, total_s=60.0)


async def run_code(
    server: ServerWithUsers, prefix: str, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> dict[str, Any]:
    """What comes of code that a reward worker asks for and a sandbox worker runs, each as its own user."""
    become(monkeypatch, server, f"{prefix}trainer")
    trainer = await Broker.connect()
    rewards = {"code": {"sandbox": LIMITS.model_dump()}}
    await publish_config(trainer, KEYS, make_config(run_id=KEYS.run_id, reward={"rewards": rewards}))
    await trainer.close()
    become(monkeypatch, server, f"{prefix}reward")
    command = [sys.executable, "-m", "tidemill.services.reward.sandbox", "--run", KEYS.run_id]
    environment = os.environ | server.variables(f"{prefix}sandbox")
    worker = start_plain([*command, "--name", "sandbox-0"], folder / "worker.log", environment)
    broker = await Broker.connect()
    reward = code_reward(broker, KEYS, LIMITS)
    try:
        tests = {"inputs": ["1"], "outputs": ["2"]}
        outcome = await asyncio.wait_for(reward.run("print(int(input()) * 2)", tests), 120)
    finally:
        await reward.close()
        await broker.close()
        worker.terminate()
        await asyncio.to_thread(worker.wait, 60)
    return outcome


async def test_an_id_of_no_job_in_the_queue_ends_no_worker(isolated, server, monkeypatch, tmp_path):
    """Reward workers may write the queue. The worker may not look at jobs of other names."""
    ids = [b"\xff", b"any", b"", f"{OTHER.sandbox_names}1".encode()]
    server.client_of("reward").rpush(f"rq:queue:{KEYS.sandbox_queue}", *ids)
    outcome = await run_code(server, "", monkeypatch, tmp_path)
    assert outcome["passed"] == 1
    assert server.refusals() == []
    assert server.client_of("admin").llen(f"rq:queue:{KEYS.sandbox_queue}") == 0
    queued = server.client_of("sandbox").lrange(f"rq:queue:{KEYS.sandbox_queue}:intermediate", 0, -1)
    assert len(queued) == len({*queued} & {*ids})


async def test_a_heartbeat_is_told_for_its_own_role_only(server, monkeypatch):
    become(monkeypatch, server, "rollout")
    rollout = await Broker.connect()
    await publish_heartbeat(rollout, KEYS, Heartbeat("rollout-0", "rollout", state="generate"))
    lie = server.client_of("reward")
    lie.hset(KEYS.workers("reward"), "rollout-0", '{"name": "rollout-0", "role": "rollout", "state": "dead"}')
    lie.hset(KEYS.workers("reward"), "a", '{"name": "b", "role": "reward"}')
    become(monkeypatch, server, "operator")
    operator = await Broker.connect()
    (beat,) = await read_heartbeats(operator, KEYS)
    assert (beat.name, beat.role, beat.state) == ("rollout-0", "rollout", "generate")
    await operator.close()
    await rollout.close()


async def test_users_of_one_run_reach_no_other(isolated, tmp_path, monkeypatch):
    with ServerWithUsers(tmp_path, runs=(KEYS.run_id, OTHER.run_id)) as server:
        outcome = await run_code(server, f"{KEYS.run_id}.", monkeypatch, tmp_path)
        assert outcome["passed"] == 1
        assert server.refusals() == []
        admin = server.client_of("admin")
        assert not any("on" in admin.acl_getuser(name)["flags"] for name in ("trainer", "rollout", "reward"))
        for role, command in {
            "rollout": ("GET", OTHER.config),
            "reward": ("XADD", OTHER.scores(), "*", "p", "x"),
            "trainer": ("HSET", OTHER.state, "a", "b"),
            "sandbox": ("HSET", f"rq:job:{OTHER.sandbox_names}1", "a", "b"),
        }.items():
            with pytest.raises(redis.exceptions.NoPermissionError):
                server.client_of(f"{KEYS.run_id}.{role}").execute_command(*command)
