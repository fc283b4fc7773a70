"""Limits on remote rewards hold over all workers together, against a real Redis."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.support.waiting import wait_until
from tidemill.common.config.servers import LimitsConfig
from tidemill.common.redis.broker import Broker
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Lane
from tidemill.services.reward.remote.faults import FaultKind, RemoteFault
from tidemill.services.reward.remote.limiter import Limiter

MakeLimiter = Callable[..., Limiter]


@pytest.fixture
async def make(broker: Broker, keys: Keys) -> AsyncIterator[MakeLimiter]:
    """Limiters of several workers of one run."""
    limiters: list[Limiter] = []

    def make(
        lease_s: float = 30.0, burst_s: float = 2.0, evaluation_share: float = 0.1, **limits: Any
    ) -> Limiter:
        limiter = Limiter(broker, keys, "judge", LimitsConfig(**limits))
        limiter.lease_s = lease_s
        limiter.burst_s = burst_s
        limiter.evaluation_share = evaluation_share
        limiters.append(limiter)
        return limiter

    yield make
    for limiter in limiters:
        await limiter.close()


class Holder:
    """Requests that are held until the test lets them go."""

    def __init__(self, limiter: Limiter, count: int, lane: Lane = Lane.TRAIN, tokens: int = 0) -> None:
        self.num_held = 0
        self.gate = asyncio.Event()
        self.tasks = [asyncio.create_task(self._hold(limiter, lane, tokens)) for _ in range(count)]

    async def _hold(self, limiter: Limiter, lane: Lane, tokens: int) -> None:
        async with limiter.permit(lane, tokens):
            self.num_held += 1
            try:
                await self.gate.wait()
            finally:
                self.num_held -= 1

    async def has(self, count: int) -> None:
        await wait_until(lambda: self.num_held == count)

    async def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture
async def hold(make: MakeLimiter) -> AsyncIterator[Callable[..., Holder]]:
    """Ask a limiter for permits, and hold them; what is still held goes at the end."""
    held: list[Holder] = []

    def hold(*arguments: Any, **more: Any) -> Holder:
        held.append(Holder(*arguments, **more))
        return held[-1]

    yield hold
    for permit in held:
        await permit.cancel()


async def test_workers_together_stay_within_the_concurrency(make: MakeLimiter) -> None:
    workers = [make(concurrency=10, evaluation_share=0.0) for _ in range(3)]
    running = 0
    peak = 0
    done = 0

    async def request(limiter: Limiter) -> None:
        nonlocal running, peak, done
        async with limiter.permit(Lane.TRAIN, 0):
            running += 1
            peak = max(peak, running)
            await asyncio.sleep(0.002)
            running -= 1
            done += 1

    await asyncio.gather(*(request(worker) for worker in workers for _ in range(60)))
    assert (peak, done) == (10, 180)


async def test_evaluation_has_places_that_training_cannot_take(make, hold):
    trainer = make(concurrency=5, evaluation_share=0.2)
    evaluator = make(concurrency=5, evaluation_share=0.2)
    training = hold(trainer, 20)
    await training.has(4)
    await hold(evaluator, 1, Lane.EVAL).has(1)
    assert training.num_held == 4


async def test_what_becomes_free_goes_to_waiting_evaluation_first(make, hold):
    trainer = make(concurrency=2, evaluation_share=0.0)
    evaluator = make(concurrency=2, evaluation_share=0.0)
    first = hold(trainer, 2)
    await first.has(2)
    training = hold(trainer, 50)
    evaluation = hold(evaluator, 2, Lane.EVAL)
    await wait_until(lambda: _waits(evaluator))  # it asked, and has to wait
    first.gate.set()
    await evaluation.has(2)
    assert training.num_held == 0
    evaluation.gate.set()
    await training.has(2)


async def test_training_gets_nothing_before_no_evaluation_waits_at_any_worker(broker, keys):
    """Nor between two that wait in one line, of which the second has not asked yet."""

    async def ask(lane: str, worker: str, num_evals: int, request: str, ended: str = "") -> int:
        arguments = [lane, 5000, 1, 0, 0, 1000, 0, worker, num_evals, int(bool(ended)), 0]
        arguments += [*([ended, 0] if ended else []), *([request, 0] if request else [])]
        names = [keys.limits("judge"), keys.requests("judge")]
        return int((await broker.script("limits", names, arguments))[0])

    assert await ask("train", "u", 0, "a") == 1
    assert await ask("eval", "v", 2, "b") == await ask("eval", "w", 1, "d") == 0
    assert await ask("train", "u", 0, "t", ended="a") == 0
    assert await ask("eval", "v", 2, "b") == 1
    assert await ask("train", "u", 0, "t", ended="b") == 0
    assert await ask("eval", "v", 1, "c") == 1
    assert await ask("train", "u", 0, "t", ended="c") == 0
    await ask("train", "w", 0, "")  # "d" was given up
    assert await ask("train", "u", 0, "t") == 1


async def test_a_dead_workers_places_are_free_when_its_lease_ends(make, hold, broker, keys):
    crashed = make(concurrency=2, evaluation_share=0.0, lease_s=0.7)
    survivor = make(concurrency=2, evaluation_share=0.0, lease_s=0.7)
    await hold(crashed, 2).has(2)
    first_end = await _lease_end(broker, keys)
    await wait_until(lambda: _is_after(broker, keys, first_end))  # as long as it lives, it renews

    held = hold(survivor, 2)
    assert crashed._upkeep is not None
    crashed._upkeep.cancel()  # as if the process had been killed: no word to anybody
    await held.has(2)


async def test_requests_per_minute_are_those_of_all_workers(make):
    # 6000 a minute are 100 a second, of which 50 may come at once.
    workers = [make(requests_per_minute=6000, burst_s=0.5, evaluation_share=0.0) for _ in range(3)]
    started = time.monotonic()
    await asyncio.gather(*(_one(worker) for worker in workers for _ in range(50)))
    # 150 requests: the burst of 50, and a second for the other 100. Load makes it longer, never shorter.
    assert time.monotonic() - started > 0.95


async def test_tokens_are_drawn_by_estimate_and_put_right_after_the_answer(make, broker, keys):
    limiter = make(tokens_per_minute=6000, burst_s=60, evaluation_share=0.0)
    async with limiter.permit(Lane.TRAIN, 1000) as permit:
        assert await _level(broker, keys) == pytest.approx(5000, abs=1)
        permit.used_tokens = 3000
    await wait_until(lambda: _is_near(broker, keys, 3000))
    async with limiter.permit(Lane.TRAIN, 1000) as permit:
        permit.used_tokens = 0  # it never got there
    await wait_until(lambda: _is_near(broker, keys, 3000))


async def test_a_request_larger_than_the_burst_passes_once_the_bucket_is_full(make: MakeLimiter) -> None:
    limiter = make(tokens_per_minute=60_000, burst_s=0.2)
    for _ in range(2):
        async with asyncio.timeout(20), limiter.permit(Lane.TRAIN, 500):
            pass


async def test_training_leaves_tokens_to_evaluation(make, hold):
    limiter = make(tokens_per_minute=1000, burst_s=60, evaluation_share=0.5)
    training = hold(limiter, 10, tokens=100)
    await training.has(5)
    await hold(limiter, 4, Lane.EVAL, tokens=100).has(4)
    assert training.num_held == 5


async def test_who_gives_up_waiting_takes_no_place(make, hold):
    limiter = make(concurrency=1, evaluation_share=0.0)
    first = hold(limiter, 1)
    await first.has(1)
    given_up = hold(limiter, 5)
    last = hold(limiter, 1)
    await asyncio.sleep(0)
    await given_up.cancel()
    first.gate.set()
    await last.has(1)


@pytest.mark.parametrize(
    "error",
    [RemoteFault(FaultKind.CONNECTION, "refused"), ValueError("a mistake"), asyncio.CancelledError()],
    ids=["fault", "error", "cancelled"],
)
async def test_a_request_that_fails_gives_its_place_to_the_next(make, broker, keys, error):
    limiter = make(concurrency=1, evaluation_share=0.0)
    second = make(concurrency=1, evaluation_share=0.0)
    with pytest.raises(type(error)):
        async with limiter.permit(Lane.TRAIN, 0):
            raise error
    for worker in (limiter, second):  # far sooner than its lease ends
        async with asyncio.timeout(limiter.lease_s / 3), worker.permit(Lane.TRAIN, 0):
            pass
    await wait_until(lambda: _is_empty(broker, keys))


async def test_asking_twice_for_the_same_request_draws_once(broker, keys):
    # A command whose answer was lost is repeated.
    names = [keys.limits("judge"), keys.requests("judge")]
    limits = ["train", 5000, 1, 60, 0, 1000, 0, "w", 0]
    for _ in range(2):
        assert await broker.script("limits", names, [*limits, 0, 0, "a", 0]) == [1, 0]
    assert await broker.execute("ZCARD", names[1]) == 1
    for _ in range(2):
        await broker.script("limits", names, [*limits, 1, 0, "a", 0])
    assert await broker.execute("ZCARD", names[1]) == 0


async def test_without_limits_redis_is_not_asked(make: MakeLimiter, broker: Broker, keys: Keys) -> None:
    limiter = make()
    async with limiter.permit(Lane.TRAIN, 10):
        assert await broker.execute("EXISTS", keys.limits("judge"), keys.requests("judge")) == 0


async def _one(limiter: Limiter) -> None:
    async with limiter.permit(Lane.TRAIN, 1):
        pass


async def _waits(limiter: Limiter) -> bool:
    """Whether evaluation waits at some worker; without buckets the hash has nothing else."""
    return bool(await limiter._broker.execute("EXISTS", limiter._levels))


async def _is_empty(broker: Broker, keys: Keys) -> bool:
    """Whether no request holds a place."""
    return int(await broker.execute("ZCARD", keys.requests("judge"))) == 0


async def _lease_end(broker: Broker, keys: Keys) -> float:
    _, end = await broker.execute("ZRANGE", keys.requests("judge"), 0, 0, "WITHSCORES")
    return float(end)


async def _is_after(broker: Broker, keys: Keys, end: float) -> bool:
    return await _lease_end(broker, keys) > end


async def _level(broker: Broker, keys: Keys) -> float:
    return float(await broker.execute("HGET", keys.limits("judge"), "tokens"))


async def _is_near(broker: Broker, keys: Keys, tokens: float) -> bool:
    with contextlib.suppress(TypeError):
        return abs(await _level(broker, keys) - tokens) < 300  # it fills by 100 a second
    return False
