"""Which messages of others a consumer may take over, and when it looks for them.

A message is abandoned when its holder has been silent for a lease. After an outage all holders look silent:
none could renew. A consumer that saw an outage, or that has just started, gives all holders 1 to 1.25 leases
to renew, and meanwhile takes only messages that were given back.
"""

import random
import time
from collections.abc import Sequence

import structlog

from tidemill.common.redis import lease_scripts
from tidemill.common.redis.broker import Broker
from tidemill.common.streams.entries import NOBODY, Fields
from tidemill.common.streams.log import fields_of

log = structlog.get_logger(__name__)

LOOKS_PER_LEASE = 2
MAX_TAKEN = 1000
"""Most messages of one look; `reclaim.lua` has the same bound, for callers that send another number."""
EVERYWHERE = "-"
"""Place where the search for deliveries from the future begins, also after the clock was set back."""
CLOCK_CHECKS_PER_LEASE = 3
"""The server's clock has jumped if it deviates from ours by more than a lease divided by this."""
JITTER = 0.25


class _InterruptedLookError(Exception):
    """The connection was lost during a look."""


class Takeover:
    """Looks for messages that other members of a group have abandoned, about twice a lease."""

    def __init__(self, broker: Broker, key: str, group: str, name: str, lease_s: float, label: str) -> None:
        self._broker = broker
        self._key = key
        self._group = group
        self._name = name
        self._lease_s = lease_s
        self._label = label
        self._place = EVERYWHERE
        self._clock: tuple[int, float] | None = None
        """The server's time in milliseconds at the last look, and our monotonic time then."""
        self._waited_s = broker.waited_s
        self._num_interruptions = broker.num_interruptions
        self.patient_until = 0.0
        """Monotonic time from which on silent holders lose their messages."""
        self.next_at = 0.0
        """Monotonic time of the next look."""

    def be_patient(self) -> None:
        """Give all holders 1 to 1.25 leases to renew, from now on."""
        self.patient_until = time.monotonic() + _at_random(self._lease_s)

    @property
    def is_due(self) -> bool:
        """Whether messages may have to be taken: the time of a look has come, or a connection was lost."""
        return time.monotonic() >= self.next_at or self._broker.num_interruptions != self._num_interruptions

    def notice_interruption(self) -> bool:
        """Returns whether a connection was lost since the last call; answers may have been lost with it."""
        if self._broker.num_interruptions == self._num_interruptions:
            return False
        self._num_interruptions = self._broker.num_interruptions
        self._place = EVERYWHERE  # a server that lost its last writes may have old delivery times
        if self._waited_s != self._broker.waited_s:  # a connection that is back at once is no outage
            self._waited_s = self._broker.waited_s
            self.be_patient()
        return True

    def ask_again(self) -> None:
        """Have `notice_interruption` return True again: not all messages of lost answers were found yet."""
        self._num_interruptions = -1

    async def look(self, count: int, worked_on: Sequence[str] = ()) -> list[tuple[bytes, Fields, int]] | None:
        """Take over up to `count` abandoned messages: id, fields, and how often each was delivered.

        Messages that the consumer works on are found, too, where their renewal was late; that is no delivery.
        None where the clock of Redis has jumped ahead, which makes held leases look expired.
        """
        if time.monotonic() < self.next_at:
            return []
        spare_s = self._lease_s / CLOCK_CHECKS_PER_LEASE
        most = min(count, MAX_TAKEN)
        try:
            reply = await lease_scripts.reclaim(
                self._broker,
                stream=self._key,
                group=self._group,
                consumer=self._name,
                idle_ms=int(self._lease_s * 1000),
                count=most,
                look_from=self._place,
                latest_ms=self._server_ms(spare_s),
                holder=NOBODY if time.monotonic() < self.patient_until else "",
                worked_on=worked_on,
                check=self._check_uninterrupted,
            )
        except _InterruptedLookError:
            # `notice_interruption` reports it next: lost deliveries are read before the next look.
            return []
        # Compared with the last reading, which the next line replaces.
        is_set_back = reply.server_ms < self._server_ms(-spare_s)
        # Also after a jump: the new time is the reference, or every look would find a jump.
        self._clock = (reply.server_ms, time.monotonic())
        if reply.has_jumped:
            log.warning("the clock of Redis jumped ahead; leases get time to be renewed", stream=self._label)
            self.be_patient()
            return None
        self._place = EVERYWHERE if is_set_back else reply.look_from
        # Where there may be more, the next look comes at once.
        if len(reply.entries) < most:
            self.next_at = time.monotonic() + _at_random(self._lease_s / LOOKS_PER_LEASE)
        return [(entry_id, fields_of(raw), attempts) for entry_id, raw, attempts in reply.entries]

    def _server_ms(self, spare_s: float) -> int:
        """The time that the server's clock should show now, plus `spare_s`; 0 where not known."""
        if self._clock is None:
            return 0
        now_ms, asked_at = self._clock
        return int(now_ms + 1000 * (time.monotonic() - asked_at + spare_s))

    def _check_uninterrupted(self) -> None:
        """Checked before each attempt: a look that began before an outage must not take messages after it."""
        if self._broker.num_interruptions != self._num_interruptions:
            raise _InterruptedLookError


def _at_random(pause_s: float) -> float:
    """The pause plus up to `JITTER` of it: workers that saw the same outage must not all come at once."""
    return pause_s * (1.0 + JITTER * random.random())
