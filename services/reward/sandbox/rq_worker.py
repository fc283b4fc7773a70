"""An RQ worker of a run's queue: `python -m tidemill.services.reward.sandbox.rq_worker RUN_ID CONFIGS [FD]`.

CONFIGS is a JSON list of the run's sandbox sections; no job exceeds them, whatever it asks for.
Where this machine is short of processes, descriptors, memory or disk, a job goes back to the queue, and none
is taken until a start works; FD gets a line when that begins and ends.
Every job runs in a process of its own, so one that crashes affects nothing else. That process inherits the
connection to Redis and does not use it: the worker writes the result, and tells RQ how the job ended. It ends
with the worker. The worker ends with the process that started it, and reaps orphaned processes of jobs.

By default, write access to a job's hash decides what is called: RQ imports any dotted name that stands there,
for the function and for its callbacks, and sends webhooks to any address. Here there is one function; its
name is compared, never imported, and it validates its arguments (`pydantic.validate_call`). Fields of a hash
that this project's jobs do not have are not read.
"""

import contextlib
import ctypes
import gc
import inspect
import json
import os
import secrets
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from typing import IO, Any, ClassVar, NoReturn

from pydantic import TypeAdapter
from redis import Redis
from redis.exceptions import RedisError
from rq import Queue, Worker, get_current_job
from rq.exceptions import NoSuchJobError, StopRequested
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.worker import WorkerStatus

from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.errors import MachineFaultError, TidemillError
from tidemill.common.process.failures import is_logged
from tidemill.common.process.privacy import hide_memory
from tidemill.common.process.programs import RUN_CODE
from tidemill.common.process.shortage import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    SHORT_OF,
    find_shortage,
    is_machine_fault,
    machine_faults,
    make_fault,
    shortage_number,
)
from tidemill.common.redis.blocking_client import make_blocking_client
from tidemill.common.redis.broker import redis_url
from tidemill.common.wire.keys import Keys
from tidemill.services.reward.sandbox.bubblewrap import SandboxError
from tidemill.services.reward.sandbox.job import RESULT_TTL_S, make_warm_jails, run_code_of
from tidemill.services.reward.sandbox.preamble import write_imports

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
BEAT_S = 2
"""Seconds between heartbeats of a busy worker, which `services/reward/rewards/sandbox.py` watches."""
LEAST_BEAT_S = 1.0
"""Between two heartbeats of the worker that are a call of their own: RQ sends three for each job."""
MAINTENANCE_S = 30
WORKER_TTL_S = 60
"""RQ waits for a job for up to 15 s less than this, and may send no beat before. The worker's entry in Redis,
which stays for `BEAT_S` + 60 s after a job, must outlive that wait."""
PAUSE_S = 1.0
NOT_SHORT = "0"
"""Line that says that a start works again. Others have the `errno` of what the machine lacks, and why."""
MAX_LINE_CHARS = 1000

# fmt: off
FIELDS = frozenset((
    "created_at", "data", "description", "ended_at", "enqueued_at", "failure_ttl", "last_heartbeat",
    "number_of_retries", "origin", "result_ttl", "retries_left", "started_at", "status", "timeout", "ttl",
    "worker_name",
))
# fmt: on
"""Fields that are read of a job's hash: no callbacks, no webhooks, no dependencies, no repetitions."""


PASSES_EXECUTION = "execution" in inspect.signature(Worker.perform_job).parameters
"""Whether RQ's methods take the execution of a job, as RQ 3's do; RQ 2 keeps it in the worker."""


class UnknownJobError(Exception):
    """A job names another function than `RUN_CODE`."""


class JobProcessError(Exception):
    """The process of a job failed."""


