"""Streams as queues: consumer groups with leases.

Guarantees: a result and the acknowledgement of its input are one atomic unit, and only the holder of the
lease can publish; a held message is renewed while it is worked on, and taken over when its holder is silent.
Every call may be repeated after a lost connection.
"""

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from functools import partial
from itertools import compress
from typing import Any, Generic, TypeVar

import structlog
from redis import exceptions as redis_errors

from tidemill.common.errors import LeaseLostError
from tidemill.common.process.lease_keeper import LeaseKeeper
from tidemill.common.redis import lease_scripts, scripts
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.lease_scripts import LeaseReply, PartReply, SampleReply
from tidemill.common.streams.entries import NOBODY, Delivery, Fields, Garbled, decoded
from tidemill.common.streams.log import ReadSize, block_for, ensure_group, fields_of, is_without_group
from tidemill.common.streams.takeover import Takeover
from tidemill.common.telemetry import metrics
from tidemill.common.wire import codec
from tidemill.common.wire.codec import SCHEMA
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Message, Ticket, Trajectory

log = structlog.get_logger(__name__)

# One renewal may be lost, and the next one still comes a third of a lease early.
RENEWALS_PER_LEASE = 3
# Redis serves no other client while a script runs, and Lua's `unpack` takes a few thousand values at most.
MAX_IN_ONE_CALL = 512

M = TypeVar("M", bound=Message)
T = TypeVar("T")


