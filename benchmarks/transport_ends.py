"""The two ends of `benchmarks.transport` and `benchmarks.durability`: each is a process and obeys its stdin.

It prints `ready` once everything is prepared, starts at a line on stdin, and prints one line of JSON with
its start and end on the machine's monotonic clock and the processor time it used.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import redis

from tidemill.common.process.programs import run_main
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Consumer, Garbled, OffsetReader, append
from tidemill.common.wire.codec import PAYLOAD_FIELD, SCHEMA, VERSION_FIELD, encode_payload
from tidemill.common.wire.keys import REWARD_GROUP, Keys
from tidemill.common.wire.messages import Message, Score, ScoreStatus, Trajectory, TrajectoryKey

PROMPT_TOKENS, COMPLETION_TOKENS, GROUP_SIZE = 256, 1024, 8
VOCABULARY = 151_936
LEASE_S = 60.0
BLOCK_S = 1.0
CELLS = PROMPT_TOKENS + 2 * COMPLETION_TOKENS


class Stopwatch:
    """Waits for the common start, then measures until `stop`."""

    def __init__(self) -> None:
        print("ready", flush=True)
        sys.stdin.readline()
        self.cpu_s, self.start = time.process_time(), time.monotonic()

    def stop(self) -> None:
        """Say how long it took."""
        end, cpu_s = time.monotonic(), time.process_time() - self.cpu_s
        print(json.dumps({"start": self.start, "end": end, "cpu_s": cpu_s}), flush=True)


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


async def write_stream(url: str, run_id: str, records: int, per_call: int, in_flight: int) -> None:
    """Append all records, `per_call` at a time, from a few tasks at once as a worker does."""
    broker, key, batch = await Broker.connect(url), Keys(run_id).trajectories(), trajectories(records)
    calls = iter(range(0, records, per_call))

    async def write() -> None:
        for first in calls:
            await append(broker, key, *batch[first : first + per_call])

    watch = Stopwatch()
    await asyncio.gather(*(write() for _ in range(in_flight)))
    watch.stop()
    await broker.close()


async def read_stream(url: str, run_id: str, records: int, per_call: int, in_flight: int) -> None:
    """Fetch, decode, validate and acknowledge until every record was seen."""
    broker, keys = await Broker.connect(url), Keys(run_id)
    consumer = Consumer(
        broker, keys.trajectories(), REWARD_GROUP, "reader", Trajectory, lease_s=LEASE_S, dead_key=keys.dead
    )
    seen: set[TrajectoryKey] = set()
    acknowledged = 0

    async def read() -> None:
        nonlocal acknowledged
        while acknowledged < records:
            deliveries = await consumer.fetch(per_call, BLOCK_S)
            done = [(delivery, None) for delivery in deliveries if not isinstance(delivery, Garbled)]
            if done:
                completed = await consumer.complete(done, keys.scores(), ahead=len(done))
                acknowledged += sum(completed)
                seen.update(delivery.message.key for delivery, _ in done)
            if acknowledged >= records:
                finished.set()

    finished = asyncio.Event()
    async with consumer:
        watch = Stopwatch()
        readers = [asyncio.create_task(read()) for _ in range(in_flight)]
        await finished.wait()
        watch.stop()
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    assert len(seen) == records, f"{records} records were written, {len(seen)} arrived"
    await broker.close()


async def read_scored(url: str, run_id: str, records: int, per_call: int, in_flight: int) -> None:
    """As a reward worker: lease, decode, and publish a score with the acknowledgement, as one unit."""
    broker, keys = await Broker.connect(url), Keys(run_id)
    consumer = Consumer(
        broker, keys.trajectories(), REWARD_GROUP, "reader", Trajectory, lease_s=LEASE_S, dead_key=keys.dead
    )
    finished, num_done = asyncio.Event(), 0

    async def read() -> None:
        nonlocal num_done
        while num_done < records:
            deliveries = await consumer.fetch(per_call, BLOCK_S)
            held = [delivery for delivery in deliveries if not isinstance(delivery, Garbled)]
            if held:
                scored = [(delivery, score_of(delivery.message)) for delivery in held]
                done = await consumer.complete(scored, keys.scores(), ahead=len(scored))
                num_done += sum(done)
        finished.set()

    async with consumer:
        watch = Stopwatch()
        readers = [asyncio.create_task(read()) for _ in range(in_flight)]
        await finished.wait()
        watch.stop()
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    await broker.close()


async def write_forgotten(url: str, run_id: str, records: int, per_call: int, in_flight: int) -> None:
    """The same records in pipelines of plain XADDs: no transaction."""
    broker, key, batch = await Broker.connect(url), Keys(run_id).trajectories(), trajectories(records)
    calls = iter(range(0, records, per_call))

    async def write() -> None:
        for first in calls:
            await send(broker, key, batch[first : first + per_call])

    watch = Stopwatch()
    await asyncio.gather(*(write() for _ in range(in_flight)))
    watch.stop()
    await broker.close()


async def read_forgotten(url: str, run_id: str, records: int, per_call: int, in_flight: int) -> None:
    """XREAD from a position of its own, and the same scores by plain XADDs: no group, no acknowledgement.

    A batch is decoded and answered while the next one travels, so that this end is no slower by design.
    """
    broker, keys = await Broker.connect(url), Keys(run_id)
    reader, num_read = OffsetReader(broker, keys.trajectories(), Trajectory), 0
    sending: set[asyncio.Task[None]] = set()
    watch = Stopwatch()
    while num_read < records:
        entries = await reader.read(per_call, BLOCK_S)
        scores = [score_of(entry.message) for entry in entries if not isinstance(entry, Garbled)]
        num_read += len(scores)
        if len(sending) == in_flight:
            _, sending = await asyncio.wait(sending, return_when=asyncio.FIRST_COMPLETED)
        sending.add(asyncio.create_task(send(broker, keys.scores(), scores)))
    await asyncio.gather(*sending)
    watch.stop()
    await broker.close()


async def send(broker: Broker, key: str, messages: Sequence[Message]) -> None:
    """Plain XADDs in one pipeline."""
    fields = ((VERSION_FIELD, SCHEMA, PAYLOAD_FIELD, encode_payload(message)) for message in messages)
    await broker.pipeline([("XADD", key, "*", *pairs) for pairs in fields])


def score_of(trajectory: Trajectory) -> Score:
    """What a reward worker says of it."""
    return Score(
        ticket=trajectory.ticket,
        index=trajectory.index,
        status=ScoreStatus.OK,
        value=0.5,
        components={"correct": 0.5},
        worker="reward-0",
    )


async def write_raw(url: str, run_id: str, records: int, per_call: int, in_flight: int) -> None:
    """Arrays as bytes, a pipeline of plain XADDs."""
    client, key, batch = redis.Redis.from_url(url), Keys(run_id).trajectories(), trajectories(records)
    watch = Stopwatch()
    for first in range(0, records, per_call):
        pipe = client.pipeline(transaction=False)
        for record in batch[first : first + per_call]:
            arrays = (record.prompt_ids, record.completion_ids, record.logprobs)
            pipe.xadd(key, {"p": b"".join(array.tobytes() for array in arrays)})
        pipe.execute()
    watch.stop()


async def read_raw(url: str, run_id: str, records: int, per_call: int, in_flight: int) -> None:
    """XREADGROUP and XACK, the arrays cut out of the bytes."""
    client, key = redis.Redis.from_url(url), Keys(run_id).trajectories()
    client.xgroup_create(key, REWARD_GROUP, "0", mkstream=True)
    acknowledged = 0
    watch = Stopwatch()
    while acknowledged < records:
        block_ms = int(BLOCK_S * 1000)
        reply: Any = client.xreadgroup(REWARD_GROUP, "reader", {key: ">"}, count=per_call, block=block_ms)
        for _, entries in reply:
            for _, fields in entries:
                cells = np.frombuffer(fields[b"p"], dtype=np.int32)
                assert len(cells) == CELLS
            client.xack(key, REWARD_GROUP, *[entry_id for entry_id, _ in entries])
            acknowledged += len(entries)
    watch.stop()


ENDS: dict[str, Callable[..., Any]] = {
    "write-stream": write_stream,
    "read-stream": read_stream,
    "read-scored": read_scored,
    "write-forgotten": write_forgotten,
    "read-forgotten": read_forgotten,
    "write-raw": write_raw,
    "read-raw": read_raw,
}

if __name__ == "__main__":
    end, url, run_id, *numbers = sys.argv[1:]
    run_main(ENDS[end](url, run_id, *map(int, numbers)))
