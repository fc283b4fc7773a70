"""A job is the one function that there is for it, whatever its hash in Redis says."""

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rq import Queue
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer
from rq.worker import WorkerStatus

from tests.support.preloaded import REPO
from tests.support.waiting import PATIENCE_S, has_ended, wait_until
from tidemill.common.process.programs import RUN_CODE
from tidemill.common.redis.blocking_client import make_blocking_client
from tidemill.common.redis.broker import URL_VARIABLE
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.wire.keys import Keys
from tidemill.services.reward.sandbox import rq_worker

KEYS = Keys("jobs.1")
WORKER = """
import sys, time
from tidemill.services.reward.sandbox import rq_worker

rq_worker.run_code_of = lambda *_: time.sleep
sys.exit(rq_worker.main(sys.argv[1], "[]"))
"""
"""A worker of the run, whose one function sleeps in place of running code."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def queue(server: EmbeddedRedis) -> Queue:
    connection = make_blocking_client(server.url)
    connection.flushall()
    return Queue(KEYS.sandbox_queue, connection=connection, serializer=JSONSerializer)


@pytest.fixture
def was_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Whether the module `loud`, which workers could import, was imported, or its file `mark` was made."""
    (tmp_path / "loud.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\ndef f(*_): pass\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda: any((tmp_path / name).exists() for name in ("imported", "mark"))


@contextlib.contextmanager
def working(server: EmbeddedRedis) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", WORKER, KEYS.run_id]
    env = os.environ | {URL_VARIABLE: server.url}
    worker = subprocess.Popen(command, cwd=REPO, env=env, stderr=subprocess.PIPE, text=True)
    try:
        yield worker
    finally:
        worker.kill()
        worker.wait()


async def work_off(server: EmbeddedRedis, queue: Queue) -> str:
    """Let a worker of the run do all jobs; what it said."""
    last = asked(queue, RUN_CODE, 0)
    with working(server) as worker:
        await wait_until(lambda: last.get_status(refresh=True) is JobStatus.FINISHED)
        worker.terminate()
        said = (await asyncio.to_thread(worker.communicate, timeout=PATIENCE_S))[1]
    assert (worker.returncode, queue.count) == (0, 0)
    return said


def asked(queue: Queue, function: str, *arguments: Any) -> Job:
    return queue.enqueue_call(function, args=arguments, job_id=f"{KEYS.sandbox_names}{secrets.token_hex(4)}")


async def test_no_other_function_is_called_and_nothing_imported_to_find_it_whatever_a_hash_says(
    queue, server, tmp_path, was_called
):
    """Only the fields of a hash that are listed are read, and what cannot be read ends no worker."""
    mark = tmp_path / "mark"
    calls = [
        ("subprocess.getoutput", f"touch {mark}"),
        ("os.system", f"touch {mark}"),
        ("tidemill.services.reward.sandbox.jail.subprocess.getoutput", f"touch {mark}"),
        ("pathlib.Path.touch", str(mark)),
        ("loud.f", ""),
    ]
    jobs = [asked(queue, function, argument) for function, argument in calls]
    for name in ("success_callback_name", "failure_callback_name", "stopped_callback_name"):
        queue.connection.hset(asked(queue, RUN_CODE, "no number").key, name, "loud.f")
    odd = [{"data": b"\x80\x04."}, {"timeout": b"soon"}, {"status": b"odd"}, {"data": b"[1, 2]"}]
    odd += [{"origin": b""}, {"origin": Keys("another").sandbox_queue.encode()}, {"data": b"[" * 100_000}]
    for fields in odd:
        queue.connection.hset(asked(queue, RUN_CODE, 0).key, mapping=fields)
    queue.connection.lpush(queue.key, b"\xff")
    said = await work_off(server, queue)
    assert not was_called()
    assert {job.get_status() for job in jobs} == {JobStatus.FAILED}
    assert all(f"{function} is no job of this worker" in said for function, _ in calls)
    assert {key for key in queue.connection.keys("rq:*") if b"another" in key} == set()


async def test_a_job_ends_with_its_worker(queue, server):
    """A worker that was killed cannot end it, and it is run again by another one."""
    with working(server) as worker:
        first = asked(queue, RUN_CODE, 600)
        process = psutil.Process(worker.pid)
        await wait_until(lambda: first.get_status(refresh=True) is JobStatus.STARTED)
        await wait_until(process.children)
        jobs = process.children()
    await wait_until(lambda: all(has_ended(job) for job in jobs), timeout_s=30.0)


async def test_where_no_warm_jail_can_be_made_jobs_are_run_without(queue, server, monkeypatch):
    """Neither bubblewrap nor Python is there: a job that waited for them would never end."""
    refusing = WORKER.replace(
        "sys.exit",
        "class Refusing:\n"
        "    def prepare(self, _): raise error\n"
        "rq_worker.make_warm_jails = lambda _: (Refusing(), 'refusing')\n"
        "sys.exit",
    )
    for error in ("rq_worker.SandboxError('no bwrap')", "FileNotFoundError(2, 'no bwrap')"):
        monkeypatch.setattr(sys.modules[__name__], "WORKER", refusing.replace("error", error, 1))
        assert "no warm jail could be made" in await work_off(server, queue)


async def test_a_worker_knows_that_its_warm_jails_were_killed(isolated, queue, server, monkeypatch):
    """It reaps what its jobs leave behind, which could take the ends of its jails along."""
    killing = WORKER.replace(
        "rq_worker.run_code_of = lambda *_: time.sleep",
        "import os\n"
        "def kill_jails(run_id, configs, warm):\n"
        "    def run_code(*_):\n"
        "        for template in warm._templates.values():\n"
        "            os.killpg(template._process.pid, 9)\n"
        "        while any(each.takes_requests() for each in warm._templates.values()): time.sleep(0.01)\n"
        "        time.sleep(0.2)\n"
        "    return run_code\n"
        "rq_worker.run_code_of = kill_jails\n"
        "from tidemill.services.reward.sandbox.warm import WarmJails\n"
        "WarmJails.note_failure = lambda _: print('a jail was killed', file=sys.stderr)",
    ).replace('"[]"', '"[{}]"')
    monkeypatch.setattr(sys.modules[__name__], "WORKER", killing)
    asked(queue, RUN_CODE, 0)
    asked(queue, RUN_CODE, 0)
    assert (await work_off(server, queue)).count("a jail was killed") == 2


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_a_worker_whose_redis_dies_during_a_job_goes_on_with_the_next_one_unless_it_is_stopped(
    tmp_path, is_stopped
):
    """RQ ends then, with a code that says that all is well; a signal that comes meanwhile is not lost."""
    server = EmbeddedRedis(tmp_path / "redis")
    server.start()
    queue = Queue(KEYS.sandbox_queue, connection=make_blocking_client(server.url), serializer=JSONSerializer)
    try:
        with working(server) as worker:
            first = asked(queue, RUN_CODE, 4)
            await wait_until(lambda: first.get_status(refresh=True) is JobStatus.STARTED)
            server.kill()
            assert worker.stderr is not None
            await wait_until(lambda: "trying again" in worker.stderr.readline())
            if not is_stopped:
                server.start()
                second = asked(queue, RUN_CODE, 0)
                await wait_until(lambda: second.get_status(refresh=True) is JobStatus.FINISHED)
            worker.terminate()
            assert worker.wait(PATIENCE_S) == 0
    finally:
        server.stop()


def test_a_worker_beats_now_and_then_and_writes_its_state_where_it_changes(queue, monkeypatch):
    """RQ sends three heartbeats and writes two states for each job, whose program takes milliseconds."""
    monkeypatch.setattr(rq_worker, "LEAST_BEAT_S", 3600.0)
    worker = rq_worker.CodeWorker(KEYS, time.sleep, queue.connection)

    def num_writes() -> int:
        counts = queue.connection.info("commandstats")
        return int(counts.get("cmdstat_hset", {}).get("calls", 0))

    before = num_writes()
    for _ in range(3):
        worker.heartbeat()
        worker.set_state(WorkerStatus.IDLE)
    assert num_writes() - before == 2
    worker.set_state(WorkerStatus.BUSY)
    worker.heartbeat(timeout=60)
    assert num_writes() - before == 4
