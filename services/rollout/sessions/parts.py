"""What is kept of a sample before it is whole, and how whoever takes it over goes on from there.

A part has tokens of the model (ids, logprobs, version spans) and what the environment answered since the part
before it. `Recording` makes them: one every `PART_TOKENS` tokens of a turn, and in sessions one after each
turn and each answer to it. Whoever takes the sample over plays it again from its beginning, with recorded
turns in place of the engine's and recorded answers in place of the environment's: the same code leads to the
same tokens.

Guarantees: a recorded token is never generated again, and keeps its logprob and version; parts of two plays
are never mixed; what was generated with weights of a lost history is not gone on with.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import structlog
import xxhash
from pydantic import Field, model_validator

from tidemill.common.errors import CodecError, StoreError
from tidemill.common.store.claims import NO_IDS, NO_LOGPROBS
from tidemill.common.telemetry import metrics
from tidemill.common.wire import codec
from tidemill.common.wire.arrays import Float32Array, Int32, Int32Array
from tidemill.common.wire.choices import KEPT, Rows, WireRows
from tidemill.common.wire.messages import Claim, Message, SamplingParams
from tidemill.common.wire.segments import Finish, VersionSpan
from tidemill.services.rollout.engines.engine import Generation

log = structlog.get_logger(__name__)

PLAY_BYTES = 16
"""What a part begins with in Redis: the name of its play, half of it a hash of the prompt."""


class Part(Message):
    """T tokens that follow those of the part before it, all of one turn. Arrays for each token are fields."""

    kind: ClassVar[str] = "part"
    token_ids: Int32Array = NO_IDS
    logprobs: Float32Array = NO_LOGPROBS
    spans: tuple[VersionSpan, ...] = ()
    choices: dict[str, WireRows] = Field(default_factory=dict, description="rows that follow the last part's")
    finish: Finish | None = Field(None, description="how the turn ended; absent while it goes on")
    num_cached_tokens: int = -1
    answers: tuple[Any, ...] = Field((), description="the environment's since the part before, or hashes")
    elapsed_s: float = Field(0.0, description="of the session's time")
    term: int = Field(0, description="the trainer process that announced the weights; 0: the starting ones")
    claim: Claim | None = Field(None, description="to everything else, where that is too large")

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if len(self.token_ids) != len(self.logprobs) or (len(self.token_ids) and not self.spans):
            raise ValueError(f"{len(self.token_ids)} ids, {len(self.logprobs)} logprobs, spans {self.spans}")
        return self


@dataclass(frozen=True, slots=True)
class RecordedPlay:
    """What is known of one play of a sample. `name` has `PLAY_BYTES`."""

    name: bytes
    parts: tuple[Part, ...] = ()

    @property
    def newest_version(self) -> int:
        return max((version for part in self.parts for version, _ in part.spans), default=0)

    @property
    def term(self) -> int:
        """Of its last part: who appended that had followed the run's history until then."""
        return self.parts[-1].term if self.parts else 0


def new_play(prompt_ids: Int32) -> RecordedPlay:
    """The name begins with a hash of the prompt: a ticket of a lost history may have had the same number."""
    return RecordedPlay(_prompt_hash(prompt_ids) + b"%08x" % random.getrandbits(32))


def read_play(
    fields: Mapping[bytes, bytes], index: int, prompt_ids: Int32, read_claim: Callable[[Claim], bytes]
) -> RecordedPlay:
    """The play that the parts of sample `index` are of, as far as they can be read; else a new one."""
    name, parts = b"", list[Part]()
    while (raw := fields.get(b"%d:%d" % (index, len(parts)))) is not None:
        name = name or raw[:PLAY_BYTES]
        if raw[:PLAY_BYTES] != name:
            break
        try:
            part = codec.decode_payload(raw[PLAY_BYTES:], Part)
            if part.claim is not None:
                part = codec.decode_payload(read_claim(part.claim), Part)
        except (CodecError, StoreError, ValueError, OSError) as error:  # what is before it counts
            log.warning("a part cannot be read", index=index, number=len(parts), error=str(error))
            break
        parts.append(part)
    is_of_prompt = name.startswith(_prompt_hash(prompt_ids))
    return RecordedPlay(name, tuple(parts)) if parts and is_of_prompt else new_play(prompt_ids)


