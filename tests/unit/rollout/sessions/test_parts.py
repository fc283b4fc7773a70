"""How a sample is recorded, and gone on with by another: without Redis, with a script for the engine."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tidemill.common.errors import LeaseLostError
from tidemill.common.wire import codec
from tidemill.common.wire.choices import KEPT, ROUTES, Rows
from tidemill.common.wire.messages import Claim, SamplingParams
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.sessions.parts import (
    PLAY_BYTES,
    Part,
    RecordedPlay,
    Recording,
    joined,
    new_play,
    read_play,
)

PROMPT = np.array([1, 2], np.int32)
SAMPLING = SamplingParams(max_tokens=9)


def generation(first: int, count: int, *spans: tuple[int, int], finish: Any = "stop") -> Generation:
    ids = list(range(first, first + count))
    return Generation(ids, [-0.5 * token for token in ids], spans or ((0, 0),), finish)


class Kept:
    """What Redis would hold."""

    def __init__(self, play: RecordedPlay | None = None) -> None:
        self.play = play or new_play(PROMPT)
        self.fields: dict[bytes, bytes] = {}
        self.refuses = False

    async def keep(self, name: bytes, number: int, recorded: Part) -> bool:
        if self.refuses:
            return False
        self.fields[b"3:%d" % number] = name + codec.encode_payload(recorded)
        return True

    def read(self, read_claim: Callable[[Claim], bytes] = pytest.fail) -> RecordedPlay:
        return read_play(self.fields, 3, PROMPT, read_claim)


async def never(*_: object) -> Generation:
    raise AssertionError("the engine was asked")


def test_spans_of_what_is_joined_count_on_and_a_version_that_goes_on_has_one() -> None:
    beginning = generation(10, 3, (1, 0), (2, 2), finish="length")
    assert joined(beginning, generation(13, 2, (2, 0), (3, 1))).spans == ((1, 0), (2, 2), (3, 4))
    whole = joined(beginning, generation(13, 2, (5, 0)))
    assert whole.spans == ((1, 0), (2, 2), (5, 3))
    assert (whole.token_ids, whole.finish) == ([10, 11, 12, 13, 14], "stop")


async def test_a_single_turn_goes_on_from_its_parts_with_its_spans_as_they_were() -> None:
    kept = Kept()
    asked = []

    async def dies(ids: Any, sampling: Any, on_tokens: Any) -> Generation:
        for count, *spans in ((2, (1, 0)), (4, (1, 0), (2, 3)), (5, (1, 0), (2, 3))):
            on_tokens(generation(10, count, *spans, finish="length"))
            await asyncio.sleep(0)
        raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError):
        await Recording(dies, kept.play, kept.keep).turn([1, 2], SAMPLING)
    play = kept.read()
    assert play.name == kept.play.name and play.newest_version == 2
    assert [recorded.token_ids.tolist() for recorded in play.parts] == [[10, 11], [12, 13], [14]]
    assert [recorded.spans for recorded in play.parts] == [((1, 0),), ((1, 0), (2, 1)), ((2, 0),)]

    async def goes_on(ids: Any, sampling: Any, on_tokens: Any) -> Generation:
        asked.append((ids, sampling.max_tokens))
        return generation(15, 2, (2, 0), (3, 1))

    whole = await Recording(goes_on, play, Kept(play).keep).turn([1, 2], SAMPLING)
    assert asked == [([1, 2, 10, 11, 12, 13, 14], 4)]
    assert whole.token_ids == list(range(10, 17)) and whole.spans == ((1, 0), (2, 3), (3, 6))
    assert whole.logprobs == [-0.5 * token for token in range(10, 17)]


async def test_what_the_engine_chose_comes_along_as_it_was_recorded() -> None:
    """Rows of routes are of a turn's whole prompt, and the second engine computes those of recorded tokens
    once more: they are of other weights."""
    kept = Kept()

    def with_choices(plain: Generation, num_prompt: int, engine: int) -> Generation:
        num_routes = num_prompt + len(plain.token_ids) - 1
        routes = np.array([[[engine, position]] for position in range(num_routes)], np.uint8)
        rows = {KEPT: Rows.of_lists([(token, engine) for token in plain.token_ids]), ROUTES: Rows(routes)}
        return replace(plain, choices=rows)

    async def dies(ids: Any, sampling: Any, on_tokens: Any) -> Generation:
        for count in (2, 5):
            on_tokens(with_choices(generation(10, count, finish="length"), 2, 1))
            await asyncio.sleep(0)
        raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError):
        await Recording(dies, kept.play, kept.keep).turn([1, 2], SAMPLING)
    play = kept.read()
    assert [len(recorded.choices[ROUTES]) for recorded in play.parts] == [3, 3]

    async def goes_on(ids: Any, sampling: Any, on_tokens: Any) -> Generation:
        return with_choices(generation(15, 2), len(ids), 2)

    recording = Recording(goes_on, play, kept.keep)
    whole = await recording.turn([1, 2], SAMPLING)
    await recording.keep_new()
    assert whole.choices[KEPT] == Rows.of_lists([(t, 1 if t < 15 else 2) for t in range(10, 17)])
    expected = [[[1 if position < 6 else 2, position]] for position in range(8)]
    assert whole.choices[ROUTES].values.tolist() == expected
    again = await Recording(never, kept.read()).turn([1, 2], SAMPLING)
    assert again.choices == whole.choices and again.token_ids == whole.token_ids


async def test_turns_and_answers_come_as_they_were_recorded_and_then_the_engine_is_asked() -> None:
    kept = Kept()
    turns = [generation(10, 2, finish="length"), generation(20, 3), generation(30, 1)]

    async def ask(ids: Any, sampling: Any, on_tokens: Any) -> Generation:
        return turns.pop(0)

    first = Recording(ask, kept.play, kept.keep)
    first.add_answer("opening")
    await first.turn([1], SAMPLING)
    await first.keep_new()
    first.add_answer("a")
    await first.keep_new()
    await first.turn([1], SAMPLING)
    await first.keep_new()
    first.add_answer("lost with its worker")
    second = Recording(ask, kept.read(), kept.keep)
    second.begin()
    assert second.next_answer() == "opening"
    turn = await second.turn([1], SAMPLING)
    await second.keep_new()
    assert (turn.token_ids, turn.finish) == ([10, 11], "length")
    assert [second.next_answer(), (await second.turn([1], SAMPLING)).token_ids] == ["a", [20, 21, 22]]
    await second.keep_new()
    assert not second.has_answer and len(kept.fields) == 3
    second.add_answer("b")
    second.add_answer("c")
    await second.keep_new()
    third = Recording(ask, kept.read(), kept.keep)
    third.begin()
    assert [third.next_answer() for _ in range(4)] == ["opening", "a", "b", "c"] and not third.has_answer
    assert [(await third.turn([1], SAMPLING)).token_ids for _ in range(3)] == [[10, 11], [20, 21, 22], [30]]
    assert len(kept.fields) == 4 and not turns


async def test_after_a_fault_a_play_goes_on_where_something_came_to_it_and_else_begins_again() -> None:
    kept = Kept()

    async def ask(ids: Any, sampling: Any, on_tokens: Any) -> Generation:
        return generation(10, 2)

    recording = Recording(ask, kept.play, kept.keep)
    recording.begin()
    await recording.turn([1], SAMPLING)
    await recording.keep_new()
    recording.begin()
    assert (await recording.turn([1], SAMPLING)).token_ids == [10, 11]
    recording.begin()
    assert not recording.has_answer
    await recording.turn([1], SAMPLING)
    await recording.keep_new()
    name = kept.read().name
    assert name != kept.play.name and name[:8] == kept.play.name[:8]


async def test_a_part_that_is_not_kept_is_the_last_but_the_session_is_whole() -> None:
    kept = Kept()
    kept.refuses = True

    async def ask(ids: Any, sampling: Any, on_tokens: Any) -> Generation:
        return generation(10, 2)

    recording = Recording(ask, kept.play, kept.keep)
    await recording.turn([1], SAMPLING)
    await recording.keep_new()
    kept.refuses = False
    await recording.turn([1], SAMPLING)
    await recording.keep_new()
    assert kept.fields == {}


async def test_a_lost_lease_that_only_a_part_finds_ends_the_turn() -> None:
    async def keep(name: bytes, number: int, recorded: Part) -> bool:
        raise LeaseLostError("gone")

    async def ask(ids: Any, sampling: Any, on_tokens: Any) -> Generation:
        on_tokens(generation(10, 2))
        return generation(10, 3)

    with pytest.raises(LeaseLostError):
        await Recording(ask, new_play(PROMPT), keep).turn([1], SAMPLING)


class TestReading:
    async def filled(self) -> Kept:
        kept = Kept()
        for number in range(3):
            sampled = {"token_ids": [number], "logprobs": [0.0], "spans": ((0, 0),)}
            await kept.keep(kept.play.name, number, Part(**sampled))
        return kept

    async def test_a_torn_part_is_none_and_what_is_before_it_counts(self) -> None:
        kept = await self.filled()
        kept.fields[b"3:1"] = kept.fields[b"3:1"][:-3]
        assert [recorded.token_ids.tolist() for recorded in kept.read().parts] == [[0]]
        del kept.fields[b"3:0"]
        assert kept.read().parts == ()

    async def test_parts_of_another_play_do_not_follow(self) -> None:
        kept = await self.filled()
        another = new_play(PROMPT).name
        kept.fields[b"3:1"] = another + kept.fields[b"3:1"][PLAY_BYTES:]
        assert len(kept.read().parts) == 1

    async def test_parts_of_another_prompt_with_the_same_number_are_none(self) -> None:
        kept = await self.filled()
        assert read_play(kept.fields, 3, np.array([7], np.int32), pytest.fail).parts == ()

    async def test_a_claim_is_looked_into_and_one_that_cannot_be_had_ends_what_is_known(self) -> None:
        kept = await self.filled()
        claim = Claim(pointer=f"0-3-{'0' * 32}", num_bytes=1, digest="0" * 32)
        payload = kept.fields[b"3:2"][PLAY_BYTES:]
        await kept.keep(kept.play.name, 2, Part(claim=claim))
        assert kept.read(lambda _: payload).parts[2].token_ids.tolist() == [2]

        def is_gone(_: Claim) -> bytes:
            raise FileNotFoundError("gone")

        assert len(kept.read(is_gone).parts) == 2
