"""The admission gate against a real Redis: never a ticket too many, none lost, none issued twice."""

import json
from collections.abc import Iterable

import pytest

from tests.support.numbered import append_numbered
from tests.support.training import lose_tail, make_plan, make_prompts, messages, trainer_config
from tidemill.common.errors import TidemillError
from tidemill.common.history import History
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import append, append_missing, entry_id_of, read_range
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Ticket
from tidemill.services.trainer.batch.scheduler import Scheduler


@pytest.fixture
def make(broker, keys):
    """A scheduler with groups of two, two a step; what it expected is in `expected`."""

    def make(state=None, **trainer):
        expected: list[Ticket] = []
        config = trainer_config(**trainer)
        scheduler = Scheduler(broker, keys, config, make_plan(config), expected.extend)
        scheduler.expected = expected
        if state is not None:
            scheduler.restore(state)
        return scheduler

    return make


async def tickets_of(broker: Broker, keys: Keys) -> list[Ticket]:
    return await messages(broker, keys.prompts(), Ticket)


def described(tickets: Iterable[Ticket]) -> list[tuple[int, int, int, int]]:
    """All that matters of a ticket besides its prompt."""
    return [(t.ticket, t.step, t.min_version, t.replaces) for t in tickets]


class TestGate:
    @pytest.mark.parametrize(
        ("version", "max_staleness", "limit"),
        [(0, 0, 2), (0, 1, 4), (3, 1, 10), (3, 2, 12), (8, 1, 20), (9, 1, 20), (9, 5, 20), (10, 1, 20)],
    )
    def test_the_gate_lets_in_v_plus_1_plus_k_steps_and_never_more_than_the_run_has(
        self, make, version, max_staleness, limit
    ):
        assert make(max_staleness=max_staleness).limit(version) == limit

    async def test_a_commit_frees_the_places_of_one_step(self, make, broker, keys):
        scheduler = make()
        assert len(await scheduler.admit(0)) == 4
        assert await scheduler.admit(0) == []
        assert [item.ticket for item in await scheduler.admit(1)] == [4, 5]
        tickets = await tickets_of(broker, keys)
        assert described(tickets) == [
            (0, 0, 0, -1), (1, 0, 0, -1), (2, 1, 0, -1), (3, 1, 0, -1), (4, 2, 1, -1), (5, 2, 1, -1),
        ]  # fmt: skip
        assert [entry.entry_id for entry in await read_range(broker, keys.prompts(), Ticket)] == [
            entry_id_of(number) for number in range(6)
        ]
        source = make_prompts()
        for ticket in tickets:
            prompt = source.prompt_at(ticket.ticket)
            assert ticket.prompt_ids.tolist() == prompt.ids.tolist()
            assert (ticket.row, ticket.ground_truth) == (prompt.row, prompt.ground_truth)

    async def test_over_a_whole_run_every_step_has_its_groups_replacements_or_not(self, make, broker, keys):
        scheduler = make(steps=5)
        for version in range(5):
            await scheduler.admit(version)
            of_version = [item for item in scheduler.outstanding.values() if item.step == version]
            assert len(of_version) == 2
            replacement = (await scheduler.replace(of_version[0].ticket, version))[0]
            assert (replacement.step, replacement.min_version) == (version, max(0, version - 1))
            assert scheduler.next_ticket == scheduler.limit(version)
            for ticket in (of_version[1].ticket, replacement.ticket):
                scheduler.settle(ticket)
        assert await scheduler.admit(5) == []
        assert not scheduler.outstanding
        tickets = await tickets_of(broker, keys)
        assert len(tickets) == 5 * 2 + 5
        regular = [t.step for t in tickets if t.replaces < 0]
        assert sorted(regular) == [step for step in range(5) for _ in range(2)]

    async def test_a_group_meant_for_an_earlier_step_is_replaced_for_the_step_in_progress(self, make):
        """`as_ready` trains groups later than their number says; a fresh start must be new enough."""
        scheduler = make(max_staleness=2)
        await scheduler.admit(0)
        (replacement,) = await scheduler.replace(0, step=5)
        assert (replacement.step, replacement.min_version) == (5, 3)

    async def test_tickets_are_expected_before_a_worker_can_answer_them(self, make, monkeypatch):
        scheduler = make()
        order = []
        scheduler.expect = lambda items: order.append(("expected", [item.ticket for item in items]))

        async def spy(broker, key, numbers, build):
            appended = await append_missing(broker, key, numbers, build)
            order.append(("appended", appended))
            return appended

        monkeypatch.setattr("tidemill.services.trainer.batch.scheduler.append_missing", spy)
        await scheduler.admit(0)
        await scheduler.replace(1, 0)
        regular = [0, 1, 2, 3]
        assert order == [("expected", regular), ("appended", regular), ("expected", [4]), ("appended", [4])]