class CodeJob(Job):
    """A job that can call nothing but `run_code`, whatever its hash says."""

    run_code: ClassVar[Callable[..., None]]
    keys: ClassVar[Keys]

    @classmethod
    def fetch(cls, id: str, *arguments: Any, **options: Any) -> Job:
        """Raises NoSuchJobError: there is none, or it belongs to another run."""
        if not id.startswith(cls.keys.sandbox_names):
            raise NoSuchJobError(f"{id} is no job of this worker")
        return super().fetch(id, *arguments, **options)

    def __init__(self, id: str | None = None, connection: Any = None, serializer: Any = None) -> None:
        # Always JSON: a caller that passes no serializer would get pickle.
        super().__init__(id, connection=connection, serializer=JSONSerializer)

    @property
    def func(self) -> Callable[..., Any]:
        """The only function.

        Raises:
            UnknownJobError: the job names another one, which is not imported.
        """
        if self.func_name != RUN_CODE or self.instance is not None:
            raise UnknownJobError(f"{self.func_name} is no job of this worker; expected {RUN_CODE}")
        return type(self).run_code

    def restore(self, raw_data: Mapping[bytes, bytes]) -> None:
        """Read the fields in `FIELDS`.

        Raises:
            NoSuchJobError: the hash holds no job that can be read; workers skip such a job.
        """
        fields = {name: value for name, value in raw_data.items() if name.decode(errors="replace") in FIELDS}
        try:
            super().restore(fields)
            self._deserialize_data()  # type: ignore[no-untyped-call]
            if self.origin != self.keys.sandbox_queue:  # RQ writes to any queue that a job names
                raise NoSuchJobError(f"job {self.id} is of the queue {self.origin}")
        except NoSuchJobError:
            raise
        except Exception as error:  # whatever RQ's parsing of hostile fields raises
            raise NoSuchJobError(f"job {self.id} cannot be read: {error!r}") from None


