"""A sandbox worker whose machine is short of something: its jobs are for another one, and none is lost.

As root no limit of processes holds, so `EAGAIN` comes from an `os.fork` that is replaced in the process.
"""

import asyncio
import contextlib
import errno
import itertools
import os
import resource
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rq import Queue, Retry
from rq.job import JobStatus
from rq.serializers import JSONSerializer

from tests.support.preloaded import REPO
from tests.support.waiting import PATIENCE_S, wait_until
from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.errors import MachineFaultError
from tidemill.common.process.programs import RUN_CODE
from tidemill.common.process.shortage import SHORT_OF
from tidemill.common.redis.blocking_client import make_blocking_client
from tidemill.common.redis.broker import URL_VARIABLE
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.wire.keys import Keys
from tidemill.services.reward.sandbox import jail
from tidemill.services.reward.sandbox import job as sandbox_job
from tidemill.services.reward.sandbox.bubblewrap import SandboxError
from tidemill.services.reward.sandbox.job import run_tests

KEYS = Keys("jobs.1")
NO_MORE = 3
"""A limit of open files at which no further one can be opened; those that are open stay so."""
TESTS = {"inputs": ["1\n"], "outputs": ["1\n"]}
WORKER = """
import errno, os, sys
from pathlib import Path
from tidemill.common.process.shortage import make_fault
from tidemill.services.reward.sandbox import rq_worker

_, run_id, name, flag, report_to = sys.argv
FLAG, fork = Path(flag), os.fork
FAULT = make_fault(errno.EAGAIN, "a process could not be started", "BlockingIOError")

def is_short(where):
    return FLAG.exists() and FLAG.read_text() == where

def refused():
    if is_short("fork"):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    return fork()

def work(mark):
    if is_short("jail"):
        raise FAULT
    if is_short("answer"):
        # The file of the answer is the one that has no name any more.
        for number in os.listdir("/proc/self/fd"):
            try:
                is_answer = os.readlink(f"/proc/self/fd/{number}").endswith("(deleted)")
            except FileNotFoundError:
                continue
            if is_answer:
                os.dup2(os.open("/dev/full", os.O_WRONLY), int(number))
        return
    Path(mark).write_text(name)

os.fork = refused
rq_worker.run_code_of = lambda *_: work
rq_worker.find_shortage = lambda: FAULT if FLAG.exists() else None
sys.exit(rq_worker.main(run_id, "[]", report_to))
"""


def test_a_jail_that_cannot_be_set_up_for_want_of_descriptors_is_no_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SandboxConfig()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (NO_MORE, hard))
    try:
        with pytest.raises(MachineFaultError) as caught:
            run_tests("print(input())", TESTS, config)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.number == errno.EMFILE

    def fail_in_words(*_: object, **__: object) -> None:
        raise SandboxError("bwrap: Creating new namespace failed: Resource temporarily unavailable")

    monkeypatch.setattr(sandbox_job, "run_program", fail_in_words)
    with pytest.raises(MachineFaultError) as caught:
        run_tests("print(input())", TESTS, config)
    assert caught.value.number == errno.EAGAIN


@pytest.mark.parametrize(("dies", "tests"), [
    ("import os\nos.kill(os.getpid(), 9)", TESTS),
    ("import os\ndef f(x): os.kill(os.getpid(), 9)", ["assert f(1) == 2"]),
    ("import os\ndef f(x): os.kill(os.getpid(), 9)", {"fn_name": "f", "inputs": [[1]], "outputs": [2]}),
])  # fmt: skip
def test_a_program_that_fails_while_the_kernel_kills_for_lack_of_memory_has_no_result(
    each_jail: None, monkeypatch: pytest.MonkeyPatch, dies: str, tests: Any
) -> None:
    """Nobody can tell whose process it was; a program that dies on a machine with memory fails its test."""
    config = SandboxConfig()
    result = run_tests(dies, tests, config)
    assert result["passed"] == 0
    kills = itertools.count()
    monkeypatch.setattr(jail, "count_oom_kills", lambda: next(kills))
    result = run_tests(dies, tests, config)
    assert result["is_final"] is False and "out of memory" in result["error"]
    right = {"fn_name": "f", "inputs": [[1]], "outputs": [2]}
    assert run_tests("def f(x): return x + 1", right, config)["passed"] == 1


@contextlib.contextmanager
def working(server: EmbeddedRedis, name: str, flag: Path) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """A worker of the queue, and the descriptor from which its reports of shortages come."""
    reports, writes_to = os.pipe()
    command = [sys.executable, "-c", WORKER, KEYS.run_id, name, str(flag), str(writes_to)]
    env = os.environ | {URL_VARIABLE: server.url}
    worker = subprocess.Popen(
        command, cwd=REPO, env=env, stderr=subprocess.PIPE, text=True, pass_fds=[writes_to]
    )
    os.close(writes_to)
    try:
        yield worker, reports
    finally:
        worker.kill()
        worker.wait()
        os.close(reports)


@pytest.mark.parametrize(("where", "number", "advice"), [
    ("fork", errno.EAGAIN, "ulimit -u"), ("jail", errno.EAGAIN, "ulimit -u"),
    ("answer", errno.ENOSPC, "TMPDIR"),
])  # fmt: skip
async def test_a_job_goes_back_and_a_healthy_worker_does_it(
    tmp_path: Path, where: str, number: int, advice: str
) -> None:
    server = EmbeddedRedis(tmp_path / "redis")
    server.start()
    queue = Queue(KEYS.sandbox_queue, connection=make_blocking_client(server.url), serializer=JSONSerializer)
    flag = tmp_path / "flag"
    flag.write_text(where)

    async def finish(mark: Path) -> None:
        job_id = f"{KEYS.sandbox_names}{secrets.token_hex(4)}"
        job = queue.enqueue_call(RUN_CODE, args=(str(mark),), job_id=job_id, retry=Retry(max=2))
        await wait_until(lambda: job.get_status(refresh=True) is JobStatus.FINISHED)

    try:
        with working(server, "sick", flag) as (sick, reports):
            done = asyncio.create_task(finish(tmp_path / "first"))
            line = await asyncio.to_thread(os.read, reports, 1000)
            assert line.startswith(f"{number} ".encode()) and advice.encode() in line
            with working(server, "healthy", tmp_path / "no flag"):
                await done
            assert (tmp_path / "first").read_text() == "healthy"
            flag.unlink()
            assert (await asyncio.to_thread(os.read, reports, 1000)).endswith(b"0\n")
            await finish(tmp_path / "second")
            assert (tmp_path / "second").read_text() == "sick"
            sick.terminate()
            _, said = await asyncio.to_thread(sick.communicate, timeout=PATIENCE_S)
        assert sick.returncode == 0
        assert f"This machine is short of {SHORT_OF[number]}" in said
        assert "Traceback" not in said
    finally:
        server.stop()
