"""Functions in processes, plain ones in threads and async ones on a loop: whatever one call does, blocking,
dying or refusing to end, the others get their results."""

import asyncio
import contextlib
import errno
import os
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.rewards import HOLDS_THE_LOCK, Pool, make_sample, obedient_functions, peak
from tests.support.waiting import PATIENCE_S, has_ended, wait_until
from tidemill.common.errors import MachineFaultError
from tidemill.services.reward.functions.pool import Execution, ScoringProcess, Sizing
from tidemill.services.reward.functions.request import Request
from tidemill.services.reward.functions.reward_function import load_function
from tidemill.services.reward.outcome import AttemptError, RewardOutcome

SPIN = "while True: pass"
HANG = "time.sleep(3600)"
WAIT = "time.sleep(0.2)"
AWAIT = "await asyncio.sleep(0.1)"


@contextlib.asynccontextmanager
async def pool_of(folder: Path, name: str = "plain", size: int = 1, threads: int = 1) -> AsyncIterator[Pool]:
    pool = Pool(f"{obedient_functions(folder)}:{name}", size, threads, is_async=name == "awaited")
    try:
        yield pool
    finally:
        await pool.close()


@contextlib.asynccontextmanager
async def crowded(folder: Path, name: str) -> AsyncIterator[Pool]:
    """One process that runs many calls at once."""
    async with pool_of(folder, name, threads=16) as pool:
        await warmed_up(pool, WAIT if name == "plain" else AWAIT)
        yield pool


async def warmed_up(pool: Pool, wait: str = WAIT, count: int = 48) -> list[RewardOutcome]:
    """After so many calls that wait, a pool with threads runs many at once."""
    return await asyncio.gather(*(pool.score(wait) for _ in range(count)))


def pid_of(folder: Path, name: str) -> int:
    path = folder / f"{name}.pid"
    return int(path.read_text() or 0) if path.exists() else 0


async def test_a_function_runs_elsewhere_in_as_many_processes_as_there_may_be(tmp_path: Path) -> None:
    async with pool_of(tmp_path, size=2) as pool:
        outcomes = await asyncio.gather(*(pool.score("print('hello')") for _ in range(20)))
        assert (await pool.score("pass #" + "é" * 3_000_000)).value == 1.0  # large samples pass whole
    pids = {int(outcome.components["pid"] or 0) for outcome in outcomes}
    assert [outcome.value for outcome in outcomes] == [1.0] * 20
    assert 1 <= len(pids) <= 2 and os.getpid() not in pids
    assert all(map(has_ended, pids))  # with the pool


