"""How `benchmarks.scale` counts what became of every ticket."""

from benchmarks.scale_cluster import count
from tests.support.histories import tickets
from tests.support.numbered import append_numbered
from tests.support.training import publish_group
from tidemill.common.streams import Consumer, append
from tidemill.common.wire.keys import ROLLOUT_GROUP
from tidemill.common.wire.messages import Commit, DeadLetter, Ticket


async def test_books_tell_lost_from_trained_and_from_under_way(broker, keys):
    """Ticket 0 is trained, one sample of it twice; 1 is whole; 2 is held; 3 was acknowledged and is nowhere;
    4 was not given out yet."""
    await append_numbered(broker, keys.prompts(), [(ticket.ticket, ticket) for ticket in tickets()])
    async with Consumer(
        broker, keys.prompts(), ROLLOUT_GROUP, "w", Ticket, lease_s=60.0, dead_key=keys.dead
    ) as consumer:
        given = await consumer.fetch(4, 0.1)
        await consumer.complete([(given[n], None) for n in (0, 1, 3)], keys.trajectories())
        for ticket in (0, 1):
            await publish_group(broker, keys, ticket)
        twice = [
            Commit(step=s, version=s + 1, groups=(0,), mini_batches=((((0, s), (0, 1)),),)) for s in (0, 1)
        ]
        await append_numbered(broker, keys.commits, [(commit.step, commit) for commit in twice])
        books = await count(broker, keys)
    assert (books.issued, books.trained, books.in_flight, books.lost) == (5, 2, 3, [3])
    assert books.duplicated == 1
    await append(broker, keys.dead, DeadLetter(origin="prompts", entry_id="4-0", error="given up", ticket=3))
    books = await count(broker, keys)
    assert (books.lost, books.dead_lettered) == ([], 1), "it is told, and another ticket replaces it"
