"""A step gets its groups as they complete; what cannot be trained is replaced, and told of."""

import pytest
from prometheus_client import REGISTRY

from tests.support.training import make_context, make_parts, messages, publish_group, reading, trainer_config
from tests.support.waiting import wait_until
from tidemill.common.process.service import StoppedError
from tidemill.common.streams import append
from tidemill.common.wire.messages import DeadLetter, Ticket
from tidemill.services.trainer.batch.batch_assembler import BatchAssembler
from tidemill.services.trainer.batch.reconciler import Reconciler, RunStreams
from tidemill.services.trainer.groups.group_filter import GroupFilter


@pytest.fixture
def make(broker, keys):
    """An assembler with all its parts around it."""

    def make(**trainer):
        config = trainer_config(**trainer)
        scheduler, join = make_parts(broker, keys, config)
        streams = RunStreams(scheduler, join, Reconciler(broker, keys, scheduler))
        return BatchAssembler(make_context(broker, keys, config), streams, GroupFilter(config))

    return make


async def test_groups_are_handed_over_as_they_complete(make, broker, keys):
    assembler = make()
    await assembler.scheduler.admit(0)
    async with reading(assembler.join):
        await publish_group(broker, keys, 1)
        (first,) = await assembler.take(0, 2)
        await publish_group(broker, keys, 2)  # the next step's
        await publish_group(broker, keys, 0)
        (second,) = await assembler.take(0, 1)
        assert (first.ticket, second.ticket) == (1, 0)
        assert [group.is_taken for group in assembler.join.groups.values()] == [True, True, False, False]
        assert len(assembler.scheduler.outstanding) == 4, "taken groups are outstanding until settled"
        assembler.settle([first, second])
    assert sorted(assembler.scheduler.outstanding) == sorted(assembler.join.groups) == [2, 3]


async def test_without_start_early_the_whole_step_is_handed_over_at_once(make, broker, keys):
    assembler = make(start_early=False)
    await assembler.scheduler.admit(0)
    async with reading(assembler.join):
        for ticket in (1, 0):
            await publish_group(broker, keys, ticket)
        assert [group.ticket for group in await assembler.take(0, 2)] == [1, 0]


@pytest.mark.parametrize("start_early", [True, False])
async def test_a_stop_is_noticed_also_when_groups_are_never_missing(make, broker, keys, start_early):
    """A trainer slower than its workers never waits; it must not have to wait to be stopped."""
    assembler = make(start_early=start_early)
    await assembler.scheduler.admit(0)
    async with reading(assembler.join):
        for ticket in (0, 1):
            await publish_group(broker, keys, ticket)
        await wait_until(lambda: len(assembler.join.complete) == 2)
        assembler.context.stopping.set()
        with pytest.raises(StoppedError):
            await assembler.take(0, 2)


async def test_dead_groups_are_replaced_for_the_same_step_and_told_of(make, broker, keys):
    assembler = make()
    await assembler.scheduler.admit(0)
    async with reading(assembler.join):
        await publish_group(broker, keys, 0)
        await append(broker, keys.dead, *(letter(ticket) for ticket in (1, 3)))
        await wait_until(lambda: len(assembler.join.dead) == 2)
        first = await assembler.take(0, 2)
        await publish_group(broker, keys, 4)
        second = await assembler.take(0, 1)
    assert [group.ticket for group in first + second] == [0, 4]
    tickets = await messages(broker, keys.prompts(), Ticket)
    assert [(t.ticket, t.step, t.replaces) for t in tickets[4:]] == [(4, 0, 1), (5, 1, 3)]
    assert assembler.drain_dropped() == [(1, -1, "dead: refused"), (3, -1, "dead: refused")]
    assert assembler.drain_dropped() == []
    assert sorted(assembler.join.groups) == sorted(assembler.scheduler.outstanding) == [0, 2, 4, 5]


async def test_a_group_that_dies_while_it_is_taken_is_trained_and_not_replaced_too(make, broker, keys):
    assembler = make()
    await assembler.scheduler.admit(0)
    async with reading(assembler.join):
        for ticket in (0, 1):
            await publish_group(broker, keys, ticket)
        await wait_until(lambda: len(assembler.join.complete) == 2)
        select = assembler._select

        async def select_then_die(step, places):
            selected = await select(step, places)
            assembler.join.dead[0] = ("1-0", "refused")
            return selected

        assembler._select = select_then_die
        first = await assembler.take(0, 1)
        assembler._select = select
        second = await assembler.take(0, 1)
    assert [group.ticket for group in first + second] == [0, 1]
    assert assembler.scheduler.num_replacements == 0


