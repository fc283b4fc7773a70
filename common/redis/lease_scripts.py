"""The Lua scripts of messages that workers lease, and of dead letters; see `scripts.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Any

from tidemill.common.redis.broker import Broker
from tidemill.common.redis.scripts import Check, Key, Name


class LeaseReply(IntEnum):
    """What `start_group` and `publish_group` return, and `store_result` where others finish the group."""

    LOST = 0
    HELD = 1
    """And it was done."""


class PartReply(IntEnum):
    """What `append_part` returns."""

    LEASE_LOST = 0
    KEPT = 1
    KEPT_AGAIN = 2
    """In place of an older part."""
    NOT_KEPT = 3
    """The part before it is lost, or the sample is published."""


class SampleReply(IntEnum):
    """What `publish_sample` returns."""

    LEASE_LOST = 0
    PUBLISHED = 1
    GROUP_COMPLETE = 2
    """And the ticket is acknowledged."""
    THERE_ALREADY = 3


class RequeueReply(IntEnum):
    """What `requeue` returns."""

    DONE = 1
    DEAD_LETTER_GONE = 0
    MESSAGE_GONE = -1
    """The stream no longer has it."""


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """What `reclaim` returns."""

    server_ms: int
    """The server's time."""
    look_from: str = ""
    """The entry id from which the next call looks for deliveries from the future (from before the server's
    clock was set back); empty: it need not look."""
    entries: Sequence[tuple[bytes, Any, int]] = ()
    """Entries that were taken over: id, fields as Redis lists them, and how often each was delivered."""
    has_jumped: bool = False
    """Whether the server's clock has jumped ahead, so that nothing was taken over."""


async def append_part(
    broker: Broker,
    *,
    prompts: Key,
    progress: Key,
    parts: Key,
    group: str,
    consumer: str,
    entry_id: str,
    index: int,
    field: str,
    field_before: str,
    payload: bytes,
    check: Check | None = None,
) -> PartReply:
    """Keep a part of a sample of a held ticket. `field_before` is that of the part before, empty for none."""
    keys = [prompts, progress, parts]
    args = [group, consumer, entry_id, index, field, field_before, payload]
    return PartReply(await broker.script("append_part", keys, args, check))


async def complete(
    broker: Broker,
    *,
    stream: Key,
    output: Key,
    group: str,
    consumer: str,
    schema: Name,
    results: Sequence[tuple[str, bytes]],
    check: Check | None = None,
) -> list[bool]:
    """Publish each payload to `output` and acknowledge its entry (entry id, payload); an empty payload only
    acknowledges. Returns whether each lease was still held."""
    args = [group, consumer, schema, *chain.from_iterable(results)]
    return [bool(flag) for flag in await broker.script("complete", [stream, output], args, check)]


async def hand_back(
    broker: Broker,
    *,
    stream: Key,
    group: str,
    consumer: str,
    idle_ms: int,
    num_subtracted: int,
    holder: str,
    entry_ids: Sequence[str],
) -> None:
    """Give held entries to `holder`, as if idle for so long, with so many deliveries fewer."""
    args = [group, consumer, idle_ms, num_subtracted, holder, *entry_ids]
    await broker.script("hand_back", [stream], args)


async def park(
    broker: Broker, *, stream: Key, group: str, consumer: str, entries: Sequence[tuple[str, int]]
) -> list[bytes]:
    """Set how often held entries count as delivered (entry id, deliveries), and renew their leases. Returns
    the ids that are no longer held."""
    args = [group, consumer, *chain.from_iterable(entries)]
    lost: list[bytes] = await broker.script("park", [stream], args)
    return lost


async def publish_group(
    broker: Broker,
    *,
    trajectories: Key,
    scores: Key,
    results: Key,
    group: str,
    consumer: str,
    entry_id: str,
    schema: Name,
    payloads: Sequence[bytes],
    check: Check | None = None,
) -> LeaseReply:
    """Publish all scores of a group, acknowledge its last trajectory, and drop its results."""
    args = [group, consumer, entry_id, schema, *payloads]
    return LeaseReply(await broker.script("publish_group", [trajectories, scores, results], args, check))


