"""Checks what services do while they do it: what is trained, generated again, and whose leases are taken.

Each run has one `Watch`. Violations go into `broken`, as texts that begin with their kind.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from redis.exceptions import RedisError

from tests.simulation.cluster import NOTICED_S
from tests.simulation.history import Record
from tests.simulation.loop import OWNER
from tests.simulation.process import Process
from tests.simulation.redis.server import Fields, MemoryServer
from tests.simulation.redis.stream import Stream, parse_id
from tests.simulation.reward import text_of_tokens, value_of
from tests.simulation.schedule import LEASE_S
from tests.simulation.world import World
from tidemill.common.errors import CodecError
from tidemill.common.redis.broker import LONGEST_PAUSE_S, _script
from tidemill.common.store.claims import ClaimStore
from tidemill.common.streams.consumer import RENEWALS_PER_LEASE
from tidemill.common.streams.entries import Delivery, Garbled
from tidemill.common.telemetry import metrics
from tidemill.common.wire import codec
from tidemill.common.wire.choices import KEPT, ROUTES, Rows
from tidemill.common.wire.messages import Lane, Score, Trajectory
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.sessions.parts import PLAY_BYTES, read_play
from tidemill.services.trainer.batch.reconciler import TRIMMING
from tidemill.services.trainer.batch.stream_join import SCORES, TRAJECTORIES

Key = tuple[int, int]
Weights = tuple[int, str]
"""A version, and the digest of its weights."""
Answered = Callable[[list[Any]], None]

CONTACT_S = LONGEST_PAUSE_S + LEASE_S / RENEWALS_PER_LEASE + 0.5
"""Seconds after its last failed command in which a process has renewed its leases again."""
SETTLING = frozenset({"complete", "publish_sample", "store_result", "publish_group"})
"""Scripts that acknowledge the entries that they are given."""
ON_ITS_WAY_S = 2.0
"""A worker that begins within this many seconds may not know what was published."""
NUM_NAMES = 2**19
"""Tokens of one generation have consecutive numbers, modulo this: logprobs and choices encode them."""


def _bytes(ids: Any) -> bytes:
    return np.asarray(ids, np.int32).tobytes()


def _routes_named(names: Any) -> Any:
    """Routes that encode the tokens' numbers: two layers, one expert of each."""
    return (names % NUM_NAMES).astype(np.int32).view(np.uint16).reshape(-1, 2, 1)


def _routes_of(num_prompt: int, mask: Any, logprobs: Any) -> Any:
    """The routes of a sample. A generation computes all tokens before its own that have no row yet: the last
    one of the generation before, and those of the environment."""
    sampled = num_prompt + np.flatnonzero(mask)
    # For each sampled token, the number that token 0 of the whole row would have in its generation.
    first = np.rint((-1.0 - np.float64(logprobs))[np.asarray(mask)] * 2**20).astype(np.int64) - sampled
    places = np.arange(num_prompt + len(mask) - 1)
    return _routes_named(first[np.searchsorted(sampled, places, side="right")] + places)


def weights_of(engine: Any, version: int) -> Weights:
    """The weights that the engine held as this version. The digest is empty where it never held it, and for
    the starting model, which all trainers share."""
    return version, vars(engine).get("digests", {}).get(version, "") if version else ""


def _is_of(weights: Weights, made_by: set[Weights]) -> bool:
    version, digest = weights
    return any(v == version and digest in ("", d) for v, d in made_by)


@dataclass
class Made:
    """What engines have generated for one request."""

    longest: Generation
    weights: list[set[Weights]] = field(default_factory=list)
    """All weights that were reported for each token: an engine that was frozen may report others later."""
    lengths: set[int] = field(default_factory=set)

    def add(self, generation: Generation, engine: Any) -> None:
        num_tokens = len(generation.token_ids)
        self.longest = max(self.longest, generation, key=lambda candidate: len(candidate.token_ids))
        self.lengths.add(num_tokens)
        self.weights += [set() for _ in range(num_tokens - len(self.weights))]
        ends = [*(start for _, start in generation.spans[1:]), num_tokens]
        for (version, start), end in zip(generation.spans, ends, strict=True):
            for position in range(start, end):
                self.weights[position].add(weights_of(engine, version))

    def lengths_in(
        self, ids: Any, logprobs: Any, kept: Rows | None, versions: Sequence[Weights] | None
    ) -> set[int]:
        """Lengths of its beginnings that have these ids, logprobs, choices and versions."""
        return {
            n
            for n in self.lengths
            if _bytes(ids[:n]) == _bytes(self.longest.token_ids[:n])
            and np.array_equal(np.float32(logprobs[:n]), np.float32(self.longest.logprobs[:n]))
            and (KEPT not in self.longest.choices or (kept and kept[:n] == self.longest.choices[KEPT][:n]))
            and all(map(_is_of, (versions or ())[:n], self.weights))
        }


