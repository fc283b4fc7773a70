"""What `tidemill dead requeue` and `drop` do to the streams: once, in place, and only where it helps; what
the trainer does about messages that died: dead-letters what only it reads, and heeds the operator."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.letters import dead_letter_next, make_ticket, samples_of, tickets_of, write_letter
from tests.support.numbered import append_numbered
from tests.support.recorded_sessions import as_session
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
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import update_state
from tidemill.common.streams import (
    Delivery,
    OffsetReader,
    append,
    ensure_group,
    group_status,
    length,
    scan,
)
from tidemill.common.streams.requeueing import remove_entries
from tidemill.common.wire import codec
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import Commit, DeadLetter, Lane, Score, Ticket, Trajectory
from tidemill.services.console.commands import DeadFilter
from tidemill.services.console.look.dead_letters import DeadEntry, Requeuer, RequeueResult, read_dead
from tidemill.services.trainer.batch.batch_assembler import BatchAssembler
from tidemill.services.trainer.batch.reconciler import Reconciler, RunStreams
from tidemill.services.trainer.evaluation import Evaluator
from tidemill.services.trainer.groups.group_filter import GroupFilter

EVERYTHING = DeadFilter()
CONFIG = trainer_config(streams__lease_s=1.0)


async def letters(broker: Broker, keys: Keys, wanted: DeadFilter = EVERYTHING) -> list[DeadEntry]:
    return await read_dead(scan(broker, keys.dead, DeadLetter), wanted, None)


async def put_back(broker: Broker, keys: Keys) -> RequeueResult:
    (letter,) = await letters(broker, keys)
    return await (await Requeuer.open(broker, keys, CONFIG)).put_back(letter)


async def dead_ticket(broker: Broker, keys: Keys, lane: Lane = Lane.TRAIN, **fields: Any) -> Ticket:
    ticket = make_ticket(3, **fields)
    await append_numbered(broker, keys.prompts(lane), [(3, ticket)])
    async with tickets_of(broker, keys, lane) as consumer:
        await dead_letter_next(consumer, keys)
    return ticket


async def taken_again(consumer: Any) -> Delivery[Any]:
    async def fetch() -> Any:
        return await consumer.fetch(1, 0.0)

    (delivery,) = await wait_until(fetch)
    return delivery  # type: ignore[no-any-return]


@pytest.mark.parametrize("lane", Lane)
async def test_a_dead_ticket_is_handed_out_again_under_its_own_number(broker, keys, lane):
    ticket = await dead_ticket(broker, keys, lane)
    assert (await put_back(broker, keys)).is_done
    assert await length(broker, keys.prompts(lane)) == 1, "nothing was appended"
    async with tickets_of(broker, keys, lane, "w2") as consumer:
        delivery = await taken_again(consumer)
    assert (delivery.entry_id, delivery.message, delivery.attempts) == ("4-0", ticket, 1)
    assert await letters(broker, keys) == []


async def test_what_a_dead_group_has_published_is_not_generated_again(broker, keys):
    """The worker that dead-lettered the ticket has forgotten its progress; the log has not."""
    await append(broker, keys.trajectories(), make_trajectory(3, 1, group_size=2, spans=((7, 0),)))
    await append(broker, keys.trajectories(), make_trajectory(4, 0, group_size=2))
    await dead_ticket(broker, keys)
    assert (await put_back(broker, keys)).is_done
    raw = await broker.execute("HGETALL", keys.progress(3))
    assert dict(zip(raw[::2], raw[1::2], strict=True)) == {b"version": b"7", b"1": b""}


@pytest.mark.parametrize("lane", Lane)
async def test_a_dead_trajectory_is_scored_again_and_stands_in_the_log_once(broker, keys, lane):
    await append_numbered(broker, keys.prompts(lane), [(3, make_ticket(3))])
    sample = as_session(make_trajectory(3, 1, group_size=2))
    await append(broker, keys.trajectories(lane), sample)
    async with samples_of(broker, keys, lane) as consumer:
        await dead_letter_next(consumer, keys)
    assert (await put_back(broker, keys)).is_done
    async with samples_of(broker, keys, lane, "w2") as consumer:
        delivery = await taken_again(consumer)
        assert await consumer.complete([(delivery, make_score(3, 1))], keys.scores(lane)) == [True]
    assert await messages(broker, keys.trajectories(lane), Trajectory) == [sample]
    status = await group_status(broker, keys.trajectories(lane), REWARD_GROUP)
    assert status is not None and status.pending == 0


async def test_a_score_that_can_be_read_now_is_appended_again_byte_by_byte(broker, keys):
    await append_numbered(broker, keys.prompts(), [(3, make_ticket(3))])
    score = make_score(3, 0, 0.5)
    await write_letter(broker, keys, "scores", score)
    assert (await put_back(broker, keys)).is_done
    ((_, raw),) = await broker.execute("XRANGE", keys.scores(), "-", "+")
    assert raw == [b"v", codec.SCHEMA, b"p", codec.encode_payload(score)]
    assert await messages(broker, keys.scores(), Score) == [score]


@pytest.mark.parametrize("origin", ["prompts", "scores"])
async def test_two_operators_at_once_put_a_message_back_once(broker, keys, origin):
    await dead_ticket(broker, keys)
    if origin == "scores":
        await broker.execute("DEL", keys.dead)
        await write_letter(broker, keys, "scores", make_score(3, 0))
    (letter,) = await letters(broker, keys)
    requeuers = [await Requeuer.open(broker, keys, CONFIG) for _ in range(4)]
    results = await asyncio.gather(*(requeuer.put_back(letter) for requeuer in requeuers))
    assert sorted(result.is_done for result in results) == [False, False, False, True]
    assert "somebody has put it back" in next(result.words for result in results if not result.is_done)
    status = await group_status(broker, keys.prompts(), ROLLOUT_GROUP)
    assert (await length(broker, keys.scores()), status and status.pending) in ((0, 1), (1, 0))


DROPPED = Commit(step=0, version=1, mini_batches=(((),),), groups=(), dropped=((3, -1, "dead"),))
TRAINED = Commit(step=0, version=1, mini_batches=((((3, 0), (3, 1)),),), groups=(3,))
REPLACEMENT = make_ticket(9, step=3, replaces=3)
OF_DEAD_TICKETS: dict[str, Callable[[Broker, Keys], Any]] = {
    "replaced by ticket 9": lambda broker, keys: append_numbered(broker, keys.prompts(), [(9, REPLACEMENT)]),
    "the commit of step 0 tells of it": lambda broker, keys: append_numbered(
        broker, keys.commits, [(0, DROPPED)]
    ),
    "trained at step 0": lambda broker, keys: append_numbered(broker, keys.commits, [(0, TRAINED)]),
    "has been trimmed": lambda broker, keys: broker.execute("XTRIM", keys.prompts(), "MINID", "5-0"),
    "the run is finished": lambda broker, keys: update_state(broker, keys, status="finished"),
}
OF_LETTERS: dict[str, Callable[[Broker, Keys], Any]] = {
    "too old for its step": lambda broker, keys: write_letter(
        broker, keys, "trajectories", make_trajectory(3), entry_id="", ticket=3, index=0
    ),
    "still cannot be decoded": lambda broker, keys: write_letter(broker, keys, "prompts", b"\xc1"),
    "'weights' is written by the trainer": lambda broker, keys: write_letter(
        broker, keys, "weights", b"\x80"
    ),
    "'no such stream' is written": lambda broker, keys: write_letter(broker, keys, "no such stream", b"\x80"),
    "itself cannot be decoded": lambda broker, keys: broker.execute(
        "XADD", keys.dead, "*", "v", b"9.0", "p", b"?"
    ),
}


@pytest.mark.parametrize("reason", OF_DEAD_TICKETS | OF_LETTERS)
async def test_what_can_no_longer_matter_is_refused_and_stays(broker, keys, reason):
    if reason in OF_DEAD_TICKETS:
        await dead_ticket(broker, keys)
        (letter,) = await letters(broker, keys)
        before = await Requeuer.open(broker, keys, CONFIG)
        assert "not replaced yet" in await before.reason_to_keep(letter), "the trainer has yet to act on it"
    await (OF_DEAD_TICKETS | OF_LETTERS)[reason](broker, keys)
    result = await put_back(broker, keys)
    assert not result.is_done and reason in result.words
    (letter,) = await letters(broker, keys)
    assert await (await Requeuer.open(broker, keys, CONFIG)).reason_to_keep(letter) == ""


async def test_an_evaluation_that_is_on_record_is_refused(broker, keys):
    await dead_ticket(broker, keys, Lane.EVAL, step=2)
    await update_state(broker, keys, evaluations=[{"version": 2, "set": "held"}])
    assert "evaluation of version 2 is on record" in (await put_back(broker, keys)).words


async def test_filters_choose_letters(broker, keys):
    await write_letter(broker, keys, "prompts", make_ticket(3), error="Too Long", worker="rollout-0")
    sample = make_trajectory(4, 1)
    await write_letter(broker, keys, "trajectories:eval", sample, error="boom", worker="reward-1")
    for wanted, value in (
        (DeadFilter(), [(3, -1), (4, 1)]),
        (DeadFilter(stream="prompts"), [(3, -1)]),
        (DeadFilter(error="too long"), [(3, -1)]),
        (DeadFilter(ticket=3), [(3, -1)]),
        (DeadFilter(worker="reward"), [(4, 1)]),
        (DeadFilter(stream="trajectories:eval"), [(4, 1)]),
        (DeadFilter(stream="trajectories"), []),
    ):
        assert [letter.key for letter in await letters(broker, keys, wanted)] == value, wanted


GARBAGE = {"v": b"1.0", "p": b"\xc1"}
NEWER = {"v": b"2.0", "p": b"\x80"}


def make_assembler(broker, keys, **trainer) -> BatchAssembler:
    config = trainer_config(**trainer)
    scheduler, join = make_parts(broker, keys, config)
    streams = RunStreams(scheduler, join, Reconciler(broker, keys, scheduler))
    return BatchAssembler(make_context(broker, keys, config), streams, GroupFilter(config))


async def write_raw(broker, key: str, fields: dict[str, bytes]) -> str:
    flat = [word for pair in fields.items() for word in pair]
    return (await broker.execute("XADD", key, "*", *flat)).decode()


async def letters_left(broker, keys: Keys) -> list[DeadLetter]:
    return await messages(broker, keys.dead, DeadLetter)


async def test_a_score_that_nobody_can_read_is_dead_lettered_once_with_its_bytes(broker, keys):
    for fields in (GARBAGE, NEWER):
        await write_raw(broker, keys.scores(), fields)
    for _ in range(2):  # a trainer that was started again without a checkpoint reads them again
        _, join = make_parts(broker, keys, trainer_config())
        join.expect(outstanding(0))
        async with reading(join):
            await append(broker, keys.scores(), make_score(0, 0))
            await wait_until(lambda join=join: join.groups[0].scores, awaited="what is behind it is read")
    dead = await letters_left(broker, keys)
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
