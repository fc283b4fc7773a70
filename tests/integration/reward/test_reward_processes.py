"""Plain reward functions in processes: whatever one call does, the others get their results."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from tests.support.samples import make_sample
from tests.support.waiting import wait_until
from tidemill.services.reward.functions.pool import Execution, ProcessPool
from tidemill.services.reward.functions.request import Request
from tidemill.services.reward.functions.reward_function import load_function
from tidemill.services.reward.outcome import AttemptError, RewardOutcome
from tidemill.services.reward.sample import RewardSample

SOURCE = """
    import os, signal, subprocess, sys, time
    from pathlib import Path

    FOLDER = Path({folder!r})
    with open(FOLDER / "loads", "a") as loads:
        loads.write(f"{{os.getpid()}}\\n")

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        (FOLDER / f"{{ground_truth}}.pid").write_text(str(os.getpid()))
        exec(solution_str)
        return {{"score": 1.0, "pid": os.getpid()}}
"""
SPIN = "while True: pass"
HANG = "time.sleep(3600)"


@pytest.fixture
def reference(tmp_path: Path) -> str:
    """A function that does what its sample says, and leaves its process id in a file."""
    path = tmp_path / "obedient.py"
    path.write_text(dedent(SOURCE).format(folder=str(tmp_path)))
    return f"{path}:compute_score"


class Pool(ProcessPool):
    """Processes that are asked for one sample at a time."""

    def __init__(self, reference: str, size: int) -> None:
        super().__init__({"reference": reference, "kwargs": {}}, size)

    async def score(self, sample: RewardSample, timeout_s: float) -> RewardOutcome:
        (outcome,) = await self.run(Request([sample]), timeout_s)
        return outcome


@pytest.fixture
async def pool(reference: str) -> AsyncIterator[Pool]:
    pool = Pool(reference, size=2)
    yield pool
    await pool.close()


def sample(code: str, name: str = "sample", is_evaluation: bool = False) -> RewardSample:
    return make_sample((0, 0), is_evaluation, "", code, name)


def pid_of(folder: Path, name: str) -> int:
    path = folder / f"{name}.pid"
    return int(path.read_text() or 0) if path.exists() else 0


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_a_function_runs_elsewhere_and_is_loaded_once_in_each_process(
    pool: Pool, tmp_path: Path
) -> None:
    outcomes = await asyncio.gather(*[pool.score(sample("print('hello')"), 30) for _ in range(20)])
    pids = {int(outcome.components["pid"] or 0) for outcome in outcomes}
    loads = [int(line) for line in (tmp_path / "loads").read_text().split()]
    assert [outcome.value for outcome in outcomes] == [1.0] * 20
    assert os.getpid() not in pids
    assert len(loads) <= 2
    assert pids <= set(loads)


@pytest.mark.parametrize("stuck", [SPIN, HANG, f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {HANG}"])
async def test_a_stuck_process_is_killed_at_its_limit_and_nobody_else_notices(
    pool: Pool, tmp_path: Path, stuck: str
) -> None:
    late = asyncio.create_task(pool.score(sample(stuck, "stuck"), 1.0))
    others = await asyncio.gather(*[pool.score(sample("time.sleep(0.1)"), 30) for _ in range(15)])
    with pytest.raises(AttemptError, match=r"no result within 1 s.*killed") as caught:
        await late
    assert caught.value.is_timeout
    assert [outcome.value for outcome in others] == [1.0] * 15
    await wait_until(lambda: is_gone(pid_of(tmp_path, "stuck")))
    after = await asyncio.gather(*[pool.score(sample(""), 30) for _ in range(4)])  # both slots work again
    assert len(after) == 4


@pytest.mark.parametrize(
    ("death", "reason"),
    [
        ("os._exit(3)", "exit code 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    ],
)
async def test_a_process_that_dies_fails_its_own_sample_only(pool: Pool, death: str, reason: str) -> None:
    dying = asyncio.create_task(pool.score(sample(death), 30))
    others = await asyncio.gather(*[pool.score(sample(""), 30) for _ in range(5)])
    with pytest.raises(AttemptError, match=f"process of the reward function died .{reason}") as caught:
        await dying
    assert not caught.value.is_timeout
    assert [outcome.value for outcome in others] == [1.0] * 5
    assert (await pool.score(sample(""), 30)).value == 1.0


async def test_what_the_function_started_dies_with_it(pool: Pool, tmp_path: Path) -> None:
    code = "(FOLDER / 'started.pid').write_text(str(subprocess.Popen(['sleep', '3600']).pid)); " + HANG
    with pytest.raises(AttemptError, match="no result"):
        await pool.score(sample(code), 2.0)
    await wait_until(lambda: is_gone(pid_of(tmp_path, "started")))


async def test_cancelling_kills_the_process_and_frees_the_slot(reference: str, tmp_path: Path) -> None:
    pool = Pool(reference, size=1)
    task = asyncio.create_task(pool.score(sample(HANG, "cancelled"), 3600))
    pid = await wait_until(lambda: pid_of(tmp_path, "cancelled"))
    task.cancel()
    assert (await pool.score(sample(""), 30)).value == 1.0
    await wait_until(lambda: is_gone(pid))
    await pool.close()


async def test_an_exception_costs_no_process(pool: Pool, tmp_path: Path) -> None:
    for code in ("1 / 0", "sys.exit(1)", "raise ValueError('no')"):
        with pytest.raises(AttemptError, match=r"(ZeroDivisionError|SystemExit|ValueError).*line \d"):
            await pool.score(sample(code), 30)
    assert (await pool.score(sample(""), 30)).value == 1.0
    assert len((tmp_path / "loads").read_text().split()) == 1


async def test_waiting_for_a_free_process_does_not_count(reference: str) -> None:
    pool = Pool(reference, size=1)
    await pool.score(sample(""), 30)
    outcomes = await asyncio.gather(*[pool.score(sample("time.sleep(0.5)"), 2.0) for _ in range(6)])
    assert len(outcomes) == 6  # three seconds in all, with a limit of two
    await pool.close()


async def test_large_samples_pass_whole(pool: Pool) -> None:
    text = "pass #" + "é" * 3_000_000
    assert (await pool.score(sample(text), 60)).value == 1.0


async def test_a_function_that_does_not_load_fails_the_sample_with_the_reason(tmp_path: Path) -> None:
    pool = Pool(f"{tmp_path}/nowhere.py:compute_score", size=1)
    for _ in range(2):
        with pytest.raises(AttemptError, match=r"nowhere.py does not exist"):
            await pool.score(sample(""), 30)
    await pool.close()


async def test_closing_leaves_no_process(reference: str, tmp_path: Path) -> None:
    pool = Pool(reference, size=2)
    await asyncio.gather(*[pool.score(sample(""), 30) for _ in range(4)])
    await pool.close()
    assert all(is_gone(int(pid)) for pid in (tmp_path / "loads").read_text().split())


async def test_evaluation_has_processes_of_its_own(reference: str, tmp_path: Path) -> None:
    execution = Execution(load_function(reference, {}), num_processes=1)
    training = [
        asyncio.create_task(execution.run(Request([sample(HANG, "training")]), 3600)) for _ in range(3)
    ]
    await wait_until(lambda: pid_of(tmp_path, "training"))
    (outcome,) = await execution.run(Request([sample("", is_evaluation=True)]), 30)
    assert outcome.value == 1.0
    for task in training:
        task.cancel()
    await asyncio.gather(*training, return_exceptions=True)
    await execution.close()