def _prompt_hash(prompt_ids: Int32) -> bytes:
    return xxhash.xxh32_hexdigest(np.ascontiguousarray(prompt_ids).data).encode()


def joined(one: Generation, other: Generation) -> Generation:
    """A generation, and the one that went on from its end."""
    if not one.token_ids:
        return other
    num_tokens, version = len(one.token_ids), one.spans[-1][0]
    later = ((v, num_tokens + first) for v, first in other.spans if first or v != version)
    # Where one of the two lacks rows, so does the whole, and its sample is a failure that says so.
    names = one.choices.keys() & other.choices.keys()
    return Generation(
        one.token_ids + other.token_ids,
        one.logprobs + other.logprobs,
        (*one.spans, *later),
        other.finish,
        other.num_cached_tokens,
        {name: Rows.joined([one.choices[name], other.choices[name]]) for name in names},
    )


def _after(known: Generation, new: Generation) -> Generation:
    """What the engine says after the known tokens, which it was given as the end of its prompt: of those it
    has other rows, of weights that did not sample them."""
    if not known.token_ids:
        return new
    num_rows = {name: 0 if name == KEPT else len(rows) for name, rows in known.choices.items()}
    return replace(new, choices={name: rows[num_rows.get(name, 0) :] for name, rows in new.choices.items()})


def _tail(whole: Generation, first: int, num_rows: Mapping[str, int]) -> dict[str, Any]:
    """The tokens from `first` on, and rows of choices from `num_rows` on, as fields of a `Part`."""
    before = [place for place, (_, start) in enumerate(whole.spans) if start <= first]
    spans = whole.spans[before[-1] if before else 0 :]
    return {
        "token_ids": np.asarray(whole.token_ids[first:], dtype=np.int32),
        "logprobs": np.asarray(whole.logprobs[first:], dtype=np.float32),
        "spans": tuple((version, max(0, start - first)) for version, start in spans),
        "choices": {name: rows[num_rows.get(name, 0) :] for name, rows in whole.choices.items()},
        "num_cached_tokens": whole.num_cached_tokens,
    }


NOTHING = Generation([], [], (), "length")
Keep = Callable[[bytes, int, Part], Awaitable[bool]]
"""Keeps part number n of a play; returns whether it is kept."""