@dataclass
class Watch:
    """Called by the hooks that `install.py` and `cluster.py` put in place."""

    world: World
    broken: list[str] = field(default_factory=list)
    trained: dict[str, list[dict[Key, bytes]]] = field(default_factory=dict)
    """By digest of the weights after an update: completion ids of its samples, each time it was done."""
    published: dict[tuple[str, Key], Record] = field(default_factory=dict)
    """By lane and key: the newest entry."""
    copied: set[tuple[str, int]] = field(default_factory=set)
    """Lanes and tickets with foreign copies in the stream, which are worked on like any other."""
    withdrawn: set[int] = field(default_factory=set)
    """Tickets that a trainer has taken back, and that were not issued since."""
    num_generated: int = 0
    num_resumed: int = 0
    """Samples that begin with parts of another worker."""
    keeps_parts: bool = False
    """Whether only another trainer lets a recorded sample begin again."""
    num_again: int = 0
    """Generations of samples that were generated before."""
    has_strangers: bool = False
    """Whether foreign samples, which no engine has made, may be trained."""
    _trainer: Process | None = None
    """The process that trained last."""
    _made: dict[bytes, dict[int, Made]] = field(default_factory=dict)
    """By the bytes of the prompt's ids, and by the key of the engine's random numbers."""
    _begun: set[tuple[str, Key]] = field(default_factory=set)
    _kept_by: dict[tuple[bytes, bytes], bytes] = field(default_factory=dict)
    """By key and field: the consumer that appended a part."""
    _consumers: dict[bytes, Process] = field(default_factory=dict)
    _given: dict[tuple[bytes, bytes, Key], Key | None] = field(default_factory=dict)
    """Consumer, stream and entry -> the sample that it was given last under this id; None once it knows that
    it has lost it."""
    _handed_back: set[tuple[bytes, bytes]] = field(default_factory=set)
    _lost: set[tuple[str, bytes, bytes]] = field(default_factory=set)
    """Process, stream and entry that another one has taken over from it."""
    _idle: set[tuple[bytes, bytes, Key]] = field(default_factory=set)
    """Consumer, stream and entry that it does not work on: acknowledged, not given since, or unreadable."""
    _marked_at: dict[bytes, float] = field(default_factory=dict)
    """By mark of a trim: when it came."""

    def __post_init__(self) -> None:
        names = ("reclaim", "hand_back", "move_aside", "mark", "trim", "append_part", *SETTLING)
        shas = {_script(name)[1].encode(): name for name in names}
        self._scripts = shas
        keys = self.world.keys
        self._trajectories = {keys.trajectories(lane).encode() for lane in Lane}
        self._scores = {keys.scores(lane).encode() for lane in Lane}

    # The policy.

    def accumulated(self, policy: Any, samples: Sequence[Any]) -> None:
        """Check samples that are trained now."""
        pending = self.pending_of(policy)
        for sample in samples:
            pending[sample.key] = sample.completion_ids.tobytes()
            expected = value_of(text_of_tokens(sample.completion_ids))
            if sample.reward != expected:
                self.broken.append(
                    f"pair: sample {sample.key} was trained with the reward {sample.reward} of other tokens; "
                    f"its own is {expected}"
                )
            recorded = (KEPT, sample.kept), (ROUTES, sample.routes and Rows(sample.routes[0].experts))
            choices = {name: rows for name, rows in recorded if rows}
            if not self.has_strangers and not self.is_made(sample, sample.rollout_logprobs, choices):
                self.broken.append(
                    f"made: sample {sample.key} is trained, and no engine has made it like this"
                )

    def pending_of(self, policy: Any) -> dict[Key, bytes]:
        """What was accumulated since the last update: completion ids of each sample."""
        accumulated: dict[Key, bytes] = vars(policy).setdefault("watched", {})
        return accumulated

    def updated(self, digest: str, samples: dict[Key, bytes]) -> None:
        """These samples have become weights with this digest, in a trainer that is the only one alive."""
        self.trained.setdefault(digest, []).append(samples)
        trainer = OWNER.get(self.world.loop.world)
        before = self._trainer
        if before is not None and before is not trainer and not before.is_dead:
            self.broken.append(f"two: {trainer.name} trains while {before.name}, which has trained, lives")
        self._trainer = trainer

    def zeroed(self, policy: Any) -> None:
        """Forget what was accumulated."""
        vars(policy)["watched"] = {}

    def reread(self, join: Any) -> None:
        """What has arrived is read again: nothing may be kept of groups that no step has taken."""
        kept = [g.ticket for g in join.groups.values() if not g.is_taken and (g.trajectories or g.scores)]
        if kept:
            self.broken.append(f"join: of tickets {kept[:5]} entries are kept that Redis may have lost")

    def counted(self, join: Any, entry: Any) -> tuple[int, float]:
        """Trajectories and duplicates of this entry's stream that the join has counted so far."""
        stream = TRAJECTORIES if isinstance(entry.message, Trajectory) else SCORES
        return join.num_trajectories, metrics.DUPLICATES_DROPPED.labels(stream)._value.get()

    def takes(self, join: Any, entry: Any, before: tuple[int, float]) -> None:
        """An entry was joined with its group: what is read a second time is not counted a second time."""
        entry_read = isinstance(entry.message, Trajectory), entry.entry_id
        entries_read = vars(join).setdefault("watched_places", set())
        if entry_read in entries_read and self.counted(join, entry) != before:
            self.broken.append(f"count: {entry.entry_id} of {entry.message.key} is counted twice")
        entries_read.add(entry_read)

    def evaluates(self, version: int) -> None:
        """Check that an evaluation that begins is not on record."""
        path = self.world.folder / self.world.run_id / "metrics.jsonl"
        if path.exists() and f'"kind": "evaluation", "version": {version},' in path.read_text(
            errors="replace"
        ):
            self.broken.append(f"waste: version {version} is evaluated again although that is on record")

    # Rollout workers.

    def generates(self, request_id: str) -> None:
        """An engine begins with a sample, or with a later turn of one."""
        lane, ticket, index, *suffixes = request_id.split("-")
        key = lane, (int(ticket), int(index))
        self.num_generated += 1
        is_later_turn = any(suffix.startswith("t") for suffix in suffixes)
        self.num_again += key in self._begun and not is_later_turn
        self._begun.add(key)
        record = self.published.get(key)
        owner = OWNER.get(self.world.loop.world)
        is_copied = (lane, int(ticket)) in self.copied
        if record is None or record.is_lost or is_copied or self.world.was_emptied:
            return
        if max(record.at_s, self.in_contact_since(owner)) < self.world.loop.now - ON_ITS_WAY_S:
            self.broken.append(f"waste: sample {key[1]} is generated again although Redis holds it")

    def issued(self, ticket: Any) -> None:
        """A ticket is issued. One with its number that was withdrawn was another ticket."""
        self.withdrawn.discard(ticket.ticket)
        for index in range(ticket.group_size):
            self.published.pop(("train", (ticket.ticket, index)), None)

    def publishes(self, sample: Any, engine: Any) -> None:
        """A sample is whole, and about to be published."""
        if sample.max_version > engine.version:
            self.broken.append(
                f"history: sample {sample.key} is published, of version {sample.max_version}; its engine has "
                f"gone back to {engine.version}"
            )
        choices = sample.choices.rows if sample.choices else {}
        versions = [weights_of(engine, version) for version in sample.token_versions().tolist()]
        if not self.is_made(sample, sample.logprobs, choices, versions):
            self.broken.append(f"made: sample {sample.key} is published, and no engine has made it like this")

    def holds(self, follower: Any) -> None:
        """A worker publishes: its engine holds the weights that its follower says."""
        held = follower._held
        engine = follower.engine
        if held is None or held.version != engine.version:
            return
        _, digest = weights_of(engine, held.version)
        if digest not in ("", held.digest):
            self.broken.append(
                f"weights: an engine holds {digest} as version {held.version}, announced was {held.digest}"
            )

    def fetches(self, lane: Any) -> None:
        """A lane fetches for its free slots: the others are those of samples at work, or being published."""
        num_running = sum(not task.done() for task in lane.running) + len(lane._first_attempts)
        num_at_work = num_running + lane._num_unpublished
        if lane.num_held != num_at_work:
            self.broken.append(f"slots: {lane.num_held} are taken, and {num_at_work} samples are at work")

    def makes(self, engine: Any, request: Any, key: int, generation: Generation) -> Generation:
        """Give what an engine has generated so far logprobs and choices that no other token gets. An engine
        that filters is also a mixture of experts."""
        num_prompt = len(request.prompt_ids)
        num_tokens = len(generation.token_ids)
        names = [(key + position) % NUM_NAMES for position in range(num_tokens)]
        choices = {}
        if generation.choices:
            choices[KEPT] = Rows.of_lists(list(zip(generation.token_ids, names, strict=True)))
            routed = np.arange(request.sampling.num_routed, num_prompt + num_tokens - 1)
            choices[ROUTES] = Rows(_routes_named(key % NUM_NAMES - num_prompt + routed))
        generation = replace(generation, logprobs=[-1.0 - n / 2**20 for n in names], choices=choices)
        generations = self._made.setdefault(_bytes(request.prompt_ids), {}).setdefault(key, Made(generation))
        generations.add(generation, engine)
        return generation

    def is_made(
        self,
        sample: Any,
        logprobs: Any,
        choices: Mapping[str, Rows],
        versions: Sequence[Weights] | None = None,
    ) -> bool:
        """Whether engines have generated the model's tokens in a sample from exactly the tokens before them,
        with these logprobs, choices and weights."""
        ids = np.concatenate([sample.prompt_ids, sample.completion_ids])
        num_tokens = len(logprobs)
        first = len(ids) - num_tokens
        kept = choices.get(KEPT)
        if choices and not (
            ROUTES in choices
            and np.array_equal(choices[ROUTES].values, _routes_of(first, sample.mask, logprobs))
        ):
            return False
        positions = [0]
        reached = {0}
        while positions and num_tokens not in reached:
            position = positions.pop()
            lengths = {1}
            if sample.mask[position]:
                generations = self._made.get(_bytes(ids[: first + position]), {}).values()
                asked = []
                for values in (sample.completion_ids, logprobs, kept, versions):
                    asked.append(None if values is None else values[position:])
                lengths = set().union(*(generation.lengths_in(*asked) for generation in generations))
            positions += [position + n for n in lengths if position + n not in reached]
            reached |= {position + n for n in lengths}
        return num_tokens in reached

    # Leases.

    def given(self, consumer: str, key: str, entry_id: bytes, held: Delivery[Any] | Garbled) -> None:
        """A consumer gets an entry, and knows that it has it."""
        entry = consumer.encode(), key.encode(), parse_id(entry_id)
        if isinstance(held, Delivery):
            self._idle.discard(entry)
        else:
            self._idle.add(entry)
        if key.encode() in self._trajectories:
            try:
                self._given[entry] = codec.decode(held.fields, Trajectory).key
            except CodecError:
                self._given.pop(entry, None)

    def loses(self, consumer: str, key: str, entry_id: str) -> None:
        """A consumer learns that it holds an entry no longer."""
        entry = consumer.encode(), key.encode(), parse_id(entry_id.encode())
        if entry in self._given:
            self._given[entry] = None

    def sends(self, process: Process, fields: Fields) -> None:
        """A process sends a command. A score goes out under the id of its own trajectory, as far as its
        worker can know: Redis may have lost that one, and given its id to another."""
        if fields[0] != b"EVALSHA" or self._scripts.get(fields[1]) != "complete":
            return
        if fields[4] not in self._scores:
            return
        for entry_id, payload in zip(fields[8::2], fields[9::2], strict=True):
            entry = fields[6], fields[3], parse_id(entry_id)
            if not payload or entry not in self._given:
                continue
            try:
                score = codec.decode_payload(payload, Score)
            except CodecError:  # it was damaged on its way, and is sent again
                continue
            key = self._given[entry]
            if key != score.key:
                self.broken.append(
                    f"pair: {process.name} sends the score of {score.key} under {entry_id.decode()}, "
                    + (f"which is {key} for it" if key else "which it has lost")
                )

    def arrives(self, server: MemoryServer, process: Process, fields: Fields) -> Answered | None:
        """A command is about to be applied; what is returned is called with its replies."""
        if fields[0] == b"XREADGROUP":
            self._consumers[fields[3]] = process
            return None
        name = self._scripts.get(fields[1], "") if fields[0] == b"EVALSHA" else ""
        if name == "move_aside":
            tickets = {parse_id(entry_id)[0] - 1 for entry_id in fields[7::2]}
            if fields[3] == self.world.keys.prompts().encode():
                self.withdrawn |= tickets
            elif fields[3] == self.world.keys.prompts(Lane.EVAL).encode():
                for key in [k for k in self.published if k[0] == Lane.EVAL and k[1][0] in tickets]:
                    del self.published[key]
        elif name == "hand_back":
            self._handed_back |= {(fields[3], entry_id) for entry_id in fields[8:]}
        elif name == "mark" and fields[4] == TRIMMING.encode():
            self._marked_at[fields[5]] = self.world.loop.now
        elif name == "trim":
            return lambda replies: self._trimmed(fields, replies)
        elif name == "append_part":
            holder = self._holders(server, fields[3]).get(parse_id(fields[8]), b"")
            before = dict(server.space.values.get(fields[5], {}))
            return lambda replies: self._kept(server, fields, holder, before, replies)
        elif name in SETTLING:
            held = self._holders(server, fields[3])
            parts = dict(server.space.values.get(fields[6], {}))

            def answered(replies: list[Any]) -> None:
                gone = held.keys() - self._holders(server, fields[3])
                self._idle |= {(held[entry_id], fields[3], entry_id) for entry_id in gone}
                if name == "publish_sample" and fields[-1]:
                    self._published(server, fields, parts, replies)

            return answered
        elif name == "reclaim":
            holders = self._holders(server, fields[3])
            return lambda replies: self._taken(process, fields[3], holders, replies)
        return None

    @staticmethod
    def _holders(server: MemoryServer, key: bytes) -> dict[Key, bytes]:
        """Entries of a stream that are pending, and the consumer of each."""
        stream = server.space.values.get(key)
        groups = stream.groups.values() if isinstance(stream, Stream) else ()
        return {entry_id: held.consumer for group in groups for entry_id, held in group.pending.items()}

    def _kept(
        self,
        server: MemoryServer,
        fields: Fields,
        holder: bytes,
        before: dict[bytes, bytes],
        replies: list[Any],
    ) -> None:
        """Check that a kept part is of the holder of the ticket, follows the others of its play, and has
        overwritten one only where a play begins again."""
        (reply,) = replies
        if reply not in (1, 2):
            return
        self._kept_by[fields[5], fields[10]] = fields[7]
        if holder != fields[7]:
            self.broken.append(f"part: one of {fields[7]!r} is kept, and {holder!r} holds its ticket")
        index, number = map(int, fields[10].split(b":"))
        parts = server.space.values.get(fields[5], {})
        plays = {parts.get(b"%d:%d" % (index, n), b"")[:PLAY_BYTES] for n in range(number + 1)}
        if len(plays) > 1:
            self.broken.append(f"part: {fields[10]!r} does not follow those of its own play: {plays}")
        was = before.get(fields[10], b"")[:PLAY_BYTES]
        if was and was not in plays and self.keeps_parts and not self._has_reason:
            self.broken.append(f"waste: what {fields[5]!r} has of {fields[10]!r} is generated again")

    @property
    def _has_reason(self) -> bool:
        """Whether another trainer may have gone back to versions before those of parts."""
        return sum(process.role == "trainer" for process in self.world.processes) > 1

    def _published(
        self, server: MemoryServer, fields: Fields, parts: dict[bytes, bytes], replies: list[Any]
    ) -> None:
        """Check that a published sample begins with what is recorded of it, unless there is a reason to begin
        again, and that its parts are gone."""
        (reply,) = replies
        if reply not in (1, 2) or not parts:
            return
        leftovers = [
            name for name in server.space.values.get(fields[6], {}) if name.startswith(fields[10] + b":")
        ]
        if leftovers:
            self.broken.append(f"left: parts {leftovers} of a sample that is published")
        claims = ClaimStore(self.world.folder / self.world.run_id)
        sample = claims.resolve(codec.decode({b"v": fields[-2], b"p": fields[-1]}, Trajectory))
        assert isinstance(sample, Trajectory)
        play = read_play(parts, sample.index, sample.prompt_ids, claims.get)
        recorded = [token for recorded_part in play.parts for token in recorded_part.token_ids.tolist()]
        is_begun_with = sample.completion_ids[sample.mask][: len(recorded)].tolist() == recorded
        keepers = {self._kept_by[fields[6], b"%d:%d" % (sample.index, n)] for n in range(len(play.parts))}
        self.num_resumed += is_begun_with and bool(keepers - {fields[8]})
        if not is_begun_with and self.keeps_parts and not self._has_reason:
            self.broken.append(f"part: sample {sample.key} does not begin with what was recorded of it")

    def _taken(self, taker: Process, key: bytes, holders: dict[Any, bytes], replies: list[Any]) -> None:
        (reply,) = replies
        if isinstance(reply, RedisError) or len(reply) < 3:
            return
        for entry_id, *_ in reply[2]:
            consumer = holders.get(parse_id(entry_id), b"")
            holder = self._consumers.get(consumer)
            if holder is None or (key, entry_id) in self._handed_back:
                continue
            # Redis has lost its acknowledgement, and a holder without a free slot cannot begin it again. Or
            # it cannot be read: it is not renewed, and will be dead-lettered.
            if (consumer, key, parse_id(entry_id)) in self._idle:
                continue
            # A holder that has lost an entry no longer works on it, even if Redis has lost the takeover.
            had_lost = (holder.name, key, entry_id)
            taken_over = (taker.name, key, entry_id)
            self._lost.discard(taken_over)
            if had_lost in self._lost:
                continue
            self._lost.add(had_lost)
            now = self.world.loop.now
            is_fine = not holder.is_dead and not holder.is_frozen
            outage_until = self.world.cluster.outage_until
            # After an outage holders get a lease to renew; a taker that started or froze then cannot know.
            saw_outage = max(taker.started_at, taker.woken_at) < outage_until - NOTICED_S
            is_patient = now < outage_until + LEASE_S and saw_outage
            is_back = is_fine and is_patient and holder.disturbed_at <= outage_until
            # An outage since then may have lost what it acknowledged before it left.
            has_left = holder.code == 0 and not holder.disturbed_at and holder.started_at >= outage_until
            # So may it have lost what the taker itself has acknowledged: that is pending for it again.
            is_own = holder is taker and self.world.cluster.num_servers > 1
            is_in_contact = is_fine and now - self.in_contact_since(holder) > CONTACT_S
            if has_left or ((is_back or is_in_contact) and not is_own):
                name = self.world.keys.name_of(key.decode())
                self.broken.append(
                    f"lease: {taker.name} took {name} {entry_id.decode()} from {holder.name}, "
                    + ("which has left" if has_left else "which lives")
                )

    def _trimmed(self, fields: Fields, replies: list[Any]) -> None:
        """Check that all trimmed entries were there when the trim was decided: none has such an id later."""
        (reply,) = replies
        name = self.world.keys.name_of(fields[3].decode())
        below = parse_id(fields[5])
        marked_at = self._marked_at.get(fields[7], self.world.loop.now)
        if isinstance(reply, RedisError) or reply <= 0 or name not in ("trajectories", "scores"):
            return
        later = [
            record.entry_id
            for record in self.world.history.of(name)
            if record.at_s > marked_at and parse_id(record.entry_id.encode()) < below
        ]
        if later:
            self.broken.append(f"trim: {name} {later[:3]} went, which came after it was decided what goes")

    def in_contact_since(self, process: Process) -> float:
        """Since when nothing has disturbed a process on its way to Redis."""
        return max(process.started_at, process.disturbed_at, self.world.cluster.disturbed_at)