class TestAfterACrash:
    async def test_tickets_issued_after_the_checkpoint_are_adopted(self, make, broker, keys):
        first = make()
        await first.admit(0)
        state = json.loads(json.dumps(first.state()))
        await first.replace(1, 0)
        await broker.execute("XADD", keys.prompts(), "5-7", "v", "9.0", "p", b"\x80")
        await first.admit(1)
        second = make(state)
        adopted = await second.adopt_issued(History(keys.run_id, None, broker))
        assert described(adopted) == [(4, 0, 0, 1), (5, 2, 1, -1), (6, 2, 1, -1)]
        assert second.state() == first.state()
        assert described(second.outstanding.values()) == described(first.outstanding.values())
        assert await second.admit(1) == []
        assert len(await tickets_of(broker, keys)) == 7

    async def test_without_a_checkpoint_everything_is_adopted(self, make, broker, keys):
        first = make()
        second = make()
        await first.admit(0)
        await first.replace(0, 0)
        await first.replace(4, 0)
        await second.adopt_issued(History(keys.run_id, None, broker))
        assert second.state() == first.state()
        assert sorted(second.outstanding) == [1, 2, 3, 5]


class TestAfterRedisLostItsTail:
    async def test_lost_tickets_are_issued_again_unchanged(self, make, broker, keys):
        scheduler = make()
        await scheduler.admit(0)
        await scheduler.replace(1, 0)
        before = await tickets_of(broker, keys)
        await lose_tail(broker, keys.prompts(), entry_id_of(2))
        assert await scheduler.reissue_lost() == 2
        assert await tickets_of(broker, keys) == before
        assert await scheduler.reissue_lost() == 0
        for settled in (2, 4):
            scheduler.settle(settled)
        await lose_tail(broker, keys.prompts(), entry_id_of(3))
        assert await scheduler.reissue_lost() == 0
        await broker.execute("DEL", keys.prompts())
        assert await scheduler.reissue_lost() == 2
        assert [t.ticket for t in await tickets_of(broker, keys)] == [0, 3]

    async def test_new_tickets_do_not_shut_out_lost_ones(self, make, broker, keys):
        """A stream takes no number below its last, so the lost ones have to come first."""
        scheduler = make()
        await scheduler.admit(0)
        await lose_tail(broker, keys.prompts(), entry_id_of(1))
        await scheduler.admit(1)
        assert [t.ticket for t in await tickets_of(broker, keys)] == list(range(6))

    async def test_a_tail_that_is_lost_while_new_tickets_are_issued_comes_back_before_them(
        self, make, broker, keys, monkeypatch
    ):
        """Redis loses it between the look at what is missing and the append."""
        scheduler = make()
        execute = broker.execute
        is_lost = False
        await scheduler.admit(0)

        async def look_and_lose(*command):
            nonlocal is_lost
            reply = await execute(*command)
            if command[:2] == ("XINFO", "STREAM") and not is_lost:
                is_lost = True
                await lose_tail(broker, keys.prompts(), entry_id_of(1))
            return reply

        monkeypatch.setattr(broker, "execute", look_and_lose)
        await scheduler.admit(1)
        assert is_lost
        assert [t.ticket for t in await tickets_of(broker, keys)] == list(range(6))

    async def test_a_reissued_replacement_can_still_be_adopted_as_one(self, make, broker, keys):
        first = make()
        await first.admit(0)
        state = first.state()
        await first.replace(1, 0)
        restored = make(first.state())
        await lose_tail(broker, keys.prompts(), entry_id_of(3))
        await restored.reissue_lost()
        second = make(state)
        await second.adopt_issued(History(keys.run_id, None, broker))
        assert second.state() == first.state()

    async def test_a_reissued_replacement_has_the_outcome_of_the_group_that_it_replaces(
        self, make, broker, keys
    ):
        """Without it a curriculum that adopts the ticket would not be that of the trainer before."""
        learning = {"data__train": "train.jsonl", "data__curriculum": {"revisit": 2}}
        first = make(**learning)
        await first.admit(0)
        (issued,) = await first.replace(1, 0, rewards=(1.0, 1.0))
        assert issued.outcome is not None
        restored = make(json.loads(json.dumps(first.state())), **learning)
        await lose_tail(broker, keys.prompts(), entry_id_of(3))
        await restored.reissue_lost()
        assert (await tickets_of(broker, keys))[-1].outcome == issued.outcome

    async def test_tickets_that_a_trainer_before_did_not_issue_again_are_found(self, make, broker, keys):
        first = make()
        await first.admit(0)
        state = first.state()
        first.settle(2)  # trained; its commit is lost with the ticket
        await lose_tail(broker, keys.prompts(), entry_id_of(1))
        await first.reissue_lost()
        second = make(state)
        assert await second.find_skipped() == [2]


async def test_the_same_tickets_from_two_processes_are_in_the_stream_once(make, broker, keys):
    """Nor is it an error where an append was done before the connection broke, and is repeated."""
    for scheduler in (make(), make()):
        await scheduler.admit(0)
        await scheduler.replace(0, 0)
    assert [t.ticket for t in await tickets_of(broker, keys)] == [0, 1, 2, 3, 4]


async def test_a_ticket_that_the_stream_refuses_is_an_error_and_not_a_silent_loss(make, broker, keys):
    """A stray entry is moved aside; one in the place of a ticket that looks like ours is not touched."""
    scheduler = make()
    await scheduler.admit(0)
    stray = (await tickets_of(broker, keys))[0]
    await append(broker, keys.prompts(), stray)  # under an id of the clock, far beyond all tickets
    await scheduler.admit(1)
    assert [ticket.ticket for ticket in await tickets_of(broker, keys)] == list(range(6))
    await append_numbered(broker, keys.prompts(), [(8, stray.model_copy(update={"ticket": 8}))])
    with pytest.raises(TidemillError, match=r"ticket 6 cannot be issued.*XSETID"):
        await scheduler.admit(2)
