"""The folder of large trajectories is away for a while: everybody waits for it, and no sample has failed."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import SERVERS
from tests.support.archives import archive, scanned
from tests.support.rewards import num_pending, scores, worker
from tests.support.trajectories import make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.errors import StoreError
from tidemill.common.history import History
from tidemill.common.redis.broker import Broker
from tidemill.common.store import ClaimStore, claims
from tidemill.common.streams import Entry, OffsetReader, append, length
from tidemill.common.wire.choices import Rows
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Choices, Message, ScoreStatus, Trajectory

pytestmark = pytest.mark.parametrize("redis_server", sorted(SERVERS)[:1], indirect=True)


class CountingStore(ClaimStore):
    """Counts how often it was asked while it was away."""

    num_refused = 0

    def resolve(self, message: Message, reads_choices: bool | None = None) -> Message:
        try:
            return super().resolve(message, reads_choices)
        except StoreError:
            self.num_refused += 1
            raise


@pytest.fixture
def store(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CountingStore:
    monkeypatch.setattr(claims, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(claims, "LONGEST_PAUSE_S", 0.01)
    store = CountingStore(tmp_path, 1)
    broker.claims = store
    return store


@pytest.mark.parametrize("has_choices", [False, True])
async def test_the_store_is_opened_where_the_first_payload_is_named(
    broker: Broker, keys: Keys, tmp_path: Path, has_choices: bool
) -> None:
    """A reader of choices that has not opened the store yet reads them, too."""
    broker.open_claims = lambda: ClaimStore(tmp_path)
    broker.read_choices()
    reader = OffsetReader(broker, keys.trajectories(), Trajectory)
    await append(broker, keys.trajectories(), make_trajectory(0))
    await reader.read()
    assert not broker.has_opened_claims
    choices = Choices(rows={"kept": Rows.of_lists([[1], [2], [3]])}) if has_choices else None
    sample = make_trajectory(1, completion_ids=np.arange(1, 4, dtype=np.int32), choices=choices)
    elsewhere = ClaimStore(tmp_path, 0 if has_choices else 1)
    sent = elsewhere.check_in_choices(sample) if has_choices else elsewhere.check_in(sample)
    await append(broker, keys.trajectories(), sent)
    (entry,) = await reader.read()
    assert isinstance(entry, Entry) and broker.has_opened_claims
    read = entry.message
    assert not read.fault and not read.lacks_choices
    assert read.completion_ids.tolist() == [1, 2, 3]


async def publish(broker: Broker, keys: Keys, store: ClaimStore, count: int = 4) -> list[Trajectory]:
    samples = [make_trajectory(0, index, text=f"#### {index}", group_size=count) for index in range(count)]
    await append(broker, keys.trajectories(), *map(store.check_in, samples))
    return samples


def go_away(store: ClaimStore) -> None:
    store.folder.rename(store.folder.with_name("away"))


def come_back(store: ClaimStore) -> None:
    store.folder.with_name("away").rename(store.folder)


@pytest.mark.parametrize("reward", [{}, {"group": "rank"}], ids=["samples", "groups"])
async def test_a_reward_worker_waits_and_scores_what_it_holds(broker, keys, store, reward):
    await publish(broker, keys, store)
    go_away(store)
    async with worker(broker, keys, **reward):
        await wait_until(lambda: store.num_refused > 8)
        come_back(store)
        scored = await scores(broker, keys, 4)
    assert [score.status for score in scored] == [ScoreStatus.OK] * 4
    assert await length(broker, keys.dead) == 0


async def test_a_worker_that_is_asked_to_stop_meanwhile_hands_back_what_it_holds(broker, keys, store):
    await publish(broker, keys, store)
    go_away(store)
    async with worker(broker, keys):
        await wait_until(lambda: store.num_refused > 0)
    assert await length(broker, keys.scores()) == await length(broker, keys.dead) == 0
    come_back(store)
    async with worker(broker, keys, "w2"):
        assert [score.attempts for score in await scores(broker, keys, 4)] == [1] * 4


async def test_what_one_worker_cannot_read_for_a_lease_another_one_scores(
    broker, keys, store, redis_server, tmp_path
):
    await publish(broker, keys, store)
    elsewhere = await Broker.connect(redis_server.url)
    blind = CountingStore(tmp_path / "not mounted", 1)
    elsewhere.claims = blind
    try:
        async with worker(elsewhere, keys, "blind"):
            await wait_until(lambda: blind.num_refused > 0)
            async with worker(broker, keys, "seeing"):
                scored = await scores(broker, keys, 4)
    finally:
        await elsewhere.close()
    assert {(score.worker, score.status) for score in scored} == {("seeing", ScoreStatus.OK)}
    assert await num_pending(broker, keys) == 0


async def test_samples_that_came_with_one_that_is_waited_for_are_scored_meanwhile(
    broker, keys, store, monkeypatch
):
    samples = await publish(broker, keys, store)
    is_back = asyncio.Event()

    def resolve(message: Trajectory) -> Message:
        if message.index == 1 and not is_back.is_set():
            raise StoreError("away")
        return ClaimStore.resolve(store, message)

    monkeypatch.setattr(store, "resolve", resolve)
    async with worker(broker, keys):
        assert [score.index for score in await scores(broker, keys, 3)] == [0, 2, 3]
        is_back.set()
        scored = await scores(broker, keys, len(samples))
    assert [score.status for score in scored] == [ScoreStatus.OK] * 4


async def test_a_reader_by_offset_gives_whole_trajectories_once_the_store_is_back(broker, keys, store):
    samples = await publish(broker, keys, store)
    go_away(store)
    reading = asyncio.create_task(OffsetReader(broker, keys.trajectories(), Trajectory).read())
    await wait_until(lambda: store.num_refused > 8)
    assert not reading.done()
    come_back(store)
    assert [entry.message for entry in await reading] == samples  # type: ignore[union-attr]


async def test_the_archiver_leaves_in_redis_what_it_cannot_read_just_now(broker, keys, store, tmp_path):
    samples = await publish(broker, keys, store)
    go_away(store)
    with pytest.raises(StoreError):
        await archive(broker, keys, tmp_path)
    history = History(keys.run_id, tmp_path, None)
    assert await scanned(history) == []
    come_back(store)
    assert await archive(broker, keys, tmp_path) == len(samples)
    go_away(store)
    assert [record.message for record in await scanned(history)] == samples  # type: ignore[union-attr]


@pytest.mark.parametrize("keeps", [True, False])
async def test_choices_are_waited_for_by_who_trains_them_and_by_an_archiver_that_keeps_them(
    broker, keys, store, tmp_path, keeps
):
    ids = np.arange(3, dtype=np.int32)
    choices = Choices(rows={"kept": Rows.of_lists([[token, 30] for token in ids.tolist()])})
    sample = make_trajectory(0, 0, group_size=1, completion_ids=ids, choices=choices)
    await append(broker, keys.trajectories(), store.check_in_choices(sample))
    go_away(store)
    if keeps:
        with pytest.raises(StoreError):
            await archive(broker, keys, tmp_path)
    else:
        assert await archive(broker, keys, tmp_path, keep_choices=False) == 1
    store.reads_choices = True
    reading = asyncio.create_task(OffsetReader(broker, keys.trajectories(), Trajectory).read())
    await wait_until(lambda: store.num_refused > 8)
    assert not reading.done()
    come_back(store)
    assert await archive(broker, keys, tmp_path) == keeps
    (read,) = await reading
    (archived,) = await scanned(History(keys.run_id, tmp_path, None))
    rows = [entry.message.choices.rows for entry in (read, archived)]  # type: ignore[union-attr]
    assert rows == [choices.rows, choices.rows if keeps else {}]
