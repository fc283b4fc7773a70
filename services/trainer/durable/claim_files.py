"""Payloads beside the stream of trajectories: what waits to be archived of them, and what may go."""

import asyncio
from collections.abc import AsyncIterator

import structlog

from tidemill.common.errors import StoreError
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.store import NAMES_A_CLAIM, ClaimStore
from tidemill.common.streams import Entry, ReadSize, decoded, read_raw
from tidemill.common.wire.codec import PAYLOAD_FIELD
from tidemill.common.wire.messages import Claim, Trajectory

log = structlog.get_logger(__name__)

READ_COUNT = 256


async def claims_in(broker: Broker, key: str, last: str = "+") -> AsyncIterator[Claim]:
    """The claims of a stream's entries up to an id. Other entries are not decoded: they may be many."""
    first, size = "-", ReadSize(broker.max_bytes)
    while entries := await read_raw(broker, key, first, last, size.limit(READ_COUNT)):
        size.saw(fields.values() for _, fields in entries)
        for entry_id, fields in entries:
            if NAMES_A_CLAIM in fields.get(PAYLOAD_FIELD, b""):
                record = decoded(entry_id.encode(), fields, Trajectory)
                if isinstance(record, Entry) and record.message.claim is not None:
                    yield record.message.claim
        first = f"({entries[-1][0]}"


class ClaimFiles:
    """Removes payloads that are no longer needed."""

    def __init__(self, context: ServiceContext) -> None:
        self._broker, self._key = context.broker, context.keys.trajectories()
        self._store = ClaimStore(context.run_dir, url=context.config.streams.claim_check_url)
        self.first_ticket = 0
        """Those below were settled at the oldest checkpoint that a trainer may come back to."""

    async def collect(self) -> None:
        """Remove the payloads of settled tickets that no entry claims: an entry goes only when it is archived
        with its payload, or when no checkpoint needs it. Where the store is away they stay for now."""
        try:
            settled = await asyncio.to_thread(self._store.settled, self.first_ticket)
            if settled:
                claimed = {claim.pointer async for claim in claims_in(self._broker, self._key)}
                await asyncio.to_thread(self._store.remove, settled - claimed)
        except (OSError, StoreError) as error:
            log.warning("payloads that are no longer needed stay for now", error=str(error))
