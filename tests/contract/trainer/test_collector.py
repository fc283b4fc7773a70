"""A step gets its groups as they complete; what cannot be trained is replaced, and told of."""

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import REGISTRY

from common.redis.broker import Broker
from common.streams import append
from common.wire.keys import Keys
from common.wire.messages import DeadLetter, Ticket
from services.trainer.batch.batch_assembler import Collector, StoppedError
from services.trainer.batch.reconciler import Reconciler
from services.trainer.groups.group_filter import Judge
from tests.support.training import (
    make_context,
    make_parts,
    messages,
    publish_group,
    reading,
    trainer_config,
)
from tests.support.waiting import wait_until


@pytest.fixture
def make(broker: Broker, keys: Keys) -> Callable[..., Collector]:
    """A collector with all its parts around it."""

    def make(**trainer: Any) -> Collector:
        config = trainer_config(**trainer)
        scheduler, intake = make_parts(broker, keys, config)
        reconciler = Reconciler(broker, keys, scheduler, 4)
        return Collector(make_context(broker, keys, config), scheduler, intake, Judge(config), reconciler)

    return make


async def test_groups_are_handed_over_as_they_complete(make, broker, keys):
    collector = make()
    await collector.scheduler.admit(0)
    async with reading(collector.intake):
        await publish_group(broker, keys, 1)
        (first,) = await collector.take(0, 2)
        await publish_group(broker, keys, 2)  # the next step's
        await publish_group(broker, keys, 0)
        (second,) = await collector.take(0, 1)
        assert (first.ticket, second.ticket) == (1, 0)
        assert [group.is_taken for group in collector.intake.groups.values()] == [True, True, False, False]
        assert len(collector.scheduler.outstanding) == 4, "taken groups are outstanding until settled"
        collector.settle([first, second])
    assert sorted(collector.scheduler.outstanding) == sorted(collector.intake.groups) == [2, 3]


async def test_without_start_early_the_whole_step_is_handed_over_at_once(make, broker, keys):
    collector = make(start_early=False)
    await collector.scheduler.admit(0)
    async with reading(collector.intake):
        for ticket in (1, 0):
            await publish_group(broker, keys, ticket)
        assert [group.ticket for group in await collector.take(0, 2)] == [1, 0]


@pytest.mark.parametrize("start_early", [True, False])
async def test_a_stop_is_noticed_also_when_groups_are_never_missing(make, broker, keys, start_early):
    """A trainer slower than its workers never waits; it must not have to wait to be stopped."""
    collector = make(start_early=start_early)
    await collector.scheduler.admit(0)
    async with reading(collector.intake):
        for ticket in (0, 1):
            await publish_group(broker, keys, ticket)
        await wait_until(lambda: len(collector.intake.complete) == 2)
        collector.context.stopping.set()
        with pytest.raises(StoppedError):
            await collector.take(0, 2)


async def test_a_failing_reader_ends_the_wait(make, broker, keys):
    collector = make()

    async def fail() -> None:
        raise RuntimeError("the reader broke")

    collector.context.start(fail(), "reader")
    with pytest.raises(StoppedError):
        await collector.take(0, 2)
    with pytest.raises(RuntimeError, match="the reader broke"):
        collector.context.raise_failure()


async def test_dead_groups_are_replaced_for_the_same_step_and_told_of(make, broker, keys):
    collector = make()
    await collector.scheduler.admit(0)
    async with reading(collector.intake):
        await publish_group(broker, keys, 0)
        await append(broker, keys.dead, *(letter(ticket) for ticket in (1, 3)))
        await wait_until(lambda: len(collector.intake.dead) == 2)
        first = await collector.take(0, 2)
        await publish_group(broker, keys, 4)
        second = await collector.take(0, 1)
    assert [group.ticket for group in first + second] == [0, 4]
    tickets = await messages(broker, keys.prompts(), Ticket)
    assert [(t.ticket, t.step, t.replaces) for t in tickets[4:]] == [(4, 0, 1), (5, 1, 3)]
    assert collector.drain_dropped() == [(1, -1, "dead: refused"), (3, -1, "dead: refused")]
    assert collector.drain_dropped() == []
    assert sorted(collector.intake.groups) == sorted(collector.scheduler.outstanding) == [0, 2, 4, 5]


