"""The Lua scripts of `lua/`, each a function with the names of its keys, arguments and replies: those of logs
here, those of leased messages in `lease_scripts.py`, those of rewards in `reward_scripts.py`.

A parameter of type `Key` is an entry of KEYS, and the others are those of ARGV, in the same order. The first
comment of a script has the same names; a test compares both, and what the Lua reads. What a script does, and
against whom it is atomic, is said in its file.

`check` is called before each attempt, and may raise (`Broker.script`).
"""

from collections.abc import Callable, Sequence
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


NO_MARK = -1
"""Reply of `trim`: the server has lost the mark, and nothing was removed."""
NO_STREAM = -1
"""Reply of `move_aside`."""


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


async def leave(broker: Broker, *, stream: Key, group: str, consumer: Name) -> bool:
    """Remove a consumer from its group; False where something is pending for it."""
    return bool(await broker.script("leave", [stream], [group, consumer]))


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
