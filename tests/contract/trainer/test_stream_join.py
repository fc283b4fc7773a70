"""Trajectories and scores joined from real streams: nothing needed is forgotten, whatever Redis loses."""

import asyncio
import time
from typing import Any

import pytest

from tests.support.training import append_at, lose_tail, make_score, outstanding, publish_group, reading
from tests.support.trajectories import make_trajectory
from tests.support.waiting import PATIENCE_S, wait_until
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import START, DeadLetterWriter, append, id_order, last_id
from tidemill.common.telemetry import metrics
from tidemill.common.wire import codec
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import DeadLetter, Trajectory
from tidemill.services.trainer.batch.stream_join import DEAD, SCORES, STREAMS, TRAJECTORIES, StreamJoin

EARLY = "1700000000000-0"
LATE = "1700000600000-0"


@pytest.fixture
def make(broker, keys):
    """A join of groups of two that expects some tickets."""

    def make(*tickets):
        join = StreamJoin(broker, keys)
        join.expect(outstanding(*tickets))
        return join

    return make


async def read_all(broker: Broker, keys: Keys, join: StreamJoin) -> None:
    """Let the readers reach the ends of their streams."""
    ends = {join._readers[stream]: await last_id(broker, stream.key(keys)) for stream in STREAMS}
    await wait_until(
        lambda: all(id_order(reader.position) >= id_order(end) for reader, end in ends.items()),
        awaited="the readers have read everything",
    )


def resumed(join: StreamJoin, again: StreamJoin) -> StreamJoin:
    """One that continues from the positions of another, on the same server."""
    again.restore(join.positions(), join.state() | {"trails": {}})
    return again


def sample_of(ticket: int, index: int = 0, text: str = "", **fields: Any) -> Trajectory:
    return make_trajectory(ticket, index, text, group_size=2, **fields)


def duplicates() -> tuple[float, float]:
    counters = [metrics.DUPLICATES_DROPPED.labels(stream) for stream in (TRAJECTORIES, SCORES)]
    return counters[0]._value.get(), counters[1]._value.get()


def letter(ticket: int, origin: str = "prompts") -> DeadLetter:
    return DeadLetter(origin=origin, entry_id="1-0", error="refused", ticket=ticket)


async def test_groups_complete_with_the_last_of_their_entries_in_whatever_order(make, broker, keys):
    join = make(0, 1)
    assert await join.wait(0.01) is False
    async with reading(join):
        await append(broker, keys.scores(), make_score(1, 0), make_score(1, 1))
        assert await join.wait(20) is True
        await append(broker, keys.trajectories(), sample_of(1, 1), sample_of(1, 0))
        await wait_until(lambda: join.complete)
        await publish_group(broker, keys, 0)
        await wait_until(lambda: join.complete == [1, 0])
    assert await join.wait(20) is True, "what arrived while nobody waited is not missed"
    assert await join.wait(0.01) is False
    group = join.groups[0]
    assert {i: s.value for i, s in group.scores.items()} == {0: 0.0, 1: 1.0}
    assert {i: t.key for i, t in group.trajectories.items()} == {0: (0, 0), 1: (0, 1)}


async def test_the_first_entry_of_a_key_wins_and_later_ones_are_counted(make, broker, keys):
    join = make(0)
    before = duplicates()
    async with reading(join):
        for text, value in (("first", 0.25), ("second", 0.75)):
            await append(broker, keys.trajectories(), sample_of(0, 0, text))
            await append(broker, keys.scores(), make_score(0, 0, value))
        await read_all(broker, keys, join)
    assert (join.groups[0].trajectories[0].text, join.groups[0].scores[0].value) == ("first", 0.25)
    assert not join.complete
    assert duplicates() == (before[0] + 1, before[1] + 1)


async def test_a_score_of_other_tokens_is_a_reason_to_look_for_what_is_missing(make, broker, keys):
    join = make(0)
    async with reading(join):
        await append(broker, keys.trajectories(), sample_of(0, 0, "here"))
        await append(broker, keys.scores(), make_score(0, 0, 0.5), make_score(0, 0, 0.75))
        await read_all(broker, keys, join)
        assert join.unread_at < 0.0, "a second score is none"
        await append(broker, keys.scores(), make_score(0, 0, 0.25, tokens_digest="0" * 16))
        await wait_until(lambda: join.unread_at > 0.0)
    assert join.groups[0].scores[0].value == 0.5


