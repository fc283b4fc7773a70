import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.models import run_config
from tidemill.common.wire.messages import SamplingParams
from tidemill.services.rollout.engines import simulated
from tidemill.services.rollout.engines.engine import GenerationRequest
from tidemill.services.rollout.engines.simulated import SimulatedEngine


class FakeTime:
    """Time that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.moved = asyncio.Condition()

    async def sleep(self, seconds: float) -> None:
        deadline = self.now + seconds
        async with self.moved:
            await self.moved.wait_for(lambda: self.now >= deadline)

    async def move(self, seconds: float) -> None:
        await settle()
        async with self.moved:
            self.now += seconds
            self.moved.notify_all()
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(simulated, "asyncio", SimpleNamespace(sleep=fake.sleep, Semaphore=asyncio.Semaphore))
    monkeypatch.setattr(simulated, "_now", lambda: fake.now)
    return fake


async def started_engine(seed: int = 0, max_num_seqs: int = 256, **options: Any) -> SimulatedEngine:
    rollout = {"engine": "simulated", "max_num_seqs": max_num_seqs, "simulated": options}
    engine = SimulatedEngine(run_config("none", rollout=rollout).model_copy(update={"seed": seed}))
    await engine.start()
    return engine


def request(name: str = "a", max_tokens: int = 32) -> GenerationRequest:
    return GenerationRequest(name, [1, 2, 3], SamplingParams(max_tokens=max_tokens))


async def test_tokens_depend_on_the_seed_and_the_request_alone() -> None:
    engine = await started_engine(1)
    again = await started_engine(1)
    another = await started_engine(2)
    first = await engine.generate(request())
    assert (await again.generate(request())).token_ids == first.token_ids
    assert (await another.generate(request())).token_ids != first.token_ids
    assert (await engine.generate(request("b"))).token_ids != first.token_ids


async def test_tokens_are_of_the_vocabulary_and_equally_likely_up_to_a_limit() -> None:
    engine = await started_engine(vocab_size=4, tokens=32)
    result = await engine.generate(request())
    assert set(result.token_ids) == {0, 1, 2, 3} and result.finish == "stop"
    assert result.logprobs == [-math.log(4)] * 32
    assert engine.decode([1, 3]) == "t1 t3"
    cut = await engine.generate(request(max_tokens=31))
    assert (cut.finish, len(cut.token_ids)) == ("length", 31)


@pytest.mark.parametrize(
    ("versions_at", "spans"),
    [
        ({5.0: [1]}, ((0, 0), (1, 8))),
        ({2.5: [1, 2]}, ((0, 0), (2, 4))),  # of two at the same token the later one counts
        ({0.0: [3], 10.0: [4]}, ((3, 0),)),  # before the start and after the end
    ],
)
async def test_spans_are_split_where_updates_fell(time, versions_at, spans):
    engine = await started_engine(tokens=16, group_s=10.0)
    for version in versions_at.get(0.0, ()):
        await engine.load(version, [])
    await time.move(1.0)
    running = asyncio.create_task(engine.generate(request()))
    begun = time.now
    for moment in (2.5, 5.0, 10.0):
        await time.move(begun + moment - time.now)
        for version in versions_at.get(moment, ()):
            await engine.load(version, [])
    assert (await running).spans == spans


async def test_a_load_takes_its_time_and_pauses_nothing(time: FakeTime) -> None:
    engine = await started_engine(load_s=3.0)
    loading = asyncio.create_task(engine.load(1, []))
    await time.move(2.0)
    assert engine.version == 0
    await time.move(1.0)
    assert engine.version == 1
    update = await loading
    assert (update.version, update.load_s, update.paused_s) == (1, 3.0, 0.0)


async def test_a_finished_completion_frees_a_slot_for_the_next(time: FakeTime) -> None:
    engine = await started_engine(max_num_seqs=2, group_s=1.0)
    tasks = [asyncio.create_task(engine.generate(request(str(i)))) for i in range(3)]
    await time.move(1.0)
    assert [task.done() for task in tasks] == [True, True, False]
    assert engine.num_running == 1
    await time.move(1.0)
    assert tasks[2].done()
    assert engine.num_running == 0


async def test_jitter_spreads_durations_around_the_mean(time: FakeTime) -> None:
    engine = await started_engine(group_s=10.0, jitter=0.5)
    tasks = [asyncio.create_task(engine.generate(request(str(i)))) for i in range(200)]
    await time.move(4.99)
    assert not any(task.done() for task in tasks)
    await time.move(5.01)
    assert 60 < sum(task.done() for task in tasks) < 140
    await time.move(5.0)
    assert all(task.done() for task in tasks)


async def test_with_sigma_lengths_are_log_normal_and_times_go_with_them():
    engine = await started_engine(sigma=0.99, tokens=8, group_s=4.0)
    lengths = sorted(engine._length(key) for key in range(4000))
    assert lengths[2000] == pytest.approx(8, abs=1)
    assert lengths[3960] / lengths[2000] == pytest.approx(10.0, rel=0.15)  # exp(2.326 * 0.99)
    assert engine._duration_s(1, 8) == 4.0 and engine._duration_s(1, 24) == 12.0
    plain = await started_engine(tokens=8, group_s=4.0)
    assert plain._length(1) == 8 and plain._duration_s(1, 3) == 4.0
