"""A renewal that crosses an acknowledgement on its way does not call the message lost."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.letters import make_ticket, samples_of, tickets_of
from tests.support.numbered import append_numbered
from tests.support.training import make_score
from tests.support.trajectories import make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.streams import Consumer, append


@pytest.fixture
def late_answers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Answers to a script arrive only when the test says so; what the script did is done."""

    def late_answers(consumer: Consumer[Any], name: str) -> asyncio.Event:
        arrived = asyncio.Event()
        script = consumer.broker.script

        async def delayed(called: str, *arguments: Any) -> Any:
            answer = await script(called, *arguments)
            if called == name:
                await arrived.wait()
            return answer

        monkeypatch.setattr(consumer.broker, "script", delayed)
        return arrived

    return late_answers


async def acknowledged(consumer: Consumer[Any]) -> bool:
    return not await consumer.broker.execute("XPENDING", consumer.key, consumer.group, "-", "+", 10)


async def assert_nothing_is_called_lost(
    consumer: Consumer[Any], delivery: Any, arrived: Any, work: Any
) -> None:
    working = asyncio.ensure_future(work)
    await wait_until(lambda: acknowledged(consumer))
    with capture_logs() as lines:
        await consumer.renew()
        arrived.set()
        await working
    assert not delivery.is_lost
    assert [line for line in lines if "lease lost" in line["event"]] == []
    assert consumer.held == {}


async def test_the_last_sample_of_a_group(broker, keys, late_answers):
    await append_numbered(broker, keys.prompts(), [(0, make_ticket(0, group_size=1))])
    async with tickets_of(broker, keys) as consumer:
        (delivery,) = await consumer.fetch(1, 1.0)
        arrived = late_answers(consumer, "publish_sample")
        sample = make_trajectory(0, 0, group_size=1)
        work = consumer.publish_sample(delivery, keys.trajectories(), keys.progress(0), sample)
        await assert_nothing_is_called_lost(consumer, delivery, arrived, work)


async def test_a_score(broker, keys, late_answers):
    await append(broker, keys.trajectories(), make_trajectory(0, 0))
    async with samples_of(broker, keys) as consumer:
        (delivery,) = await consumer.fetch(1, 1.0)
        arrived = late_answers(consumer, "complete")
        work = consumer.complete([(delivery, make_score(0, 0))], keys.scores())
        await assert_nothing_is_called_lost(consumer, delivery, arrived, work)


async def test_what_another_worker_has_taken_is_still_called_lost(broker, keys):
    await append(broker, keys.trajectories(), make_trajectory(0, 0))
    async with samples_of(broker, keys) as consumer:
        (delivery,) = await consumer.fetch(1, 1.0)
        await broker.execute("XCLAIM", consumer.key, consumer.group, "other", 0, delivery.entry_id)
        await consumer.renew()
        assert delivery.is_lost


async def test_another_sample_of_the_group_that_was_answered_before(broker, keys, monkeypatch):
    """Two samples settle one ticket side by side; the one answered first does not speak for the other."""
    await append_numbered(broker, keys.prompts(), [(0, make_ticket(0, group_size=2))])
    async with tickets_of(broker, keys) as consumer:
        (delivery,) = await consumer.fetch(1, 1.0)
        arrived = [asyncio.Event(), asyncio.Event()]
        script, calls = consumer.broker.script, iter(arrived)

        async def delayed(called: str, *arguments: Any) -> Any:
            event = next(calls) if called == "publish_sample" else None
            answer = await script(called, *arguments)
            if event:
                await event.wait()
            return answer

        monkeypatch.setattr(consumer.broker, "script", delayed)
        samples = [make_trajectory(0, index, group_size=2) for index in range(2)]
        first, last = (
            asyncio.ensure_future(
                consumer.publish_sample(delivery, keys.trajectories(), keys.progress(0), sample)
            )
            for sample in samples
        )
        await wait_until(lambda: acknowledged(consumer))
        arrived[0].set()
        await first
        await assert_nothing_is_called_lost(consumer, delivery, arrived[1], last)