async def test_a_group_is_complete_also_where_its_last_trajectory_refuses_the_first_score_of_its_key(
    make, broker, keys
):
    """Two scores came before it, and only the second is of its tokens."""
    join = make(0)
    late = sample_of(0, 1)
    of_others = make_score(0, 1, 0.25, tokens_digest="0" * 16)
    of_its_own = make_score(0, 1, 0.75, tokens_digest=late.tokens_digest)
    async with reading(join):
        await append(broker, keys.scores(), make_score(0, 0, 0.5), of_others, of_its_own)
        await append(broker, keys.trajectories(), sample_of(0, 0))
        await read_all(broker, keys, join)
        assert not join.complete
        await append(broker, keys.trajectories(), late)
        await wait_until(lambda: join.complete == [0])
    assert join.groups[0].scores[1].value == 0.75


async def test_a_group_with_tokens_of_a_version_that_is_still_to_come_is_told_from_others(make, broker, keys):
    join = make(0, 1)
    join.version = 1
    async with reading(join):
        await publish_group(broker, keys, 0, version=1)
        await publish_group(broker, keys, 1, version=2)
        await wait_until(lambda: join.complete == [0, 1])
    assert [join.groups[ticket].is_ahead for ticket in (0, 1)] == [False, True]


async def test_late_entries_of_settled_tickets_are_counted_and_not_kept(make, broker, keys):
    join = make()
    before = duplicates()
    async with reading(join):
        for ticket in range(20):
            join.expect(outstanding(ticket))
            await publish_group(broker, keys, ticket)
            await wait_until(lambda ticket=ticket: join.complete == [ticket])
            join.close(ticket)
        await publish_group(broker, keys, 0)
        await publish_group(broker, keys, 25)  # was never outstanding here
        await read_all(broker, keys, join)
    assert (join.groups, join.complete, join.dead) == ({}, [], {})
    assert duplicates() == (before[0] + 4, before[1] + 4)


async def test_what_cannot_be_decoded_is_skipped(make, broker, keys):
    join = make(0)
    async with reading(join):
        for key in (keys.trajectories(), keys.scores(), keys.dead):
            for entry in (("v", "1.0", "p", b"\xc1 no msgpack"), ("v", "2.0", "p", b"\x80"), ("a", "b")):
                await broker.execute("XADD", key, "*", *entry)
        await publish_group(broker, keys, 0)
        await wait_until(lambda: join.complete == [0])


async def test_the_wait_for_a_reward_is_measured_by_one_clock(make, broker, keys):
    """Workers' clocks may be an hour apart; entry ids are times of Redis."""
    join = make(0)
    late = time.time() + 3600
    async with reading(join):
        for index in (0, 1):
            sample = sample_of(0, index, started_at=1.0, finished_at=2.0)
            score = make_score(0, index, latency_s=0.5, scored_at=late)
            await append_at(broker, keys.trajectories(), f"1000-{index}", sample)
            await append_at(broker, keys.scores(), f"3500-{index}", score)
        await wait_until(lambda: join.complete == [0])
    assert join.groups[0].queued_s == {0: 2.0, 1: 2.0}


class TestDeadLetters:
    async def test_a_dead_ticket_is_known_by_its_letter_unless_a_step_has_taken_its_group(
        self, make, broker, keys
    ):
        """Letters of other lanes and tickets say nothing; one without a ticket, that something is lost."""
        join = make(*range(6))
        join.groups[4].is_taken = True
        origins = ("prompts", "trajectories", "prompts:eval", "scores", "prompts")
        letters = [letter(ticket, origin) for ticket, origin in enumerate(origins)]
        async with reading(join):
            await append(broker, keys.dead, *letters, letter(9))
            await read_all(broker, keys, join)
            assert (list(join.dead), join.unread_at > 0) == ([0, 1], False)
            await append(broker, keys.dead, letter(-1, "trajectories"))
            await wait_until(lambda: join.unread_at > 0)

    async def test_a_letter_that_has_not_been_acted_on_is_read_again_after_a_restart(
        self, make, broker, keys
    ):
        join = make(0, 1)
        async with reading(join):
            await append(broker, keys.dead, letter(0), letter(1))
            await wait_until(lambda: len(join.dead) == 2)
        join.close(0)
        restarted = resumed(join, make(1))
        async with reading(restarted):
            await wait_until(lambda: list(restarted.dead) == [1])