class Consumer(Generic[M]):
    """One member of a consumer group on one stream.

    `async with consumer:` creates the group where needed and renews leases in the background. A message
    is held from `fetch` until `complete`, `publish_sample` (the last one), `dead_letter` or `hand_back`.
    """

    def __init__(
        self,
        broker: Broker,
        key: str,
        group: str,
        name: str,
        message_type: type[M],
        *,
        lease_s: float,
        dead_key: str,
        label: str = "",
        lease_keeper: LeaseKeeper | None = None,
    ) -> None:
        self.broker = broker
        self.key = key
        self.group = group
        self.name = name
        self.message_type = message_type
        self.lease_s = lease_s
        self.dead_key = dead_key
        self.label = label or key.rpartition(":")[2]
        self.max_bytes = broker.max_bytes
        self.held: dict[str, Delivery[M]] = {}
        self._in_call: Counter[str] = Counter()
        """Held messages with a call under way: not to find them pending is no lost lease."""
        self._ahead: deque[Delivery[M] | Garbled] = deque()
        """New messages that came in the round trip of an acknowledgement, for the next `fetch`. They are held
        and renewed from their arrival on."""
        self._read = ("XREADGROUP", "GROUP", group, name, "COUNT")
        self._size = ReadSize(self.max_bytes)
        self._num_deliveries = metrics.DELIVERIES.labels(self.label)
        self.takeover = Takeover(broker, key, group, name, lease_s, self.label)
        self._lease_keeper = lease_keeper
        self._renewal: asyncio.Task[None] | None = None
        self.renewed_at = time.monotonic()

    async def __aenter__(self) -> "Consumer[M]":
        await ensure_group(self.broker, self.key, self.group)
        # An outage may have just ended, which leases do not show: other holders get time to renew.
        self.takeover.be_patient()
        self._renewal = asyncio.create_task(self._renew_forever(), name=f"renew {self.label}")
        # Before the keeper gets this consumer: with an old time, its loop would look blocked.
        self.renewed_at = time.monotonic()
        if self._lease_keeper:
            self._lease_keeper.add(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        # Before the renewal ends, or the keeper would renew in its place.
        if self._lease_keeper:
            self._lease_keeper.remove(self)
        if self._renewal:
            self._renewal.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._renewal

    @property
    def num_ahead(self) -> int:
        """Messages that are here already for the next `fetch`."""
        return len(self._ahead)

    async def fetch(self, count: int, block_s: float) -> list[Delivery[M] | Garbled]:
        """Up to `count` messages: those that are here already, else abandoned ones, else new ones; for these
        it waits `block_s`. `Garbled` ones are for `dead_letter`."""
        count = self._size.limit(count)
        if self._renewal is not None and self._renewal.done():
            self._renewal.result()  # without renewal every lease would be lost: end with its error
        try:
            # What came ahead first: with abandoned messages beside it, more would be held than asked for.
            # These wait for one `fetch` at most, as `complete` then asks for no new ones. They come before
            # new ones because their groups wait for them, and no worker renews them.
            deliveries = self._take_ahead(count) or await self._reclaim(count)
            if deliveries:
                return deliveries
            command = (*self._read, count, *block_for(block_s), "STREAMS", self.key, ">")
            reply = await self.broker.execute(*command)
        except redis_errors.ResponseError as error:
            if not is_without_group(error):
                raise
            log.warning("consumer group is gone, creating it again", stream=self.label, group=self.group)
            await ensure_group(self.broker, self.key, self.group)
            return []
        return self._hold_new(reply)

    async def complete(
        self, results: Sequence[tuple[Delivery[M], Message | None]], out_key: str, ahead: int = 0
    ) -> list[bool]:
        """Publish each result to `out_key` and acknowledge its input, as one unit for each pair.

        A result of None only acknowledges. Returns whether each lease was still held; if not, nothing was
        published. Up to `ahead` new messages are read in the same round trip: they are held from then on, and
        the next `fetch` returns them. Ask for no more than will be fetched without delay. None are read where
        the next `fetch` has to look for abandoned messages.
        """
        if ahead > 0 and not self.takeover.is_due:
            command = (*self._read, self._size.limit(ahead), "STREAMS", self.key, ">")
            # Sent with the next call, and not repeated: `fetch` asks anyway.
            asked = self.broker.redis.ask(command)
            if asked is not None:
                asked.add_done_callback(self._receive_ahead)
        done: list[bool] = []
        for chunk in _in_parts(results):
            payloads = [
                (delivery, codec.encode_payload(result) if result is not None else b"")
                for delivery, result in chunk
            ]
            done += await self._complete(payloads, out_key)
        return done

    async def publish_sample(
        self, delivery: Delivery[Ticket], out_key: str, progress_key: str, sample: Trajectory | None
    ) -> bool:
        """Publish one trajectory of the held ticket; the ticket is acknowledged with the last one. With a
        `sample` of None, only check whether all are published. Returns whether the group is complete now.

        Raises:
            LeaseLostError: another worker has taken the ticket over. CodecError: the sample is too large.
        """
        index: int | str = ""
        group_size = delivery.message.group_size
        schema = SCHEMA
        payload = b""
        if sample is not None:
            payload = codec.payload_of(sample, self.max_bytes)
            index = sample.index
            group_size = sample.group_size
            schema = codec.schema_of(sample)
        call = lease_scripts.publish_sample(
            self.broker,
            prompts=self.key,
            trajectories=out_key,
            progress=progress_key,
            parts=Keys.parts(progress_key),
            group=self.group,
            consumer=self.name,
            entry_id=delivery.entry_id,
            index=index,
            group_size=group_size,
            schema=schema,
            payload=payload,
            check=partial(self._check_current, [delivery]),
        )
        reply = await self._under_lease(delivery, call, SampleReply.LEASE_LOST)
        if reply is SampleReply.PUBLISHED:
            # As in Redis, where the script has reset the count of deliveries.
            delivery.attempts = 1
        elif reply is SampleReply.GROUP_COMPLETE:
            self.held.pop(delivery.entry_id, None)
        return reply is SampleReply.GROUP_COMPLETE

    async def append_part(
        self, delivery: Delivery[Ticket], progress_key: str, index: int, number: int, payload: bytes
    ) -> bool:
        """Keep part `number` of a sample of the held ticket, until the sample is published. The first 16
        bytes identify the play. Returns whether it is kept: not if the part before is lost, or the sample
        published.

        Raises:
            LeaseLostError: another worker has taken the ticket over.
        """
        call = lease_scripts.append_part(
            self.broker,
            prompts=self.key,
            progress=progress_key,
            parts=Keys.parts(progress_key),
            group=self.group,
            consumer=self.name,
            entry_id=delivery.entry_id,
            index=index,
            field=f"{index}:{number}",
            field_before=f"{index}:{number - 1}" if number else "",
            payload=payload,
            check=partial(self._check_current, [delivery]),
        )
        reply = await self._under_lease(delivery, call, PartReply.LEASE_LOST)
        if reply is PartReply.KEPT:
            delivery.attempts = 1  # as after a sample
        return reply is not PartReply.NOT_KEPT

    async def start_group(
        self, delivery: Delivery[M], progress_key: str, version: int, replaces: bool = False
    ) -> None:
        """Note the version at which a group was started, unless one is noted; with `replaces`, in any case.
        Raises LeaseLostError: another worker has taken the ticket over."""
        call = lease_scripts.start_group(
            self.broker,
            prompts=self.key,
            progress=progress_key,
            group=self.group,
            consumer=self.name,
            entry_id=delivery.entry_id,
            version=version,
            replaces=replaces,
            check=partial(self._check_current, [delivery]),
        )
        await self._under_lease(delivery, call, LeaseReply.LOST)

    def holds(self, delivery: Delivery[M]) -> bool:
        """Whether this delivery is held: neither completed nor lost, nor delivered here again since."""
        return self.held.get(delivery.entry_id) is delivery

    async def store_result(
        self, delivery: Delivery[Trajectory], results_key: str, tickets_key: str, result: Message | None
    ) -> list[bytes] | None:
        """Keep the result of one trajectory of a group that is published as a whole.

        With the last one, returns the payloads of all results, by index: the trajectory stays held, and this
        consumer has to finish the group with `publish_group`. Otherwise returns None, and the trajectory is
        acknowledged. A result of None means that it is kept already (`has_result`).

        Raises:
            LeaseLostError: another worker has taken the trajectory over; nothing was kept.
        """
        call = lease_scripts.store_result(
            self.broker,
            trajectories=self.key,
            results=results_key,
            tickets=tickets_key,
            group=self.group,
            consumer=self.name,
            entry_id=delivery.entry_id,
            ticket=delivery.message.ticket,
            index=delivery.message.index,
            group_size=delivery.message.group_size,
            payload=codec.encode_payload(result) if result is not None else b"",
            check=partial(self._check_current, [delivery]),
        )
        reply = await self._under_lease(delivery, call, LeaseReply.LOST)
        if isinstance(reply, list):
            return reply
        self.held.pop(delivery.entry_id, None)
        return None

    async def has_result(self, results_key: str, index: int) -> bool:
        """Whether the result of this sample is kept: its worker died after storing it."""
        return bool(await self.broker.execute("HEXISTS", results_key, index))

    async def publish_group(
        self, delivery: Delivery[M], out_key: str, results_key: str, scores: Sequence[Message]
    ) -> None:
        """Publish all scores of a group and acknowledge its last trajectory, as one unit.

        Raises:
            LeaseLostError: another worker has taken the trajectory over; nothing was published.
        """
        call = lease_scripts.publish_group(
            self.broker,
            trajectories=self.key,
            scores=out_key,
            results=results_key,
            group=self.group,
            consumer=self.name,
            entry_id=delivery.entry_id,
            schema=SCHEMA,
            payloads=[codec.encode_payload(score) for score in scores],
            check=partial(self._check_current, [delivery]),
        )
        await self._under_lease(delivery, call, LeaseReply.LOST)
        self.held.pop(delivery.entry_id, None)

    async def dead_letter(self, delivery: Delivery[M] | Garbled, dead_letter: Message) -> bool:
        # In one unit with the acknowledgement: no crash leaves a message both dead and pending.
        (done,) = await self._complete([(delivery, codec.encode_payload(dead_letter))], self.dead_key)
        if done:
            metrics.DEAD_LETTERS.labels(self.label).inc()
        return done

    async def renew(self) -> None:
        """Renew every held lease now, and mark those that are lost; a background task calls it, too."""
        # A copy: messages come and go while Redis is awaited.
        for chunk in _in_parts(list(self.held)):
            all_lost = [entry_id.encode() for entry_id in chunk]
            call = lease_scripts.renew(
                self.broker, stream=self.key, group=self.group, consumer=self.name, entry_ids=chunk
            )
            for entry_id in await self._unless_without_group(call, all_lost):
                if not self._in_call[entry_id.decode()]:  # that call finds out for itself
                    self._lose(entry_id.decode())
        self.renewed_at = time.monotonic()

    async def renew_by(self, broker: Broker) -> None:
        """Renew every held lease through another connection, from another thread than the one of `fetch`.

        Lost leases are noticed by `renew`, once this consumer's own loop runs again.
        """
        # Copied in one step: the loop of `fetch` changes the dict meanwhile, in its own thread.
        for chunk in _in_parts(list(self.held)):
            with contextlib.suppress(redis_errors.ResponseError):  # without its group all is lost anyway
                await lease_scripts.renew(
                    broker, stream=self.key, group=self.group, consumer=self.name, entry_ids=chunk
                )

    async def hand_back(self, deliveries: Sequence[Delivery[M]], is_counted: bool = False) -> None:
        """Give messages back, to the next consumer that reclaims; an attempt only with `is_counted`."""
        if not deliveries:
            return
        ids = [delivery.entry_id for delivery in deliveries]
        call = lease_scripts.hand_back(
            self.broker,
            stream=self.key,
            group=self.group,
            consumer=self.name,
            # As if their holder had been silent for more than a lease: the next look takes them.
            idle_ms=int(self.lease_s * 1000) + 1,
            num_subtracted=0 if is_counted else 1,
            holder=NOBODY,
            entry_ids=ids,
        )
        with self._during_call(ids):
            await self._unless_without_group(call, None)
        # After the answer: a call that fails has given nothing back, and they are still renewed.
        for entry_id in ids:
            self.held.pop(entry_id, None)
        metrics.HANDED_BACK.labels(self.label).inc(len(ids))

    async def hand_back_ahead(self) -> None:
        """Give back the messages that came in the round trip of an acknowledgement, and were not fetched."""
        ahead = self._take_ahead(len(self._ahead))
        # Garbled ones are not worked on: they can be dead-lettered by the next `fetch`.
        self._ahead.extend(entry for entry in ahead if isinstance(entry, Garbled))
        await self.hand_back([entry for entry in ahead if isinstance(entry, Delivery)])

    async def park(self, deliveries: Sequence[Delivery[M]]) -> None:
        """Keep messages for later: they stay held, and this delivery does not count until `unpark`."""
        await self._count_deliveries(deliveries, -1)

    async def unpark(self, deliveries: Sequence[Delivery[M]]) -> None:
        """Count the delivery of parked messages again, when work on them begins."""
        await self._count_deliveries(deliveries, 0)

    async def _count_deliveries(self, deliveries: Sequence[Delivery[M]], change: int) -> None:
        pairs = [(d.entry_id, max(d.attempts + change, 0)) for d in deliveries if not d.is_lost]
        if pairs:
            call = lease_scripts.park(
                self.broker, stream=self.key, group=self.group, consumer=self.name, entries=pairs
            )
            for entry_id in await self._unless_without_group(call, [pair[0].encode() for pair in pairs]):
                self._lose(entry_id.decode())

    async def leave(self) -> None:
        """Hand everything back and remove this consumer from the group, if nothing is pending for it."""
        self._ahead.clear()  # they are in `held`, too, and are handed back with it
        await self.hand_back(list(self.held.values()))
        # Checked in the script: after a loss of Redis, entries may be pending again, and would be removed
        # with the consumer. NOBODY is a consumer in Redis, too, and stays one until it holds nothing.
        for name in (self.name, NOBODY):
            call = scripts.leave(self.broker, stream=self.key, group=self.group, consumer=name)
            await self._unless_without_group(call, False)

    async def _unless_without_group(self, call: Awaitable[T], without_group: T) -> T:
        """The reply of a script; `without_group` where the group is gone, and with it every lease."""
        try:
            return await call
        except redis_errors.ResponseError as error:
            if not is_without_group(error):
                raise
            return without_group

    async def _under_lease(self, delivery: Delivery[Any], call: Awaitable[T], lease_lost: T) -> T:
        """The reply of a script on a held message, which checks its lease. Raises LeaseLostError: the reply
        was `lease_lost`."""
        with self._during_call([delivery.entry_id]):
            reply = await self._unless_without_group(call, lease_lost)
        if reply == lease_lost:
            self._lose(delivery.entry_id)
            raise LeaseLostError(f"{self.label} {delivery.entry_id} is held by another worker now")
        return reply

    async def _complete(
        self, results: Sequence[tuple[Delivery[M] | Garbled, bytes]], out_key: str
    ) -> list[bool]:
        """Publish each payload and acknowledge its delivery; an empty payload only acknowledges.

        Each payload stays with its delivery: one that is left out must not shift the others.
        """
        if not results:
            return []
        deliveries = [delivery for delivery, _ in results]
        ids = [delivery.entry_id for delivery in deliveries]
        call = lease_scripts.complete(
            self.broker,
            stream=self.key,
            output=out_key,
            group=self.group,
            consumer=self.name,
            schema=SCHEMA,
            results=[(delivery.entry_id, payload) for delivery, payload in results],
            check=partial(self._check_current, deliveries),
        )
        try:
            with self._during_call(ids):
                flags = await self._unless_without_group(call, [False] * len(ids))
        except LeaseLostError:  # some were lost or delivered again: left out now
            current = [self._is_current(delivery) for delivery in deliveries]
            done = iter(await self._complete(list(compress(results, current)), out_key))
            return [is_current and next(done) for is_current in current]
        for entry_id, is_done in zip(ids, flags, strict=True):
            if is_done:
                self.held.pop(entry_id, None)
            else:
                self._lose(entry_id)
        return flags

    @contextlib.contextmanager
    def _during_call(self, entry_ids: Sequence[str]) -> Iterator[None]:
        self._in_call.update(entry_ids)
        try:
            yield
        finally:
            # Counted, because several samples of one ticket may be published at once.
            self._in_call.subtract(entry_ids)
            for entry_id in entry_ids:
                if not self._in_call[entry_id]:
                    del self._in_call[entry_id]

    def _hold_new(self, reply: Any) -> list[Delivery[M] | Garbled]:
        entries = reply[0][1] if reply else []
        if entries:
            self._size.saw(raw for _, raw in entries)
        self._num_deliveries.inc(len(entries))
        return [self._hold(entry_id, fields_of(raw), 1) for entry_id, raw in entries if raw]

    def _hold(self, raw_id: bytes, fields: Fields, attempts: int) -> Delivery[M] | Garbled:
        entry = decoded(raw_id, fields, self.message_type, self.max_bytes)
        # Not held: it is dead-lettered next, and where this worker dies before, its lease runs out.
        if isinstance(entry, Garbled):
            return entry
        if entry.entry_id in self.held:
            # Delivered here again: Redis has lost the first delivery, and the work begun under it is void.
            self._lose(entry.entry_id)
        delivery = Delivery(entry.entry_id, fields, entry.message, attempts)
        self.held[delivery.entry_id] = delivery
        return delivery

    def _receive_ahead(self, asked: asyncio.Future[list[Any]]) -> None:
        if asked.cancelled() or asked.exception() is not None:
            self.broker.num_interruptions += 1  # Redis may have delivered messages in the lost answer
            return
        (reply,) = asked.result()
        # An error, such as a group that is gone, is raised again when `fetch` asks.
        if not isinstance(reply, Exception):
            self._ahead.extend(self._hold_new(reply))

    def _take_ahead(self, count: int) -> list[Delivery[M] | Garbled]:
        """Up to `count` messages of `_ahead`, without those that were lost since."""
        deliveries: list[Delivery[M] | Garbled] = []
        while self._ahead and len(deliveries) < count:
            entry = self._ahead.popleft()
            if isinstance(entry, Garbled) or not entry.is_lost:
                deliveries.append(entry)
        return deliveries

    def _is_current(self, delivery: Delivery[Any] | Garbled) -> bool:
        """Whether it was not lost, and no other delivery of the same entry has come since.

        After a loss of Redis, its id may be that of another message, pending here before it is read: a lost
        delivery must not be acknowledged again.
        """
        is_lost = isinstance(delivery, Delivery) and delivery.is_lost
        return not is_lost and self.held.get(delivery.entry_id, delivery) is delivery

    def _check_current(self, deliveries: Sequence[Any]) -> None:
        """Checked before each attempt: Redis may have lost an entry, and delivered another with its id."""
        for delivery in deliveries:
            if not self._is_current(delivery):
                raise LeaseLostError(
                    f"{self.label} {delivery.entry_id} was lost, or delivered here once more"
                )

    def _lose(self, entry_id: str) -> None:
        delivery = self.held.pop(entry_id, None)
        if delivery is not None:
            delivery.is_lost = True
            if delivery.on_lost is not None:
                delivery.on_lost()
            metrics.LEASES_LOST.labels(self.label).inc()
            log.warning("lease lost, another worker took over", stream=self.label, entry=entry_id)

    async def _reclaim(self, count: int) -> list[Delivery[M] | Garbled]:
        """Messages that were delivered here in a lost answer, or that other consumers have abandoned."""
        if self.takeover.notice_interruption():
            unanswered = [self._hold(*row) for row in await self._read_unanswered(count)]
            # At once: after an outage the others wait little more than a lease (`Takeover.be_patient`). It
            # also finds what another consumer has taken since the listing.
            await self.renew()
            # With as many as were asked for, there may be more.
            if len(unanswered) >= count:
                self.takeover.ask_again()
            if unanswered:
                return unanswered
        entries = await self.takeover.look(count, list(self.held))
        if entries is None:
            # The clock has made our own leases look expired as well.
            await self.renew()
        # Our own messages are taken, too, where their renewal was late: they are worked on already.
        deliveries = [self._hold(*entry) for entry in entries or () if entry[0].decode() not in self.held]
        if deliveries:
            metrics.RECLAIMED.labels(self.label).inc(len(deliveries))
            log.info("took over abandoned messages", stream=self.label, count=len(deliveries))
        return deliveries

    async def _read_unanswered(self, count: int) -> list[tuple[bytes, Fields, int]]:
        """Up to `count` entries that were delivered here in an answer that was lost with its connection, as
        (id, fields, attempts): no other consumer would look for them before their leases end.

        Raises:
            ResponseError: stream or group are gone.
        """
        # The answer lists held messages, too; with room for these, `count` others fit.
        most = count + len(self.held)
        unanswered: dict[bytes, tuple[bytes, Fields, int]] = {}
        while True:
            pending = ("XPENDING", self.key, self.group, "-", "+", most, self.name)
            rows = await self.broker.execute(*pending)
            known_ids = {entry_id.encode() for entry_id in self.held} | unanswered.keys()
            attempts = {row[0]: int(row[3]) for row in rows if row[0] not in known_ids}
            asked = list(attempts)[: count - len(unanswered)]
            # Not by XREADGROUP: with each lost answer, Redis would count one more delivery of messages that
            # no worker has begun.
            reads = [("XRANGE", self.key, entry_id, entry_id) for entry_id in asked]
            replies = await self.broker.pipeline(reads)
            fields_by_id = dict(reply[0] for reply in replies if isinstance(reply, list) and reply)
            unanswered |= {
                i: (i, fields_of(fields_by_id[i]), attempts[i]) for i in asked if i in fields_by_id
            }
            trimmed = [i for i, reply in zip(asked, replies, strict=True) if reply == []]
            if not trimmed:
                return list(unanswered.values())
            # Trimmed while they were pending: they cannot be worked on, and would stay pending for ever.
            await self.broker.execute("XACK", self.key, self.group, *trimmed)

    async def _renew_forever(self) -> None:
        """Renew every held lease, three times a lease, until cancelled."""
        while True:
            await asyncio.sleep(self.lease_s / RENEWALS_PER_LEASE)
            await self.renew()


def _in_parts(items: Sequence[T]) -> Iterable[Sequence[T]]:
    return (items[i : i + MAX_IN_ONE_CALL] for i in range(0, len(items), MAX_IN_ONE_CALL))