async def publish_sample(
    broker: Broker,
    *,
    prompts: Key,
    trajectories: Key,
    progress: Key,
    parts: Key,
    group: str,
    consumer: str,
    entry_id: str,
    index: int | str,
    group_size: int,
    schema: Name,
    payload: bytes,
    check: Check | None = None,
) -> SampleReply:
    """Publish one sample of a held ticket. An empty payload only checks whether the group is complete."""
    keys = [prompts, trajectories, progress, parts]
    args = [group, consumer, entry_id, index, group_size, schema, payload]
    return SampleReply(await broker.script("publish_sample", keys, args, check))


async def reappend(
    broker: Broker, *, dead: Key, log: Key, dead_id: str, fields: Sequence[tuple[Name, bytes]]
) -> bool:
    """Append the fields (name, value) of a dead letter to the log they came from, and remove it; False where
    it is gone."""
    args = [dead_id, *chain.from_iterable(fields)]
    return bool(await broker.script("reappend", [dead, log], args))


async def reclaim(
    broker: Broker,
    *,
    stream: Key,
    group: str,
    consumer: str,
    idle_ms: int,
    count: int,
    look_from: str,
    latest_ms: int,
    holder: str,
    worked_on: Sequence[str],
    check: Check | None = None,
) -> Reclaimed:
    """Take over entries of consumers that have been silent for so long, or only of `holder`. `look_from` is
    where to look for deliveries from the future (empty: nowhere), `latest_ms` the latest plausible time of
    the server (0: any). Entries that the caller has `worked_on` do not count as delivered once more."""
    args = [group, consumer, idle_ms, count, look_from, latest_ms, holder, *worked_on]
    server_ms, *rest_of_reply = await broker.script("reclaim", [stream], args, check)
    if not rest_of_reply:
        return Reclaimed(server_ms, has_jumped=True)
    next_look_from, entries = rest_of_reply
    return Reclaimed(server_ms, next_look_from.decode(), entries)


async def renew(
    broker: Broker, *, stream: Key, group: str, consumer: str, entry_ids: Sequence[str]
) -> list[bytes]:
    """Renew leases; returns the ids that are no longer held."""
    lost: list[bytes] = await broker.script("renew", [stream], [group, consumer, *entry_ids])
    return lost


async def requeue(
    broker: Broker,
    *,
    dead: Key,
    stream: Key,
    progress: Key,
    dead_id: str,
    group: str,
    entry_id: str,
    idle_ms: int,
    version: int | None,
    holder: str,
    published: Sequence[int],
) -> RequeueReply:
    """Make the message of a dead letter pending for `holder`, as if idle for so long, and remove the dead
    letter. For a ticket, `version` is that at which its group was started, and `published` its samples that
    are there already."""
    noted = "" if version is None else version
    args = [dead_id, group, entry_id, idle_ms, noted, holder, *published]
    return RequeueReply(await broker.script("requeue", [dead, stream, progress], args))


async def start_group(
    broker: Broker,
    *,
    prompts: Key,
    progress: Key,
    group: str,
    consumer: str,
    entry_id: str,
    version: int,
    replaces: bool,
    check: Check | None = None,
) -> LeaseReply:
    """Note the version at which the group of a held ticket was started. One that is noted already stays,
    unless this one `replaces` it."""
    args = [group, consumer, entry_id, version, int(replaces)]
    return LeaseReply(await broker.script("start_group", [prompts, progress], args, check))


async def store_result(
    broker: Broker,
    *,
    trajectories: Key,
    results: Key,
    tickets: Key,
    group: str,
    consumer: str,
    entry_id: str,
    ticket: int,
    index: int,
    group_size: int,
    payload: bytes,
    check: Check | None = None,
) -> LeaseReply | list[bytes]:
    """Keep the result of one sample of a group (an empty payload: it is there already). With the last one,
    the payloads of all: this consumer has to finish the group."""
    keys = [trajectories, results, tickets]
    args = [group, consumer, entry_id, ticket, index, group_size, payload]
    reply = await broker.script("store_result", keys, args, check)
    return reply if isinstance(reply, list) else LeaseReply(reply)
