"""Results of groups that are scored as a whole, between the first sample of a group and the last.

A result refers to its trajectory (`references.py`); scripts write and read it, for reward workers.
"""

from collections.abc import Container

from tidemill.common.redis.broker import Broker
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Lane


async def delete_results(broker: Broker, keys: Keys, lane: Lane, outstanding: Container[int]) -> int:
    """Delete the results of every ticket that is not outstanding; returns how many there were."""
    index = keys.result_tickets(lane)
    tickets = [int(raw) for raw in await broker.execute("SMEMBERS", index)]
    gone = [ticket for ticket in tickets if ticket not in outstanding]
    if gone:
        deletions = [("DEL", keys.results(ticket, lane)) for ticket in gone]
        # One unit: the index must not forget a ticket whose results are still there.
        await broker.pipeline([*deletions, ("SREM", index, *gone)], atomic=True)
    return len(gone)
