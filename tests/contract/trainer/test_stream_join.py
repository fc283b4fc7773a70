"""Trajectories and scores joined from real streams: the first entry wins, and nothing needed is forgotten."""

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.training import lose_tail, make_score, outstanding, publish_group, reading
from tests.support.trajectories import make_trajectory
from tests.support.waiting import PATIENCE_S, wait_until
from tidemill.common.history import History
from tidemill.common.history.groups import GroupCursor
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import START, LettersAbout, append, id_order, last_id
from tidemill.common.telemetry import metrics
from tidemill.common.wire import codec
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import DeadLetter, Message, Score, Trajectory
from tidemill.services.trainer.batch.stream_join import DEAD, SCORES, TRAJECTORIES, StreamJoin


@pytest.fixture
def make(broker: Broker, keys: Keys) -> Callable[..., StreamJoin]:
    """An join of groups of two that expects some tickets."""

    def make(*tickets: int) -> StreamJoin:
        join = StreamJoin(broker, keys)
        join.expect(outstanding(*tickets))
        return join

    return make


async def read_all(broker: Broker, keys: Keys, join: StreamJoin) -> None:
    """Let the readers reach the ends of their streams."""
    ends = {
        join._readers[TRAJECTORIES]: await last_id(broker, keys.trajectories()),
        join._readers[SCORES]: await last_id(broker, keys.scores()),
        join._readers[DEAD]: await last_id(broker, keys.dead),
    }
    await wait_until(
        lambda: all(id_order(reader.position) >= id_order(end) for reader, end in ends.items()),
        what="the readers have read everything",
    )


def duplicates(stream: str) -> float:
    value: float = metrics.DUPLICATES_DROPPED.labels(stream)._value.get()
    return value


def letter(ticket: int, origin: str = "prompts", index: int = -1) -> DeadLetter:
    return DeadLetter(origin=origin, entry_id="1-0", error="refused", ticket=ticket, index=index)


class TestJoining:
    async def test_groups_complete_with_the_last_of_their_entries_in_whatever_order(self, make, broker, keys):
        join = make(0, 1)
        async with reading(join):
            await append(broker, keys.scores(), make_score(1, 0), make_score(1, 1))
            await append(broker, keys.trajectories(), *(make_trajectory(1, i, group_size=2) for i in (1, 0)))
            await wait_until(lambda: join.complete)
            await publish_group(broker, keys, 0)
            await wait_until(lambda: join.complete == [1, 0])
        group = join.groups[0]
        assert {i: s.value for i, s in group.scores.items()} == {0: 0.0, 1: 1.0}
        assert {i: t.key for i, t in group.trajectories.items()} == {0: (0, 0), 1: (0, 1)}

    async def test_the_first_entry_of_a_key_wins_and_later_ones_are_counted(self, make, broker, keys):
        join, before = make(0), (duplicates(TRAJECTORIES), duplicates(SCORES))
        async with reading(join):
            for text, value in (("first", 0.25), ("second", 0.75)):
                await append(broker, keys.trajectories(), make_trajectory(0, 0, text, group_size=2))
                await append(broker, keys.scores(), make_score(0, 0, value))
            await read_all(broker, keys, join)
        assert join.groups[0].trajectories[0].text == "first"
        assert join.groups[0].scores[0].value == 0.25
        assert not join.complete
        assert (duplicates(TRAJECTORIES), duplicates(SCORES)) == (before[0] + 1, before[1] + 1)

    async def test_late_entries_of_settled_tickets_are_counted_and_not_kept(self, make, broker, keys):
        join, before = make(0), duplicates(TRAJECTORIES)
        async with reading(join):
            await publish_group(broker, keys, 0)
            await wait_until(lambda: join.complete)
            join.close(0)
            await publish_group(broker, keys, 0)
            await publish_group(broker, keys, 5)  # was never outstanding here
            await read_all(broker, keys, join)
        assert (join.groups, join.complete, join.dead) == ({}, [], {})
        assert duplicates(TRAJECTORIES) == before + 4

    async def test_an_index_outside_of_the_group_does_not_complete_it(self, make, broker, keys):
        join = make(0)
        async with reading(join):
            await append(broker, keys.trajectories(), *(make_trajectory(0, i, group_size=9) for i in (0, 8)))
            await append(broker, keys.scores(), make_score(0, 0), make_score(0, 8))
            await read_all(broker, keys, join)
        assert not join.complete
        assert list(join.groups[0].trajectories) == [0]

    async def test_what_cannot_be_decoded_is_passed_over(self, make, broker, keys):
        join = make(0)
        async with reading(join):
            for key in (keys.trajectories(), keys.scores(), keys.dead):
                await broker.execute("XADD", key, "*", "v", "1.0", "p", b"\xc1 no msgpack")
                await broker.execute("XADD", key, "*", "v", "2.0", "p", b"\x80")
                await broker.execute("XADD", key, "*", "something", "else")
            await publish_group(broker, keys, 0)
            await wait_until(lambda: join.complete == [0])

    async def test_waiting_ends_with_news_and_says_when_there_was_none(self, make, broker, keys):
        join = make(0)
        assert await join.wait(0.01) is False
        async with reading(join):
            await publish_group(broker, keys, 0)
            assert await join.wait(20) is True
            await wait_until(lambda: join.complete)
        # News that came while nobody waited are not missed either.
        join.changed.set()
        assert await join.wait(20) is True
        assert await join.wait(0.01) is False