class Recording:
    """Gives the turns of one sample as they are recorded, then asks the engine, and keeps what that says.

    As an `Ask` it is the engine's, and records nothing: for players that begin again.
    """

    def __init__(
        self,
        ask: Callable[..., Awaitable[Generation]],
        play: RecordedPlay = RecordedPlay(b""),
        keep: Keep | None = None,
    ) -> None:
        """Without `keep` nothing is recorded."""
        self._ask, self._keep = ask, keep
        self._name, self._parts = play.name, list(play.parts)
        self._num_at_begin, self._is_kept = -1, True
        self._saver: asyncio.Task[None] | None = None
        self._rewind()

    @classmethod
    def of(cls, ask: Callable[..., Awaitable[Generation]]) -> "Recording":
        return ask if isinstance(ask, Recording) else cls(ask)

    async def __call__(self, ids: Sequence[int], sampling: SamplingParams) -> Generation:
        return await self._ask(ids, sampling)

    @property
    def elapsed_s(self) -> float:
        """What the session has taken, in the hands of all who have played it."""
        return self._elapsed_s + time.monotonic() - self._begun

    @property
    def has_answer(self) -> bool:
        """Whether there is a recorded answer that was not asked for yet."""
        return self._num_answers < len(self._answers)

    def begin(self) -> None:
        """A play begins: first comes what is recorded. One that ended in a fault, and to which nothing was
        added since it began, begins again: what is recorded may be the cause."""
        if len(self._parts) == self._num_at_begin:
            self.forget()
        self._num_at_begin = len(self._parts)
        self._rewind()

    def forget(self) -> None:
        """Begin again: what is recorded does not count any more."""
        self._name, self._is_kept = self._name[: PLAY_BYTES // 2] + b"%08x" % random.getrandbits(32), True
        self._parts.clear()
        self._rewind()

    def _rewind(self) -> None:
        self._begun = time.monotonic()
        self._elapsed_s = self._parts[-1].elapsed_s if self._parts else 0.0
        self._turns, self._open = list[Generation](), NOTHING
        for part in self._parts:
            arrays = (part.token_ids.tolist(), part.logprobs.tolist())
            finish = part.finish or "length"
            found = Generation(*arrays, part.spans, finish, part.num_cached_tokens, part.choices)
            self._open = joined(self._open, found)
            if part.finish is not None:
                self._turns.append(self._open)
                self._open = NOTHING
        self._answers = [answer for part in self._parts for answer in part.answers]
        self._num_turns = self._num_answers = 0
        self._num_answers_kept = len(self._answers)
        self._note_kept(self._open)

    def _note_kept(self, turn: Generation) -> None:
        """So much of the turn is in parts."""
        self._num_kept = len(turn.token_ids)
        self._num_rows_kept = {name: len(rows) for name, rows in turn.choices.items()}

    async def turn(self, ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """The next turn: as it is recorded, or what is missing of it by the engine.

        Raises:
            LeaseLostError: another worker has taken the ticket over.
        """
        self._num_turns += 1
        if self._num_turns <= len(self._turns):
            known = self._turns[self._num_turns - 1]
            metrics.RESUMED_TOKENS.inc(len(known.token_ids))
            return known
        known = self._open
        if num_known := len(known.token_ids):
            metrics.RESUMED_TOKENS.inc(num_known)
            ids = [*ids, *known.token_ids]
            if (left := sampling.max_tokens - num_known) <= 0:  # this worker has a lower limit
                return known
            sampling = sampling.model_copy(update={"max_tokens": left})
        if self._keep is None:
            return joined(known, _after(known, await self._ask(ids, sampling)))
        try:
            new = await self._ask(ids, sampling, lambda new: self._grow(known, new))
            self._open = joined(known, _after(known, new))
            if self._saver is not None:  # parts are kept in order
                await self._saver
        finally:
            if self._saver is not None:
                self._saver.cancel()
            self._saver = None
        return self._open

    def _grow(self, known: Generation, new: Generation) -> None:
        """The engine has got so far, while it goes on."""
        if self._saver is None or (self._saver.done() and self._saver.exception() is None):
            self._saver = asyncio.create_task(self._save(joined(known, _after(known, new))))

    async def keep_new(self) -> None:
        """Keep what is not kept yet: the turn that was given last, or what the environment has answered to
        it. Each by itself, for either may take minutes."""
        if self._keep is None:
            return
        if self._num_turns > len(self._turns):
            await self._save(self._open, self._open.finish)
            self._turns.append(self._open)
            self._open = NOTHING
            self._note_kept(NOTHING)
        elif self._num_answers_kept < len(self._answers):
            await self._save(NOTHING)

    async def _save(self, turn: Generation, finish: Finish | None = None) -> None:
        answers = tuple(self._answers[self._num_answers_kept :])
        new = _tail(turn, self._num_kept, self._num_rows_kept)
        part = Part(**new, finish=finish, answers=answers, elapsed_s=self.elapsed_s)
        self._num_answers_kept = len(self._answers)
        self._note_kept(turn)
        assert self._keep is not None
        # Without the one before it, a part is of no use to anybody else; here it is, should a fault come.
        self._is_kept = self._is_kept and await self._keep(self._name, len(self._parts), part)
        self._parts.append(part)

    def next_answer(self) -> Any:
        self._num_answers += 1
        return self._answers[self._num_answers - 1]

    def add_answer(self, answer: Any) -> None:
        """Kept by `keep_new`, or with the turn that is given next."""
        self._answers.append(answer)
        self._num_answers += 1
