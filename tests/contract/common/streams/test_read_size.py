"""Whoever reads a stream asks for fewer entries at once where they are large."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.support.consumers import make_consumer
from tests.support.trajectories import make_trajectory
from tidemill.common.history import History, StreamName
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import OffsetReader, ReadSize, append, ensure_group, log, scan
from tidemill.common.wire.keys import REWARD_GROUP, Keys
from tidemill.common.wire.messages import Trajectory

MIB = 1 << 20
LIMIT_BYTES = 64 << 10


@pytest.fixture
def answers(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many entries each answer had."""
    counts: list[int] = []
    execute = broker.execute

    async def counting(*command: Any) -> Any:
        reply = await execute(*command)
        if command[0] in ("XREAD", "XREADGROUP", "XRANGE") and reply:
            counts.append(len(reply if command[0] == "XRANGE" else reply[0][1]))
        return reply

    monkeypatch.setattr(broker, "execute", counting)
    monkeypatch.setattr(broker, "max_bytes", LIMIT_BYTES)
    monkeypatch.setattr(log, "READ_BYTES", LIMIT_BYTES)
    return counts


async def by_offset(broker: Broker, keys: Keys) -> list[int]:
    reader, found = OffsetReader(broker, keys.trajectories(), Trajectory), []
    while entries := await reader.read():
        found += [entry.message.index for entry in entries]  # type: ignore[union-attr]
    return found


async def by_lease(broker: Broker, keys: Keys) -> list[int]:
    consumer, found = make_consumer(broker, keys), []
    while entries := await consumer.fetch(256, 0):
        found += [entry.message.index for entry in entries]  # type: ignore[union-attr]
    return found


async def by_scan(broker: Broker, keys: Keys) -> list[int]:
    return [e.message.index async for e in scan(broker, keys.trajectories(), Trajectory)]  # type: ignore[union-attr]


async def by_history(broker: Broker, keys: Keys) -> list[int]:
    history = History(keys.run_id, None, broker)
    return [e.message.index async for e in history.scan(StreamName.TRAJECTORIES)]  # type: ignore[union-attr]


@pytest.mark.parametrize("read", [by_offset, by_lease, by_scan, by_history])
async def test_answers_have_no_more_bytes_than_fit(
    broker: Broker, keys: Keys, answers: list[int], read: Callable[[Broker, Keys], Awaitable[list[int]]]
) -> None:
    """Small ones, then others of which three fit: one answer goes by what was seen before."""
    await ensure_group(broker, keys.trajectories(), REWARD_GROUP)
    texts = ["x" * size for size, count in ((10, 40), (20_000, 120)) for _ in range(count)]
    samples = [make_trajectory(0, n, text=text, group_size=160) for n, text in enumerate(texts)]
    await append(broker, keys.trajectories(), *samples)
    assert await read(broker, keys) == list(range(160))
    assert answers[0] == log.UNSEEN_SHARE
    assert max(answers) > 16
    assert max(answers[-10:]) <= 3


def test_an_entry_that_is_larger_than_all_that_fits_is_read_alone_and_then_more_again() -> None:
    size = ReadSize(64 * MIB)
    assert size.limit(256) == 8 and size.limit(0) == 0
    size.saw([(b"p", b"x" * (log.READ_BYTES + 1))])
    assert size.limit(256) == 1
    for expected in (1, 4, 8):
        size.saw([(b"p", b"x")])
        assert size.limit(256) == expected
    assert ReadSize(None).limit(256) == 256
