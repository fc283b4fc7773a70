"""Parts of an unfinished sample, kept in Redis: another worker continues the sample where they end.

A part has tokens of the model (ids, logprobs, version spans) and the environment's answers since the part
before it. `Recording` makes them: one every `PART_TOKENS` tokens of a turn, as the engine reports them, and
in sessions one after each turn and each answer to it. A worker that takes the sample over plays it again from
its beginning, with recorded turns in place of the engine's and recorded answers in place of the
environment's. Sessions whose environment can neither restore nor repeat them record nothing and begin again.

Guarantees: a recorded token that is used again keeps its logprob and version; parts of two plays are never
mixed; tokens of a lost history are not continued.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import structlog
import xxhash
from pydantic import Field, model_validator

from tidemill.common.errors import CodecError, ConfigError, StoreError
from tidemill.common.store.claims import NO_IDS, NO_LOGPROBS
from tidemill.common.telemetry import metrics
from tidemill.common.wire import codec
from tidemill.common.wire.arrays import Float32Array, Int32, Int32Array
from tidemill.common.wire.choices import KEPT, Rows, WireRows
from tidemill.common.wire.images import Image
from tidemill.common.wire.messages import Claim, Message, SamplingParams
from tidemill.common.wire.segments import Finish, VersionSpan
from tidemill.services.rollout.containers.names import SessionName
from tidemill.services.rollout.engines.engine import Generation

log = structlog.get_logger(__name__)

PLAY_BYTES = 16
"""Length of the name of a play, with which its parts begin in Redis; half of it is a hash of the prompt."""


class Part(Message):
    """T tokens that follow those of the part before it, all of one turn.

    Example: of a turn of 2,500 tokens: parts of 1,024, 1,024 and 452 tokens, of which the last has a
    `finish`. A worker that takes the ticket over after two of them generates from token 2,048 on.
    """

    kind: ClassVar[str] = "part"
    token_ids: Int32Array = NO_IDS
    """[T]"""
    logprobs: Float32Array = NO_LOGPROBS
    """[T]"""
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
    """The recorded parts of one play of a sample. `name` has `PLAY_BYTES`.

    Example: two parts of the first turn, with the spans ((7, 0),) and ((7, 0), (8, 500)): `newest_version` is
    8.
    """

    name: bytes
    parts: tuple[Part, ...] = ()

    @property
    def newest_version(self) -> int:
        return max((version for play_part in self.parts for version, _ in play_part.spans), default=0)

    @property
    def term(self) -> int:
        """Trainer process that the worker of the last part followed; 0 without parts."""
        return self.parts[-1].term if self.parts else 0


def new_play(prompt_ids: Int32, images: Sequence[Image] = ()) -> RecordedPlay:
    """A play without parts. Its name has a hash of the prompt: ticket numbers of a lost history recur."""
    return RecordedPlay(_prompt_hash(prompt_ids, images) + b"%08x" % random.getrandbits(32))


def read_play(
    fields: Mapping[bytes, bytes],
    index: int,
    prompt_ids: Int32,
    read_claim: Callable[[Claim], bytes],
    images: Sequence[Image] = (),
) -> RecordedPlay:
    """The play of sample `index`, with the parts that can be read; a new one if there are none."""
    name = b""
    parts = list[Part]()
    while (raw := fields.get(b"%d:%d" % (index, len(parts)))) is not None:
        name = name or raw[:PLAY_BYTES]
        if raw[:PLAY_BYTES] != name:
            break
        try:
            play_part = codec.decode_payload(raw[PLAY_BYTES:], Part)
            if play_part.claim is not None:
                play_part = codec.decode_payload(read_claim(play_part.claim), Part)
        except (CodecError, ConfigError, StoreError, ValueError, OSError) as error:
            # The parts before it count.
            log.warning("a part cannot be read", index=index, number=len(parts), error=str(error))
            break
        parts.append(play_part)
    is_of_prompt = name.startswith(_prompt_hash(prompt_ids, images))
    return RecordedPlay(name, tuple(parts)) if parts and is_of_prompt else new_play(prompt_ids, images)


def _prompt_hash(prompt_ids: Int32, images: Sequence[Image]) -> bytes:
    """Of ids and pictures: those of another one may have the same ids."""
    digest = xxhash.xxh32(np.ascontiguousarray(prompt_ids).data)
    for image in images:
        digest.update(image.digest.encode())
    return digest.hexdigest().encode()


def joined(before: Generation, after: Generation) -> Generation:
    """`before` and `after`, which continued it, as one generation."""
    if not before.token_ids:
        return after
    num_tokens = len(before.token_ids)
    version = before.spans[-1][0]
    later = ((v, num_tokens + first) for v, first in after.spans if first or v != version)
    # If one of the two lacks rows, so does the whole, and its sample fails because of that.
    names = before.choices.keys() & after.choices.keys()
    return Generation(
        before.token_ids + after.token_ids,
        before.logprobs + after.logprobs,
        (*before.spans, *later),
        after.finish,
        after.num_cached_tokens,
        {name: Rows.joined([before.choices[name], after.choices[name]]) for name in names},
    )


def _after(before: Generation, new: Generation) -> Generation:
    """`new`, which the engine generated with the known tokens at the end of its prompt, without rows for
    these: those come from weights that did not sample them."""
    if not before.token_ids:
        return new
    num_rows = {name: 0 if name == KEPT else len(rows) for name, rows in before.choices.items()}
    return replace(new, choices={name: rows[num_rows.get(name, 0) :] for name, rows in new.choices.items()})


def _tail(whole: Generation, first: int, num_rows: Mapping[str, int]) -> dict[str, Any]:
    """The tokens from `first` on, and rows of choices from `num_rows` on, as fields of a `Part`."""
    before = [index for index, (_, start) in enumerate(whole.spans) if start <= first]
    spans = whole.spans[before[-1] if before else 0 :]
    return {
        "token_ids": np.asarray(whole.token_ids[first:], dtype=np.int32),
        "logprobs": np.asarray(whole.logprobs[first:], dtype=np.float32),
        "spans": tuple((version, max(0, start - first)) for version, start in spans),
        "choices": {name: rows[num_rows.get(name, 0) :] for name, rows in whole.choices.items()},
        "num_cached_tokens": whole.num_cached_tokens,
    }


def pictures_of(images: Sequence[Image]) -> dict[str, Any]:
    """A further argument of an `Ask`, which only runs with pictures give."""
    return {"images": images} if images else {}


NOTHING = Generation([], [], (), "length")
Keep = Callable[[bytes, int, Part], Awaitable[bool]]
"""Keeps part number n of a play; returns whether it is kept."""


class Recording:
    """Returns the turns of one sample as they are recorded, then asks the engine, and records its answers.

    Called as an `Ask` it asks the engine and records nothing: for players that always begin again.
    """

    def __init__(
        self,
        ask: Callable[..., Awaitable[Generation]],
        play: RecordedPlay = RecordedPlay(b""),
        keep: Keep | None = None,
        session: SessionName | None = None,
    ) -> None:
        """Without `keep` nothing is recorded. `session` names what is played, for its containers."""
        self.session = session
        self._ask = ask
        self._keep = keep
        self._name = play.name
        self._parts = list(play.parts)
        self._num_at_begin = -1
        self._is_kept = True
        self._saver: asyncio.Task[None] | None = None
        self._rewind()

    @classmethod
    def of(cls, ask: Callable[..., Awaitable[Generation]]) -> "Recording":
        return ask if isinstance(ask, Recording) else cls(ask)

    async def __call__(
        self, ids: Sequence[int], sampling: SamplingParams, images: Sequence[Image] = ()
    ) -> Generation:
        return await self._ask(ids, sampling, **pictures_of(images))

    @property
    def elapsed_s(self) -> float:
        """Seconds that the session has taken, in all workers that have played it."""
        return self._elapsed_s + time.monotonic() - self._begun

    def leave_out(self, seconds: float) -> None:
        """Count so much of the time since the play began as none of the session's."""
        self._begun += seconds

    @property
    def has_answer(self) -> bool:
        """Whether there is a recorded answer that was not asked for yet."""
        return self._num_answers < len(self._answers)

    def begin(self) -> None:
        """Begin a play with what is recorded. If nothing was added since the last call, that play failed, and
        the recorded turns are forgotten: they may be the cause."""
        if len(self._parts) == self._num_at_begin:
            self.forget()
        self._num_at_begin = len(self._parts)
        self._rewind()

    def forget(self) -> None:
        """Begin a new play: what is recorded no longer counts."""
        self._name = self._name[: PLAY_BYTES // 2] + b"%08x" % random.getrandbits(32)
        self._is_kept = True
        self._parts.clear()
        self._rewind()

    def _rewind(self) -> None:
        self._begun = time.monotonic()
        self._elapsed_s = self._parts[-1].elapsed_s if self._parts else 0.0
        self._turns = list[Generation]()
        self._open = NOTHING
        for play_part in self._parts:
            arrays = (play_part.token_ids.tolist(), play_part.logprobs.tolist())
            finish = play_part.finish or "length"
            generation = Generation(
                *arrays, play_part.spans, finish, play_part.num_cached_tokens, play_part.choices
            )
            self._open = joined(self._open, generation)
            if play_part.finish is not None:
                self._turns.append(self._open)
                self._open = NOTHING
        self._answers = [answer for play_part in self._parts for answer in play_part.answers]
        self._num_turns = 0
        self._num_answers = 0
        self._num_answers_kept = len(self._answers)
        self._note_kept(self._open)

    def _note_kept(self, turn: Generation) -> None:
        """Note that this much of the turn is in parts."""
        self._num_kept = len(turn.token_ids)
        self._num_rows_kept = {name: len(rows) for name, rows in turn.choices.items()}

    async def turn(
        self, ids: Sequence[int], sampling: SamplingParams, images: Sequence[Image] = ()
    ) -> Generation:
        """The next turn: as it is recorded, else continued by the engine. `images` are those of `ids`.

        Raises:
            LeaseLostError: another worker has taken the ticket over.
        """
        self._num_turns += 1
        if self._num_turns <= len(self._turns):
            replayed = self._turns[self._num_turns - 1]
            metrics.RESUMED_TOKENS.inc(len(replayed.token_ids))
            return replayed
        replayed = self._open
        num_replayed = len(replayed.token_ids)
        if num_replayed:
            metrics.RESUMED_TOKENS.inc(num_replayed)
            ids = [*ids, *replayed.token_ids]
            num_left = sampling.max_tokens - num_replayed
            if num_left <= 0:  # this worker has a lower limit
                return replayed
            sampling = sampling.model_copy(update={"max_tokens": num_left})
        if self._keep is None:
            new = await self._ask(ids, sampling, **pictures_of(images))
            return joined(replayed, _after(replayed, new))
        save = partial(self._grow, replayed)
        try:
            new = await self._ask(ids, sampling, save, **pictures_of(images))
            self._open = joined(replayed, _after(replayed, new))
            if self._saver is not None:  # parts are kept in order
                await self._saver
        finally:
            if self._saver is not None:
                self._saver.cancel()
            self._saver = None
        return self._open

    def _grow(self, before: Generation, new: Generation) -> None:
        """Save what the engine has generated so far, unless a save is under way."""
        if self._saver is None or (self._saver.done() and self._saver.exception() is None):
            self._saver = asyncio.create_task(self._save(joined(before, _after(before, new))))

    async def keep_new(self) -> None:
        """Keep what is not kept yet: the last turn, or the environment's answers to it. Each by itself,
        because either may take minutes."""
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
        play_part = Part(**new, finish=finish, answers=answers, elapsed_s=self.elapsed_s)
        self._num_answers_kept = len(self._answers)
        self._note_kept(turn)
        assert self._keep is not None
        # Without the part before it, a part is of no use to other workers; this one may use it after a fault.
        self._is_kept = self._is_kept and await self._keep(self._name, len(self._parts), play_part)
        self._parts.append(play_part)

    def next_answer(self) -> Any:
        self._num_answers += 1
        return self._answers[self._num_answers - 1]

    def add_answer(self, answer: Any) -> None:
        """Kept by `keep_new`, or with the turn that is given next."""
        self._answers.append(answer)
        self._num_answers += 1
