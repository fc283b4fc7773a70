"""A job is one of the few functions that exist for it, whatever its hash in Redis says."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rq import Queue
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from tests.support.preloaded import REPO
from tests.support.waiting import PATIENCE_S, wait_until
from tidemill.common.process.programs import JobFunction
from tidemill.common.redis.broker import URL_VARIABLE
from tidemill.common.redis.client import make_blocking_client
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.wire.keys import Keys

KEYS = Keys("jobs.1")


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
    return Queue(KEYS.jobs_queue, connection=connection, serializer=JSONSerializer)


@pytest.fixture
def loud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there once the module `loud`, which workers could import, was imported."""
    mark = tmp_path / "was-here"
    (tmp_path / "loud.py").write_text(f"open({str(mark)!r}, 'w')\ndef f(*_): pass\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return mark


def work(server: EmbeddedRedis) -> str:
    """Let a worker of the run do all jobs; what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "tidemill.services.jobs", KEYS.run_id, "--burst"],
        cwd=REPO,
        env=os.environ | {URL_VARIABLE: server.url},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


def asked(queue: Queue, function: str, *arguments: Any, **options: Any) -> Job:
    job_id = f"{KEYS.jobs_names}{queue.count}"
    return queue.enqueue_call(function, args=arguments, job_id=job_id, **options)


def test_no_other_function_is_called_and_nothing_imported_to_find_it(
    queue: Queue, server: EmbeddedRedis, tmp_path: Path, loud: Path
) -> None:
    mark = tmp_path / "called"
    calls = [
        ("subprocess.getoutput", f"touch {mark}"),
        ("os.system", f"touch {mark}"),
        ("tidemill.services.jobs.export.subprocess.getoutput", f"touch {mark}"),
        ("pathlib.Path.touch", str(mark)),
        ("loud.f", ""),
    ]
    jobs = [asked(queue, function, argument) for function, argument in calls]
    said = work(server)
    assert not mark.exists() and not loud.exists()
    assert {job.get_status() for job in jobs} == {JobStatus.FAILED}
    assert all(f"{function} is no job of this worker" in said for function, _ in calls)


def test_callbacks_that_a_job_names_are_not_called(queue: Queue, server: EmbeddedRedis, loud: Path) -> None:
    """Only the fields of a hash that are listed are read."""
    for name in ("success_callback_name", "failure_callback_name", "stopped_callback_name"):
        job = asked(queue, JobFunction.ARCHIVE, KEYS.run_id, f"/nowhere/{KEYS.run_id}", {})
        queue.connection.hset(job.key, name, "loud.f")
    work(server)
    assert not loud.exists()


def test_arguments_are_checked_before_the_function_is_called(queue: Queue, server: EmbeddedRedis) -> None:
    folder = f"/runs/{KEYS.run_id}"
    calls: list[tuple[str, tuple[Any, ...], str]] = [
        (JobFunction.ARCHIVE, ("another-run", "/runs/another-run", {}), "and the job of another-run"),
        (JobFunction.ARCHIVE, (KEYS.run_id, "/runs/other", {}), "/runs/other"),
        (JobFunction.ARCHIVE, (KEYS.run_id, f"../{KEYS.run_id}", {}), f"../{KEYS.run_id}"),
        (JobFunction.ARCHIVE, (KEYS.run_id, folder, {"secrets": "1-0"}), "secrets"),
        (JobFunction.ARCHIVE, (KEYS.run_id, folder, {"scores": "1-0; x"}), "scores"),
        (JobFunction.ARCHIVE, (KEYS.run_id, folder, {}, "perhaps"), "perhaps"),
        (JobFunction.ARCHIVE, (KEYS.run_id,), "missing_argument"),
        (JobFunction.EXPORT, ("/etc", "m", "bfloat16", "last", "/tmp/x"), "/etc"),
        (JobFunction.EXPORT, (folder, "m", "bfloat16", "../1", "/tmp/x"), "../1"),
        (JobFunction.EXPORT, (folder, "m", "bfloat16", "last", "here"), "here"),
    ]
    jobs = [asked(queue, function, *arguments) for function, arguments, _ in calls]
    work(server)
    for job, (_, arguments, complaint) in zip(jobs, calls, strict=True):
        result = job.latest_result()
        assert result is not None and result.exc_string is not None, arguments
        assert "ValidationError" in result.exc_string and complaint in result.exc_string, arguments


def test_a_job_that_cannot_be_read_ends_no_worker(queue: Queue, server: EmbeddedRedis) -> None:
    odd = [{"data": b"\x80\x04."}, {"timeout": b"soon"}, {"status": b"odd"}, {"data": b"[1, 2]"}]
    odd += [{"origin": b""}, {"origin": Keys("another").jobs_queue.encode()}, {"data": b"[" * 100_000}]
    for fields in odd:
        job = asked(queue, JobFunction.ARCHIVE, KEYS.run_id, f"/nowhere/{KEYS.run_id}", {})
        queue.connection.hset(job.key, mapping=fields)
    work(server)
    assert queue.count == 0
    assert {key for key in queue.connection.keys("rq:*") if b"another" in key} == set()


def test_an_id_that_is_no_text_ends_no_worker(queue: Queue, server: EmbeddedRedis) -> None:
    queue.connection.lpush(queue.key, b"\xff")
    job = asked(queue, "os.system", "true")
    work(server)
    assert queue.count == 0 and job.get_status() is JobStatus.FAILED


WAITING = """
import sys, time
from tidemill.services.jobs.known_jobs import serve_queue

def wait(seconds):
    time.sleep(seconds)

sys.exit(serve_queue(*sys.argv[1:], {"wait": wait}, "these tests", job_monitoring_interval=1))
"""


async def test_a_worker_whose_redis_dies_during_a_job_goes_on_with_the_next_one(tmp_path: Path) -> None:
    """RQ ends then, with a code that says that all is well."""
    server = EmbeddedRedis(tmp_path / "redis")
    server.start()
    queue = Queue(KEYS.jobs_queue, connection=make_blocking_client(server.url), serializer=JSONSerializer)
    command = [sys.executable, "-c", WAITING, KEYS.run_id, KEYS.jobs_queue, KEYS.jobs_names]
    env = os.environ | {URL_VARIABLE: server.url}
    worker = await asyncio.to_thread(
        lambda: subprocess.Popen(command, cwd=REPO, env=env, stderr=subprocess.PIPE, text=True)
    )
    try:
        first = asked(queue, "wait", 4)
        await wait_until(lambda: first.get_status(refresh=True) is JobStatus.STARTED)
        server.kill()
        assert worker.stderr is not None
        await wait_until(lambda: "trying again" in worker.stderr.readline())
        server.start()
        second = asked(queue, "wait", 0)
        await wait_until(lambda: second.get_status(refresh=True) is JobStatus.FINISHED)
        worker.terminate()
        assert worker.wait(PATIENCE_S) == 0
    finally:
        worker.kill()
        server.stop()