class TestPositions:
    async def test_a_checkpoint_remembers_positions_below_every_entry_that_is_needed(
        self, make, broker, keys
    ):
        join = make(0, 1, 2, 3)
        async with reading(join):
            for ticket in range(4):
                await publish_group(broker, keys, ticket)
            await append(broker, keys.trajectories(), sample_of(3, 1))
            await read_all(broker, keys, join)
        for settled in range(4):
            restarted = resumed(join, make(*join.groups))
            async with reading(restarted):
                await wait_until(lambda r=restarted: len(r.complete) == len(r.groups))
            join.close(settled)
        assert join.positions() == join.high_water() | {DEAD: START}

    async def test_a_score_that_waits_for_its_trajectory_is_read_again(self, make, broker, keys):
        join = make(0)
        async with reading(join):
            for digest in ("a" * 16, "b" * 16):
                await append(broker, keys.scores(), make_score(0, 0, tokens_digest=digest))
            await wait_until(lambda: join.groups[0].other_scores)
        held = [join.groups[0].score_ids[0], join.groups[0].other_scores[0].entry_id]
        assert all(id_order(entry_id) > id_order(join.positions()[SCORES]) for entry_id in held)

    async def test_what_is_read_a_second_time_is_not_counted_a_second_time(self, make, broker, keys):
        join = make(0, 1)
        async with reading(join):
            await publish_group(broker, keys, 0)
            await publish_group(broker, keys, 1)
            await read_all(broker, keys, join)
        join.close(1)
        restarted = resumed(join, make(0, 2))
        new_scores: list[int] = []
        restarted.on_score = lambda _, score: new_scores.append(score.ticket)
        before = duplicates()
        async with reading(restarted):
            await read_all(broker, keys, restarted)
            assert (restarted.num_trajectories, duplicates()) == (4, before)
            assert restarted.complete == [0] and not new_scores
            await publish_group(broker, keys, 1)
            await publish_group(broker, keys, 2)
            await read_all(broker, keys, restarted)
        assert restarted.num_trajectories == 8
        assert new_scores == [2, 2]
        assert duplicates() == (before[0] + 2, before[1] + 2)


