"""The two ends of `benchmarks.transport`: each is a process that obeys its stdin.

It prints `ready` once everything is prepared, starts at a line on stdin, and prints its start and end on the
machine's monotonic clock as one line of JSON.
"""

import asyncio
import json
import pickle
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import redis

from tidemill.common.process.programs import run_main
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Consumer, Delivery, Garbled, OffsetReader, append
from tidemill.common.wire.codec import PAYLOAD_FIELD, SCHEMA, VERSION_FIELD, encode_payload
from tidemill.common.wire.keys import REWARD_GROUP, Keys
from tidemill.common.wire.messages import Message, Score, ScoreStatus, Trajectory, TrajectoryKey

PROMPT_TOKENS, COMPLETION_TOKENS, GROUP_SIZE = 256, 1024, 8
VOCABULARY = 151_936
LEASE_S = 60.0
BLOCK_S = 1.0
IN_FLIGHT = 2
"""One call travels while the next one is encoded, or the last one decoded."""
CELLS = PROMPT_TOKENS + 2 * COMPLETION_TOKENS
KEYS = Keys("transport")
PEER_MAXLEN, PEER_BLOCK_MS = 1_000_000, 100


class Stopwatch:
    """Waits for the common start, then measures until `stop`."""

    def __init__(self) -> None:
        print("ready", flush=True)
        sys.stdin.readline()
        self.start = time.monotonic()

    def stop(self) -> None:
        """Print start and end."""
        print(json.dumps((self.start, time.monotonic())), flush=True)


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
    return Score(
        ticket=trajectory.ticket,
        index=trajectory.index,
        status=ScoreStatus.OK,
        value=0.5,
        components={"correct": 0.5},
        worker="reward-0",
    )


async def send_plainly(broker: Broker, key: str, *messages: Message) -> None:
    """Plain XADDs in one pipeline, without a transaction."""
    fields = ((VERSION_FIELD, SCHEMA, PAYLOAD_FIELD, encode_payload(message)) for message in messages)
    await broker.pipeline([("XADD", key, "*", *pairs) for pairs in fields])


async def _write_with(send: Callable[..., Awaitable[Any]], url: str, records: int, per_call: int) -> None:
    """Send all records, `per_call` at a time, from a few tasks at once as a worker does."""
    broker, key, batch = await Broker.connect(url), KEYS.trajectories(), trajectories(records)
    calls = iter(range(0, records, per_call))

    async def write() -> None:
        for first in calls:
            await send(broker, key, *batch[first : first + per_call])

    watch = Stopwatch()
    await asyncio.gather(*(write() for _ in range(IN_FLIGHT)))
    watch.stop()
    await broker.close()


async def _read_with(
    result_of: Callable[[Delivery[Trajectory]], Score | None], url: str, records: int, per_call: int
) -> None:
    """Fetch, decode, validate and acknowledge until every record was seen."""
    broker = await Broker.connect(url)
    consumer = Consumer(
        broker, KEYS.trajectories(), REWARD_GROUP, "reader", Trajectory, lease_s=LEASE_S, dead_key=KEYS.dead
    )
    seen: set[TrajectoryKey] = set()
    finished, acknowledged = asyncio.Event(), 0

    async def read() -> None:
        nonlocal acknowledged
        while acknowledged < records:
            deliveries = await consumer.fetch(per_call, BLOCK_S)
            done = [(one, result_of(one)) for one in deliveries if not isinstance(one, Garbled)]
            if done:
                completed = await consumer.complete(done, KEYS.scores(), ahead=len(done))
                acknowledged += sum(completed)  # after the await: other readers add to it meanwhile
                seen.update(delivery.message.key for delivery, _ in done)
        finished.set()

    async with consumer:
        watch = Stopwatch()
        readers = [asyncio.create_task(read()) for _ in range(IN_FLIGHT)]
        await finished.wait()
        watch.stop()
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    assert len(seen) == records, f"{records} records were written, {len(seen)} arrived"
    await broker.close()


