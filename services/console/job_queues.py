"""How many jobs of a run wait in RQ's queues, are being done, or have failed."""

from common.broker import Broker
from common.keys import RQ_STATES, Keys

QUEUED, STARTED, FAILED = RQ_STATES
"""How far a job may be."""


async def job_counts(broker: Broker, keys: Keys) -> dict[tuple[str, str], int]:
    """Jobs by queue (`sandbox`, `jobs`) and by how far they are.

    Raises:
        BrokerError: the Redis user may not look at RQ's keys.
    """
    counts = {}
    for name, queue in (("sandbox", keys.sandbox_queue), ("jobs", keys.jobs_queue)):
        for state, key in RQ_STATES.items():
            command = "LLEN" if state == QUEUED else "ZCARD"
            counts[name, state] = int(await broker.execute(command, key.format(queue)))
    return counts
