"""Samples of another trainer get their scores whatever happens to Redis and to their trajectories."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.trajectories import make_config, make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.archive import stream_folder
from tidemill.common.archive.manifest import Manifest
from tidemill.common.process.json_api import BusyError, TooLargeError
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import publish_config
from tidemill.common.streams import append, ensure_group, read_range
from tidemill.common.streams.dead_letters import dead_letter
from tidemill.common.streams.departed import DepartedProcesses
from tidemill.common.streams.log import KEPT_LETTERS
from tidemill.common.wire.keys import REWARD_GROUP, Keys
from tidemill.common.wire.messages import DeadLetter, Score, ScoreStatus, Trajectory
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.console.serve import gateway as module
from tidemill.services.console.serve.gateway import RewardGateway, ScoreOut
from tidemill.services.console.serve.samples import SampleIn
from tidemill.services.reward.sample import RewardSample

Start = Callable[..., Any]


@pytest.fixture
def start(broker: Broker, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setattr(module, "WATCH_S", 0.05)

    @asynccontextmanager
    async def started(**sections: Any) -> AsyncIterator[RewardGateway]:
        config = make_config(
            run_id=keys.run_id, **{"reward": {}, "streams": {"archive": {"enabled": False}}, **sections}
        )
        folder = RunFolder(tmp_path, keys.run_id)
        folder.logs.mkdir(parents=True, exist_ok=True)

        async def register(_: Broker) -> None:
            await publish_config(broker, keys, config)
            await ensure_group(broker, keys.trajectories(), REWARD_GROUP)

        run: Any = SimpleNamespace(keys=keys, config=config, folder=folder, env={}, register=register)
        await register(broker)
        gateway = await RewardGateway.open(run, broker)
        running = asyncio.create_task(gateway.run())
        try:
            yield gateway
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    return started


async def appended(broker: Broker, keys: Keys, count: int) -> list[Any]:
    replies: list[Any] = []

    async def are_there() -> bool:
        replies[:] = await read_range(broker, keys.trajectories(), Trajectory)
        return len(replies) >= count

    await wait_until(are_there)
    return replies


def ok(ticket: int, index: int = 0, value: float = 1.0) -> Score:
    return Score(ticket=ticket, index=index, status=ScoreStatus.OK, value=value)


def samples(count: int, **more: Any) -> list[SampleIn]:
    return [SampleIn(completion=f"c{n}", **more) for n in range(count)]


async def values(asked: "asyncio.Task[list[ScoreOut]]") -> list[float | None]:
    return [score.value for score in await asked]


async def test_no_number_of_a_ticket_is_used_before_redis_has_reserved_it(start, broker, keys, monkeypatch):
    execute = broker.execute
    is_reserved = asyncio.Event()

    async def slow(*command: Any) -> Any:
        if command[0] == "HSET":
            await is_reserved.wait()
        return await execute(*command)

    async with start() as gateway:
        monkeypatch.setattr(broker, "execute", slow)
        asked = [asyncio.create_task(gateway.score(samples(1), 0)) for _ in range(2)]
        for _ in range(5):
            await execute("PING")
        assert await read_range(broker, keys.trajectories(), Trajectory) == []
        is_reserved.set()
        tickets = [entry.message.ticket for entry in await appended(broker, keys, 2)]
        assert sorted(tickets) == [0, 1]
        await append(broker, keys.scores(), ok(0), ok(1))
        assert [await values(answer) for answer in asked] == [[1.0], [1.0]]


async def test_the_first_score_of_a_key_counts_and_answers_keep_their_order(start, broker, keys):
    async with start() as gateway:
        asked = asyncio.create_task(gateway.score(samples(3), 0))
        await appended(broker, keys, 3)
        await append(
            broker, keys.scores(), ok(2, value=2.0), ok(2, value=9.0), ok(7), ok(1), ok(0, value=0.5)
        )
        assert await values(asked) == [0.5, 1.0, 2.0]


async def test_messages_in_parts_are_scored_by_their_text(start: Start, broker: Broker, keys: Keys) -> None:
    def said(role: str, *texts: str) -> list[dict[str, Any]]:
        return [{"role": role, "content": [{"type": "text", "text": text} for text in texts]}]

    posted = SampleIn(prompt=said("user", "1 + ", "1?"), completion=said("assistant", "two"))
    async with start() as gateway:
        asked = asyncio.create_task(gateway.score([posted], 0))
        ((trajectory,),) = [[entry.message for entry in await appended(broker, keys, 1)]]
        await append(broker, keys.scores(), ok(0))
        await asked
    sample = RewardSample(trajectory)
    assert (sample.prompt, sample.trajectory.text) == ("1 + 1?", "two")


def test_numbers_that_no_message_holds_are_refused_with_their_field() -> None:
    with pytest.raises(ValidationError, match="64 bits"):
        SampleIn(completion="x", ground_truth=2**70)


async def test_a_dead_trajectory_fails_with_its_reason_and_so_does_what_waits_of_its_group(
    start, broker, keys
):
    async with start() as gateway:
        asked = asyncio.create_task(gateway.score([*samples(2, group="a"), *samples(1)], 0))
        (first, *_) = await appended(broker, keys, 3)
        letter = dead_letter("trajectories", first.entry_id, {}, "it kills workers", message=first.message)
        await append(broker, keys.dead, letter, letter.model_copy(update={"origin": "prompts", "ticket": 1}))
        await append(broker, keys.scores(), ok(1))
        answers = await asked
        assert [score.value for score in answers] == [None, None, 1.0]
        assert [score.error for score in answers] == ["it kills workers", "it kills workers", ""]


async def test_a_trajectory_that_no_worker_can_read_fails_by_its_entry(start, broker, keys):
    async with start() as gateway:
        asked = asyncio.create_task(gateway.score(samples(1), 0))
        (first,) = await appended(broker, keys, 1)
        await wait_until(lambda: all(waiting.entry_id for waiting in gateway._waiting["train"].values()))
        await append(broker, keys.dead, dead_letter("trajectories", first.entry_id, {}, "too large"))
        (answer,) = await asked
        assert (answer.value, answer.error) == (None, "too large")


async def test_nothing_is_trimmed_that_may_just_have_been_appended(start, broker, keys, monkeypatch):
    """A look at the streams between an append and its answer."""
    async with start() as gateway:
        real = module.append_encoded

        async def late(*arguments: Any) -> list[str]:
            ids = await real(*arguments)
            await gateway._trim()
            return ids

        monkeypatch.setattr(module, "append_encoded", late)
        asked = asyncio.create_task(gateway.score(samples(2), 0))
        assert len(await appended(broker, keys, 2)) == 2
        await append(broker, keys.scores(), ok(0), ok(1))
        assert await values(asked) == [1.0, 1.0]


async def test_what_an_emptied_redis_has_lost_is_appended_again_under_its_key(start, broker, keys):
    async with start() as gateway:
        asked = asyncio.create_task(gateway.score(samples(2), 0))
        before = [entry.message for entry in await appended(broker, keys, 2)]
        await append(broker, keys.scores(), ok(0))
        await wait_until(lambda: len(gateway._waiting["train"]) == 1)
        await broker.execute("FLUSHALL")
        (again,) = await appended(broker, keys, 1)
        assert again.message == before[1]
        assert int(await broker.execute("HGET", keys.state, "served")) >= 2, "numbers are not used twice"
        await append(broker, keys.scores(), ok(1))
        assert await values(asked) == [1.0, 1.0]


async def test_redis_keeps_what_is_in_flight_and_the_archive_has_all_the_rest(
    start, broker, keys, redis_server, tmp_path
):
    streams = {"archive": {"enabled": True, "segment_mb": 0.001}}
    async with start(streams=streams) as gateway:
        gateway._run.env = {
            "TIDEMILL_REDIS_URL": redis_server.url,
            "PYTHONPATH": str(Path(__file__).parents[3]),
        }
        asked = asyncio.create_task(gateway.score(samples(39), 2000))
        await appended(broker, keys, 39)
        waits = asyncio.create_task(gateway.score(samples(1), 0))
        await appended(broker, keys, 40)
        await append(broker, keys.scores(), *(ok(ticket) for ticket in range(39)))
        assert len(await values(asked)) == 39

        async def is_trimmed() -> bool:
            return len(await read_range(broker, keys.trajectories(), Trajectory)) < 40

        await wait_until(is_trimmed)
        tickets = [
            entry.message.ticket for entry in await read_range(broker, keys.trajectories(), Trajectory)
        ]
        archived = Manifest.load(stream_folder(tmp_path / keys.run_id, "trajectories")).entries
        assert tickets[-1] == 39 and tickets == list(range(archived, 40)), "nothing lost, nothing twice"
        await append(broker, keys.scores(), ok(39))
        assert await values(waits) == [1.0]


async def test_more_than_may_wait_are_refused_and_none_of_them_is_appended(start, broker, keys, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    async with start() as gateway:
        asked = asyncio.create_task(gateway.score(samples(3), 0))
        await appended(broker, keys, 3)
        with pytest.raises(BusyError):
            await gateway.score(samples(1), 0)
        await append(broker, keys.scores(), *map(ok, range(3)))
        assert await values(asked) == [1.0] * 3
        assert len(await appended(broker, keys, 3)) == 3


async def test_more_than_may_ever_wait_are_refused_for_good(start, broker, keys, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    async with start() as gateway:
        with pytest.raises(TooLargeError, match="4 samples, and at most 3"):
            await gateway.score(samples(4), 0)
        assert await read_range(broker, keys.trajectories(), Trajectory) == []


async def test_results_of_groups_go_once_nobody_waits_for_them(start, broker, keys):
    async with start() as gateway:
        asked = asyncio.create_task(gateway.score([*samples(2, group="a"), *samples(2, group="b")], 0))
        await appended(broker, keys, 4)
        for ticket in (0, 1, 7):  # that of 7 is of an earlier process
            await broker.execute("HSET", keys.results(ticket), "0", "result")
            await broker.execute("SADD", keys.result_tickets(), ticket)
        await append(broker, keys.scores(), ok(0), ok(0, 1))

        async def are_left(*tickets: bytes) -> bool:
            return set(await broker.execute("SMEMBERS", keys.result_tickets())) == set(tickets)

        await wait_until(lambda: are_left(b"1"))
        existing = [await broker.execute("EXISTS", keys.results(ticket)) for ticket in (0, 1, 7)]
        assert existing == [0, 1, 0]
        await append(broker, keys.scores(), ok(1), ok(1, 1))
        assert await values(asked) == [1.0] * 4
        await wait_until(are_left)
        assert not await broker.execute("EXISTS", keys.results(1))


async def test_the_newest_dead_letters_stay_and_older_ones_go(start, broker, keys):
    async with start():
        letters = [dead_letter("trajectories", f"{n + 1}-0", {}, f"{n}") for n in range(KEPT_LETTERS + 1)]
        old = letters.pop(0)
        await append(broker, keys.dead, old)
        await append(broker, keys.dead, *letters)

        async def errors() -> list[str]:
            return [entry.message.error for entry in await read_range(broker, keys.dead, DeadLetter)]

        async def is_trimmed() -> bool:
            return len(await errors()) == KEPT_LETTERS

        await wait_until(is_trimmed)
        assert (await errors())[0] == "1"


async def test_consumers_of_dead_workers_go_and_what_they_hold_stays(start, broker, keys, monkeypatch):
    forget = DepartedProcesses.forget
    monkeypatch.setattr(DepartedProcesses, "forget", lambda departed: forget(departed, after_s=-1.0))
    group = (keys.trajectories(), REWARD_GROUP)
    await ensure_group(broker, *group)
    await append(broker, keys.trajectories(), make_trajectory())
    for name in ("holds-one", "holds-nothing"):
        await broker.execute("XGROUP", "CREATECONSUMER", *group, name)
    read = ("GROUP", REWARD_GROUP, "holds-one", "COUNT", 1, "STREAMS", keys.trajectories(), ">")
    await broker.execute("XREADGROUP", *read)

    async def names() -> list[bytes]:
        return [info[1] for info in await broker.execute("XINFO", "CONSUMERS", *group)]

    async def is_gone() -> bool:
        return await names() == [b"holds-one"]

    assert len(await names()) == 2
    async with start():
        await wait_until(is_gone)
