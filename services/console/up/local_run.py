"""A run on this machine from start to report: Redis, processes, the view, signals, and the end.

Redis starts before the services and stops after them, because they drain through it. The summary is computed
while Redis is still there.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import structlog
from rich.console import Console
from rich.text import Text

from tidemill.common.archive import mark_whole
from tidemill.common.command_line import command_line
from tidemill.common.config import RunConfig
from tidemill.common.config.environment import NO_CONTAINERS
from tidemill.common.errors import TidemillError, first_cause
from tidemill.common.files import StorageError
from tidemill.common.history import History
from tidemill.common.process.programs import ROOT, Program, run_own
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.client import URL_VARIABLE
from tidemill.common.run.state import (
    FAILED,
    FINISHED,
    STARTING,
    STOPPED,
    has_finished,
    publish_config,
    read_state,
    read_uid,
    update_state,
)
from tidemill.common.streams import read_newest
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit
from tidemill.services.console.look.archive import archive_rest
from tidemill.services.console.look.bottleneck import ROLES, Bottleneck
from tidemill.services.console.look.failed_scores import FailedScores
from tidemill.services.console.look.report import print_report, read_report, summarise, write_report
from tidemill.services.console.look.snapshot import RunSnapshot, SnapshotReader
from tidemill.services.console.run.end import RunEnd, started_now, write_end
from tidemill.services.console.run.folder import RunFolder, log_to_file, nearest
from tidemill.services.console.run.guard import Guard
from tidemill.services.console.run.local_redis import open_redis
from tidemill.services.console.text.formats import in_columns, printable
from tidemill.services.console.up.forks import ForkServer
from tidemill.services.console.up.specs import ServiceSpec, service_environment
from tidemill.services.console.up.supervisor import (
    MAX_REASON_CHARACTERS,
    Ending,
    RunOutcome,
    Supervisor,
)
from tidemill.services.console.up.views import LiveView, PlainView, View

log = structlog.get_logger(__name__)

STOPPED_EXIT_CODE = 130
REFRESH_S = 0.5
SHUTDOWN_TIMEOUT_S = 5.0
"""Timeout of writes and reads of the run's state at the end: Redis may be what failed."""
CONTAINERS_TIMEOUT_S = 120.0
TUTORIAL = "docs/tutorial.md"
GRACE_MARGIN_S = 60.0  # a trainer writes its checkpoint before it ends
HINT = "Ctrl-C stops the run; it can be resumed. Logs: {logs}"


def _import_for_report() -> None:
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401
    import pyarrow

    import tidemill.common.archive.archiver  # noqa: F401

    pyarrow.array([b""])  # the first one imports pandas, where it is installed


