"""Deletes what reward workers kept of groups that no longer count.

The results of a group gather in Redis until all are there (`services/reward/grouping.py`). A group that is
settled, replaced or dead leaves them behind, or the mark that it was published; nothing of it has a time to
live, because a slow group must not lose what was paid for.
"""

from collections.abc import Container

from common.broker import Broker
from common.keys import Keys
from common.messages import Lane


async def delete_results(broker: Broker, keys: Keys, lane: Lane, outstanding: Container[int]) -> int:
    """Delete the results of every ticket that is not outstanding; returns how many there were."""
    index = keys.result_tickets(lane)
    tickets = [int(raw) for raw in await broker.execute("SMEMBERS", index)]
    gone = [ticket for ticket in tickets if ticket not in outstanding]
    if gone:
        deletions = [("DEL", keys.results(ticket, lane)) for ticket in gone]
        await broker.pipeline([*deletions, ("SREM", index, *gone)], atomic=True)
    return len(gone)
