"""What the trainer does about messages that died: buries what only it reads, and heeds the operator."""

import asyncio

from tests.support.letters import tickets_of
from tests.support.training import (
    make_context,
    make_parts,
    make_prompts,
    make_score,
    make_trimmer,
    messages,
    outstanding,
    publish_group,
    reading,
    trainer_config,
)
from tests.support.trajectories import make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.streams import OffsetReader, append, ensure_group, remove_entries
from tidemill.common.wire.keys import REWARD_GROUP, Keys
from tidemill.common.wire.messages import DeadLetter, Lane, Ticket
from tidemill.services.trainer.batch.batch_assembler import BatchAssembler
from tidemill.services.trainer.batch.reconciler import Reconciler, RunStreams
from tidemill.services.trainer.evaluation import Evaluator
from tidemill.services.trainer.groups.group_filter import GroupFilter

GARBAGE = {"v": b"1.0", "p": b"\xc1"}
NEWER = {"v": b"2.0", "p": b"\x80"}


def make_assembler(broker, keys, **trainer) -> BatchAssembler:
    config = trainer_config(**trainer)
    scheduler, join = make_parts(broker, keys, config)
    streams = RunStreams(scheduler, join, Reconciler(broker, keys, scheduler))
    return BatchAssembler(make_context(broker, keys, config), streams, GroupFilter(config))


async def write_raw(broker, key: str, fields: dict[str, bytes]) -> str:
    flat = [part for pair in fields.items() for part in pair]
    return (await broker.execute("XADD", key, "*", *flat)).decode()


async def letters(broker, keys: Keys) -> list[DeadLetter]:
    return await messages(broker, keys.dead, DeadLetter)


async def test_a_score_that_nobody_can_read_is_dead_lettered_once_with_its_bytes(broker, keys):
    for fields in (GARBAGE, NEWER):
        await write_raw(broker, keys.scores(), fields)
    for _ in range(2):  # a trainer that was started again without a checkpoint reads them again
        _, join = make_parts(broker, keys, trainer_config())
        join.expect(outstanding(0))
        async with reading(join):
            await append(broker, keys.scores(), make_score(0, 0))
            await wait_until(lambda join=join: join.groups[0].scores, what="what is behind it is read")
    dead = await letters(broker, keys)
    assert [letter.origin for letter in dead] == ["scores", "scores"]
    assert [letter.fields for letter in dead] == [GARBAGE, NEWER]
    assert "schema 2.0 cannot be read" in dead[1].error


async def test_a_group_whose_score_died_is_replaced_soon_and_not_after_minutes(broker, keys):
    """`reissue_after_s` is a patient 300 s: what can be known at once is not waited for."""
    assembler = make_assembler(broker, keys)
    await assembler.scheduler.admit(0)
    await work_off(broker, keys, 0)
    await append(broker, keys.scores(), make_score(0, 0))
    await write_raw(broker, keys.scores(), GARBAGE)
    await publish_group(broker, keys, 1)
    async with reading(assembler.join):
        taking = asyncio.ensure_future(assembler.take(0, 2))
        (first,) = await asyncio.wait_for(taking, 120)
        assert first.ticket == 1
        taking = asyncio.ensure_future(assembler.take(0, 1))

        async def replacement() -> list[Ticket]:
            return [t for t in await messages(broker, keys.prompts(), Ticket) if t.replaces == 0]

        (fresh,) = await wait_until(replacement)
        await publish_group(broker, keys, fresh.ticket)
        assert [group.ticket for group in await asyncio.wait_for(taking, 120)] == [fresh.ticket]
    assert assembler.drain_dropped() == [(0, -1, "lost: unreadable or refused")]


async def work_off(broker, keys: Keys, ticket: int) -> None:
    """The ticket is generated, and both its trajectories are acknowledged; the scores are the test's."""
    async with tickets_of(broker, keys) as consumer:
        (delivery,) = await consumer.fetch(1, 1.0)
        assert delivery.message.ticket == ticket
        await ensure_group(broker, keys.trajectories(), REWARD_GROUP)
        for index in range(2):
            sample = make_trajectory(ticket, index, group_size=2)
            await consumer.publish_sample(delivery, keys.trajectories(), keys.progress(ticket), sample)
    raw = await broker.execute(
        "XREADGROUP", "GROUP", REWARD_GROUP, "w", "COUNT", 2, "STREAMS", keys.trajectories(), ">"
    )
    ids = [entry_id for entry_id, _ in raw[0][1]]
    await broker.execute("XACK", keys.trajectories(), REWARD_GROUP, *ids)


async def test_a_group_whose_letter_the_operator_took_back_is_not_replaced(broker, keys):
    assembler = make_assembler(broker, keys)
    await assembler.scheduler.admit(0)
    letter = DeadLetter(origin="prompts", entry_id="1-0", error="refused", ticket=0)
    (letter_id,) = await append(broker, keys.dead, letter)
    async with reading(assembler.join):
        await wait_until(lambda: 0 in assembler.join.dead)
        await remove_entries(broker, keys.dead, [letter_id])  # as `requeue` does
        for ticket in (1, 0):
            await publish_group(broker, keys, ticket)
        await wait_until(lambda: len(assembler.join.complete) == 2)
        groups = await assembler.take(0, 2)
    assert sorted(group.ticket for group in groups) == [0, 1]
    assert assembler.drain_dropped() == []


async def test_an_evaluation_waits_for_what_the_operator_put_back(broker, keys, monkeypatch):
    read_letter = asyncio.Event()
    read = OffsetReader.read

    async def note(reader: OffsetReader, *arguments) -> list:
        entries = await read(reader, *arguments)
        if reader.key == keys.dead and entries:
            read_letter.set()
        return entries

    monkeypatch.setattr(OffsetReader, "read", note)
    context = make_context(broker, keys, trainer_config(evaluation={"samples": 1}))
    evaluator = Evaluator(context, {"held": make_prompts(2).prompts}, make_trimmer(context))
    letter = DeadLetter(origin="prompts:eval", entry_id="1-0", error="refused", ticket=0)
    (letter_id,) = await append(broker, keys.dead, letter)
    evaluating = asyncio.ensure_future(evaluator.evaluate(0))
    await asyncio.wait_for(read_letter.wait(), 120)
    await remove_entries(broker, keys.dead, [letter_id])  # as `requeue` does
    await answer(broker, keys, 1)
    assert not (await asyncio.wait({evaluating}, timeout=1.0))[0], "the other sample is not all of it"
    await answer(broker, keys, 0)
    result = (await asyncio.wait_for(evaluating, 120))["held"]
    assert (result["num_samples"], result["num_failed"]) == (2, 0)


async def answer(broker, keys: Keys, ticket: int) -> None:
    await append(broker, keys.trajectories(Lane.EVAL), make_trajectory(ticket, 0, group_size=1))
    await append(broker, keys.scores(Lane.EVAL), make_score(ticket, 0))