class CodeWorker(Worker):
    """Executes the jobs of a run's sandbox queue with `run_code`; all other jobs fail."""

    is_asked_to_stop: ClassVar[bool] = False
    """Shared by this process's workers: while one replaces another, the signal still goes to the old one."""
    num_faults: ClassVar[int] = 0
    """Jobs that were given back because this machine was short of something."""

    def __init__(
        self,
        keys: Keys,
        run_code: Callable[..., Any],
        connection: Redis,
        report_to: int = -1,
        prepare: Callable[[], None] = lambda: None,
        reap: Callable[[int], bool] = lambda pid: False,
    ) -> None:
        """`report_to` is a descriptor for lines about shortages of this machine; -1: there is none. `prepare`
        is called before the process of a job is forked, which inherits what it makes. `reap` is called with a
        child that has ended, and reaps it and returns True if it is one that `prepare` has made."""
        self._report_to = report_to
        self._prepare = prepare
        self._reap = reap
        self._run_code = run_code
        self._keys = keys
        self._faults: list[MachineFaultError] = []
        """Of the machine, in the job under way."""
        self._beat_at = float("-inf")
        """When the last heartbeat that was a call of its own was sent, on the monotonic clock."""
        self._execution: tuple[Any, ...] = ()
        """RQ's record of the job under way, where its methods take it (`PASSES_EXECUTION`)."""
        super().__init__(
            [keys.sandbox_queue],
            # RQ refuses a name whose former holder was killed, so it is new at every start.
            name=f"{keys.sandbox_names}{secrets.token_hex(4)}",
            connection=connection,
            serializer=JSONSerializer,
            job_class=type(
                "RunsCodeJob", (CodeJob,), {"keys": keys, "run_code": staticmethod(self._run_apart)}
            ),
            job_monitoring_interval=BEAT_S,
            maintenance_interval=MAINTENANCE_S,
            worker_ttl=WORKER_TTL_S,
            log_job_description=False,
        )

    def request_stop(self, signum: int, frame: Any) -> None:
        CodeWorker.is_asked_to_stop = True
        with contextlib.suppress(RedisError):  # RQ writes the time of the request to Redis
            super().request_stop(signum, frame)  # type: ignore[no-untyped-call]

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        """Say that this worker is there, unless it has said so in the last `LEAST_BEAT_S`. Beats that go with
        other commands cost nothing, and are sent in any case."""
        # Nobody waits for these. That a worker hangs or is gone shows in the heartbeat of its job, which
        # `_wait_for` has RQ send every `BEAT_S`: the reward worker asks again `LOST_S` after the last one
        # (`services/reward/rewards/sandbox.py`). A job that no worker has taken waits for any of them.
        if pipeline is None and timeout is None:
            now = time.monotonic()
            if now < self._beat_at + LEAST_BEAT_S:
                return
            self._beat_at = now
        super().heartbeat(timeout, pipeline)

    def set_state(self, state: str, pipeline: Any = None) -> None:
        """Write the state where it changes: RQ says "idle" once more as it looks for the next job."""
        if pipeline is not None or state != self.get_state():
            super().set_state(state, pipeline)

    def execute_job(self, job: Job, queue: Queue) -> None:
        """Do what RQ does for a job in this process; `_run_apart` forks. RQ forks here, and its fork connects
        to Redis, and copies the memory that all of this takes."""
        self._faults.clear()
        try:
            execution = self.prepare_execution(job)
            self._execution = (execution,) if PASSES_EXECUTION else ()
            self.perform_job(job, queue, *self._execution)
            self.set_state(WorkerStatus.IDLE)
        finally:
            self._reap_orphans()
        if self._faults:
            self._wait_out_shortage(self._faults[-1])

    def _reap_orphans(self) -> None:
        """Reap what jobs have left. How a warm jail has ended must not be lost with it."""
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if not self._reap(ended.si_pid):
                    os.waitpid(ended.si_pid, 0)

    def handle_exception(self, job: Job, *exc_info: Any) -> None:
        """Of a job that has failed. RQ puts it back into the queue, or the reward worker that waits for it
        asks again."""
        if isinstance(exc_info[1], MachineFaultError):
            self._faults.append(exc_info[1])
            return
        super().handle_exception(job, *exc_info)

    def _run_apart(self, *arguments: Any) -> None:
        """Call `run_code` in a process of its own, and write its result to Redis.

        Raises:
            MachineFaultError: the machine is short of something: the job is for another one.
            JobProcessError: it raised an exception, or its process was killed.
        """
        job = get_current_job()
        assert job is not None
        with machine_faults("a job could not be run"), tempfile.TemporaryFile() as answer:
            self._prepare_for_job()
            worker = os.getpid()
            child = os.fork()
            if child == 0:
                self._answer(arguments, answer, worker)
            with contextlib.suppress(OSError):  # as the child does, whichever is first; it may have ended
                os.setpgid(child, child)
            self._horse_pid = child
            try:
                status = self._wait_for(child, job)
            finally:
                if self._horse_pid:
                    os.killpg(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                self._horse_pid = 0
            # Before the answer is read: what was written may be a part of it.
            code = os.waitstatus_to_exitcode(status)
            if code in SHORT_OF:
                raise make_fault(code, "the answer of a job could not be written", os.strerror(code))
            if code != 0:
                raise JobProcessError(f"the job's process ended with {code}")
            answer.seek(0)
            reply = json.loads(answer.read())
        if "number" in reply:
            raise MachineFaultError(reply["reason"], reply["number"])
        if "error" in reply:
            raise JobProcessError(reply["error"])
        if reply["value"] is not None:
            key = self._keys.sandbox_result(job.id)
            self.connection.set(key, json.dumps(reply["value"]), ex=RESULT_TTL_S)

    def _prepare_for_job(self) -> None:
        """Let there be warm jails; without them, the job's programs get jails of their own.

        Raises:
            MachineFaultError, OSError: the machine is short of something.
        """
        try:
            self._prepare()
        except (SandboxError, OSError) as error:
            if is_machine_fault(error):
                raise
            print(f"tidemill sandbox: no warm jail could be made: {error}", file=sys.stderr, flush=True)

    def _answer(self, arguments: tuple[Any, ...], answer: IO[bytes], worker: int) -> NoReturn:
        """What the process of a job does, a child of the process `worker`. Its exit code is 0 once the answer
        is written, and else the `errno` of what the machine lacks for that, or 1."""
        reply: dict[str, Any]
        if sys.platform == "linux":
            # A worker that is killed can end nothing: its job would run on beside its second run.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != worker:  # it has ended before that call
            os._exit(1)
        try:
            os.setpgid(0, 0)
            self.setup_work_horse_signals()  # type: ignore[no-untyped-call]
            reply = {"value": self._run_code(*arguments)}
        except MachineFaultError as fault:
            reply = {"number": fault.number, "reason": str(fault)}
        except BaseException:
            reply = {"error": traceback.format_exc()}
        try:
            answer.write(json.dumps(reply).encode())
            answer.flush()
        except BaseException as error:
            os._exit(shortage_number(error) or 1)
        os._exit(0)

    def _wait_for(self, child: int, job: Job) -> int:
        """The exit status of a job's process; heartbeats say that it is at work."""
        with os.fdopen(os.pidfd_open(child)) as process:  # which becomes readable as the process ends
            ended = select.poll()
            ended.register(process, select.POLLIN)
            while not ended.poll(1000 * BEAT_S):
                self.maintain_heartbeats(job, *self._execution)
        _, status = os.waitpid(child, 0)
        self._horse_pid = 0
        return status

    def _wait_out_shortage(self, fault: MachineFaultError) -> None:
        """Take no job until a start works."""
        CodeWorker.num_faults += 1
        if is_logged(CodeWorker.num_faults):
            print(f"tidemill sandbox: {fault}", file=sys.stderr, flush=True)
        self._report(f"{fault.number} {fault}")
        pause_s = FIRST_PAUSE_S
        while not CodeWorker.is_asked_to_stop:
            time.sleep(pause_s)
            self.heartbeat()
            if find_shortage() is None:
                break
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self._report(NOT_SHORT)

    def _report(self, line: str) -> None:
        if self._report_to >= 0:
            with contextlib.suppress(OSError):  # nobody reads any more: the worker is about to end
                os.write(self._report_to, f"{' '.join(line.split())[:MAX_LINE_CHARS]}\n".encode())

    def _set_ip_address(self, connection: Any) -> None:
        """RQ would look for its address in Redis's list of clients, which workers may not read."""
        self.ip_address = "unknown"


def main(run_id: str, configs: str, report_to: str = "-1") -> int:
    """Execute jobs until SIGTERM; one that is under way is finished first. RQ's worker is replaced when it
    has ended, for instance because Redis was away during a job."""
    if sys.platform == "linux":
        # SIGTERM lets RQ finish the job under way.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    hide_memory()  # it has the password of Redis, and code of models runs as the same user
    try:
        connection = make_blocking_client(redis_url(), run_id)
    except TidemillError as error:
        print(f"tidemill sandbox: {error}", file=sys.stderr)
        return error.exit_code
    sections = TypeAdapter(list[SandboxConfig]).validate_json(configs)
    warm, sentence = make_warm_jails(sections)
    print(f"tidemill sandbox: {sentence}", file=sys.stderr, flush=True)
    run_code = run_code_of(run_id, sections, warm)

    def prepare() -> None:
        if warm is not None:
            warm.prepare(sections)

    def reap(pid: int) -> bool:
        return warm is not None and warm.reap(pid)

    write_imports("")  # its table is made once, and not in the process of each job
    gc.collect()
    gc.freeze()  # collections in the processes of jobs would copy all of it
    while not CodeWorker.is_asked_to_stop:
        worker = CodeWorker(Keys(run_id), run_code, connection, int(report_to), prepare, reap)
        problem = "RQ's worker ended"
        try:
            worker.work(logging_level="WARNING")
            for queue in worker.queues:  # an id that is not text ends the worker, and would at every start
                connection.delete(queue.intermediate_queue_key)
        except RedisError as error:
            problem = str(error)
        if not CodeWorker.is_asked_to_stop:
            print(f"tidemill sandbox: {problem}; trying again", file=sys.stderr, flush=True)
            with contextlib.suppress(StopRequested):
                time.sleep(PAUSE_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
