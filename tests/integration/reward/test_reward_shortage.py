"""A reward worker whose machine is short of descriptors: its samples are scored by a healthy one.

The limit is a real one, set for the running process. As root no limit of processes holds, so `EAGAIN` comes
from a `Popen` that fails in the place of the real one.
"""

import asyncio
import errno
import os
import resource
from pathlib import Path
from textwrap import dedent
from typing import Any

import httpx
import pytest

from tests.integration.reward.test_reward_service import put, run_of, scores
from tests.support.rewards import Pool, make_sample, num_pending, obedient_functions, servers_at
from tests.support.runs import ServiceRun
from tests.support.training import messages
from tests.support.waiting import wait_until
from tidemill.common.errors import MachineFaultError
from tidemill.common.process import children
from tidemill.common.process.heartbeats import Heartbeat, read_heartbeats
from tidemill.common.process.shortage import SHORT, make_fault
from tidemill.common.wire.messages import DeadLetter, ScoreStatus
from tidemill.services.reward.functions import pool
from tidemill.services.reward.functions.pool import Execution
from tidemill.services.reward.functions.request import Request
from tidemill.services.reward.functions.reward_function import load_function
from tidemill.services.reward.outcome import AttemptError, RewardOutcome
from tidemill.services.reward.remote.faults import RemoteFault

NUM_SAMPLES = 20
NO_MORE = 3
"""A limit of open files at which no further one can be opened; those that are open stay so."""

LENGTH = """
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return float(len(solution_str))
"""


def limit_files(pid: int, count: int | None = None) -> None:
    """Limit the open files of a running process; None: as many as it may have at most."""
    _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most if count is None else count, most))


async def beat_of(run: ServiceRun, name: str, is_short: bool) -> Heartbeat:
    """The worker's heartbeat, once it says that its machine is short of something, or that it is not."""

    async def find_beat() -> Heartbeat | None:
        beats = {beat.name: beat for beat in await read_heartbeats(run.broker, run.keys)}
        beat = beats.get(name)
        # It reports its scores once it has imported all that it needs.
        is_ready = beat is not None and "scored" in beat.counts
        return beat if is_ready and bool(beat.counts.get(SHORT)) == is_short else None

    return await wait_until(find_beat)


