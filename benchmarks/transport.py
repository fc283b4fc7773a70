"""How many records a second one hop through a stream carries, what a record weighs, and what guarantees cost.

    python -m benchmarks.transport
    python -m benchmarks.transport --appendfsync always

A record is a `Trajectory` of 256 prompt ids, 1,024 completion ids and 1,024 logprobs. Writer and reader are
processes of their own, beside an embedded Redis on a unix socket. Records exist before the clock starts; the
reader must have seen each one exactly once. The ways to send take turns, `--repeats` times, each on a fresh
server. A rate is records over the time from the common start until the last acknowledgement: once without an
append-only file, once with one that is flushed as `--appendfsync` says.

* records a call: the writer encodes and appends; the reader is a `Consumer` that fetches, decodes, validates
  and acknowledges.
* raw: redis-py without Tidemill: the same arrays as plain bytes, XADD, XREADGROUP, XACK, nothing validated.
* PipelineRL: what its streams do (`pipelinerl/streams.py`): lists of numbers, pickled, one XADD a record,
  XREAD of one record, no group, no acknowledgement.
* with scores: the reader publishes a score with each acknowledgement, in one unit that checks the lease.
  fire-and-forget: the same records and scores by plain XADDs, XREAD by offset.

`ratio_to_raw` is 64 records a call over raw 64 a call, `ratio_to_pipelinerl` one record a call over
PipelineRL's, both with AOF; `ratio_guaranteed` is `with scores` with AOF over fire-and-forget without.
"""

import asyncio
import multiprocessing
import pickle
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from threading import Barrier
from typing import Any, Literal

import numpy as np
import redis
import typer

from benchmarks.report import in_turns, machine, paired_ratio, print_result, print_table
from tidemill.common.process.programs import run_main
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.streams import Delivery, Garbled, OffsetReader, append
from tidemill.common.streams.consumer import Consumer
from tidemill.common.wire.codec import PAYLOAD_FIELD, SCHEMA, VERSION_FIELD, encode_payload
from tidemill.common.wire.keys import REWARD_GROUP, Keys
from tidemill.common.wire.messages import Message, Score, ScoreStatus, Trajectory, TrajectoryKey

PROMPT_TOKENS = 256
COMPLETION_TOKENS = 1024
GROUP_SIZE = 8
VOCABULARY = 151_936
LEASE_S = 60.0
BLOCK_S = 1.0
IN_FLIGHT = 2
"""One call travels while the next one is encoded, or the last one decoded."""
KEYS = Keys("transport")
PEER_MAXLEN = 1_000_000
PEER_BLOCK_MS = 100
Steps = AsyncIterator[None]
"""One end of a way to send: what is before its first `yield` prepares, and its work ends with the second."""
common_start: Barrier
"""Barrier at which writer and reader start, set in each of their processes."""