@pytest.mark.parametrize("stuck", [SPIN, f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {HANG}"])
async def test_a_stuck_process_is_killed_at_its_limit_and_nobody_else_notices(tmp_path, stuck):
    """What the function started dies with it."""
    child = "(FOLDER / 'started.pid').write_text(str(subprocess.Popen(['sleep', '3600']).pid))"
    async with pool_of(tmp_path, size=2) as pool:
        late = asyncio.create_task(pool.score(f"{child}\n{stuck}", 2.0, "stuck"))
        others = await asyncio.gather(*(pool.score("time.sleep(0.1)") for _ in range(15)))
        with pytest.raises(AttemptError, match=r"no result within 2 s.*killed") as caught:
            await late
        assert caught.value.is_timeout
        assert [outcome.value for outcome in others] == [1.0] * 15
        for name in ("stuck", "started"):
            await wait_until(lambda name=name: has_ended(pid_of(tmp_path, name)))
        assert len(await asyncio.gather(*(pool.score("") for _ in range(4)))) == 4  # both slots work again


async def test_a_late_call_is_named_with_its_line_and_one_that_computes_is_an_error_of_the_code(tmp_path):
    async with pool_of(tmp_path) as pool:
        late = {}
        for code in (SPIN, HANG):
            with pytest.raises(AttemptError, match=r"no result within 4 s") as caught:
                await pool.score(code, 4.0)
            late[code] = caught.value
    assert "it computed, in the end in " in str(late[SPIN]) and ", line " in str(late[SPIN])
    assert "it waited, in the end in " in str(late[HANG])
    assert (late[SPIN].is_code_error, late[HANG].is_code_error, late[HANG].is_final) == (True, False, False)


async def test_a_late_async_call_is_named_with_the_line_it_awaits_and_the_remedy(tmp_path: Path) -> None:
    function = tmp_path / "slow.py"
    body = "import asyncio\nasync def ask():\n    await asyncio.sleep(60)\n"
    function.write_text(f"{body}async def judge(data_source, solution_str, ground_truth):\n    await ask()\n")
    pool = Pool(f"{function}:judge", is_async=True)
    with pytest.raises(AttemptError) as caught:
        await pool.score("", 1.0)
    await pool.close()
    assert caught.value.is_timeout and not caught.value.is_code_error
    assert "it waited, in the end in judge (slow.py, line 5), in sleep (" in str(caught.value)
    assert "raise timeout_s" in str(caught.value)


async def test_cancelling_kills_the_process_and_frees_the_slot(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        task = asyncio.create_task(pool.score(HANG, 3600, "cancelled"))
        pid = await wait_until(lambda: pid_of(tmp_path, "cancelled"))
        task.cancel()
        assert (await pool.score("pass")).value == 1.0
        await wait_until(lambda: has_ended(pid))


async def test_an_async_call_is_cancelled_where_it_runs(tmp_path: Path) -> None:
    code = "try:\n    await asyncio.sleep(3600)\nfinally:\n    (FOLDER / 'ended').touch()"
    async with pool_of(tmp_path, "awaited") as pool:
        call = asyncio.create_task(pool.score(code, 3600, "cancelled"))
        await wait_until(lambda: pid_of(tmp_path, "cancelled"))
        call.cancel()
        await wait_until(lambda: (tmp_path / "ended").exists())


async def test_waiting_for_a_free_process_does_not_count(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        await pool.score("pass")
        outcomes = await asyncio.gather(*(pool.score("time.sleep(0.5)", 2.0) for _ in range(6)))
    assert len(outcomes) == 6  # three seconds in all, with a limit of two
    assert peak(outcomes) == 1  # of one thread


async def test_a_function_that_does_not_load_fails_the_sample_with_the_reason(tmp_path: Path) -> None:
    pool = Pool(f"{tmp_path}/nowhere.py:compute_score")
    for _ in range(2):
        with pytest.raises(AttemptError, match=r"nowhere.py does not exist"):
            await pool.score("pass")
    await pool.close()


async def test_evaluation_has_processes_of_its_own(tmp_path: Path) -> None:
    execution = Execution(load_function(f"{obedient_functions(tmp_path)}:plain", {}), num_processes=1)
    stuck = Request([make_sample(solution_str=HANG, ground_truth="training")])
    training = [asyncio.create_task(execution.run(stuck, 3600)) for _ in range(3)]
    await wait_until(lambda: pid_of(tmp_path, "training"))
    (outcome,) = await execution.run(Request([make_sample((0, 0), True)]), 30)
    assert outcome.value == 1.0
    for task in training:
        task.cancel()
    await asyncio.gather(*training, return_exceptions=True)
    await execution.close()


async def test_calls_that_wait_run_many_at_once(tmp_path: Path) -> None:
    async with pool_of(tmp_path, size=2, threads=16) as pool:
        wait_s = 0.1
        outcomes = list[RewardOutcome]()
        async with asyncio.timeout(PATIENCE_S):
            while peak(outcomes) <= 8:
                # On a full machine the wait for a core counts as load: the less, the longer calls are.
                wait_s *= 2
                calls = [pool.score(f"time.sleep({wait_s})") for _ in range(48)]
                outcomes = await asyncio.gather(*calls)
        assert peak(outcomes) <= 32
        assert len({outcome.components["pid"] for outcome in outcomes}) == 2


async def test_any_number_of_async_calls_is_awaited_at_once_in_one_process(tmp_path: Path) -> None:
    async with pool_of(tmp_path, "awaited") as pool:
        outcomes = await asyncio.gather(*(pool.score("await asyncio.sleep(1)") for _ in range(100)))
        assert peak(outcomes) == 100
        assert len({outcome.components["pid"] for outcome in outcomes}) == 1


async def test_calls_that_compute_run_one_at_a_time_in_each_process(tmp_path: Path) -> None:
    async with pool_of(tmp_path, size=2, threads=16) as pool:
        outcomes = await asyncio.gather(*(pool.score("sum(range(4_000_000))") for _ in range(24)))
    by_process: dict[float | None, list[RewardOutcome]] = defaultdict(list)
    for outcome in outcomes:
        by_process[outcome.components["pid"]].append(outcome)
        assert outcome.components["main"]
    assert all(peak(mine) == 1 for mine in by_process.values())


async def test_what_sets_alarms_runs_in_main_threads_whatever_it_swallows(tmp_path: Path) -> None:
    code = "try: signal.signal(signal.SIGALRM, lambda *_: None); signal.alarm(0)\nexcept ValueError: pass"
    async with pool_of(tmp_path, threads=16) as pool:
        await warmed_up(pool, count=24)
        outcomes = await asyncio.gather(*(pool.score(code) for _ in range(12)))
        assert all(outcome.components["main"] for outcome in outcomes)
        assert peak(await warmed_up(pool, count=6)) == 1


@pytest.mark.parametrize(
    ("name", "wait", "death", "reason"),
    [
        ("plain", WAIT, "os._exit(3)", "exit code 3"),
        ("plain", WAIT, f"os.kill(os.getpid(), signal.SIGSEGV); {HANG}", "SIGSEGV"),
        ("awaited", AWAIT, "await asyncio.sleep(0.05); os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    ],
)
async def test_a_call_that_ends_its_process_fails_alone(tmp_path, name, wait, death, reason):
    async with crowded(tmp_path, name) as pool:
        calls = [pool.score(death if i == 7 else wait, index=i) for i in range(40)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [i for i, result in enumerate(results) if isinstance(result, BaseException)] == [7]
        assert f"process of the reward function died ({reason}" in str(results[7])
        others = [asyncio.create_task(pool.score(wait)) for _ in range(4)]
        with pytest.raises(AttemptError, match=reason) as caught:  # again, and it takes nobody with it
            await pool.score(death, index=7)
        assert not caught.value.is_timeout
        assert len(await asyncio.gather(*others)) == 4


DIES_ONCE = """
if not (FOLDER / 'has died').exists():
    (FOLDER / 'has died').touch()
    os._exit(0)
"""


@pytest.mark.parametrize(("name", "wait"), [("plain", WAIT), ("awaited", AWAIT)])
async def test_a_death_that_fails_no_call_is_counted_with_its_cause(tmp_path, name, wait):
    """What crashes now and then is never alone with its process, so no attempt fails."""
    async with crowded(tmp_path, name) as pool:
        codes = [wait] * 7 + [DIES_ONCE] + [wait] * 8
        outcomes = await asyncio.gather(*(pool.score(code, index=i) for i, code in enumerate(codes)))
        (death,) = pool.deaths.by_cause("a process of reward mine")
    assert [outcome.value for outcome in outcomes] == [1.0] * 16
    assert (death.what, death.kind, death.count) == ("a process of reward mine", "died", 1)
    assert "died (exit code 0) with " in death.reason and "run again" in death.reason


async def test_a_process_that_dies_while_no_call_runs_is_counted_and_forgotten(tmp_path: Path) -> None:
    async with pool_of(tmp_path, "awaited") as pool:
        await pool.score("asyncio.get_running_loop().call_later(0.2, os._exit, 3)")
        await wait_until(lambda: pool.deaths.by_cause(""))
        (death,) = pool.deaths.by_cause("")
        assert "exit code 3" in death.reason and "no call running" in death.reason
        assert pool._processes == []
        assert (await pool.score("pass")).value == 1.0


@pytest.mark.parametrize("name", ["plain", "awaited"])
async def test_what_ends_for_another_reason_is_no_death(tmp_path, name):
    """Processes that end with their pool, with a call that is cancelled, or with one that fails for it."""
    pool = Pool(f"{obedient_functions(tmp_path)}:{name}", is_async=name == "awaited")
    await pool.score("pass")
    with pytest.raises(AttemptError, match="exit code 3"):
        await pool.score("os._exit(3)")
    call = asyncio.create_task(pool.score(f"{HANG}", 3600, "cancelled"))
    await wait_until(lambda: pid_of(tmp_path, "cancelled"))
    call.cancel()
    await asyncio.wait({call})
    await pool.score("pass", index=1)
    await pool.close()
    assert pool.deaths.by_cause("") == []


@pytest.mark.parametrize(
    ("name", "stuck", "limit_s", "quick", "quick_limit_s"),
    [
        ("plain", HANG, 1.0, "time.sleep(3)", 60.0),
        ("plain", HOLDS_THE_LOCK, 5.0, WAIT, 5.0),
        ("awaited", HANG, 2.0, AWAIT, 2.0),
        ("awaited", HOLDS_THE_LOCK, 2.0, AWAIT, 2.0),
    ],
)
async def test_a_call_that_never_ends_fails_alone_also_where_it_lets_no_other_run(
    tmp_path, name, stuck, limit_s, quick, quick_limit_s
):
    async with crowded(tmp_path, name) as pool:
        calls = [pool.score(stuck, limit_s), *(pool.score(quick, quick_limit_s) for _ in range(7))]
        late, *others = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(late, AttemptError) and late.is_timeout
        assert [type(outcome) for outcome in others] == [RewardOutcome] * 7


async def test_an_async_function_that_blocks_is_named_and_holds_up_its_own_loop_only(tmp_path: Path) -> None:
    async with pool_of(tmp_path, "awaited") as pool:
        calls = [asyncio.create_task(pool.score("time.sleep(0.25)", 2.0)) for _ in range(20)]
        await wait_until(lambda: pool.blockage.note_text)
        assert "awaited blocks its event loop" in pool.blockage.note_text
        assert "obedient.py, line" in pool.blockage.note_text
        assert not all(call.done() for call in calls)  # this loop turns while theirs does not
        assert len(await asyncio.gather(*calls)) == 20  # five seconds in all, with a limit of two


async def test_what_will_not_be_cancelled_holds_up_nobody_and_ends_with_the_pool(tmp_path: Path) -> None:
    code = "while True:\n    try: await asyncio.sleep(3600)\n    except asyncio.CancelledError: pass"
    async with pool_of(tmp_path, "awaited") as pool:
        with pytest.raises(AttemptError, match=r"no result within 0\.5 s") as caught:
            await pool.score(code, 0.5, "stubborn")
        assert caught.value.is_timeout
        held = asyncio.create_task(pool.score(code, 3600))
        assert (await pool.score(AWAIT)).value == 1.0
        pid = pid_of(tmp_path, "stubborn")
        held.cancel()
        await asyncio.wait({held})
    await wait_until(lambda: not psutil.pid_exists(pid))


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


async def test_what_a_call_sets_in_its_context_is_not_seen_by_the_next_one(tmp_path: Path) -> None:
    codes = [
        "import decimal; decimal.getcontext().prec = 3; await asyncio.sleep(0.1)",
        "import decimal; await asyncio.sleep(0); assert decimal.getcontext().prec == 28",
    ]
    async with pool_of(tmp_path, "awaited") as pool:
        pool._spec["at_once"] = 1
        both = await asyncio.gather(*(pool.score(code, index=i) for i, code in enumerate(codes)))
    assert [outcome.value for outcome in both] == [1.0, 1.0]


async def test_a_process_that_cannot_send_answers_ends_with_the_reason(tmp_path: Path) -> None:
    """Its calls would never end, as the loop of the process goes on after an error."""
    code = "import tidemill.common.process.children as module; module.frame_of = None"
    async with pool_of(tmp_path, "awaited") as pool:
        with pytest.raises(AttemptError, match="exit code 1"):
            await pool.score(code)
        assert (await pool.score("pass")).value == 1.0


FORKS = """
pid = os.fork()
if pid == 0:
    {ends}
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == {code}
"""


@pytest.mark.parametrize("name", ["plain", "awaited"])
@pytest.mark.parametrize(
    ("ends", "code"),
    [("sys.exit(0)", 0), ("sys.exit(3)", 3), ("sys.exit('no')", 1), ("raise ValueError", 1)],
)
async def test_a_child_that_a_function_forks_ends_and_does_not_answer_for_it(tmp_path, name, ends, code):
    async with pool_of(tmp_path, name) as pool:
        for index in range(3):
            outcome = await pool.score(FORKS.format(ends=ends, code=code), index=index)
            assert (outcome.value, outcome.components["pid"]) == (1.0, pool._processes[0].pid)


async def test_a_forked_child_that_returns_is_not_taken_for_the_function(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        for index in range(3):
            outcome = await pool.score("if os.fork(): time.sleep(0.2)", index=index)
            assert outcome.components["pid"] == pool._processes[0].pid


FORKS_AND_BLOCKS = """
if os.fork():
    time.sleep(1)  # meanwhile its loop reads no calls
else:
    while True: await asyncio.sleep(0)
"""


async def test_a_forked_child_of_an_async_function_takes_no_calls_from_its_parent(tmp_path: Path) -> None:
    async with pool_of(tmp_path, "awaited") as pool:
        forking = asyncio.create_task(pool.score(FORKS_AND_BLOCKS, name="forking"))
        await wait_until(lambda: pid_of(tmp_path, "forking"))
        outcomes = await asyncio.gather(forking, *(pool.score(AWAIT, index=index) for index in range(1, 9)))
        assert {outcome.components["pid"] for outcome in outcomes} == {pool._processes[0].pid}


CANNOT_ANSWER_IN_A_THREAD = """
import tidemill.common.process.children as module
def packed(frame, pack=module.frame_of, threading=threading):
    is_main = threading.current_thread() is threading.main_thread()
    return pack(frame) if is_main or "outcomes" not in frame else 1 / 0
module.frame_of = packed
while not (FOLDER / 'has held').exists():
    time.sleep(0.01)
"""
HOLDS_ONCE = """
if not (FOLDER / 'has held').exists():
    (FOLDER / 'has held').touch()
    time.sleep(3600)
"""


async def test_a_process_that_cannot_send_the_answer_of_a_thread_ends_and_its_calls_run_again(tmp_path):
    """They would end at their limits only: an executor drops errors."""
    async with pool_of(tmp_path, threads=2) as pool:
        pool._sizing.calls = 2
        calls = [pool.score(HOLDS_ONCE, 3600), pool.score(CANNOT_ANSWER_IN_A_THREAD, 3600, index=1)]
        outcomes = await asyncio.wait_for(asyncio.gather(*calls), PATIENCE_S)
        (death,) = pool.deaths.by_cause("")
    assert [outcome.value for outcome in outcomes] == [1.0, 1.0]
    assert "exit code 1" in death.reason


LEAVE_NO_DESCRIPTOR = """
import resource
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
time.sleep(0.2)
"""


async def test_a_function_that_leaves_no_descriptor_is_answered_and_named_by_what_it_could_not_open(tmp_path):
    """The process measures its load by files."""
    async with pool_of(tmp_path) as pool:
        assert (await pool.score(LEAVE_NO_DESCRIPTOR)).value == 1.0
        with pytest.raises(AttemptError, match=r"Too many open files.*obedient\.py, line"):
            await pool.score("pass")
        assert (await pool.score("pass")).value == 1.0  # in another process


async def test_a_process_that_could_not_be_connected_to_is_not_used_again(tmp_path, monkeypatch):
    loop = asyncio.get_running_loop()
    connect = loop.create_connection
    failures = [OSError(errno.EMFILE, "Too many open files")]

    async def failing(*args: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return await connect(*args, **options)

    monkeypatch.setattr(loop, "create_connection", failing)
    async with pool_of(tmp_path, "awaited") as pool:
        await pool.start()
        assert not failures
        assert pool._processes == []
        failures.append(OSError(errno.EMFILE, "Too many open files"))
        with pytest.raises(MachineFaultError, match="file descriptors"):
            await pool.score("pass")
        assert (await pool.score("pass")).value == 1.0


@pytest.mark.parametrize(
    "code", ["sys.stdout = None", "sys.stdout = type('Slow', (), {'flush': lambda _: time.sleep(3600)})()"]
)
async def test_a_process_ends_whatever_a_function_has_put_in_place_of_its_output(tmp_path, code):
    spec = {
        "maker": f"{load_function.__module__}:load_function",
        "reference": f"{obedient_functions(tmp_path)}:awaited",
        "kwargs": {},
    }
    process = ScoringProcess(is_async=True, on_blocked=lambda _: None)
    await process.run(spec, Request([make_sample((0, 0), False, "", code, "sample")]), 60)
    await process.end(PATIENCE_S)
    assert process._process.returncode == 0