class TestDeadLetters:
    @pytest.mark.parametrize(("origin", "is_dead"), [("prompts", True), ("trajectories", True),
                                                     ("prompts:eval", False), ("scores", False)])  # fmt: skip
    async def test_a_dead_ticket_is_known_by_its_letter(self, make, broker, keys, origin, is_dead):
        join = make(0, 1)
        async with reading(join):
            await append(broker, keys.dead, letter(0, origin), letter(9, "prompts"), letter(1))
            await wait_until(lambda: 1 in join.dead)
        assert (0 in join.dead) is is_dead
        assert set(join.dead) <= {0, 1}

    async def test_a_letter_without_a_ticket_makes_it_look_for_what_will_never_come(self, make, broker, keys):
        join = make(0)
        async with reading(join):
            await append(broker, keys.dead, letter(-1, "trajectories"))
            await wait_until(lambda: join.unread_at > 0)
        assert not join.dead

    async def test_a_group_that_a_step_has_taken_cannot_die_any_more(self, make, broker, keys):
        join = make(0, 1)
        join.groups[0].is_taken = True
        async with reading(join):
            await append(broker, keys.dead, letter(0), letter(1))
            await wait_until(lambda: join.dead)
        assert list(join.dead) == [1]

    async def test_a_letter_that_has_not_been_acted_on_is_read_again_after_a_restart(
        self, make, broker, keys
    ):
        join = make(0, 1)
        async with reading(join):
            await append(broker, keys.dead, letter(0), letter(1))
            await wait_until(lambda: len(join.dead) == 2)
        join.close(0)
        restarted = make(1)
        restarted.restore(join.positions(), join.state() | {"trails": {}})
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
            await append(broker, keys.trajectories(), make_trajectory(3, 1, group_size=2))
            await read_all(broker, keys, join)
        for settled in range(4):
            positions = join.positions()
            needed = [e for g in join.groups.values() for e in g.trajectory_ids.values()]
            assert all(id_order(entry_id) > id_order(positions[TRAJECTORIES]) for entry_id in needed)
            restarted = make(*join.groups)
            restarted.restore(positions, join.state() | {"trails": {}})
            async with reading(restarted):
                await wait_until(lambda r=restarted: len(r.complete) == len(r.groups))
            join.close(settled)
        assert join.positions() == join.high_water() | {DEAD: START}

    async def test_what_is_read_a_second_time_is_not_counted_a_second_time(self, make, broker, keys):
        join = make(0, 1)
        async with reading(join):
            await publish_group(broker, keys, 0)
            await publish_group(broker, keys, 1)
            await read_all(broker, keys, join)
        join.close(1)
        restarted, before = make(0), duplicates(TRAJECTORIES)
        restarted.restore(join.positions(), join.state() | {"trails": {}})
        restarted.num_trajectories = join.num_trajectories
        async with reading(restarted):
            await read_all(broker, keys, restarted)
            assert (restarted.num_trajectories, duplicates(TRAJECTORIES)) == (4, before)
            await publish_group(broker, keys, 1)
            await read_all(broker, keys, restarted)
        assert (restarted.num_trajectories, duplicates(TRAJECTORIES)) == (6, before + 2)

    async def test_memory_holds_only_what_is_outstanding(self, make, broker, keys):
        join = make()
        async with reading(join):
            for ticket in range(50):
                join.expect(outstanding(ticket))
                await publish_group(broker, keys, ticket)
                await wait_until(lambda ticket=ticket: join.complete == [ticket])
                join.close(ticket)
        assert (join.groups, join.complete, join.dead) == ({}, [], {})