async def test_a_worker_without_descriptors_gives_its_samples_to_a_healthy_one(tmp_path: Path) -> None:
    async with run_of(tmp_path, LENGTH, lease_s=2.0) as run:
        sick = run.start("reward", "sick")
        await beat_of(run, "sick", is_short=False)
        limit_files(sick.pid, NO_MORE)
        await put(run, *["abc"] * NUM_SAMPLES)
        beat = await beat_of(run, "sick", is_short=True)
        assert beat.detail.startswith("takes no samples") and "ulimit -n" in beat.detail
        assert [failure.what for failure in beat.failures] == ["the machine of sick"]
        assert await messages(run.broker, run.keys.scores(), DeadLetter) == []

        run.start("reward", "healthy")
        published = await scores(run, NUM_SAMPLES)
        assert sorted(score.key for score in published) == [(ticket, 0) for ticket in range(NUM_SAMPLES)]
        assert {score.status for score in published} == {ScoreStatus.OK}
        assert {score.worker for score in published} == {"healthy"}
        # No attempt was counted: a sample that was delivered often is suspected of killing its workers.
        assert {score.attempts for score in published} == {1}
        assert await messages(run.broker, run.keys.dead, DeadLetter) == []
        assert await num_pending(run.broker, run.keys) == 0

        await run.stop_all("healthy")
        limit_files(sick.pid)
        await put(run, *["abc"] * NUM_SAMPLES, first=NUM_SAMPLES)
        published = await scores(run, 2 * NUM_SAMPLES)
        assert {score.worker for score in published[NUM_SAMPLES:]} == {"sick"}
        assert {score.status for score in published} == {ScoreStatus.OK}
        await beat_of(run, "sick", is_short=False)
        log = (tmp_path / "sick.log").read_text()
        assert "this machine is short of something" in log and "a start works again" in log
        assert "Traceback" not in log


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let no process be started here from now on, as at a limit of processes; returns a function that ends
    it."""

    def refuse() -> Any:
        def fail(*_: Any, **__: Any) -> None:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

        monkeypatch.setattr(children.subprocess, "Popen", fail)
        return monkeypatch.undo

    return refuse


async def test_without_any_process_a_call_is_no_attempt_and_with_one_it_waits_for_that(
    tmp_path: Path, no_process: Any
) -> None:
    calls = Pool(f"{obedient_functions(tmp_path)}:plain", size=2)
    try:
        end = no_process()
        with pytest.raises(MachineFaultError) as caught:
            await calls.score("pass")
        assert caught.value.number == errno.EAGAIN and "ulimit -u" in str(caught.value)
        end()
        first = await calls.score("pass")
        no_process()
        outcomes = await asyncio.gather(*(calls.score("time.sleep(0.1)", index=i) for i in range(4)))
        assert {outcome.components["pid"] for outcome in outcomes} == {first.components["pid"]}
        assert "plain runs in 1 of 2 processes" in calls.short_text
    finally:
        await calls.close()


async def test_what_a_function_says_of_the_machine_counts_where_our_own_start_fails_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution = Execution(load_function(f"{obedient_functions(tmp_path)}:plain", {}), num_processes=1)

    async def score(code: str) -> RewardOutcome:
        request = Request([make_sample((0, 0), False, "", code, "sample")])
        (outcome,) = await execution.run(request, 60)
        return outcome

    try:
        before = await score("pass")
        for wrong in ("raise OSError(24, 'Too many open files')", "raise MemoryError"):
            with pytest.raises(AttemptError) as failed:
                await score(wrong)
            assert not failed.value.is_code_error
            # It may leak descriptors: its process is replaced.
            after = await score("pass")
            assert after.components["pid"] != before.components["pid"]
            before = after
        short = make_fault(errno.EMFILE, "a process could not be started", "OSError")
        monkeypatch.setattr(pool, "find_shortage", lambda: short)
        with pytest.raises(MachineFaultError):
            await score("raise OSError(24, 'Too many open files')")
        with pytest.raises(MachineFaultError):  # what a process dies of may be the machine's, too
            await score("os.kill(os.getpid(), signal.SIGKILL)")
        with pytest.raises(AttemptError):
            await score("raise ValueError('no number')")
    finally:
        await execution.close()


async def test_a_process_that_ends_with_its_pool_as_it_starts_says_nothing_of_the_machine(
    tmp_path: Path,
) -> None:
    function = tmp_path / "mine.py"
    flag = tmp_path / "importing"
    function.write_text(f"import pathlib, time\npathlib.Path({str(flag)!r}).touch()\ntime.sleep(3600)\n")
    calls = Pool(f"{function}:compute_score")
    scored = asyncio.create_task(calls.score("pass"))
    await wait_until(flag.exists)
    await calls.close()
    with pytest.raises(AttemptError, match="SIGKILL"):
        await scored


DIES_AT_ITS_START = """
    import os, signal
    from pathlib import Path

    FLAG = Path({flag!r})
    if not FLAG.exists():
        FLAG.touch()
        {death}

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return 1.0
"""


@pytest.mark.parametrize(
    ("death", "is_short"),
    [("os.kill(os.getpid(), signal.SIGKILL)", False), ("os._exit(1)", True)],
)
async def test_a_scoring_process_that_dies_at_its_start_for_lack_of_memory_costs_no_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: str, is_short: bool
) -> None:
    """The kernel kills it, or Python ends as it cannot load a library: our own start fails as well then."""
    function = tmp_path / "mine.py"
    flag = tmp_path / "died"
    function.write_text(dedent(DIES_AT_ITS_START).format(flag=str(flag), death=death))
    flag.touch()
    execution = Execution(load_function(f"{function}:compute_score", {}), num_processes=1)
    request = Request([make_sample((0, 0), False, "", "", "sample")])
    flag.unlink()
    short = make_fault(errno.ENOMEM, "no memory could be taken", "MemoryError") if is_short else None
    monkeypatch.setattr(pool, "find_shortage", lambda: short)
    try:
        with pytest.raises(MachineFaultError) as caught:
            await execution.run(request, 60)
        assert caught.value.number == errno.ENOMEM
        (outcome,) = await execution.run(request, 60)
        assert outcome.value == 1.0
    finally:
        await execution.close()


THREADLESS = """
    import threading, time
    from pathlib import Path

    FLAG = Path({flag!r})
    start = threading.Thread.start

    def refused(thread):
        if FLAG.exists():
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refused

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        exec(solution_str)
        return 1.0
"""


async def test_a_scoring_process_that_gets_no_thread_runs_calls_one_after_the_other(tmp_path: Path) -> None:
    flag = tmp_path / "threadless"
    function = tmp_path / "mine.py"
    function.write_text(dedent(THREADLESS).format(flag=str(flag)))
    calls = Pool(f"{function}:compute_score", threads=8)
    try:
        await calls.score("pass")
        calls._sizing.calls = 8
        flag.touch()
        scored = asyncio.gather(*(calls.score("time.sleep(0.05)", index=index) for index in range(8)))
        outcomes = await asyncio.wait_for(scored, 60)
        assert [outcome.value for outcome in outcomes] == [1.0] * 8
    finally:
        await calls.close()


async def test_a_scoring_process_that_gets_no_thread_at_its_start_is_no_fault_of_the_code(
    tmp_path: Path,
) -> None:
    flag = tmp_path / "threadless"
    function = tmp_path / "mine.py"
    function.write_text(dedent(THREADLESS).format(flag=str(flag)))
    flag.touch()
    calls = Pool(f"{function}:compute_score")
    try:
        with pytest.raises(MachineFaultError):
            await calls.score("pass")
        flag.unlink()
        assert (await calls.score("pass")).value == 1.0
    finally:
        await calls.close()


async def test_a_request_without_a_descriptor_says_nothing_of_the_server(tmp_path: Path) -> None:
    """The limit is that of this process, so all is ready before it is set."""
    async with httpx.AsyncClient() as http:
        servers = servers_at("http://127.0.0.1:9", http)
        (replica,) = servers.replicas
        limit_files(os.getpid(), NO_MORE)
        try:
            with pytest.raises(MachineFaultError) as caught:
                await servers.request(replica, "POST", f"{replica.origin}/v1", {}, content=b"")
            await servers.look()
        finally:
            limit_files(os.getpid())
        assert caught.value.number == errno.EMFILE
        assert replica.is_healthy and not servers.errors
        with pytest.raises(RemoteFault):
            await servers.request(replica, "POST", f"{replica.origin}/v1", {}, content=b"")