async def test_a_violation_of_the_staleness_bound_is_dead_lettered_and_replaced(make, broker, keys):
    before = REGISTRY.get_sample_value("tidemill_dead_letters_total", {"stream": "trajectories"}) or 0.0
    assembler = make(max_staleness=1)
    await assembler.scheduler.admit(0)
    for ticket in range(4):
        assembler.scheduler.settle(ticket)
        assembler.join.close(ticket)
    await assembler.scheduler.admit(1)
    await assembler.scheduler.admit(2)
    async with reading(assembler.join):
        await publish_group(broker, keys, 4, version=0)  # of step 2: two steps old
        await publish_group(broker, keys, 5, version=1)
        assert [group.ticket for group in await assembler.take(2, 2)] == [5]
    (letter,) = await messages(broker, keys.dead, DeadLetter)
    assert (letter.origin, letter.ticket) == ("trajectories", 4)
    assert "version 0 at step 2, max_staleness 1" in letter.error
    assert assembler.dropped == [(4, -1, "stale")]
    assert REGISTRY.get_sample_value("tidemill_dead_letters_total", {"stream": "trajectories"}) == before + 1
    tickets = await messages(broker, keys.prompts(), Ticket)
    assert [(t.step, t.min_version) for t in tickets if t.replaces == 4] == [(2, 1)]


@pytest.mark.parametrize("version", [1, 7, 2**40])
async def test_a_version_that_the_run_has_not_reached_is_a_violation_like_any_other(
    make, broker, keys, version
):
    """Of a worker that outlived a history that Redis and trainer have lost, or of a poisoned trajectory."""
    assembler = make(max_staleness=0)
    await assembler.scheduler.admit(0)
    async with reading(assembler.join):
        await publish_group(broker, keys, 0, version=version)
        await publish_group(broker, keys, 1)
        assert [group.ticket for group in await assembler.take(0, 2)] == [1]
        await publish_group(broker, keys, 2)
        assert [group.ticket for group in await assembler.take(0, 1)] == [2]
    (letter,) = await messages(broker, keys.dead, DeadLetter)
    assert (letter.origin, letter.ticket) == ("trajectories", 0)
    assert f"version {version} at step 0" in letter.error
    assert assembler.dropped == [(0, -1, "stale")]


async def test_a_version_that_was_named_before_it_was_committed_is_a_violation_later_too(make, broker, keys):
    """The run reaches the number again, by other weights than those that the tokens are of."""
    assembler = make(max_staleness=1)
    await assembler.scheduler.admit(0)
    assembler.join.version = 0
    async with reading(assembler.join):
        await publish_group(broker, keys, 2, version=1)
        await wait_until(lambda: assembler.join.complete == [2])
        assembler.join.version = 1
        await publish_group(broker, keys, 3, version=1)
        assert [group.ticket for group in await assembler.take(1, 2)] == [3]
    assert assembler.dropped == [(2, -1, "stale")]


async def test_after_a_restart_of_redis_nothing_is_taken_before_it_is_read_again(
    make, broker, keys, monkeypatch
):
    assembler = make()
    await assembler.scheduler.admit(0)
    await assembler.reconciler.take_restart()
    async with reading(assembler.join):
        await publish_group(broker, keys, 0, text="lost")
        await wait_until(lambda: assembler.join.complete == [0])
        await broker.execute("DEL", keys.trajectories(), keys.scores(), keys.prompts())
        await publish_group(broker, keys, 0, text="again")
        monkeypatch.setattr(broker, "info", _another_server)
        (group,) = await assembler.take(0, 1)
    assert {t.text for t in group.trajectories.values()} == {"again"}
    assert assembler.reconciler.needs_checkpoint
    assert [t.ticket for t in await messages(broker, keys.prompts(), Ticket)] == [0, 1, 2, 3]


async def _another_server(section: str) -> dict[str, str]:
    return {"run_id": "another"}


def letter(ticket: int) -> DeadLetter:
    return DeadLetter(origin="prompts", entry_id="1-0", error="refused", ticket=ticket)
