"""Entries that nobody can read: each gets one letter, and each letter is read once."""

from typing import Any

from tidemill.common.streams import DeadLetterWriter, Garbled, append
from tidemill.common.streams.log import length
from tidemill.common.wire.messages import DeadLetter

NUM = 40


async def test_a_burst_of_them_reads_each_letter_once(broker, keys, monkeypatch):
    earlier = [DeadLetter(origin="prompts", entry_id=f"{n}-0", error="") for n in range(NUM)]
    await append(broker, keys.dead, *earlier)
    num_read, execute = 0, broker.execute

    async def counted(*command: Any) -> Any:
        nonlocal num_read
        reply = await execute(*command)
        num_read += len(reply) if command[:2] == ("XRANGE", keys.dead) else 0
        return reply

    monkeypatch.setattr(broker, "execute", counted)
    letters = DeadLetterWriter(broker, keys, keys.scores())
    for _ in range(2):
        for n in range(NUM):
            await letters.append_unread(Garbled(f"{n}-0", {b"p": b"?"}, "no msgpack"), "trainer")
    assert await length(broker, keys.dead) == 2 * NUM, "one letter for each"
    assert num_read == 2 * NUM


async def test_letters_of_others_are_seen_whenever_they_come(broker, keys):
    letters = DeadLetterWriter(broker, keys, keys.scores())
    assert not await letters.has("1-0")
    for origin in ("scores:eval", "scores"):
        await append(broker, keys.dead, DeadLetter(origin=origin, entry_id="1-0", error=""))
        assert await letters.has("1-0") is (origin == "scores")
