"""What `tidemill dead requeue` and `drop` do to the streams: once, in place, and only where it helps."""

import asyncio
from typing import Any

import pytest

from tests.support.letters import bury_next, make_ticket, samples_of, tickets_of, write_letter
from tests.support.numbered import append_numbered
from tests.support.recorded_sessions import as_session
from tests.support.training import make_score, messages, trainer_config
from tests.support.trajectories import make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import update_state
from tidemill.common.streams import Delivery, append, group_status, length, scan
from tidemill.common.wire import codec
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import Commit, DeadLetter, Lane, Score, Ticket, Trajectory
from tidemill.services.console.dead.entries import DeadEntry, read_dead
from tidemill.services.console.dead.requeue import Requeuer, RequeueResult
from tidemill.services.console.options import DeadFilter

EVERYTHING = DeadFilter()

CONFIG = trainer_config(streams__lease_s=1.0)


async def letters(broker: Broker, keys: Keys, wanted: DeadFilter = EVERYTHING) -> list[DeadEntry]:
    return await read_dead(scan(broker, keys.dead, DeadLetter), wanted, None)


async def put_back(broker: Broker, keys: Keys) -> list[RequeueResult]:
    requeuer = await Requeuer.open(broker, keys, CONFIG)
    return [await requeuer.put_back(letter) for letter in await letters(broker, keys)]


async def refusal(broker: Broker, keys: Keys) -> str:
    """The one letter is not put back; returns why."""
    (verdict,) = await put_back(broker, keys)
    assert not verdict.is_done
    assert len(await letters(broker, keys)) == 1, "a letter that is refused stays"
    return verdict.words


async def dead_ticket(broker: Broker, keys: Keys, lane: Lane = Lane.TRAIN, **fields: Any) -> Ticket:
    ticket = make_ticket(3, **fields)
    await append_numbered(broker, keys.prompts(lane), [(3, ticket)])
    async with tickets_of(broker, keys, lane) as consumer:
        await bury_next(consumer, keys)
    return ticket


async def taken_again(consumer: Any) -> Delivery[Any]:
    async def fetch() -> Any:
        return await consumer.fetch(1, 0.0)

    (delivery,) = await wait_until(fetch)
    return delivery  # type: ignore[no-any-return]


@pytest.mark.parametrize("lane", Lane)
async def test_a_dead_ticket_is_handed_out_again_under_its_own_number(broker, keys, lane):
    ticket = await dead_ticket(broker, keys, lane)
    (verdict,) = await put_back(broker, keys)
    assert verdict.is_done
    assert await length(broker, keys.prompts(lane)) == 1, "nothing was appended"
    async with tickets_of(broker, keys, lane, "w2") as consumer:
        delivery = await taken_again(consumer)
    assert (delivery.entry_id, delivery.message, delivery.attempts) == ("4-0", ticket, 1)
    assert await letters(broker, keys) == []


async def test_what_a_dead_group_has_published_is_not_generated_again(broker, keys):
    """The worker that buried the ticket has forgotten its progress; the log has not."""
    await append_numbered(broker, keys.prompts(), [(3, make_ticket(3))])
    await append(broker, keys.trajectories(), make_trajectory(3, 1, group_size=2, spans=((7, 0),)))
    await append(broker, keys.trajectories(), make_trajectory(4, 0, group_size=2))
    async with tickets_of(broker, keys) as consumer:
        await bury_next(consumer, keys)
    assert (await put_back(broker, keys))[0].is_done
    raw = await broker.execute("HGETALL", keys.progress(3))
    assert dict(zip(raw[::2], raw[1::2], strict=True)) == {b"version": b"7", b"1": b""}


@pytest.mark.parametrize("lane", Lane)
async def test_a_dead_trajectory_is_scored_again_and_stands_in_the_log_once(broker, keys, lane):
    await append_numbered(broker, keys.prompts(lane), [(3, make_ticket(3))])
    sample = as_session(make_trajectory(3, 1, group_size=2))
    await append(broker, keys.trajectories(lane), sample)
    async with samples_of(broker, keys, lane) as consumer:
        await bury_next(consumer, keys)
    assert (await put_back(broker, keys))[0].is_done
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
    assert (await put_back(broker, keys))[0].is_done
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
    verdicts = await asyncio.gather(*(requeuer.put_back(letter) for requeuer in requeuers))
    assert sorted(verdict.is_done for verdict in verdicts) == [False, False, False, True]
    assert "somebody has put it back" in next(v.words for v in verdicts if not v.is_done)
    status = await group_status(broker, keys.prompts(), ROLLOUT_GROUP)
    assert (await length(broker, keys.scores()), status and status.pending) in ((0, 1), (1, 0))


