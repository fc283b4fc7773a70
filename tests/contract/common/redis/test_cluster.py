"""A real Redis Cluster of six processes holds several runs, their jobs, and the set of runs."""

import asyncio
import os
import shutil
import subprocess

import pytest
from redis.crc import key_slot
from rq import Queue
from rq.serializers import JSONSerializer

from tests.support.consumers import make_consumer
from tests.support.letters import make_ticket
from tests.support.servers import RedisServer, free_port, newest_server
from tests.support.trajectories import make_trajectory
from tidemill.common.errors import BrokerError
from tidemill.common.process.programs import Program, run_own
from tidemill.common.redis.blocking_client import make_blocking_client
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import known_runs
from tidemill.common.streams import OffsetReader, append, append_missing, length
from tidemill.common.wire.keys import RQ_STATES, RUNS, Keys
from tidemill.common.wire.messages import Trajectory

pytestmark = pytest.mark.skipif(
    not newest_server() or shutil.which("redis-cli") is None, reason="no redis-server, or no redis-cli"
)
OPTIONS = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000"]
OPTIONS += ["--cluster-replica-validity-factor", "0"]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    nodes = [RedisServer(folder / str(number), *OPTIONS) for number in range(6)]
    try:
        for node in nodes:
            while not 0 < node.port < 55_000:  # the nodes talk on a port that is 10,000 higher
                node.port = free_port()
            node.start()
        hosts = [f"127.0.0.1:{node.port}" for node in nodes]
        command = ["redis-cli", "--cluster", "create", *hosts, "--cluster-replicas", "1", "--cluster-yes"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        yield nodes
    finally:
        for node in nodes:
            node.kill()


@pytest.fixture
def url(nodes):
    return f"redis+cluster://127.0.0.1:1,127.0.0.1:{nodes[0].port},127.0.0.1:{nodes[4].port}"


def runs_apart() -> list[Keys]:
    """Two runs on different primaries, neither on that of the set of runs."""
    of_runs = key_slot(RUNS.encode()) * 3 // 16384
    third = {key_slot(f"{{run-{n}}}".encode()) * 3 // 16384: Keys(f"run-{n}") for n in range(40)}
    return [third[number] for number in range(3) if number != of_runs]


async def test_two_runs_and_their_jobs_share_a_cluster_and_outlive_a_primary(nodes, url):
    broker = await Broker.connect(url)
    runs = runs_apart()
    for keys in runs:
        await broker.keep_scripts(keys.state)
        await broker.execute("SADD", RUNS, keys.run_id)
    assert await known_runs(broker) == sorted(keys.run_id for keys in runs)

    async def score(keys, count):
        async with make_consumer(broker, keys) as consumer:
            await append(broker, keys.trajectories(), *(make_trajectory(number) for number in range(count)))
            while count:
                held = await consumer.fetch(2, 0.2)
                done = await consumer.complete([(item, item.message) for item in held], keys.scores())
                assert all(done)
                count -= len(done)

    await asyncio.gather(*(score(keys, 9) for keys in runs))
    assert await append_missing(broker, runs[0].prompts(), range(3), make_ticket) == [0, 1, 2]
    unit = [("HSET", runs[1].state, "a", "1"), ("SET", runs[1].config, "{}", "NX")]
    assert await broker.pipeline(unit, atomic=True) == [1, b"OK"]

    async def port_of(keys):
        assert await length(broker, keys.scores()) >= 9
        return int((await broker.info("server"))["tcp_port"])

    port = await port_of(runs[0])
    assert port != await port_of(runs[1])
    for keys in runs:
        await has_jobs(broker, url, keys)

    reader = OffsetReader(broker, runs[0].scores(), Trajectory)
    assert len(await reader.read(99)) == 9
    waiting = asyncio.create_task(reader.read(99, 5.0))
    victim = next(node for node in nodes if node.port == port)
    assert await length(broker, runs[0].scores()) == 9
    assert await broker.execute("WAIT", 1, 5000) == 1, "of the primary that was asked last"
    victim.kill()
    # Its replica takes over, without the scripts; the other run notices nothing.
    await asyncio.gather(*(score(keys, 5) for keys in runs))
    assert broker.waited_s > 0
    assert [await length(broker, keys.scores()) for keys in runs] == [14, 14]
    entries = await waiting
    while len(entries) < 5:
        entries += await reader.read(99, 1.0)
    assert await port_of(runs[0]) != port
    await has_jobs(broker, url, runs[0], 2)
    await broker.close()


async def has_jobs(broker: Broker, url: str, keys: Keys, count: int = 1) -> None:
    """A job is queued, counted, and taken by the run's worker; what it keeps lies with the run."""

    async def num_jobs(command: str, state: str) -> int:
        return int(await broker.execute(command, RQ_STATES[state].format(keys.sandbox_queue)))

    connection = await asyncio.to_thread(make_blocking_client, url, keys.run_id)
    queue = Queue(keys.sandbox_queue, connection=connection, serializer=JSONSerializer)
    await asyncio.to_thread(queue.enqueue_call, "no_such_job", job_id=f"{keys.sandbox_names}{count}")
    assert await num_jobs("LLEN", "queued") == 1
    env = {**os.environ, "TIDEMILL_REDIS_URL": url}
    worker = await asyncio.create_subprocess_exec(*run_own(Program.SANDBOX_QUEUE, keys.run_id, "[]"), env=env)
    while await num_jobs("ZCARD", "failed") < count:  # noqa: ASYNC110 (no event crosses processes)
        await asyncio.sleep(0.1)
    worker.terminate()
    assert (await worker.wait(), await num_jobs("LLEN", "queued")) == (0, 0)
    await asyncio.to_thread(connection.set, keys.sandbox_result("1"), "x")
    assert await broker.execute("GET", keys.sandbox_result("1")) == b"x"
    connection.close()


async def test_an_address_without_a_cluster_is_said(nodes):
    with pytest.raises(BrokerError, match=r"redis\+cluster://host:6379"):
        await Broker.connect("redis+cluster://a:b:c")
    with pytest.raises(BrokerError, match="cannot reach Redis"):
        await Broker.connect("redis+cluster://127.0.0.1:1")
    with pytest.raises(BrokerError, match="need the id of their run"):
        make_blocking_client("redis+cluster://127.0.0.1:1")