async def read_forgotten(url: str, records: int, per_call: int) -> None:
    """XREAD from a position of its own, and the same scores by plain XADDs: no group, no acknowledgement.

    A batch is decoded and answered while the next one travels, so that this end is no slower by design.
    """
    broker = await Broker.connect(url)
    reader, num_read = OffsetReader(broker, KEYS.trajectories(), Trajectory), 0
    sending: set[asyncio.Task[None]] = set()
    watch = Stopwatch()
    while num_read < records:
        entries = await reader.read(per_call, BLOCK_S)
        scores = [score_of(entry.message) for entry in entries if not isinstance(entry, Garbled)]
        num_read += len(scores)
        if len(sending) == IN_FLIGHT:
            _, sending = await asyncio.wait(sending, return_when=asyncio.FIRST_COMPLETED)
        sending.add(asyncio.create_task(send_plainly(broker, KEYS.scores(), *scores)))
    await asyncio.gather(*sending)
    watch.stop()
    await broker.close()


async def write_raw(url: str, records: int, per_call: int) -> None:
    """Arrays as bytes, a pipeline of plain XADDs."""
    client, batch = redis.Redis.from_url(url), trajectories(records)
    watch = Stopwatch()
    for first in range(0, records, per_call):
        pipe = client.pipeline(transaction=False)
        for record in batch[first : first + per_call]:
            arrays = (record.prompt_ids, record.completion_ids, record.logprobs)
            pipe.xadd(KEYS.trajectories(), {"p": b"".join(array.tobytes() for array in arrays)})
        pipe.execute()
    watch.stop()


async def read_raw(url: str, records: int, per_call: int) -> None:
    """XREADGROUP and XACK, the arrays cut out of the bytes."""
    client, key = redis.Redis.from_url(url), KEYS.trajectories()
    client.xgroup_create(key, REWARD_GROUP, "0", mkstream=True)
    acknowledged = 0
    watch = Stopwatch()
    while acknowledged < records:
        block_ms = int(BLOCK_S * 1000)
        reply: Any = client.xreadgroup(REWARD_GROUP, "reader", {key: ">"}, count=per_call, block=block_ms)
        for _, entries in reply:
            for _, fields in entries:
                assert len(np.frombuffer(fields[b"p"], dtype=np.int32)) == CELLS
            client.xack(key, REWARD_GROUP, *[entry_id for entry_id, _ in entries])
            acknowledged += len(entries)
    watch.stop()


async def write_peer(url: str, records: int, per_call: int) -> None:
    """As PipelineRL's writer: lists of numbers, pickled, one XADD a record, approximately trimmed."""
    client = redis.Redis.from_url(url)
    batch = [peer_record(record) for record in trajectories(records)]
    watch = Stopwatch()
    for index, record in enumerate(batch):
        fields: Any = {"index": index, "data": pickle.dumps(record)}
        client.xadd(KEYS.trajectories(), fields, maxlen=PEER_MAXLEN, approximate=True)
    watch.stop()


def peer_record(record: Trajectory) -> dict[str, Any]:
    """Ids and logprobs as lists, as its model of a sample has them."""
    arrays: dict[str, Sequence[Any]] = {
        "input_ids": [*record.prompt_ids.tolist(), *record.completion_ids.tolist()],
        "labels": [*([-100] * PROMPT_TOKENS), *record.completion_ids.tolist()],
        "logprobs": record.logprobs.tolist(),
    }
    return {**arrays, "group_id": str(record.ticket), "reward": 0.0, "metadata": {"model_version": 0}}


async def read_peer(url: str, records: int, per_call: int) -> None:
    """As PipelineRL's reader: XREAD of one record from its own position, unpickled; no acknowledgement."""
    client, key = redis.Redis.from_url(url), KEYS.trajectories()
    last_id: Any = 0
    num_read = 0
    watch = Stopwatch()
    while num_read < records:
        reply: Any = client.xread({key: last_id}, count=1, block=PEER_BLOCK_MS)
        for _, entries in reply:
            ((last_id, fields),) = entries
            assert int(fields[b"index"]) == num_read
            assert len(pickle.loads(fields[b"data"])["logprobs"]) == COMPLETION_TOKENS
            num_read += 1
    watch.stop()


ENDS: dict[str, Callable[..., Any]] = {
    "write-stream": partial(_write_with, append),
    "read-stream": partial(_read_with, lambda delivery: None),
    # As a reward worker: each score and the acknowledgement of its trajectory are one unit.
    "read-scored": partial(_read_with, lambda delivery: score_of(delivery.message)),
    "write-forgotten": partial(_write_with, send_plainly),
    "read-forgotten": read_forgotten,
    "write-raw": write_raw,
    "read-raw": read_raw,
    "write-peer": write_peer,
    "read-peer": read_peer,
}

if __name__ == "__main__":
    end, url, *numbers = sys.argv[1:]
    run_main(ENDS[end](url, *map(int, numbers)))
