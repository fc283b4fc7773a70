"""Checks what scripts and heartbeats do to Redis: results go to their own messages, only holders act on
messages, what is put back counts no delivery, and times are the server's.

A script that checks too little is seen at once, and not only where its mistake has come to something.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.history import Record
from tests.simulation.process import Process
from tests.simulation.redis.server import Fields, MemoryServer
from tests.simulation.redis.stream import Pending, Stream, parse_id
from tests.simulation.world import World
from tidemill.common.errors import CodecError
from tidemill.common.process.heartbeats import ROLES
from tidemill.common.redis.broker import _script
from tidemill.common.wire import codec
from tidemill.common.wire.messages import Lane, Score, Trajectory

Answered = Callable[[list[Any]], None]
Key = tuple[int, int]
CHECKED = ("complete", "hand_back", "start_group", "requeue", "finish")


def held_in(server: MemoryServer, key: bytes) -> dict[Any, Pending]:
    """Entries of a stream that are pending, by id."""
    stream = server.space.values.get(key)
    groups = stream.groups.values() if isinstance(stream, Stream) else ()
    return {entry_id: pending for group in groups for entry_id, pending in group.pending.items()}


@dataclass
class ScriptCheck:
    """Sees each command before it is applied. Violations go into `broken`, with the others of the run."""

    world: World
    broken: list[str]
    _keys_at: dict[tuple[bytes, bytes], set[Key]] = field(default_factory=dict)
    """Stream and entry id -> samples that have had this id: Redis gives an id again after a loss."""
    _times: dict[Process, set[float]] = field(default_factory=dict)
    """Times that the server has told each process."""
    _refused: set[Process] = field(default_factory=set)
    """Trainers whose run is not over: the server lacks its last commit."""

    def __post_init__(self) -> None:
        self._scripts = {_script(name)[1].encode(): name for name in CHECKED}
        keys = self.world.keys
        self._scores = {keys.scores(lane).encode() for lane in Lane}
        self._heartbeats = {keys.workers(role).encode() for role in ROLES}

    def see(self, record: Record) -> None:
        """A trajectory was appended, and is readable."""
        if isinstance(record.message, Trajectory):
            lane = Lane.EVAL if record.stream.endswith(":eval") else Lane.TRAIN
            entry = self.world.keys.trajectories(lane).encode(), record.entry_id.encode()
            self._keys_at.setdefault(entry, set()).add(record.message.key)

    def arrives(self, server: MemoryServer, process: Process, fields: Fields) -> Answered | None:
        """A command is about to be applied; what is returned is called with its replies."""
        if fields[0] == b"TIME":
            return lambda replies: self._was_told(process, replies)
        if fields[0] == b"HSET" and fields[1] in self._heartbeats:
            self._check_heartbeat(process, fields[3])
            return None
        name = self._scripts.get(fields[1], "") if fields[0] == b"EVALSHA" else ""
        if name == "complete" and fields[4] in self._scores:
            return lambda replies: self._check_pairs(fields, replies)
        if name == "hand_back":
            before = {entry_id: pending.consumer for entry_id, pending in held_in(server, fields[3]).items()}
            return lambda _: self._check_handed_back(server, fields, before)
        if name == "start_group":
            pending = held_in(server, fields[3]).get(parse_id(fields[7]))
            is_held = pending is not None and pending.consumer == fields[6]
            return lambda replies: self._check_started(fields, is_held, replies)
        if name == "requeue":
            return lambda replies: self._check_requeued(server, fields, replies)
        if name == "finish":
            return lambda replies: self._was_finished(process, replies)
        return None

    def _was_told(self, process: Process, replies: list[Any]) -> None:
        (reply,) = replies
        if isinstance(reply, list):
            self._times.setdefault(process, set()).add(int(reply[0]) + int(reply[1]) / 1e6)

    def _was_finished(self, process: Process, replies: list[Any]) -> None:
        if replies == [0]:
            self._refused.add(process)
        else:
            self._refused.discard(process)

    def judge(self) -> list[str]:
        """What is wrong with the ends of processes."""
        return [
            f"finish: {process.name} has left, and the server lacks the last commit of the run"
            for process in self._refused
            if process.code == 0 and not process.is_asked_to_leave
        ]

    def _check_heartbeat(self, process: Process, value: bytes) -> None:
        sent_at = json.loads(value)["at"]
        if sent_at not in self._times.get(process, ()):
            self.broken.append(f"clock: a heartbeat of {process.name} has a time that no server has told it")

    def _check_pairs(self, fields: Fields, replies: list[Any]) -> None:
        """Each result was published with the acknowledgement of its own message."""
        (flags,) = replies
        if not isinstance(flags, list):
            return
        for flag, entry_id, payload in zip(flags, fields[8::2], fields[9::2], strict=True):
            keys = self._keys_at.get((fields[3], entry_id))
            if flag != 1 or not payload or keys is None:
                continue
            try:
                score = codec.decode_payload(payload, Score)
            except CodecError:  # it was damaged on its way
                continue
            if score.key not in keys:
                self.broken.append(
                    f"pair: the score of {score.key} was published with the acknowledgement of {keys}"
                )

    def _check_handed_back(self, server: MemoryServer, fields: Fields, before: dict[Any, bytes]) -> None:
        after = held_in(server, fields[3])
        for raw_id in fields[9:]:
            entry_id = parse_id(raw_id)
            holder = before.get(entry_id)
            if entry_id in after and holder != fields[5] and after[entry_id].consumer != holder:
                self.broken.append(f"lease: {fields[5]!r} has handed {raw_id!r} back, which {holder!r} held")

    def _check_started(self, fields: Fields, is_held: bool, replies: list[Any]) -> None:
        (reply,) = replies
        if reply == 1 and not is_held:
            self.broken.append(
                f"lease: {fields[6]!r} has started the group of {fields[7]!r} without holding it"
            )

    def _check_requeued(self, server: MemoryServer, fields: Fields, replies: list[Any]) -> None:
        (reply,) = replies
        if reply != 1:
            return
        # What a server does not have that takes over before this write, has not been put back there.
        self.world.history.put_back[fields[6].decode()] = len(server.log) - 1
        pending = held_in(server, fields[4]).get(parse_id(fields[8]))
        if pending is not None and pending.num_deliveries:
            self.broken.append(
                f"requeue: {fields[8]!r} was put back with {pending.num_deliveries} deliveries; none counts"
            )


def heard_by(
    *watches: Callable[[MemoryServer, Process, Fields], Answered | None],
) -> Callable[[MemoryServer, Process, Fields], Answered | None]:
    """All of them see each command, and its replies."""

    def arrives(server: MemoryServer, process: Process, fields: Fields) -> Answered | None:
        answered = [watch(server, process, fields) for watch in watches]
        hearing = [hear for hear in answered if hear is not None]
        if len(hearing) < 2:
            return hearing[0] if hearing else None

        def replied(replies: list[Any]) -> None:
            for hear in hearing:
                hear(replies)

        return replied

    return arrives
