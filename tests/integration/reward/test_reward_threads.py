"""Plain functions in threads: how many is measured, and no call pays for what another does."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.scoring import HOLDS_THE_LOCK, Pool, obedient_functions, peak
from tidemill.services.reward.functions.pool import Sizing
from tidemill.services.reward.outcome import AttemptError, RewardOutcome

WAIT = "time.sleep(0.2)"


@contextlib.asynccontextmanager
async def pool_of(folder: Path, size: int = 1, threads: int = 16) -> AsyncIterator[Pool]:
    pool = Pool(f"{obedient_functions(folder)}:plain", size, threads)
    try:
        yield pool
    finally:
        await pool.close()


async def warmed_up(pool: Pool, count: int = 48) -> list[RewardOutcome]:
    """After so many calls that wait, the pool runs many at once."""
    return await asyncio.gather(*(pool.score(WAIT) for _ in range(count)))


async def test_calls_that_wait_run_many_at_once(tmp_path: Path) -> None:
    async with pool_of(tmp_path, size=2) as pool:
        outcomes = await warmed_up(pool)
        assert 8 < peak(outcomes) <= 32
        assert len({outcome.components["pid"] for outcome in outcomes}) == 2


async def test_calls_that_compute_run_one_at_a_time_in_each_process(tmp_path: Path) -> None:
    async with pool_of(tmp_path, size=2) as pool:
        outcomes = await asyncio.gather(*(pool.score("sum(range(4_000_000))") for _ in range(24)))
    by_process: dict[float | None, list[RewardOutcome]] = defaultdict(list)
    for outcome in outcomes:
        by_process[outcome.components["pid"]].append(outcome)
        assert outcome.components["main"]
    assert all(peak(mine) == 1 for mine in by_process.values())


async def test_one_thread_is_one_call_at_a_time(tmp_path: Path) -> None:
    async with pool_of(tmp_path, threads=1) as pool:
        assert peak(await asyncio.gather(*(pool.score(WAIT) for _ in range(6)))) == 1


async def test_what_sets_alarms_runs_in_main_threads_whatever_it_swallows(
    tmp_path: Path,
) -> None:
    code = "\n".join(
        (
            "try:",
            "    signal.signal(signal.SIGALRM, lambda *_: None)",
            "    signal.alarm(0)",
            "except ValueError:",
            "    pass",
        )
    )
    async with pool_of(tmp_path) as pool:
        await warmed_up(pool, 24)
        outcomes = await asyncio.gather(*(pool.score(code) for _ in range(12)))
        assert all(outcome.components["main"] for outcome in outcomes)
        assert peak(await warmed_up(pool, 6)) == 1


async def test_a_call_that_ends_its_process_fails_alone(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        await warmed_up(pool)
        codes = [WAIT] * 40
        codes[7] = "os._exit(3)"
        results = await asyncio.gather(
            *(pool.score(code, index=i) for i, code in enumerate(codes)), return_exceptions=True
        )
        failed = [i for i, result in enumerate(results) if isinstance(result, BaseException)]
        assert failed == [7]
        with pytest.raises(AttemptError, match="process of the reward function died"):
            raise results[7]  # type: ignore[misc]
        with pytest.raises(AttemptError, match="exit code 3"):  # again, and it takes nobody with it
            others = [asyncio.create_task(pool.score(WAIT)) for _ in range(4)]
            await pool.score("os._exit(3)", index=7)
        assert len(await asyncio.gather(*others)) == 4


async def test_a_call_that_is_late_leaves_its_neighbours_alone(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        await warmed_up(pool)
        others = [asyncio.create_task(pool.score("time.sleep(3)")) for _ in range(6)]
        with pytest.raises(AttemptError, match="no result within 1 s") as caught:
            await pool.score("time.sleep(3600)", 1.0)
        assert caught.value.is_timeout
        assert len(await asyncio.gather(*others)) == 6


async def test_a_call_that_lets_no_other_run_fails_alone(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        await warmed_up(pool)
        calls = [pool.score(HOLDS_THE_LOCK, 5.0), *(pool.score(WAIT, 5.0) for _ in range(7))]
        first, *others = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(first, AttemptError) and first.is_timeout
        assert [type(other) for other in others] == [RewardOutcome] * 7


def test_the_number_of_calls_follows_the_load() -> None:
    sizing = Sizing(16)
    seen = []
    for load, is_wanted in [(0.01, True)] * 5 + [(0.5, True), (None, True), (0.01, False), (1.0, True)]:
        sizing.observe(load, is_wanted)
        seen.append(sizing.calls)
    assert seen == [2, 4, 8, 16, 16, 16, 16, 16, 15]
    sizing.pin()
    sizing.observe(0.01, True)
    assert sizing.calls == 1
