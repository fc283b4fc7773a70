"""The Lua scripts of `lua/`, each a function with the names of its keys, arguments and replies.

A parameter of type `Key` is an entry of KEYS, and the others are those of ARGV, in the same order. The first
comment of a script has the same names; a test compares both, and what the Lua reads. What a script does, and
against whom it is atomic, is said in its file.

`check` is called before each attempt, and may raise (`Broker.script`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Annotated, Any

from tidemill.common.redis.broker import Broker

Key = Annotated[str, "KEYS"]
Name = str | bytes
"""As Redis gives it, or as we do."""
Check = Callable[[], None]


class AppendReply(IntEnum):
    """What `append_after` returns; nothing is appended unless it says so."""

    APPENDED = 1
    ENDS_ELSEWHERE = 0
    MARK_LOST = -1


class LeaseReply(IntEnum):
    """What `start_group` and `publish_group` return."""

    LOST = 0
    HELD = 1


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


class ResultReply(IntEnum):
    """What `store_result` returns where others finish the group."""

    LEASE_LOST = 0
    KEPT = 1


class RequeueReply(IntEnum):
    """What `requeue` returns."""

    DONE = 1
    DEAD_LETTER_GONE = 0
    MESSAGE_GONE = -1
    """The stream no longer has it."""


NO_MARK = -1
"""Reply of `trim`: the server has lost the mark, and nothing was removed."""
NO_STREAM = -1
"""Reply of `move_aside`."""


@dataclass(frozen=True, slots=True)
class Admission:
    """What `limits` returns.

    Example: `num_admitted` 0, `wait_ms` 150: the request waits, and asks again in 0.15 s.
    """

    num_admitted: int
    """How many of the waiting requests, from the first on."""
    wait_ms: int
    """After which to ask for the next one; -1 where that depends on a request that ends."""


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


async def append_after(
    broker: Broker,
    *,
    stream: Key,
    marks: Key | None = None,
    last: str,
    schema: Name,
    mark_field: str | None = None,
    mark: bytes | None = None,
    entries: Sequence[tuple[str, bytes]],
) -> AppendReply:
    """Append entries (id, payload) under their ids where the stream ends with the id `last`. With `marks`,
    only if that hash has the `mark`."""
    keys = [stream]
    args: list[Any] = [last, schema]
    if marks is not None:
        keys.append(marks)
        args += [mark_field, mark]
    args += chain.from_iterable(entries)
    return AppendReply(await broker.script("append_after", keys, args))


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


async def cache_get(broker: Broker, *, rewards: Key, uses: Key, totals: Key, digest: str) -> bytes | None:
    """A cached reward."""
    value: bytes | None = await broker.script("cache_get", [rewards, uses, totals], [digest])
    return value


async def cache_put(
    broker: Broker,
    *,
    rewards: Key,
    uses: Key,
    totals: Key,
    digest: str,
    payload: bytes,
    max_bytes: int,
) -> None:
    """Cache a reward; where there are more than `max_bytes`, those used longest ago are dropped."""
    await broker.script("cache_put", [rewards, uses, totals], [digest, payload, max_bytes])


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


async def continue_after(
    broker: Broker, *, stream: Key, last_known: str, entry_id: str, moves_last_id: bool
) -> bool:
    """Make new entries follow `entry_id`; False where there are new ones between `last_known` and it."""
    args = [last_known, entry_id, int(moves_last_id)]
    return bool(await broker.script("continue_after", [stream], args))


async def finish(
    broker: Broker, *, commits: Key, state: Key, last_commit_id: str, fields: Sequence[tuple[str, str]]
) -> bool:
    """Set fields (name, value) of the run's state; False where Redis lacks the last commit."""
    args = [last_commit_id, *chain.from_iterable(fields)]
    return bool(await broker.script("finish", [commits, state], args))


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


async def leave(broker: Broker, *, stream: Key, group: str, consumer: Name) -> bool:
    """Remove a consumer from its group; False where something is pending for it."""
    return bool(await broker.script("leave", [stream], [group, consumer]))


async def limits(
    broker: Broker,
    *,
    levels: Key,
    in_flight: Key,
    lane: str,
    lease_ms: int,
    concurrency: int,
    requests_per_minute: float,
    tokens_per_minute: float,
    burst_ms: int,
    evaluation_share: float,
    worker: str,
    num_evaluations: int,
    ended: Sequence[tuple[str, int]],
    renewed: Sequence[str],
    waiting: Sequence[tuple[str, int]],
) -> Admission:
    """End requests (id, tokens to give back), renew those that go on, and admit waiting ones (id, tokens)."""
    args: list[Any] = [lane, lease_ms, concurrency, requests_per_minute, tokens_per_minute, burst_ms]
    args += [evaluation_share, worker, num_evaluations, len(ended), len(renewed)]
    args += chain(chain.from_iterable(ended), renewed, chain.from_iterable(waiting))
    num_admitted, wait_ms = await broker.script("limits", [levels, in_flight], args)
    return Admission(num_admitted, wait_ms)


async def mark(broker: Broker, *, marks: Key, field: str, value: bytes) -> None:
    """Set a field of a hash, also on a full server."""
    await broker.script("mark", [marks], [field, value])


async def move_aside(
    broker: Broker,
    *,
    stream: Key,
    dead: Key,
    schema: Name,
    floor: str,
    entries: Sequence[tuple[str, bytes]],
) -> int:
    """Move entries (entry id, dead letter or nothing) out of a numbered stream, whose last id becomes that of
    its newest entry, or `floor`. Returns how many entries were still there, or NO_STREAM."""
    args = [schema, floor, *chain.from_iterable(entries)]
    return int(await broker.script("move_aside", [stream, dead], args))


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
) -> ResultReply | list[bytes]:
    """Keep the result of one sample of a group (an empty payload: it is there already). With the last one,
    the payloads of all: this consumer has to finish the group."""
    keys = [trajectories, results, tickets]
    args = [group, consumer, entry_id, ticket, index, group_size, payload]
    reply = await broker.script("store_result", keys, args, check)
    return reply if isinstance(reply, list) else ResultReply(reply)


async def trim(
    broker: Broker,
    *,
    stream: Key,
    marks: Key,
    entry_id: str,
    mark_field: str,
    mark: bytes,
    trim_field: str,
    group: str | None = None,
    progress_prefix: str | None = None,
    progress_suffix: str | None = None,
) -> int:
    """Remove entries below `entry_id`, if the hash `marks` still has the `mark`; its `trim_field` notes the
    id. With a `group`, leases and progress of removed tickets go too. Returns how many, or NO_MARK."""
    args = [entry_id, mark_field, mark, trim_field]
    if group is not None:
        args += [group, progress_prefix or "", progress_suffix or ""]
    return int(await broker.script("trim", [stream, marks], args))