async def test_the_wait_for_a_reward_is_measured_by_one_clock(make, broker, keys):
    """Workers' clocks may be an hour apart; entry ids are times of Redis."""
    join = make(0)
    late = time.time() + 3600
    async with reading(join):
        for index in (0, 1):
            sample = make_trajectory(0, index, group_size=2, started_at=1.0, finished_at=2.0)
            score = make_score(0, index, latency_s=0.5, scored_at=late)
            for key, clock, message in ((keys.trajectories(), 1000, sample), (keys.scores(), 3500, score)):
                flat = [part for pair in codec.encode(message).items() for part in pair]
                await broker.execute("XADD", key, f"{clock}-{index}", *flat)
        await wait_until(lambda: join.complete == [0])
    assert join.groups[0].queued_s == {0: 2.0, 1: 2.0}


class TestAfterRedisLostItsTail:
    async def test_a_score_never_meets_a_trajectory_that_is_gone(self, make, broker, keys):
        """Ticket 0 was read, then lost and generated again: other tokens, and a score of their own."""
        join = make(0, 1)
        async with reading(join):
            await publish_group(broker, keys, 1)
            end = await last_id(broker, keys.trajectories())
            for index in (0, 1):
                await append(broker, keys.trajectories(), make_trajectory(0, index, "lost", group_size=2))
            await read_all(broker, keys, join)
            await lose_tail(broker, keys.trajectories(), end)
            for index in (0, 1):
                await append(broker, keys.trajectories(), make_trajectory(0, index, "again", group_size=2))
                await append(broker, keys.scores(), make_score(0, index, 0.5))
            await wait_until(lambda: join.complete == [1, 0])
            assert join.groups[0].trajectories[0].text == "lost"
            join.reread()
            assert not join.complete
            await wait_until(lambda: sorted(join.complete) == [0, 1])
        texts = {sample.text for sample in join.groups[0].trajectories.values()}
        assert texts == {"again"}

    async def test_what_a_step_has_taken_is_not_read_again(self, make, broker, keys):
        join = make(0, 1)
        async with reading(join):
            await publish_group(broker, keys, 0)
            await publish_group(broker, keys, 1)
            await wait_until(lambda: join.complete == [0, 1])
            join.groups[0].is_taken = True
            join.complete.remove(0)
            join.reread()
            await wait_until(lambda: join.complete == [1])
        assert join.groups[0].is_complete

    async def test_entries_of_a_server_whose_clock_is_behind_are_read(self, make, broker, keys):
        """Ids are times: what is generated again may get smaller ones than what was read and lost."""
        join: Any = make(0)
        entry = codec.encode(make_trajectory(0, 0, group_size=2))
        fields = [part for pair in entry.items() for part in pair]
        async with reading(join):
            await broker.execute("XADD", keys.trajectories(), "1700000050000-0", *fields)
            await wait_until(lambda: join.groups[0].trajectories)
            await lose_tail(broker, keys.trajectories(), START)
            await broker.execute("XADD", keys.trajectories(), "1700000010000-0", *fields)
            join.reread()
            await wait_until(lambda: join.groups[0].trajectories)
        assert join.groups[0].trajectory_ids[0] == "1700000010000-0"

    async def test_a_clock_that_is_set_back_by_more_than_any_margin_hides_nothing(self, make, broker, keys):
        """Trajectory, score and letter are lost, and come again with ids ten minutes smaller."""
        join: Any = make(0, 1)
        sample, score = codec.encode(make_trajectory(0, 0, group_size=2)), codec.encode(make_score(0, 0))
        dead = codec.encode(letter(1))
        messages = {keys.trajectories(): sample, keys.scores(): score, keys.dead: dead}
        group = join.groups[0]
        async with reading(join):
            for clock in ("1700000600000-0", "1700000000000-0"):
                for key, fields in messages.items():
                    flat = [part for pair in fields.items() for part in pair]
                    await broker.execute("XADD", key, clock, *flat)
                await wait_until(lambda: group.trajectories and group.scores and join.dead)
                assert group.trajectory_ids[0] == join.dead[1][0] == clock
                for key in messages if clock == "1700000600000-0" else ():
                    await lose_tail(broker, key, START)
                join.dead.clear()
                join.reread()

    async def test_what_still_stands_is_found_by_content_too(self, make, broker, keys):
        """The same id may be given out twice: a lost entry's place is not proof that it is there."""
        join: Any = make(0, 1, 2)
        async with reading(join):
            for number, text in ((0, "kept"), (1, "lost")):
                fields = codec.encode(make_trajectory(number, 0, text, group_size=2))
                flat = [part for pair in fields.items() for part in pair]
                await broker.execute("XADD", keys.trajectories(), f"{100 + number}-0", *flat)
            await wait_until(lambda: join.groups[1].trajectories)
            join.close(0)
            join.close(1)
            await lose_tail(broker, keys.trajectories(), "100-0")
            fields = codec.encode(make_trajectory(2, 0, "new", group_size=2))
            await broker.execute(
                "XADD", keys.trajectories(), "101-0", *[p for pair in fields.items() for p in pair]
            )
            join.reread()
            await wait_until(lambda: join.groups[2].trajectories)

    async def test_what_got_lower_ids_is_read_also_where_the_reader_has_gone_on_since(
        self, make, broker, keys
    ):
        """It was noticed late that another server had taken over."""
        join: Any = make(0, 1, 2)

        async def add(ticket: int, index: int, entry_id: str) -> None:
            fields = codec.encode(make_trajectory(ticket, index, group_size=2))
            flat = [part for pair in fields.items() for part in pair]
            await broker.execute("XADD", keys.trajectories(), entry_id, *flat)

        async with reading(join):
            await add(0, 0, "100-0")
            await wait_until(lambda: join.groups[0].trajectories)
            join.trust(join.seen())
            join.close(0)
            await add(1, 0, "300-0")
            await wait_until(lambda: join.groups[1].trajectories)
            await lose_tail(broker, keys.trajectories(), "100-0")
            await add(2, 0, "200-0")
            await add(1, 1, "400-0")
            await wait_until(lambda: len(join.groups[1].trajectories) == 2)
            join.reread()
            await wait_until(lambda: join.groups[2].trajectories)

    async def test_a_late_copy_that_names_a_version_of_the_future_does_not_spoil_its_group(
        self, make, broker, keys
    ):
        join: Any = make(0)
        join.version = 1
        async with reading(join):
            await publish_group(broker, keys, 0)
            await wait_until(lambda: join.complete == [0])
            await append(broker, keys.trajectories(), make_trajectory(0, 0, group_size=2, spans=((7, 0),)))
            await append(broker, keys.trajectories(), make_trajectory(0, 1, group_size=2))
            end = await last_id(broker, keys.trajectories())
            await wait_until(lambda: join.high_water()[TRAJECTORIES] == end)
        assert not join.groups[0].is_ahead

    async def test_positions_of_a_checkpoint_are_not_relied_on_where_the_stream_is_another(
        self, make, broker, keys
    ):
        """Redis and trainer die together; the new server's clock is behind."""
        first: Any = make(0)
        fields = codec.encode(make_trajectory(0, 0, group_size=2))
        flat = [part for pair in fields.items() for part in pair]
        async with reading(first):
            await broker.execute("XADD", keys.trajectories(), "1700000600000-0", *flat)
            await wait_until(lambda: first.groups[0].trajectories)
        first.close(0)
        positions, state = first.positions(), first.state()
        await lose_tail(broker, keys.trajectories(), START)
        second: Any = make(0)
        second.restore(positions, state)
        async with reading(second):
            await broker.execute("XADD", keys.trajectories(), "1700000000000-0", *flat)
            await wait_until(lambda: second.groups[0].trajectories)

    async def test_an_answer_to_an_older_question_is_not_taken_in(self, make, broker, keys, monkeypatch):
        """`reread` comes while a read is under way whose reply is from before."""
        join: Any = make(0)
        reader, replies = join._readers[TRAJECTORIES], []
        read = reader.read

        async def late(*args: Any) -> Any:
            reply = await read(*args)
            if reply:
                join.reread()
                await lose_tail(broker, keys.trajectories(), START)
                replies.extend(reply)
            return reply

        monkeypatch.setattr(reader, "read", late)
        async with reading(join):
            await append(broker, keys.trajectories(), make_trajectory(0, 0, group_size=2))
            await wait_until(lambda: replies)
            assert join._readers[TRAJECTORIES] is not reader
            await append(broker, keys.trajectories(), make_trajectory(0, 1, group_size=2))
            await wait_until(lambda: join.groups[0].trajectories)
        assert list(join.groups[0].trajectories) == [1]

    async def test_no_score_is_taken_after_a_letter_that_took_until_redis_was_another(
        self, make, broker, keys, monkeypatch
    ):
        """Of one answer the first entry cannot be decoded, and the second one is lost meanwhile."""
        join: Any = make(0)
        was_lost = asyncio.Event()

        async def bury(*_: Any) -> None:
            await lose_tail(broker, keys.scores(), START)
            join.reread()
            was_lost.set()

        monkeypatch.setattr(LettersAbout, "bury_unread", bury)
        garbled = ("XADD", keys.scores(), "*", "v", "1.0", "p", b"\xc1")
        fields = [part for pair in codec.encode(make_score(0, 0, 0.25)).items() for part in pair]
        await broker.pipeline([garbled, ("XADD", keys.scores(), "*", *fields)], atomic=True)
        async with reading(join):
            await asyncio.wait_for(was_lost.wait(), PATIENCE_S)
            await append(broker, keys.scores(), make_score(0, 1, 0.75))
            await wait_until(lambda: 1 in join.groups[0].scores)
        assert list(join.groups[0].scores) == [1]