class LocalRun:
    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        specs: Sequence[ServiceSpec],
        console: Console,
        *,
        is_live: bool,
        resume_command: str,
        view: View | None = None,
        is_finished: bool = False,
        replaces: bool = False,
    ) -> None:
        """Args:
        is_finished: it has done all its steps before: nothing is started
        replaces: its folder has a run that ended before its first step, which is removed
        """
        self.is_finished = is_finished
        self.replaces = replaces
        self.config = config
        self.folder = folder
        self.specs = specs
        self.console = console
        self.is_live = is_live
        self.resume_command = resume_command
        self.keys = Keys(config.run_id)
        self.snapshot = RunSnapshot(config.run_id, config.trainer.steps, config.trainer.max_staleness)
        self._plain_view = view or PlainView(console)
        self._view: View = self._plain_view
        self.why_not_finished = ""
        self._supervisor = Supervisor(
            specs,
            folder.logs,
            config.streams.drain_s + GRACE_MARGIN_S,
            lambda text: self._view.event(text),
            lease_s=config.streams.lease_s,
        )
        self.server: ForkServer | None = None
        """Processes that load torch are forked from it."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopping = False
        self._is_ending_at_once = False
        self._archiving: asyncio.Task[None] | None = None
        self._removal: asyncio.subprocess.Process | None = None
        """Removes containers of the run; None before and after that."""
        self._started = time.monotonic()
        self._ran_before_s = 0.0
        self._rollout_idle: float | None = None
        self._verdict: Bottleneck | None = None
        self._start = started_now(resume_command, config.trainer.steps)
        self._has_ended = False
        """Whether the run's end is written."""

    async def go(self) -> int:
        """Start everything, see the run to its end, report."""
        if self.is_finished:
            return self._show_finished()
        self._loop = asyncio.get_running_loop()
        if self.replaces:
            self.folder.clear()
        self.folder.create(self.config)
        self._keep_end(self._start)
        try:
            return await self._go()
        except BaseException as error:
            if not self._has_ended:
                self._keep_end_of(error)
            raise

    def _show_finished(self) -> int:
        """Say that the run is finished; its files stay as they are."""
        steps = self.config.trainer.steps
        resume = self.resume_command.replace(f" --set trainer.steps={steps}", "")
        more = f"{resume} --set trainer.steps={2 * steps}"
        report = read_report(self.folder) or {}
        self.console.print(
            f"finished: all {report.get('steps', steps)} steps are done, and nothing was started.\n"
            f"  {self.folder.command('status')}  shows its summary\n"
            f"  {more}  goes on from there",
            soft_wrap=True,
            markup=False,
        )
        return 0 if report.get("ok", True) else 1

    async def _go(self) -> int:
        # Before anything is written: readers take an archive that counts as whole in place of the streams.
        mark_whole(self.folder.path, False)
        log_to_file(self.folder.logs / "console.log")
        # The guard is left last: it watches Redis until that has stopped.
        with (
            Guard() as guard,
            self._signals(),
            self.server.watched(guard) if self.server else contextlib.nullcontext(),
        ):
            address = os.environ.get(URL_VARIABLE, "")
            redis = open_redis(
                address, self.folder, guard, lambda text: self._view.event(text), self._supervisor.fail
            )
            async with redis as (url, broker):
                env = service_environment(url, self.folder.runs)
                outcome = await self._supervise(broker, env, guard)
                await self._remove_containers()
                await self._archive_rest(broker)
                return await self._report(broker, outcome)

    async def _remove_containers(self) -> None:
        """Remove what sessions have left on this node: no worker of the run is there to do it. Ctrl-C ends
        it."""
        command = self.config.rollout.environment.containers
        uid = read_uid(self.folder.path)
        # Without a uid no session has begun.
        if command == NO_CONTAINERS or not uid:
            return
        arguments = ("--uid", uid, "--command", command)
        nothing = asyncio.subprocess.DEVNULL
        try:
            process = await asyncio.create_subprocess_exec(
                *run_own(Program.CONTAINERS, *arguments), stdin=nothing, stdout=asyncio.subprocess.PIPE
            )
        except OSError as error:  # the machine is short of processes: the run still gets its report
            self._view.event(f"containers of the run may be left on this node: {error}")
            return
        self._removal = process
        output = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONTAINERS_TIMEOUT_S):
                output, _ = await process.communicate()
        self._removal = None
        for line in output.decode(errors="replace").splitlines():
            self._view.event(line)
        has_ended = process.returncode is not None and process.returncode >= 0
        if not has_ended:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            rest_command = f"python -m tidemill.services.rollout.containers {' '.join(arguments)}"
            self._view.event(f"containers of the run may be left on this node; `{rest_command}` removes them")

    async def _supervise(self, broker: Broker, env: dict[str, str], guard: Guard) -> RunOutcome:
        # Before any process starts: it reads its config from Redis.
        await publish_config(broker, self.keys, self.config)
        self._ran_before_s = float((await read_state(broker, self.keys)).get("ran_s", 0.0))
        trainer = self.config.trainer
        if await has_finished(broker, self.keys, trainer.steps):
            # Only the launcher was killed before its report: there is nothing to train.
            self._view.event("the run is finished: only its summary is made")
            return RunOutcome(Ending.FINISHED)
        # Until the trainer says `running`: what was said before is not said of this start.
        await update_state(broker, self.keys, status=STARTING, end=None)
        reader = SnapshotReader(broker, self.keys, trainer.steps, trainer.max_staleness, self.config.warnings)
        # What a resumed run did before is read before anything is shown: it is not shown again.
        await self._look(reader)
        if self.is_live:
            self._view = LiveView(self.console, self.folder, HINT.format(logs=nearest(self.folder.logs)))
        watching = [
            asyncio.create_task(self._gather(reader), name="snapshots"),
            asyncio.create_task(self._draw(), name="view"),
        ]
        try:
            return await self._supervisor.run(
                env,
                guard,
                is_finished=lambda: self._is_finished(broker),
                server=self.server,
                is_done=lambda: has_finished(broker, self.keys, trainer.steps),
            )
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                # Once more: else the last step is missing in the view and the verdict. Redis may be away.
                async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                    await self._look(reader)
            self._view.show(self.snapshot, self._supervisor.statuses, 0.0)
            self._view.close()
            self._view = self._plain_view

    async def _gather(self, reader: SnapshotReader) -> None:
        """Take snapshots for ever; waits while Redis is away, which the view notices by their age."""
        has_imported = False
        while True:
            await self._look(reader)
            if not has_imported and self.snapshot.version >= self.config.trainer.steps - 1:
                has_imported = True
                # Beside the last step: else the report would wait a second for these imports.
                await asyncio.to_thread(_import_for_report)
            await asyncio.sleep(REFRESH_S)

    async def _look(self, reader: SnapshotReader) -> None:
        """Take one snapshot for the view; the run does not depend on it."""
        try:
            self.snapshot = await reader.read()
        except Exception as error:
            log.warning("no snapshot", error=str(error))
            return
        idle = self.snapshot.idle_share("rollout")
        self._rollout_idle = idle if idle is not None else self._rollout_idle
        verdict = self.snapshot.bottleneck
        # At the end the processes leave one by one: only a verdict with workers of all roles counts.
        if verdict is not None and all(verdict.evidence.num_workers.get(role) for role in ROLES):
            self._verdict = verdict

    async def _draw(self) -> None:
        while True:
            self._view.show(self.snapshot, self._supervisor.statuses, time.time() - self.snapshot.at)
            await asyncio.sleep(REFRESH_S)

    async def _is_finished(self, broker: Broker) -> bool:
        """Whether the last step has its commit; a trainer that ends before that is started again."""
        newest = await read_newest(broker, self.keys.commits, Commit)
        return newest is not None and newest.message.version >= self.config.trainer.steps

    async def _archive_rest(self, broker: Broker) -> None:
        """Leave all of the streams in the run's folder, before its Redis stops. Ctrl-C may end it."""
        streams = self.config.streams
        if not streams.archive.enabled or self._is_ending_at_once:
            return
        # The run's own limit, which bounds how much is read from Redis at once.
        broker.max_bytes = streams.max_message_mb << 20
        work = archive_rest(broker, self.keys, self.folder.path, streams.archive)
        self._archiving = asyncio.create_task(work, name="archive")
        try:
            await self._archiving
            # Last: after a crash before this line readers still look into what Redis left as well.
            mark_whole(self.folder.path, True)
        # From `_stop`, which cancels the archiving alone: this task goes on to its report.
        except asyncio.CancelledError:
            rest_command = self.folder.command("archive")
            self._view.event(f"not archived to the end; `{rest_command}` does the rest")
        except TidemillError as error:
            self._view.event(f"the streams are not archived to the end: {error}")

    async def _report(self, broker: Broker, outcome: RunOutcome) -> int:
        """Say how the run ended; a finished one is compared with what the config expects of it."""
        ran_s = self._ran_before_s + time.monotonic() - self._started
        if outcome.ending is Ending.FINISHED:
            # The trainer has written `finished` itself, atomically with a check of its last commit.
            with contextlib.suppress(TimeoutError):  # Redis may be away
                async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                    await update_state(broker, self.keys, ran_s=ran_s)
            code = await self._summarise(broker, ran_s)
            self._keep_end(replace(self._end(FINISHED, exit_code=code), steps=self.config.trainer.steps))
            return code
        has_failed = outcome.ending is Ending.FAILED
        end = self._end(
            FAILED if has_failed else STOPPED,
            reason=outcome.summary,
            error=outcome.error,
            log=nearest(outcome.log) if outcome.log else "",
            failing=await self._failing(broker),
            exit_code=outcome.exit_code if has_failed else STOPPED_EXIT_CODE,
        )
        self._keep_end(end)
        with contextlib.suppress(TimeoutError):
            written = update_state(broker, self.keys, ran_s=ran_s, status=end.status, end=asdict(end))
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                await written
        self.why_not_finished = (
            f"{end.status} after {end.steps} of {end.of_steps} steps. Continue with:\n  {self.resume_command}"
        )
        if has_failed:
            self.why_not_finished = f"tidemill up: {outcome.reason}\n{self.why_not_finished}"
        if not self.console.quiet:
            print(self.why_not_finished, file=sys.stderr)
        return end.exit_code

    async def _failing(self, broker: Broker) -> tuple[str, ...]:
        """Lines about the rewards that failed: the workers that could say it have left."""
        if self._is_ending_at_once:
            return ()
        history = History(self.keys.run_id, self.folder.path, broker)
        failed_scores = FailedScores(self.config.reward)
        try:
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                await failed_scores.read(history)
        except TimeoutError:  # Redis may be away, or there are very many
            log.warning("not all failed rewards were counted", scores=failed_scores.num_read)
        except TidemillError as error:  # the run still gets its end
            log.warning("failed rewards were not counted to the end", error=str(error))
        return tuple(failed_scores.lines)

    def _end(self, status: str, **values: Any) -> RunEnd:
        return replace(self._start, status=status, steps=self.snapshot.version, at=time.time(), **values)

    def _keep_end_of(self, error: BaseException) -> None:
        """Write the end of a run that an error ended here, in the launcher."""
        cause = first_cause(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(cause, asyncio.CancelledError | KeyboardInterrupt):
            self._keep_end(self._end(STOPPED, exit_code=STOPPED_EXIT_CODE))
            return
        is_for_user = isinstance(cause, TidemillError)
        text = str(cause) if is_for_user else f"{type(cause).__name__}: {cause}"
        code = cause.exit_code if isinstance(cause, TidemillError) else 1
        self._keep_end(self._end(FAILED, reason=printable(text, MAX_REASON_CHARACTERS), exit_code=code))

    def _keep_end(self, end: RunEnd) -> None:
        """Write the run's end into its folder; a full disk must not keep the run from starting or ending."""
        self._has_ended = end.is_over
        try:
            write_end(self.folder, end)
        except StorageError as error:
            log.warning("the run's end is not written", error=str(error))

    async def _summarise(self, broker: Broker, ran_s: float) -> int:
        folder = self.folder
        config = self.config
        idle = self._rollout_idle
        tree = await summarise(broker, self.keys, config, folder.path, wall_s=ran_s, rollout_idle=idle)
        verdict = self._verdict or self.snapshot.bottleneck
        tree["bottleneck"] = verdict.as_dict() if verdict else None
        write_report(folder, tree)
        print_report(self.console, folder, tree)
        self._print_next_steps()
        return 0 if tree["ok"] else 1

    def _print_next_steps(self) -> None:
        """Say what a user may do with a finished run."""
        steps = {
            self.folder.command("web"): "its completions, token by token, in a browser",
            self.folder.command("export", "-o", "trained"): "the trained model, as a folder",
        }
        guide = ROOT / TUTORIAL
        if guide.exists():
            steps[nearest(guide)] = "your own data and reward function"
        else:
            steps[command_line("check", "CONFIG")] = "find the mistakes of your own config"
        self.console.print("next")
        for line in in_columns(steps, self.console.width if self.console.is_terminal else sys.maxsize):
            self.console.print(Text(line), soft_wrap=True)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first signal stops the run in order, the second one at once. Only a main thread gets any."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup it stays ignored
            numbers.append(signal.SIGHUP)
        for number in numbers:
            # Not `signal.signal`, whose handler may run between any two steps of a task.
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Act as the first Ctrl-C, from any thread; a second call acts as the second."""
        if self._loop is not None:
            # The loop's objects may be touched by its own thread alone.
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            self._view.event("stopping: what is held is finished or handed back; Ctrl-C again ends at once")
            self._supervisor.stop()
        else:
            self._view.event("ending at once")
            self._is_ending_at_once = True
            self._supervisor.kill()
            if self._removal is not None:
                with contextlib.suppress(ProcessLookupError):
                    self._removal.kill()
            if self._archiving is not None:
                self._archiving.cancel()
