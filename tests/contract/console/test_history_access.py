"""Who wants to look at a run finds its history: in its Redis, in what that left, or is told what to do;
and where the entries of a ticket lie in a long stream."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from tests.support.archives import archive
from tests.support.numbered import append_numbered
from tests.support.trajectories import make_config, make_trajectory
from tidemill.common.archive import mark_whole
from tidemill.common.history import History, StreamName
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.run.state import publish_config
from tidemill.common.streams import append
from tidemill.common.wire import codec
from tidemill.common.wire.codec import SCHEMA
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit, SamplingParams, Score, ScoreStatus, Ticket
from tidemill.services.console.look.joins import CLOCK_SPARE_S, near_tickets, read_group
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.console.run.history import MissingHistoryError, open_history


async def write_run(broker: Broker, folder: RunFolder) -> None:
    config = make_config(run_id=folder.run_id)
    folder.create(config)
    await publish_config(broker, Keys(folder.run_id), config)
    await append(broker, Keys(folder.run_id).trajectories(), make_trajectory(3))


async def num_trajectories(run: str, runs: Path) -> int:
    async with open_history(run, runs) as access:
        assert access.config is not None
        return len([record async for record in access.history.scan(StreamName.TRAJECTORIES)])


@pytest.fixture(autouse=True)
def no_server_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDEMILL_REDIS_URL", raising=False)


async def test_a_live_run_is_read_from_its_redis(broker, keys, redis_server, tmp_path):
    folder = RunFolder(tmp_path, keys.run_id)
    await write_run(broker, folder)
    folder.write_address(redis_server.url)
    async with open_history(None, tmp_path) as access:
        assert (access.run_id, access.source) == (keys.run_id, "Redis")
    assert await num_trajectories(keys.run_id, tmp_path) == 1


async def test_a_finished_run_is_read_from_the_data_of_its_redis_or_from_an_archive_that_has_everything(
    tmp_path,
):
    folder = RunFolder(tmp_path, "one")
    server = EmbeddedRedis(folder.redis_data)
    server.start()
    broker = await Broker.connect(server.url)
    await write_run(broker, folder)
    await archive(broker, Keys("one"), folder.path)
    await append(broker, Keys("one").trajectories(), make_trajectory(4))
    await broker.close()
    server.stop()
    for _ in range(2):
        assert await num_trajectories("one", tmp_path) == 2, "the archive lacks what came after it"
    server.start()  # it refuses while another process serves the data
    server.stop()
    mark_whole(folder.path, True)
    async with open_history("one", tmp_path) as access:
        assert access.history.broker is None and access.is_over, "no Redis is started"
    mark_whole(folder.path, False)  # the run goes on
    assert await num_trajectories("one", tmp_path) == 2


async def test_where_nothing_is_left_it_says_what_to_do(redis_server, monkeypatch, tmp_path):
    RunFolder(tmp_path, "one").create(make_config(run_id="one"))
    with pytest.raises(MissingHistoryError, match="run one"):
        await num_trajectories("one", tmp_path)
    monkeypatch.setenv("TIDEMILL_REDIS_URL", redis_server.url)
    with pytest.raises(MissingHistoryError, match="does not know it"):
        await num_trajectories("nothing", tmp_path)


NUM_TICKETS = 40
BEGIN_S = 1_700_000_000
STEP_S = 60


def ms_of(ticket: int) -> int:
    """When its entries are appended; it was issued 20 s before, and is trained 20 s after."""
    return 1000 * (BEGIN_S + ticket * STEP_S)


async def write_stretch(broker: Broker, keys: Keys, times_ms: Iterable[int]) -> None:
    """A ticket of one sample for each step."""
    tickets = [
        Ticket(ticket=n, step=n, min_version=n, group_size=1, prompt_ids=np.arange(2, dtype=np.int32),
               sampling=SamplingParams(max_tokens=8), issued_at=ms_of(n) / 1000 - 20)
        for n in range(NUM_TICKETS)
    ]  # fmt: skip
    commits = [
        Commit(
            step=n, version=n + 1, groups=(n,), mini_batches=((((n, 0),),),), finished_at=ms_of(n) / 1000 + 20
        )
        for n in range(NUM_TICKETS)
    ]
    await append_numbered(broker, keys.prompts(), enumerate(tickets))
    await append_numbered(broker, keys.commits, enumerate(commits))
    for ms, n in sorted(zip(times_ms, range(NUM_TICKETS), strict=True)):
        score = Score(ticket=n, index=0, status=ScoreStatus.OK, value=1.0)
        for key, message in (
            (keys.trajectories(), make_trajectory(n, 0, group_size=1)),
            (keys.scores(), score),
        ):
            payload = codec.encode_payload(message)
            await broker.execute("XADD", key, f"{ms}-0", "v", SCHEMA, "p", payload)


@pytest.mark.parametrize("ticket", [0, 7, NUM_TICKETS - 1])
async def test_a_window_holds_the_ticket_and_little_else(broker, keys, ticket):
    await write_stretch(broker, keys, map(ms_of, range(NUM_TICKETS)))
    history = History(keys.run_id, None, broker)
    near = await near_tickets(history, ticket, ticket, commit=await history.commit(ticket))
    for stream in (StreamName.TRAJECTORIES, StreamName.SCORES):
        entries = await broker.execute("XRANGE", stream.key(keys), near.first_id, near.last_id)
        assert f"{ms_of(ticket)}-0".encode() in dict(entries)
        assert len(entries) <= 1 + 2 * (1 + CLOCK_SPARE_S // STEP_S)
    in_flight = await near_tickets(history, ticket, ticket)
    assert (in_flight.first_id, in_flight.last_id) == (near.first_id, "+")


async def test_a_group_is_found_wherever_it_lies(broker, keys):
    """Its entries have the times of a clock that is wrong."""
    times_ms = [ms_of(n) for n in range(NUM_TICKETS)]
    times_ms[2] = ms_of(10**4)
    await write_stretch(broker, keys, times_ms)
    group = await read_group(History(keys.run_id, None, broker), 2)
    assert group.is_trained and group.is_whole