class TestAfterRedisLostItsTail:
    async def test_a_score_never_meets_a_trajectory_that_is_gone(self, make, broker, keys):
        """Ticket 0 was read, then lost and generated again: other tokens, and a score of their own. What a
        step has taken is not read again."""
        join = make(0, 1, 2)
        async with reading(join):
            for ticket in (1, 2):
                await publish_group(broker, keys, ticket)
            end = await last_id(broker, keys.trajectories())
            await append(broker, keys.trajectories(), *(sample_of(0, index, "lost") for index in (0, 1)))
            await read_all(broker, keys, join)
            await lose_tail(broker, keys.trajectories(), end)
            await append(broker, keys.trajectories(), *(sample_of(0, index, "again") for index in (0, 1)))
            await append(broker, keys.scores(), *(make_score(0, index, 0.5) for index in (0, 1)))
            await wait_until(lambda: join.complete == [1, 2, 0])
            assert join.groups[0].trajectories[0].text == "lost"
            join.groups[2].is_taken = True
            join.complete.remove(2)
            join.reread()
            assert not join.complete
            await wait_until(lambda: sorted(join.complete) == [0, 1])
        assert {sample.text for sample in join.groups[0].trajectories.values()} == {"again"}
        assert join.groups[2].is_complete

    async def test_a_clock_that_is_set_back_hides_nothing(self, make, broker, keys):
        """Trajectory, score and letter are lost, and come again with ids ten minutes smaller."""
        join = make(0, 1)
        messages = {keys.trajectories(): sample_of(0), keys.scores(): make_score(0, 0), keys.dead: letter(1)}
        group = join.groups[0]
        async with reading(join):
            for clock in (LATE, EARLY):
                for key, message in messages.items():
                    await append_at(broker, key, clock, message)
                await wait_until(lambda: group.trajectories and group.scores and join.dead)
                assert group.trajectory_ids[0] == join.dead[1][0] == clock
                for key in messages if clock == LATE else ():
                    await lose_tail(broker, key, START)
                join.dead.clear()
                join.reread()

    async def test_what_still_stands_is_found_by_content_too(self, make, broker, keys):
        """The same id may be given out twice: a lost entry's place is not proof that it is there."""
        join = make(0, 1, 2)
        async with reading(join):
            for number, text in ((0, "kept"), (1, "lost")):
                await append_at(broker, keys.trajectories(), f"{100 + number}-0", sample_of(number, 0, text))
            await wait_until(lambda: join.groups[1].trajectories)
            join.close(0)
            join.close(1)
            await lose_tail(broker, keys.trajectories(), "100-0")
            await append_at(broker, keys.trajectories(), "101-0", sample_of(2, 0, "new"))
            join.reread()
            await wait_until(lambda: join.groups[2].trajectories)

    async def test_what_got_lower_ids_is_read_also_where_the_reader_has_gone_on_since(
        self, make, broker, keys
    ):
        """It was noticed late that another server had taken over."""
        join = make(0, 1, 2)
        key = keys.trajectories()
        async with reading(join):
            await append_at(broker, key, "100-0", sample_of(0))
            await wait_until(lambda: join.groups[0].trajectories)
            join.trust(join.seen())
            join.close(0)
            await append_at(broker, key, "300-0", sample_of(1))
            await wait_until(lambda: join.groups[1].trajectories)
            await lose_tail(broker, key, "100-0")
            await append_at(broker, key, "200-0", sample_of(2))
            await append_at(broker, key, "400-0", sample_of(1, 1))
            await wait_until(lambda: len(join.groups[1].trajectories) == 2)
            join.reread()
            await wait_until(lambda: join.groups[2].trajectories)

    async def test_a_late_copy_that_names_a_version_of_the_future_does_not_spoil_its_group(
        self, make, broker, keys
    ):
        join = make(0)
        join.version = 1
        async with reading(join):
            await publish_group(broker, keys, 0)
            await wait_until(lambda: join.complete == [0])
            await append(broker, keys.trajectories(), sample_of(0, 0, spans=((7, 0),)), sample_of(0, 1))
            await read_all(broker, keys, join)
        assert not join.groups[0].is_ahead

    async def test_positions_of_a_checkpoint_are_not_relied_on_where_the_stream_is_another(
        self, make, broker, keys
    ):
        """Redis and trainer die together; the new server's clock is behind."""
        first = make(0)
        second = make(0)
        async with reading(first):
            await append_at(broker, keys.trajectories(), LATE, sample_of(0))
            await wait_until(lambda: first.groups[0].trajectories)
        first.close(0)
        await lose_tail(broker, keys.trajectories(), START)
        second.restore(first.positions(), first.state())
        async with reading(second):
            await append_at(broker, keys.trajectories(), EARLY, sample_of(0))
            await wait_until(lambda: second.groups[0].trajectories)

    async def test_an_answer_to_an_older_question_is_not_taken_in(self, make, broker, keys, monkeypatch):
        """`reread` comes while a read is under way whose reply is from before."""
        join = make(0)
        reader = join._readers[TRAJECTORIES]
        replies = []
        read = reader.read

        async def late(*args):
            reply = await read(*args)
            if reply:
                join.reread()
                await lose_tail(broker, keys.trajectories(), START)
                replies.extend(reply)
            return reply

        monkeypatch.setattr(reader, "read", late)
        async with reading(join):
            await append(broker, keys.trajectories(), sample_of(0, 0))
            await wait_until(lambda: replies)
            assert join._readers[TRAJECTORIES] is not reader
            await append(broker, keys.trajectories(), sample_of(0, 1))
            await wait_until(lambda: join.groups[0].trajectories)
        assert list(join.groups[0].trajectories) == [1]

    async def test_no_score_is_taken_after_a_letter_that_took_until_redis_was_another(
        self, make, broker, keys, monkeypatch
    ):
        """Of one answer the first entry cannot be decoded, and the second one is lost meanwhile."""
        join = make(0)
        was_lost = asyncio.Event()

        async def lose(*_):
            await lose_tail(broker, keys.scores(), START)
            join.reread()
            was_lost.set()

        monkeypatch.setattr(DeadLetterWriter, "append_unread", lose)
        garbled = ("XADD", keys.scores(), "*", "v", "1.0", "p", b"\xc1")
        fields = [word for pair in codec.encode(make_score(0, 0, 0.25)).items() for word in pair]
        await broker.pipeline([garbled, ("XADD", keys.scores(), "*", *fields)], atomic=True)
        async with reading(join):
            await asyncio.wait_for(was_lost.wait(), PATIENCE_S)
            await append(broker, keys.scores(), make_score(0, 1, 0.75))
            await wait_until(lambda: 1 in join.groups[0].scores)
        assert list(join.groups[0].scores) == [1]