class TestScoresOfOtherTokens:
    """A key has come twice: `lost` was generated before Redis lost its tail, `again` after it."""

    @staticmethod
    def made(text: str, index: int = 0) -> tuple[Trajectory, Score]:
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        logprobs = np.full(len(ids), -0.5, np.float32)
        sample = make_trajectory(0, index, text, group_size=2, completion_ids=ids, logprobs=logprobs)
        value = 0.25 if text == "lost" else 0.75
        return sample, make_score(0, index, value, tokens_digest=sample.tokens_digest)

    async def join_of(self, make, broker, keys, *in_order: Message) -> StreamJoin:
        join: StreamJoin = make(0)
        async with reading(join):
            for message in in_order:
                key = keys.scores() if isinstance(message, Score) else keys.trajectories()
                await append(broker, key, message)
                await read_all(broker, keys, join)
        return join

    async def test_are_refused_and_those_of_its_own_are_taken(self, make, broker, keys):
        _, old = self.made("lost")
        sample, own = self.made("again")
        for in_order in itertools.permutations((sample, old, own)):
            await broker.execute("DEL", keys.scores(), keys.trajectories())
            join = await self.join_of(make, broker, keys, *in_order)
            group = join.groups[0]
            assert {i: score.value for i, score in group.scores.items()} == {0: 0.75}
            assert not group.other_scores

    async def test_do_not_complete_a_group(self, make, broker, keys):
        (_, old), (again, _), (other, its) = self.made("lost"), self.made("again"), self.made("again", 1)
        for in_order in ((old, other, its, again), (again, other, its, old)):
            await broker.execute("DEL", keys.scores(), keys.trajectories())
            join = await self.join_of(make, broker, keys, *in_order)
            assert not join.complete
            assert list(join.groups[0].scores) == [1]

    async def test_of_an_older_release_say_nothing_and_are_taken(self, make, broker, keys):
        sample, _ = self.made("again")
        join = await self.join_of(make, broker, keys, sample, make_score(0, 0, 0.5))
        assert join.groups[0].scores[0].value == 0.5

    async def test_a_checkpoint_reads_again_what_waits_for_its_trajectory(self, make, broker, keys):
        join = await self.join_of(make, broker, keys, self.made("lost")[1], self.made("again")[1])
        assert len(join.groups[0].other_scores) == 1
        held = [*join.groups[0].score_ids.values(), join.groups[0].other_scores[0].entry_id]
        assert all(id_order(entry_id) > id_order(join.positions()[SCORES]) for entry_id in held)

    async def test_a_replay_takes_the_same_as_training_did(self, broker, keys):
        (_, old), (sample, own) = self.made("lost"), self.made("again")
        other, its = self.made("again", 1)
        for scores in ((old, own, its), (own, old, its)):
            await broker.execute("DEL", keys.scores(), keys.trajectories())
            await append(broker, keys.trajectories(), sample, other)
            await append(broker, keys.scores(), *scores)
            async with GroupCursor(History(keys.run_id, None, broker), 2, 1) as cursor:
                group = (await cursor.groups([0]))[0]
            assert {index: score.value for index, score in group.scores.items()} == {0: 0.75, 1: 0.75}
