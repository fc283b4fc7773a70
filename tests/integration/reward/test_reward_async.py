"""Async functions on a loop of their own: blocking, dying or refusing to end, one call harms no other."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from tests.support.rewards import scorer_of
from tests.support.scoring import HOLDS_THE_LOCK, Pool, obedient_functions, peak
from tests.support.trajectories import make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.config import RewardConfig
from tidemill.common.wire.messages import Lane, Score, ScoreStatus
from tidemill.services.reward.functions.reward_function import load_function
from tidemill.services.reward.outcome import AttemptError, RewardOutcome
from tidemill.services.reward.rewards.reward import FunctionReward


@contextlib.asynccontextmanager
async def pool_of(folder: Path) -> AsyncIterator[Pool]:
    pool = Pool(f"{obedient_functions(folder)}:awaited", is_async=True)
    try:
        yield pool
    finally:
        await pool.close()


async def test_any_number_of_calls_is_awaited_at_once_in_one_process(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        outcomes = await asyncio.gather(*(pool.score("await asyncio.sleep(1)") for _ in range(100)))
        assert peak(outcomes) == 100
        assert len({outcome.components["pid"] for outcome in outcomes}) == 1


async def test_a_function_that_blocks_is_named_and_holds_up_its_own_loop_only(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        calls = [asyncio.create_task(pool.score("time.sleep(0.25)", 2.0)) for _ in range(20)]
        await wait_until(lambda: pool.blockage.note_text)
        assert "awaited blocks its event loop" in pool.blockage.note_text
        assert "obedient.py, line" in pool.blockage.note_text
        assert not all(call.done() for call in calls)  # this loop turns while theirs does not
        assert len(await asyncio.gather(*calls)) == 20  # five seconds in all, with a limit of two


@pytest.mark.parametrize("code", ["time.sleep(3600)", HOLDS_THE_LOCK])
async def test_a_step_that_never_ends_fails_alone(tmp_path: Path, code: str) -> None:
    async with pool_of(tmp_path) as pool:
        calls = [pool.score("await asyncio.sleep(0.1)", 2.0) for _ in range(7)]
        stuck, *others = await asyncio.gather(pool.score(code, 2.0), *calls, return_exceptions=True)
        assert isinstance(stuck, AttemptError) and stuck.is_timeout
        assert [type(other) for other in others] == [RewardOutcome] * 7


async def test_a_call_that_ends_its_process_fails_alone(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        codes = ["await asyncio.sleep(0.2)"] * 40
        codes[30] = "await asyncio.sleep(0.1); os.kill(os.getpid(), signal.SIGSEGV)"
        results = await asyncio.gather(
            *(pool.score(code, index=i) for i, code in enumerate(codes)), return_exceptions=True
        )
        assert [i for i, result in enumerate(results) if isinstance(result, BaseException)] == [30]
        assert "SIGSEGV" in str(results[30])


async def test_what_will_not_be_cancelled_holds_up_nobody_and_ends_with_the_pool(tmp_path: Path) -> None:
    code = "\n".join(
        (
            "while True:",
            "    try:",
            "        await asyncio.sleep(3600)",
            "    except asyncio.CancelledError:",
            "        pass",
        )
    )
    async with pool_of(tmp_path) as pool:
        with pytest.raises(AttemptError, match=r"no result within 0\.5 s") as caught:
            await pool.score(code, 0.5, "stubborn")
        assert caught.value.is_timeout
        held = asyncio.create_task(pool.score(code, 3600))
        assert (await pool.score("await asyncio.sleep(0)")).value == 1.0
        pid = int((tmp_path / "stubborn.pid").read_text())
        held.cancel()
        await asyncio.wait({held})
    await wait_until(lambda: not psutil.pid_exists(pid))


async def test_a_cancelled_call_is_cancelled_where_it_runs(tmp_path: Path) -> None:
    code = "\n".join(("try:", "    await asyncio.sleep(3600)", "finally:", "    (FOLDER / 'ended').touch()"))
    async with pool_of(tmp_path) as pool:
        call = asyncio.create_task(pool.score(code, 3600, "cancelled"))
        await wait_until(lambda: (tmp_path / "cancelled.pid").exists())
        call.cancel()
        await wait_until(lambda: (tmp_path / "ended").exists())


async def scored(folder: Path, code: str, timeout_s: float = 30.0) -> Score:
    """What a scorer says of a sample whose text is `code`."""
    function = load_function(f"{obedient_functions(folder)}:awaited", {})
    reward = FunctionReward(function, timeout_s, 1)
    try:
        config = RewardConfig(backoff_s=0.0, max_attempts=1)
        return await scorer_of(reward, config).score(make_trajectory(3, 2, text=code), Lane.TRAIN)
    finally:
        await reward.close()


async def test_an_async_function_past_its_limit_is_cancelled_and_times_out(tmp_path: Path) -> None:
    made = await scored(tmp_path, "await asyncio.Event().wait()", 0.5)
    assert (made.status, made.value) == (ScoreStatus.TIMEOUT, None)
    assert "no result within 0.5 s" in made.error


@pytest.mark.parametrize("error", ["SystemExit(1)", "asyncio.CancelledError()", "TimeoutError('upstream')"])
async def test_an_async_function_can_neither_end_nor_cancel_the_worker(tmp_path: Path, error: str) -> None:
    made = await scored(tmp_path, f"raise {error}")
    assert made.status is ScoreStatus.FAILED
    assert made.error


async def test_half_a_surrogate_pair_in_an_error_is_a_failure_like_any_other(tmp_path: Path) -> None:
    made = await scored(tmp_path, "raise ValueError('\\ud800 no')")
    assert made.status is ScoreStatus.FAILED
    assert "\ufffd no" in made.error
