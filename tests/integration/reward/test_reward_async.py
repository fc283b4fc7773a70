"""Async functions on a loop of their own: blocking, dying or refusing to end, one call harms no other."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from tests.support.scoring import HOLDS_THE_LOCK, Pool, obedient_functions, peak
from tests.support.waiting import wait_until
from tidemill.services.reward.outcome import AttemptError, RewardOutcome


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


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("await asyncio.Event().wait()", "no result within 2 s"),
        ("raise SystemExit(1)", "SystemExit"),
        ("raise TimeoutError('upstream')", "upstream"),
        ("raise ValueError('\\ud800 no')", "\ufffd no"),
    ],
)
async def test_what_an_async_function_does_is_its_calls_failure(tmp_path: Path, code: str, said: str) -> None:
    async with pool_of(tmp_path) as pool:
        with pytest.raises(AttemptError) as caught:
            await pool.score(code, 2.0)
    assert said in str(caught.value)
    assert caught.value.is_timeout == ("within" in said)
