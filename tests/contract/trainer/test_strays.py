"""Someone writes into a stream of numbered entries by hand, and the run goes on."""

import asyncio
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from tests.support.letters import make_ticket
from tests.support.training import answering, append_at, messages
from tests.support.trajectories import make_commit
from tests.support.waiting import wait_until
from tests.support.whole_trainer import assert_trained_once, crash_after_commit, run
from tidemill.common.errors import TidemillError
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import START, ensure_group, entry_id_of, group_status, last_id
from tidemill.common.wire.codec import PAYLOAD_FIELD, SCHEMA, VERSION_FIELD
from tidemill.common.wire.keys import ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import DeadLetter, Lane, Ticket, WeightManifest
from tidemill.services.rollout.engines.simulated import SimulatedEngine
from tidemill.services.rollout.weight_follower import WeightFollower
from tidemill.services.trainer.batch.unexpected_entries import remove_unexpected
from tidemill.services.trainer.durable.commits import append_commit

NUMBERED: list[Callable[[Keys], str]] = [
    lambda keys: keys.prompts(),
    lambda keys: keys.weights,
    lambda keys: keys.commits,
]
each_stream = pytest.mark.parametrize("key_of", NUMBERED, ids=["prompts", "weights", "commits"])


@each_stream
async def test_an_unexpected_entry_before_the_trainer_and_in_the_middle_of_a_run_is_moved_aside(
    make, broker, keys, key_of
):
    key = key_of(keys)
    strays = [(await broker.execute("XADD", key, "*", "by", "hand")).decode()]
    serving = asyncio.ensure_future(run(make()))
    await wait_until(lambda: broker.execute("XLEN", keys.prompts()))
    strays.append((await broker.execute("XADD", key, "*", "by", "hand")).decode())
    async with answering(broker, keys):
        await serving
    await assert_trained_once(broker, keys, 6)
    for stray in strays:
        await assert_moved(broker, keys, key, stray)


@each_stream
@pytest.mark.parametrize("entry_id", ["*", "9-0", "3-7"], ids=["time", "number", "sequence"])
@pytest.mark.usefixtures("answers")
async def test_one_that_comes_between_two_trainers_is_moved_aside(make, broker, keys, key_of, entry_id):
    await crash_after_commit(make(), 1)
    key = key_of(keys)
    if "prompts" in key and entry_id != "*":
        entry_id = entry_id.replace("9", "99").replace("3-", "8-")
    stray = (await broker.execute("XADD", key, entry_id, "by", "hand")).decode()
    await run(make())
    await assert_trained_once(broker, keys, 6)
    await assert_moved(broker, keys, key, stray)


async def test_a_stray_entry_among_the_tickets_of_an_evaluation_does_not_skip_it(make, broker, keys):
    key = keys.prompts(Lane.EVAL)
    stray = (await broker.execute("XADD", key, "*", "by", "hand")).decode()
    async with answering(broker, keys):
        await run(make(steps=1, has_eval=True))
    await assert_moved(broker, keys, key, stray)
    assert {ticket.step for ticket in await messages(broker, key, Ticket)} == {0, 1}


async def test_the_group_is_taken_back_with_its_stream(broker, keys):
    """Or its consumers would never be given the tickets that follow."""
    key = keys.prompts()
    await ensure_group(broker, key, ROLLOUT_GROUP)
    await append_at(broker, key, entry_id_of(0), make_ticket(0))
    stray = (await broker.execute("XADD", key, "*", "by", "hand")).decode()
    await broker.execute("XREADGROUP", "GROUP", ROLLOUT_GROUP, "w", "STREAMS", key, ">")
    assert await remove_unexpected(broker, keys, key, Ticket) == 1
    assert await last_id(broker, key) == "1-0"
    status = await group_status(broker, key, ROLLOUT_GROUP)
    assert status is not None and (status.last_delivered, status.pending) == ("1-0", 1)
    assert await remove_unexpected(broker, keys, key, Ticket) == 0
    await assert_moved(broker, keys, key, stray)


async def test_an_entry_that_someone_has_removed_by_hand_leaves_no_gap(broker, keys):
    key = keys.weights
    await append_at(broker, key, entry_id_of(4), manifest(4))
    stray = (await broker.execute("XADD", key, "*", "by", "hand")).decode()
    await broker.execute("XDEL", key, stray)
    await remove_unexpected(broker, keys, key, WeightManifest)
    assert await last_id(broker, key) == "5-0"
    assert await broker.execute("XLEN", keys.dead) == 0


async def test_an_entry_of_a_newer_release_is_not_touched(broker, keys):
    commit = make_commit(0, groups=(), digest="0" * 32)
    await broker.execute("XADD", keys.commits, "1-0", VERSION_FIELD, "9.0", PAYLOAD_FIELD, b"?")
    with pytest.raises(TidemillError, match="1-0"):
        await append_commit(broker, keys, commit)
    assert await broker.execute("XLEN", keys.commits) == 1


async def test_a_worker_is_stuck_at_no_stray_entry_among_the_weights(make, broker, keys, monkeypatch):
    """Nor behind one that was moved aside after the worker has read it."""
    context = make()
    engine = SimulatedEngine(context.config)
    follower = WeightFollower(context, engine)
    monkeypatch.setattr(follower, "_load_from", lambda _, manifest: engine.load(manifest.version, []))
    following = asyncio.ensure_future(follower.run())
    try:
        await append_at(broker, keys.weights, "1-0", manifest(0))
        with capture_logs() as logs:
            stray = (await broker.execute("XADD", keys.weights, "*", "by", "hand")).decode()
            await wait_until(lambda: any(line.get("entry") == stray for line in logs))
        await remove_unexpected(broker, keys, keys.weights, WeightManifest)
        await append_at(broker, keys.weights, "2-0", manifest(1))
        await asyncio.wait_for(follower.reach(1), 120)
    finally:
        following.cancel()


def manifest(version: int) -> WeightManifest:
    return WeightManifest(version=version, folder=f"v{version:08d}", files=(), digest="0" * 32)


async def assert_moved(broker: Broker, keys: Keys, key: str, stray: str) -> None:
    """The entry is in the dead letters, once, with its bytes, and in its stream no more."""
    letters = [letter for letter in await messages(broker, keys.dead, DeadLetter) if letter.entry_id == stray]
    assert [(letter.origin, letter.fields) for letter in letters] == [(keys.name_of(key), {"by": b"hand"})]
    assert not await broker.execute("XRANGE", key, stray, stray)


async def test_a_stream_that_has_vanished_meanwhile_has_no_strays(broker, keys):
    arguments = [SCHEMA, START, entry_id_of(4), b""]
    assert await broker.script("move_aside", [keys.prompts(), keys.dead], arguments) == -1