def trajectories(count: int) -> list[Trajectory]:
    """Records as a rollout worker makes them, every one different."""
    rng = np.random.default_rng(0)
    now = time.time()
    return [
        Trajectory(
            ticket=number // GROUP_SIZE,
            index=number % GROUP_SIZE,
            step=number // 1024,
            group_size=GROUP_SIZE,
            prompt_ids=rng.integers(0, VOCABULARY, PROMPT_TOKENS, dtype=np.int32),
            completion_ids=rng.integers(0, VOCABULARY, COMPLETION_TOKENS, dtype=np.int32),
            logprobs=-rng.random(COMPLETION_TOKENS, dtype=np.float32),
            spans=((number // 1024, 0),),
            worker="rollout-0",
            started_at=now,
            finished_at=now,
        )
        for number in range(count)
    ]


def score_of(trajectory: Trajectory) -> Score:
    """A score as a reward worker publishes it."""
    score = {"ticket": trajectory.ticket, "index": trajectory.index, "components": {"correct": 0.5}}
    return Score(status=ScoreStatus.OK, value=0.5, worker="reward-0", **score)


async def send_plainly(broker: Broker, key: str, *messages: Message) -> None:
    """Plain XADDs in one pipeline, without a transaction."""
    fields = ((VERSION_FIELD, SCHEMA, PAYLOAD_FIELD, encode_payload(message)) for message in messages)
    await broker.pipeline([("XADD", key, "*", *pairs) for pairs in fields])


async def _write_with(send: Callable[..., Awaitable[Any]], url: str, records: int, per_call: int) -> Steps:
    """Send all records, `per_call` at a time, from a few tasks at once as a worker does."""
    broker = await Broker.connect(url)
    batch = trajectories(records)
    calls = iter(range(0, records, per_call))

    async def write() -> None:
        for first in calls:
            await send(broker, KEYS.trajectories(), *batch[first : first + per_call])

    yield
    await asyncio.gather(*(write() for _ in range(IN_FLIGHT)))
    yield
    await broker.close()


async def _read_with(
    result_of: Callable[[Delivery[Trajectory]], Score | None], url: str, records: int, per_call: int
) -> Steps:
    """Fetch, decode, validate and acknowledge until every record was seen."""
    broker = await Broker.connect(url)
    key = KEYS.trajectories()
    consumer = Consumer(broker, key, REWARD_GROUP, "reader", Trajectory, lease_s=LEASE_S, dead_key=KEYS.dead)
    seen: set[TrajectoryKey] = set()
    finished = asyncio.Event()
    acknowledged = 0

    async def read() -> None:
        nonlocal acknowledged
        while acknowledged < records:
            deliveries = await consumer.fetch(per_call, BLOCK_S)
            done = [
                (delivery, result_of(delivery))
                for delivery in deliveries
                if not isinstance(delivery, Garbled)
            ]
            if done:
                completed = await consumer.complete(done, KEYS.scores(), ahead=len(done))
                acknowledged += sum(completed)  # after the await: other readers add to it meanwhile
                seen.update(delivery.message.key for delivery, _ in done)
        finished.set()

    async with consumer:
        yield
        readers = [asyncio.create_task(read()) for _ in range(IN_FLIGHT)]
        await finished.wait()
        yield
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    assert len(seen) == records, f"{records} records were written, {len(seen)} arrived"
    await broker.close()


async def read_forgotten(url: str, records: int, per_call: int) -> Steps:
    """XREAD from a position of its own, and the same scores by plain XADDs: no group, no acknowledgement.

    A batch is decoded and answered while the next one travels, so that this end is no slower by design.
    """
    broker = await Broker.connect(url)
    reader = OffsetReader(broker, KEYS.trajectories(), Trajectory)
    num_read = 0
    sending: set[asyncio.Task[None]] = set()
    yield
    while num_read < records:
        entries = await reader.read(per_call, BLOCK_S)
        scores = [score_of(entry.message) for entry in entries if not isinstance(entry, Garbled)]
        num_read += len(scores)
        if len(sending) == IN_FLIGHT:
            _, sending = await asyncio.wait(sending, return_when=asyncio.FIRST_COMPLETED)
        sending.add(asyncio.create_task(send_plainly(broker, KEYS.scores(), *scores)))
    await asyncio.gather(*sending)
    yield
    await broker.close()


async def write_raw(url: str, records: int, per_call: int) -> Steps:
    """Arrays as bytes, a pipeline of plain XADDs."""
    client = redis.Redis.from_url(url)
    batch = trajectories(records)
    yield
    for first in range(0, records, per_call):
        pipe = client.pipeline(transaction=False)
        for record in batch[first : first + per_call]:
            arrays = (record.prompt_ids, record.completion_ids, record.logprobs)
            pipe.xadd(KEYS.trajectories(), {"p": b"".join(array.tobytes() for array in arrays)})
        pipe.execute()
    yield


async def read_raw(url: str, records: int, per_call: int) -> Steps:
    """XREADGROUP and XACK, the arrays cut out of the bytes."""
    client = redis.Redis.from_url(url)
    key = KEYS.trajectories()
    acknowledged = 0
    client.xgroup_create(key, REWARD_GROUP, "0", mkstream=True)
    yield
    while acknowledged < records:
        position: Any = {key: ">"}
        reply: Any = client.xreadgroup(REWARD_GROUP, "reader", position, per_call, int(BLOCK_S * 1000))
        for _, entries in reply:
            for _, fields in entries:
                assert len(np.frombuffer(fields[b"p"], np.int32)) == PROMPT_TOKENS + 2 * COMPLETION_TOKENS
            client.xack(key, REWARD_GROUP, *[entry_id for entry_id, _ in entries])
            acknowledged += len(entries)
    yield


async def write_peer(url: str, records: int, per_call: int) -> Steps:
    """Write as PipelineRL does: lists of numbers, pickled, one XADD a record, approximately trimmed."""
    client = redis.Redis.from_url(url)
    batch = [peer_record(record) for record in trajectories(records)]
    yield
    for index, record in enumerate(batch):
        fields: Any = {"index": index, "data": pickle.dumps(record)}
        client.xadd(KEYS.trajectories(), fields, maxlen=PEER_MAXLEN, approximate=True)
    yield


def peer_record(record: Trajectory) -> dict[str, Any]:
    """Ids and logprobs as lists, as its model of a sample has them."""
    arrays: dict[str, Sequence[Any]] = {
        "input_ids": [*record.prompt_ids.tolist(), *record.completion_ids.tolist()],
        "labels": [*([-100] * PROMPT_TOKENS), *record.completion_ids.tolist()],
        "logprobs": record.logprobs.tolist(),
    }
    return {**arrays, "group_id": str(record.ticket), "reward": 0.0, "metadata": {"model_version": 0}}


async def read_peer(url: str, records: int, per_call: int) -> Steps:
    """Read as PipelineRL does: XREAD of one record from its own position, unpickled; no acknowledgement."""
    client = redis.Redis.from_url(url)
    key = KEYS.trajectories()
    num_read = 0
    last_id: Any = 0
    yield
    while num_read < records:
        reply: Any = client.xread({key: last_id}, count=1, block=PEER_BLOCK_MS)
        for _, entries in reply:
            ((last_id, fields),) = entries
            assert int(fields[b"index"]) == num_read
            assert len(pickle.loads(fields[b"data"])["logprobs"]) == COMPLETION_TOKENS
            num_read += 1
    yield


NO_AOF = "no-aof"
SINGLE = "one record a call"
BATCHED = "64 records a call"
RAW = "raw arrays, 64 a call"
PEER = "PipelineRL's way, one a call"
SCORED = "with scores, 64 a call"
FORGOTTEN = "fire-and-forget, 64 a call"
WRITE = partial(_write_with, append)
READ = partial(_read_with, lambda delivery: None)
# As in a reward worker, each score and the acknowledgement of its trajectory are one unit.
READ_SCORED = partial(_read_with, lambda delivery: score_of(delivery.message))
WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any], int]] = {
    SINGLE: (WRITE, READ, 1),
    BATCHED: (WRITE, READ, 64),
    RAW: (write_raw, read_raw, 64),
    PEER: (write_peer, read_peer, 1),
    SCORED: (WRITE, READ_SCORED, 64),
    FORGOTTEN: (partial(_write_with, send_plainly), read_forgotten, 64),
}
"""Writer, reader, and records a call."""