class TestWhatCanNoLongerMatter:
    async def test_a_ticket_that_was_replaced(self, broker, keys):
        await dead_ticket(broker, keys)
        await append_numbered(broker, keys.prompts(), [(9, make_ticket(9, step=3, replaces=3))])
        assert "ticket 3 was replaced by ticket 9" in await refusal(broker, keys)

    async def test_a_ticket_whose_replacement_only_a_commit_tells_of(self, broker, keys):
        await dead_ticket(broker, keys)
        commit = Commit(step=0, version=1, mini_batches=(((),),), groups=(), dropped=((3, -1, "dead"),))
        await append_numbered(broker, keys.commits, [(0, commit)])
        assert "the commit of step 0 tells of it" in await refusal(broker, keys)

    async def test_a_step_that_is_committed(self, broker, keys):
        await dead_ticket(broker, keys)
        commit = Commit(step=0, version=1, mini_batches=((((3, 0), (3, 1)),),), groups=(3,))
        await append_numbered(broker, keys.commits, [(0, commit)])
        assert "trained at step 0, which is committed" in await refusal(broker, keys)

    async def test_an_evaluation_that_is_on_record(self, broker, keys):
        await dead_ticket(broker, keys, Lane.EVAL, step=2)
        await update_state(broker, keys, evaluations=[{"version": 2, "set": "held"}])
        assert "evaluation of version 2 is on record" in await refusal(broker, keys)

    async def test_a_ticket_that_was_trimmed(self, broker, keys):
        await dead_ticket(broker, keys)
        await broker.execute("XTRIM", keys.prompts(), "MINID", "5-0")
        assert "trimmed" in await refusal(broker, keys)

    async def test_a_run_that_is_finished(self, broker, keys):
        await dead_ticket(broker, keys)
        await update_state(broker, keys, status="finished")
        assert "the run is finished" in await refusal(broker, keys)

    async def test_a_trajectory_that_is_too_old(self, broker, keys):
        await write_letter(broker, keys, "trajectories", make_trajectory(3), entry_id="", ticket=3, index=0)
        assert "too old for its step" in await refusal(broker, keys)

    async def test_bytes_that_would_only_die_again(self, broker, keys):
        await write_letter(broker, keys, "prompts", b"\xc1")
        assert "still cannot be decoded" in await refusal(broker, keys)

    @pytest.mark.parametrize("origin", ["weights", "commits", "no such stream"])
    async def test_what_only_the_trainer_writes(self, broker, keys, origin):
        await write_letter(broker, keys, origin, b"\x80")
        assert "written by the trainer alone" in await refusal(broker, keys)

    async def test_a_letter_that_is_garbled_itself(self, broker, keys):
        await broker.execute("XADD", keys.dead, "*", "v", b"9.0", "p", b"?")
        assert "itself cannot be decoded" in await refusal(broker, keys)


async def test_a_letter_that_the_trainer_has_not_acted_on_is_kept(broker, keys):
    await dead_ticket(broker, keys)
    (letter,) = await letters(broker, keys)
    requeuer = await Requeuer.open(broker, keys, CONFIG)
    assert "not replaced yet" in await requeuer.reason_to_keep(letter)
    await append_numbered(broker, keys.prompts(), [(9, make_ticket(9, step=3, replaces=3))])
    requeuer = await Requeuer.open(broker, keys, CONFIG)
    assert await requeuer.reason_to_keep(letter) == ""


async def test_filters_choose_letters(broker, keys):
    await write_letter(broker, keys, "prompts", make_ticket(3), error="Too Long", worker="rollout-0")
    await write_letter(
        broker, keys, "trajectories:eval", make_trajectory(4, 1), error="boom", worker="reward-1"
    )

    async def found(**conditions: Any) -> list[tuple[int, int]]:
        return [letter.key for letter in await letters(broker, keys, DeadFilter(**conditions))]

    assert await found() == [(3, -1), (4, 1)]
    assert (
        await found(stream="prompts") == await found(error="too long") == await found(ticket=3) == [(3, -1)]
    )
    assert await found(worker="reward") == await found(stream="trajectories:eval") == [(4, 1)]
    assert await found(stream="trajectories") == []