async def test_a_group_that_dies_while_it_is_taken_is_trained_and_not_replaced_too(make, broker, keys):
    collector = make()
    await collector.scheduler.admit(0)
    async with reading(collector.intake):
        for ticket in (0, 1):
            await publish_group(broker, keys, ticket)
        await wait_until(lambda: len(collector.intake.complete) == 2)
        select = collector._select

        async def select_then_die(step: int, places: int) -> list[int]:
            selected = await select(step, places)
            collector.intake.dead[0] = ("1-0", "refused")
            return selected

        collector._select = select_then_die
        first = await collector.take(0, 1)
        collector._select = select
        second = await collector.take(0, 1)
    assert [group.ticket for group in first + second] == [0, 1]
    assert collector.scheduler.num_replacements == 0


async def test_a_violation_of_the_staleness_bound_is_dead_lettered_and_replaced(make, broker, keys):
    before = REGISTRY.get_sample_value("tidemill_dead_letters_total", {"stream": "trajectories"}) or 0.0
    collector = make(max_staleness=1)
    await collector.scheduler.admit(0)
    for ticket in range(4):
        collector.scheduler.settle(ticket)
        collector.intake.close(ticket)
    await collector.scheduler.admit(1)
    await collector.scheduler.admit(2)
    async with reading(collector.intake):
        await publish_group(broker, keys, 4, version=0)  # of step 2: two steps old
        await publish_group(broker, keys, 5, version=1)
        assert [group.ticket for group in await collector.take(2, 2)] == [5]
    (found,) = await messages(broker, keys.dead, DeadLetter)
    assert (found.origin, found.ticket) == ("trajectories", 4)
    assert "version 0 at step 2, max_staleness 1" in found.error
    assert collector.dropped == [(4, -1, "stale")]
    assert REGISTRY.get_sample_value("tidemill_dead_letters_total", {"stream": "trajectories"}) == before + 1
    tickets = await messages(broker, keys.prompts(), Ticket)
    assert [(t.step, t.min_version) for t in tickets if t.replaces == 4] == [(2, 1)]


@pytest.mark.parametrize("version", [1, 7, 2**40])
async def test_a_version_that_the_run_has_not_reached_is_a_violation_like_any_other(
    make, broker, keys, version
):
    """Of a worker that outlived a history that Redis and trainer have lost, or of a poisoned trajectory."""
    collector = make(max_staleness=0)
    await collector.scheduler.admit(0)
    async with reading(collector.intake):
        await publish_group(broker, keys, 0, version=version)
        await publish_group(broker, keys, 1)
        assert [group.ticket for group in await collector.take(0, 2)] == [1]
        await publish_group(broker, keys, 2)
        assert [group.ticket for group in await collector.take(0, 1)] == [2]
    (found,) = await messages(broker, keys.dead, DeadLetter)
    assert (found.origin, found.ticket) == ("trajectories", 0)
    assert f"version {version} at step 0" in found.error
    assert collector.dropped == [(0, -1, "stale")]


async def test_a_version_that_was_named_before_it_was_committed_is_a_violation_later_too(make, broker, keys):
    """The run reaches the number again, by other weights than those that the tokens are of."""
    collector = make(max_staleness=1)
    await collector.scheduler.admit(0)
    collector.intake.version = 0
    async with reading(collector.intake):
        await publish_group(broker, keys, 2, version=1)
        await wait_until(lambda: collector.intake.complete == [2])
        collector.intake.version = 1
        await publish_group(broker, keys, 3, version=1)
        assert [group.ticket for group in await collector.take(1, 2)] == [3]
    assert collector.dropped == [(2, -1, "stale")]


async def test_after_a_restart_of_redis_nothing_is_taken_before_it_is_read_again(
    make, broker, keys, monkeypatch
):
    collector = make()
    await collector.scheduler.admit(0)
    await collector.reconciler.has_restarted()
    async with reading(collector.intake):
        await publish_group(broker, keys, 0, text="lost")
        await wait_until(lambda: collector.intake.complete == [0])
        await broker.execute("DEL", keys.trajectories(), keys.scores(), keys.prompts())
        await publish_group(broker, keys, 0, text="again")
        monkeypatch.setattr(broker, "info", _another_server)
        (group,) = await collector.take(0, 1)
    assert {t.text for t in group.source.trajectories.values()} == {"again"}
    assert collector.reconciler.needs_checkpoint
    assert [t.ticket for t in await messages(broker, keys.prompts(), Ticket)] == [0, 1, 2, 3]


async def _another_server(section: str) -> dict[str, str]:
    return {"run_id": "another"}


def letter(ticket: int) -> DeadLetter:
    return DeadLetter(origin="prompts", entry_id="1-0", error="refused", ticket=ticket)