def hop(way: str, records: int, appendfsync: str) -> tuple[float, float]:
    """Send all records over a fresh server; returns records a second, and all bytes that the server received
    from both ends, protocol included, for each record."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as folder:
        server = EmbeddedRedis(Path(folder), appendfsync)
        server.start()
        try:
            # Where one end fails, its error is raised here, and the other one is ended with the pool.
            with context.Pool(2, _set_start, [context.Barrier(2)]) as pool:
                calls = [(way, end, server.url, records) for end in (0, 1)]
                starts, stops = zip(*pool.imap_unordered(run_end, calls), strict=True)
            num_bytes = redis.Redis.from_url(server.url).info("stats")["total_net_input_bytes"]
            return records / (max(stops) - min(starts)), num_bytes / records
        finally:
            server.stop()


def _set_start(barrier: Barrier) -> None:
    global common_start
    common_start = barrier


def run_end(call: tuple[str, int, str, int]) -> tuple[float, float]:
    """One end, in a process of its own: its start and stop, on the machine's monotonic clock."""
    way, end, url, records = call

    async def run() -> tuple[float, float]:
        steps = WAYS[way][end](url, records, WAYS[way][2])
        await anext(steps)
        common_start.wait()
        started = time.monotonic()
        await anext(steps)
        times = started, time.monotonic()
        await anext(steps, None)
        return times

    return run_main(run())


def main(
    records: int = 5000, repeats: int = 3, appendfsync: Literal["everysec", "always"] = "everysec"
) -> None:
    """Measure records a second over one hop through a stream."""
    sides = {(way, aof): partial(hop, way, records, aof) for way in WAYS for aof in (NO_AOF, appendfsync)}
    results = {side: list(zip(*hops, strict=True)) for side, hops in in_turns(sides, repeats).items()}
    rates = {}
    medians = {}
    for aof in (NO_AOF, appendfsync):
        rates[aof] = {way: results[way, aof][0] for way in WAYS}
        medians[aof] = {way: round(median(rates[aof][way])) for way in WAYS}
    num_bytes = {way: round(median(results[way, NO_AOF][1])) for way in WAYS}
    rows = []
    for way in WAYS:
        cells = [f"{figures[way]:,}" for figures in (num_bytes, *medians.values())]
        rows.append((way, *cells))
    note = f"{machine()}; Redis on a unix socket; {records:,} records, medians of {repeats}"
    columns = f"records/s,bytes a record,no AOF,AOF {appendfsync}"
    print_table("One hop through a stream", columns, rows, note)
    plain = rates[NO_AOF]
    flushed = rates[appendfsync]
    print_result(
        {
            "ratio_to_raw": paired_ratio(flushed[BATCHED], flushed[RAW]),
            "ratio_to_pipelinerl": paired_ratio(flushed[SINGLE], flushed[PEER]),
            "ratio_guaranteed": paired_ratio(flushed[SCORED], plain[FORGOTTEN]),
            "bytes_per_record": num_bytes[BATCHED],
            "records_per_s": medians[appendfsync],
            "records_per_s_no_aof": medians[NO_AOF],
            "appendfsync": appendfsync,
        }
    )


if __name__ == "__main__":
    typer.run(main)
