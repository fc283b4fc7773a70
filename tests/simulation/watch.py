"""Looks at what services do while they do it: what is trained, generated again, and whose leases are taken.

Each run has one. What is wrong goes into `broken`, as words that begin with their kind.
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
from tidemill.common.redis.broker import LONGEST_PAUSE_S, _script
from tidemill.common.store.claims import ClaimStore
from tidemill.common.streams.consumer import RENEWALS_PER_LEASE
from tidemill.common.wire import codec
from tidemill.common.wire.choices import KEPT, ROUTES, Rows
from tidemill.common.wire.messages import Lane, Trajectory
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.sessions.parts import PLAY_BYTES, read_play
from tidemill.services.trainer.batch.reconciler import TRIMMING

Key = tuple[int, int]
Weights = tuple[int, str]
"""A version, and the digest of its weights."""
Answered = Callable[[list[Any]], None]

CONTACT_S = LONGEST_PAUSE_S + LEASE_S / RENEWALS_PER_LEASE + 0.5
"""So long after its last failed command, a process has renewed its leases again."""
SETTLING = frozenset({"complete", "publish_sample", "store_result", "publish_group"})
"""Scripts that acknowledge what they are about."""
ON_ITS_WAY_S = 2.0
"""What was published may not be known to a worker that begins within so long."""
NUM_NAMES = 2**19
"""Tokens of one generation have names that follow each other: logprobs and choices say them."""


def _bytes(ids: Any) -> bytes:
    return np.asarray(ids, np.int32).tobytes()


def _routes_named(names: Any) -> Any:
    """Two layers, one expert of each."""
    return (names % NUM_NAMES).astype(np.int32).view(np.uint16).reshape(-1, 2, 1)


def _routes_of(num_prompt: int, mask: Any, logprobs: Any) -> Any:
    """The routes of a sample. Who samples a token has computed all before it that has no row yet: the last
    token of the generation before, and what the environment said."""
    sampled = num_prompt + np.flatnonzero(mask)
    # Of each sampled token the name of its generation's token 0, were the prompt counted too.
    first = np.rint((-1.0 - np.float64(logprobs))[np.asarray(mask)] * 2**20).astype(np.int64) - sampled
    places = np.arange(num_prompt + len(mask) - 1)
    return _routes_named(first[np.searchsorted(sampled, places, side="right")] + places)


def weights_of(engine: Any, version: int) -> Weights:
    """What the engine has computed with under this number; without a digest where it never held that, and of
    the starting model, which all trainers have."""
    return version, vars(engine).get("digests", {}).get(version, "") if version else ""


def _is_of(weights: Weights, made_by: set[Weights]) -> bool:
    version, digest = weights
    return any(v == version and digest in ("", d) for v, d in made_by)


@dataclass
class Made:
    """What an engine has said to one request."""

    longest: Generation
    weights: list[set[Weights]] = field(default_factory=list)
    """Of each token: an engine that stood still may say later that another one has made it."""
    lengths: set[int] = field(default_factory=set)

    def add(self, found: Generation, engine: Any) -> None:
        num_tokens = len(found.token_ids)
        self.longest = max(self.longest, found, key=lambda one: len(one.token_ids))
        self.lengths.add(num_tokens)
        self.weights += [set() for _ in range(num_tokens - len(self.weights))]
        ends = [*(start for _, start in found.spans[1:]), num_tokens]
        for (version, start), end in zip(found.spans, ends, strict=True):
            for place in range(start, end):
                self.weights[place].add(weights_of(engine, version))

    def lengths_in(
        self, ids: Any, logprobs: Any, kept: Rows | None, versions: Sequence[Weights] | None
    ) -> set[int]:
        """With so many of its tokens a sample may begin that goes on somehow."""
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
    """`world` calls the hooks that `install.py` and `cluster.py` put in place."""

    world: World
    broken: list[str] = field(default_factory=list)
    trained: dict[str, list[dict[Key, bytes]]] = field(default_factory=dict)
    """By digest of the weights that came of it: completion ids of each sample, each time it was trained."""
    published: dict[tuple[str, Key], Record] = field(default_factory=dict)
    """By lane and key: the entry that came last."""
    copied: set[tuple[str, int]] = field(default_factory=set)
    """Lanes and tickets that a stranger has copied into the stream: they are worked on like any other."""
    withdrawn: set[int] = field(default_factory=set)
    """Tickets that a trainer has taken back, and nobody has issued since."""
    num_generated: int = 0
    num_resumed: int = 0
    """Samples that begin with parts of another worker."""
    keeps_parts: bool = False
    """Nothing but another trainer lets a recorded sample begin again."""
    num_again: int = 0
    """Generations of samples that were generated before."""
    has_strangers: bool = False
    """Whether somebody's samples may be trained that no engine has made."""
    _made: dict[bytes, dict[int, Made]] = field(default_factory=dict)
    """By what stood before, and what the engine draws by."""
    _begun: set[tuple[str, Key]] = field(default_factory=set)
    _kept_by: dict[tuple[bytes, bytes], bytes] = field(default_factory=dict)
    """By key and field: who appended a part."""
    _consumers: dict[bytes, Process] = field(default_factory=dict)
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

    # The policy.

    def accumulated(self, policy: Any, samples: Sequence[Any]) -> None:
        """These samples are trained now, as they are."""
        pending = self.pending_of(policy)
        for sample in samples:
            pending[sample.key] = sample.completion_ids.tobytes()
            expected = value_of(text_of_tokens(sample.completion_ids))
            if sample.reward != expected:
                self.broken.append(
                    f"pair: sample {sample.key} was trained with the reward {sample.reward} of other tokens; "
                    f"its own is {expected}"
                )
            given = (KEPT, sample.kept), (ROUTES, sample.routes and Rows(sample.routes[0].experts))
            choices = {name: rows for name, rows in given if rows}
            if not self.has_strangers and not self.is_made(sample, sample.rollout_logprobs, choices):
                self.broken.append(
                    f"made: sample {sample.key} is trained, and no engine has made it like this"
                )

    def pending_of(self, policy: Any) -> dict[Key, bytes]:
        """What was accumulated since the last update: completion ids of each sample."""
        found: dict[Key, bytes] = vars(policy).setdefault("watched", {})
        return found

    def updated(self, digest: str, samples: dict[Key, bytes]) -> None:
        """These samples have become weights with this digest."""
        self.trained.setdefault(digest, []).append(samples)

    def zeroed(self, policy: Any) -> None:
        """What was accumulated is forgotten."""
        vars(policy)["watched"] = {}

    def reread(self, join: Any) -> None:
        """What has arrived is read again: nothing may be kept of groups that no step has taken."""
        kept = [g.ticket for g in join.groups.values() if not g.is_taken and (g.trajectories or g.scores)]
        if kept:
            self.broken.append(f"join: of tickets {kept[:5]} entries are kept that Redis may have lost")

    def evaluates(self, version: int) -> None:
        """An evaluation begins: it is not on record."""
        path = self.world.folder / self.world.run_id / "metrics.jsonl"
        if path.exists() and f'"kind": "evaluation", "version": {version},' in path.read_text(
            errors="replace"
        ):
            self.broken.append(f"waste: version {version} is evaluated again although that is on record")

    # Rollout workers.

    def generates(self, request_id: str) -> None:
        """An engine begins with a sample, or with a later turn of one."""
        lane, ticket, index, *rest = request_id.split("-")
        key = lane, (int(ticket), int(index))
        self.num_generated += 1
        is_later_turn = any(part.startswith("t") for part in rest)
        self.num_again += key in self._begun and not is_later_turn
        self._begun.add(key)
        record, owner = self.published.get(key), OWNER.get(self.world.loop.world)
        is_copied = (lane, int(ticket)) in self.copied
        if record is None or record.is_lost or is_copied or self.world.was_emptied:
            return
        if max(record.at_s, self.in_contact_since(owner)) < self.world.loop.now - ON_ITS_WAY_S:
            self.broken.append(f"waste: sample {key[1]} is generated again although Redis holds it")

    def issued(self, ticket: Any) -> None:
        """A ticket goes out. One of its number that was withdrawn is another one."""
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

    def makes(self, engine: Any, request: Any, key: int, found: Generation) -> Generation:
        """An engine has got so far with a request. No other token gets these logprobs and choices. Where it
        filters, it is a mixture of experts too."""
        num_prompt, num_tokens = len(request.prompt_ids), len(found.token_ids)
        names = [(key + place) % NUM_NAMES for place in range(num_tokens)]
        choices = {}
        if found.choices:
            choices[KEPT] = Rows.of_lists(list(zip(found.token_ids, names, strict=True)))
            routed = np.arange(request.sampling.num_routed, num_prompt + num_tokens - 1)
            choices[ROUTES] = Rows(_routes_named(key % NUM_NAMES - num_prompt + routed))
        found = replace(found, logprobs=[-1.0 - n / 2**20 for n in names], choices=choices)
        known = self._made.setdefault(_bytes(request.prompt_ids), {}).setdefault(key, Made(found))
        known.add(found, engine)
        return found

    def is_made(
        self,
        sample: Any,
        logprobs: Any,
        choices: Mapping[str, Rows],
        versions: Sequence[Weights] | None = None,
    ) -> bool:
        """Whether what the model said in it are answers of engines to just what stood before each: token by
        token, with their logprobs, choices and weights."""
        ids, num_tokens = np.concatenate([sample.prompt_ids, sample.completion_ids]), len(logprobs)
        first, kept = len(ids) - num_tokens, choices.get(KEPT)
        if choices and not (
            ROUTES in choices
            and np.array_equal(choices[ROUTES].values, _routes_of(first, sample.mask, logprobs))
        ):
            return False
        places, reached = [0], {0}
        while places and num_tokens not in reached:
            place = places.pop()
            lengths = {1}
            if sample.mask[place]:
                made = self._made.get(_bytes(ids[: first + place]), {}).values()
                asked = (sample.completion_ids, logprobs, kept, versions)
                rest = [one if one is None else one[place:] for one in asked]
                lengths = set().union(*(one.lengths_in(*rest) for one in made))
            places += [place + n for n in lengths if place + n not in reached]
            reached |= {place + n for n in lengths}
        return num_tokens in reached

    # Leases.

    def given(self, consumer: str, key: str, entry_id: bytes, is_readable: bool) -> None:
        """A consumer gets an entry, and knows that it has it."""
        place = consumer.encode(), key.encode(), parse_id(entry_id)
        if is_readable:
            self._idle.discard(place)
        else:
            self._idle.add(place)

    def arrives(self, server: MemoryServer, process: Process, fields: Fields) -> Answered | None:
        """A command is about to be applied; what is returned hears of its replies."""
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
            held, parts = self._holders(server, fields[3]), dict(server.space.values.get(fields[6], {}))

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
        """Parts are kept of whoever holds the ticket, behind others of their play; one is written over only
        where a play begins again."""
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
        """A sample begins with what is recorded of it, unless there is a reason to begin again; then its
        parts are gone."""
        (reply,) = replies
        if reply not in (1, 2) or not parts:
            return
        left = [name for name in server.space.values.get(fields[6], {}) if name.startswith(fields[10] + b":")]
        if left:
            self.broken.append(f"left: parts {left} of a sample that is published")
        claims = ClaimStore(self.world.folder / self.world.run_id)
        sample = claims.resolve(codec.decode({b"v": fields[-2], b"p": fields[-1]}, Trajectory))
        assert isinstance(sample, Trajectory)
        play = read_play(parts, sample.index, sample.prompt_ids, claims.get)
        recorded = [token for part in play.parts for token in part.token_ids.tolist()]
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
            # Redis has lost that it was settled, and who has no free slot cannot begin it again. Or nobody
            # can read it: it is not renewed, and waits for the dead letters.
            if (consumer, key, parse_id(entry_id)) in self._idle:
                continue
            # Who has lost an entry works on it no more, also where Redis has lost that another one took it.
            had_lost, given = (holder.name, key, entry_id), (taker.name, key, entry_id)
            self._lost.discard(given)
            if had_lost in self._lost:
                continue
            self._lost.add(had_lost)
            now = self.world.loop.now
            is_fine = not holder.is_dead and not holder.is_frozen
            outage_until = self.world.cluster.outage_until
            # Everybody has a lease to renew after an outage. Who started or slept then knows nothing of it.
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
        """What goes was there when that was decided: no server gives it the id of something later."""
        (reply,) = replies
        name, below = self.world.keys.name_of(fields[3].decode()), parse_id(fields[5])
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
