"""The frame of a service process: arguments, logs, Redis, config, metrics port, heartbeat, shutdown.

SIGTERM (or Ctrl-C) asks the service to drain: it finishes or hands back what it holds and exits with 0.
So does the end of a worker's run (`shutdown.py`). A second signal exits at once. A user's error is printed in
plain words, with the error's exit code.
"""

import argparse
import asyncio
import contextlib
import gc
import importlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from tidemill.common.command_line import command_line
from tidemill.common.config import RunConfig, StreamsConfig, load_config, load_recorded, override_config
from tidemill.common.errors import OutageError, TidemillError, UnreachableError, first_cause
from tidemill.common.process.activity import LOAD, WAIT_START, Activity
from tidemill.common.process.heartbeats import (
    BLOCKING,
    HEARTBEAT_S,
    Heartbeat,
    Reporter,
    check_sole_trainer,
    folder_name,
    publish_heartbeat,
    reachable_host,
    remove_heartbeat,
)
from tidemill.common.process.http_endpoint import HttpEndpoint
from tidemill.common.process.lease_keeper import LeaseKeeper
from tidemill.common.process.privacy import hide_memory
from tidemill.common.process.programs import SERVES, Program, importing, run_main
from tidemill.common.process.shutdown import TRAINER, Shutdown, unless_set
from tidemill.common.redis.broker import Broker, no_address, redis_url
from tidemill.common.redis.client import URL_VARIABLE, make_client
from tidemill.common.run.state import (
    ADDRESS_FILE,
    CONFIG_FILE,
    RUNS_DIR_VARIABLE,
    UnknownRunError,
    has_finished,
    read_config,
    register_config,
    runs_dir,
)
from tidemill.common.telemetry import metrics
from tidemill.common.telemetry.logs import configure_logs
from tidemill.common.threads import BoundedThreads
from tidemill.common.wire.keys import Keys

if TYPE_CHECKING:
    from tidemill.common.process.shortage import Shortage
    from tidemill.common.store import ClaimStore

log = structlog.get_logger(__name__)

METRICS_HOST_VARIABLE = "TIDEMILL_METRICS_HOST"
RUN_WAIT_VARIABLE = "TIDEMILL_RUN_WAIT_S"
"""Seconds for which a service waits for its run to appear in Redis: containers start in any order."""
RUN_WAIT_S = 120.0
"""Default of it for workers. A trainer does not wait by default: no other process registers its run."""
FIRST_RUN_PAUSE_S = 0.5
LONGEST_RUN_PAUSE_S = 10.0
WORKER_ROLES = ("rollout", "reward")
"""Roles that have nothing to do in a run that is finished."""
LAG_PROBE_S = 0.25
NUM_OUTSIDE = 8
"""Threads for such calls: weights, journal, checkpoint, trimming and archive each have one at a time."""

T = TypeVar("T")


class StoppedError(Exception):
    """The service must stop: waiting and unfinished work is given up, and done after the restart."""


@dataclass
class ServiceContext:
    """A service's identity, its run, and the event that tells it to stop.

    Example: `role` "rollout", `name` "rollout-0", the run's `keys`, `config` and `run_dir`, and an open
    `broker`.
    """

    role: str
    name: str
    keys: Keys
    config: RunConfig
    broker: Broker
    run_dir: Path
    activity: Activity
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    reporters: list[Reporter] = field(default_factory=list)
    failure: BaseException | None = None
    """Why the service must end with an error, once it has drained."""
    options: argparse.Namespace = field(default_factory=argparse.Namespace)
    """The command line, with what the service added to it."""
    registered: RunConfig | None = None
    """The run's config without what `--set` has changed for this process."""
    started_at: float = field(default_factory=time.monotonic)
    """On the machine's monotonic clock."""
    lease_keeper: LeaseKeeper | None = None
    """Renews leases while the event loop is blocked."""
    outside: BoundedThreads = field(default_factory=lambda: BoundedThreads("outside", NUM_OUTSIDE))
    """Threads for calls that wait for the run's folder, or for what is copied to and from another machine."""

    def __post_init__(self) -> None:
        # A restarted process has the same name, but must not count as the holder of its earlier leases.
        self.consumer_name = f"{self.name}.{secrets.token_hex(4)}"
        folder = folder_name(self.run_dir) if self.role == TRAINER else ""
        self.beat = Heartbeat(self.name, self.role, folder=folder)

    @cached_property
    def shortage(self) -> "Shortage":
        """What a worker's machine is short of; a trainer takes no samples."""
        from tidemill.common.process.shortage import Shortage

        return Shortage(self.name)

    def fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.stopping.set()

    def raise_failure(self) -> None:
        """End with the error that stopped the service, if one did."""
        if self.failure is not None:
            raise self.failure

    def start(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        """Run `work` in the background; if it fails, the service ends with its error."""

        def finished(task: "asyncio.Task[None]") -> None:
            error = None if task.cancelled() else task.exception()
            if error and not isinstance(error, StoppedError):
                log.error("a background task failed", task=name, error=str(error))
                self.fail(error)

        task = asyncio.create_task(work, name=name)
        task.add_done_callback(finished)
        return task

    async def unless_stopping(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Await `work`, or cancel it and return None when the service must stop."""
        return await unless_set(self.stopping, work)


Serve = Callable[[ServiceContext], Coroutine[Any, Any, None]]


def run_service(
    role: str,
    describe: str,
    *,
    program: Program | None = None,
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda _: None,
) -> int:
    """Run one service process to its end; returns the exit code.

    Its module in `SERVES` is imported only after address, run and config are known to be good, so that
    mistakes are answered before anything heavy is imported. `add_arguments` adds the service's own arguments,
    which it finds in `ServiceContext.options`.
    """
    program = program or Program(f"tidemill.services.{role}")
    hide_memory()  # before anything is started, and before anything heavy is loaded
    # Services share a machine's cores: threads that spin while they wait would slow the others down.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    parser = _parser(role, program, describe)
    add_arguments(parser)
    options = parser.parse_args()
    configure_logs(role, options.name)
    try:
        code = run_main(
            _serve_to_the_end(role, options, lambda: importlib.import_module(SERVES[program]).serve)
        )
    except (TidemillError, BaseExceptionGroup) as error:
        cause = first_cause(error)
        if not isinstance(cause, TidemillError):
            raise
        print(f"tidemill {role}: {cause}", file=sys.stderr)
        return cause.exit_code
    finally:
        # Or Python's last garbage collection looks through all modules: with torch, for a second.
        gc.freeze()
    # All is done but Python's own end. It puts handlers back to their defaults, which a stop would end with a
    # failure; what is ignored stays ignored.
    sys.stdout.flush()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    return code


def _parser(role: str, program: Program, describe: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=describe,
        epilog="Addresses and secrets come from the environment: TIDEMILL_REDIS_URL (and _USERNAME, "
        "_PASSWORD, _CA), TIDEMILL_RUNS_DIR. Without an address, a worker joins the Redis that `tidemill up` "
        "keeps for the run on this machine. Everything else is the run's config, read from Redis.",
    )
    parser.add_argument("--run", required=True, metavar="RUN_ID", help="id of the run to serve")
    default_name = f"{role}-{socket.gethostname()}-{os.getpid()}"
    parser.add_argument("--name", default=default_name, help="name of this worker (default: %(default)s)")
    parser.add_argument("--metrics-port", type=int, default=0, help="port of /metrics and /healthz; 0: any")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="override a field of the run's config for this process only; may be repeated",
    )
    return parser


async def _serve_to_the_end(role: str, options: argparse.Namespace, load: Callable[[], Serve]) -> int:
    """Serve; a stop that comes afterwards must not make a failure of it: a worker leaves a run that is over
    by itself, while somebody stops it."""
    code = await _serve(role, options, load)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # First: the loop would put back the default when it is closed.
        loop.remove_signal_handler(number)
        signal.signal(number, lambda *_: os._exit(code))
    return code


async def _serve(role: str, options: argparse.Namespace, load: Callable[[], Serve]) -> int:
    keys = Keys(options.run)
    address_file = runs_dir() / keys.run_id / ADDRESS_FILE
    is_found = role != TRAINER and _find_address(address_file)
    shutdown = Shutdown()
    shutdown.handle_signals()  # before the first wait: a stop must end that, too
    connecting = _connect_to_found(address_file) if is_found else Broker.connect()
    broker = await unless_set(shutdown.stopping, connecting)
    if broker is None:
        return _stop_unbegun()
    shutdown.broker = broker
    try:
        if role == TRAINER:
            await broker.keep_scripts(keys.state)  # before there is a run that workers could find
        registered = await unless_set(shutdown.stopping, _find_config(role, broker, keys, options))
        if registered is None:
            return _stop_unbegun()
        config = override_config(registered, options.set)
        if role in WORKER_ROLES and await has_finished(broker, keys, config.trainer.steps):
            log.info("the run is finished: nothing is left to do", run=keys.run_id)
            return 0
        endpoint = HttpEndpoint(options.metrics_port, os.environ.get(METRICS_HOST_VARIABLE, "127.0.0.1"))
        metrics.RUN_INFO.labels(keys.run_id, role).set(1)
        run_dir = runs_dir() / keys.run_id
        streams = config.streams
        broker.max_bytes = streams.max_message_mb << 20
        broker.open_claims = partial(_open_claims, run_dir, streams, broker.max_bytes)
        if streams.claim_check_bytes or streams.claim_check_url:
            # Now: an address that cannot be used ends the service before it takes anything.
            broker.claims = broker.open_claims()
        activity = Activity(role, redis_s=broker.round_trips.total_s)
        context = ServiceContext(
            role,
            options.name,
            keys,
            config,
            broker,
            run_dir,
            activity,
            stopping=shutdown.stopping,
            options=options,
        )
        context.registered = registered
        context.lease_keeper = LeaseKeeper(
            lambda: Broker(make_client(redis_url())), lambda: activity.state in (WAIT_START, LOAD)
        )
        context.reporters.append(context.lease_keeper.report)
        if role == TRAINER:
            await context.unless_stopping(check_sole_trainer(broker, keys, run_dir))
        log.info("joined the run", run=keys.run_id)
        async with _heartbeat(context, endpoint):
            if role != TRAINER:
                context.start(_leave_at_end(context, shutdown), "end of the run")
            try:
                # In a thread: heavy imports take seconds and must not block the loop.
                with importing():
                    serve = await asyncio.to_thread(load)
                await serve(context)
            except StoppedError:
                log.info("stopped before it had begun; nothing was changed")
                context.raise_failure()
        log.info("left the run", run=keys.run_id)
        return 0
    except (OutageError, BaseExceptionGroup) as error:
        # A run that has ended may have taken its Redis along: nothing can be handed back.
        if not shutdown.is_run_over or not isinstance(first_cause(error), OutageError):
            raise
        log.info("left the run", run=keys.run_id)
        return 0
    finally:
        await broker.close()


def _find_address(file: Path) -> bool:
    """Take the address of the run's own Redis into the environment, where connections and child processes
    read it, unless an address is there already. Returns whether it was taken.

    Raises:
        BrokerError: there is neither.
    """
    if os.environ.get(URL_VARIABLE):
        return False
    problem = "is empty"
    address = ""
    try:
        address = file.read_text().strip()
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    if not address:
        raise no_address(
            f", and {file} {problem}. `{command_line('up')}` keeps the address of its own Redis there while "
            f"it runs; {RUNS_DIR_VARIABLE} names another folder of runs"
        )
    os.environ[URL_VARIABLE] = address
    log.info("joining the run's own Redis", address_in=str(file))
    return True


async def _connect_to_found(file: Path) -> Broker:
    """Connect to the address that `_find_address` has found in this file.

    Raises:
        UnreachableError: nothing answers there.
    """
    try:
        return await Broker.connect()
    except UnreachableError as error:
        # Of the same class: an outage is no mistake, and the service may start again.
        raise type(error)(
            f"the run's own Redis, whose address is in {file}, does not answer: its `{command_line('up')}` "
            "was probably killed, or it runs on another machine and listens there alone. Resume the run, or "
            f"set {URL_VARIABLE} to the address of its server. ({error})"
        ) from None


def _open_claims(run_dir: Path, streams: StreamsConfig, max_bytes: int) -> "ClaimStore":
    from tidemill.common.store import ClaimStore

    return ClaimStore(run_dir, streams.claim_check_bytes, streams.claim_check_url, max_bytes)


def _stop_unbegun() -> int:
    log.info("stopped before it had joined a run; nothing was changed")
    return 0


async def _leave_at_end(context: ServiceContext, shutdown: Shutdown) -> None:
    """Drain a worker whose run has ended."""
    from tidemill.common.process.run_watch import RunWatch

    watch = RunWatch(context.broker, context.keys, context.config.trainer.steps)
    why = await watch.until_over()
    if not context.stopping.is_set():
        shutdown.is_run_over = True
        shutdown.begin(f"leaving: {why}")


async def _find_config(role: str, broker: Broker, keys: Keys, options: argparse.Namespace) -> RunConfig:
    """The run's config: registered from a file, or waited for, as containers start in any order.

    Raises:
        ConfigError: the run is there with another config, or it has not appeared in time.
    """
    file = getattr(options, "config", None)
    if file:  # an option of the trainer only
        config = load_config(file)
        if config.trainer.epochs is not None:
            from tidemill.common.data.prompt_lengths import with_steps

            config = with_steps(config)
        return await register_config(broker, keys, config)
    wait_s = float(os.environ.get(RUN_WAIT_VARIABLE, 0 if role == TRAINER else RUN_WAIT_S))
    deadline = time.monotonic() + wait_s
    pause_s = FIRST_RUN_PAUSE_S
    while True:
        try:
            return await read_config(broker, keys)
        except UnknownRunError as error:
            if role == TRAINER and (runs_dir() / keys.run_id / CONFIG_FILE).exists():
                log.warning("Redis does not know the run: taking its config from its folder", run=keys.run_id)
                kept = load_recorded(runs_dir() / keys.run_id / CONFIG_FILE)
                return await register_config(broker, keys, kept)
            if time.monotonic() > deadline:
                raise
            log.warning("waiting for the run to appear", reason=str(error), at_most_s=wait_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_RUN_PAUSE_S)


@contextlib.asynccontextmanager
async def _heartbeat(context: ServiceContext, endpoint: HttpEndpoint) -> AsyncIterator[None]:
    beat = context.beat
    beat.port = endpoint.port
    beat.address = reachable_host(endpoint.host)
    longest_lag_s = 0.0

    async def forever() -> None:
        nonlocal longest_lag_s
        while True:
            # Reporters add to it, so each beat starts from empty.
            beat.counts[BLOCKING] = 0
            beat.failures = []
            beat.counts["loop_lag_ms"] = round(1000 * longest_lag_s, 1)
            longest_lag_s = 0.0
            beat.counts["redis_ms"] = round(1000 * context.broker.round_trips.present_s, 2)
            beat.state = context.activity.state
            beat.detail = context.activity.detail
            beat.shares = context.activity.shares()
            beat.idle_share = context.activity.idle_share()
            for report in context.reporters:
                report(beat)
            if context.role == TRAINER:
                await context.broker.keep_scripts(context.keys.state)  # workers may not load them
            else:
                # Last: a service's own share of failed attempts is about its samples only.
                context.shortage.report(beat)
            await publish_heartbeat(context.broker, context.keys, beat)
            await asyncio.sleep(HEARTBEAT_S)

    async def watch_loop() -> None:
        nonlocal longest_lag_s
        loop = asyncio.get_running_loop()
        while True:
            endpoint.beat()
            if context.lease_keeper:
                context.lease_keeper.turned()
            due_at = loop.time() + LAG_PROBE_S
            await asyncio.sleep(LAG_PROBE_S)
            lag_s = max(0.0, loop.time() - due_at)
            metrics.LOOP_LAG_SECONDS.observe(lag_s)
            longest_lag_s = max(longest_lag_s, lag_s)

    tasks = [asyncio.create_task(forever()), asyncio.create_task(watch_loop())]
    if context.lease_keeper:
        context.lease_keeper.start()
    try:
        yield
    finally:
        # The keeper first: without `watch_loop` the loop would look blocked to it.
        if context.lease_keeper:
            context.lease_keeper.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            # Redis may be away; a heartbeat that stays counts as gone after `GONE_AFTER_S`.
            async with asyncio.timeout(2.0):
                await remove_heartbeat(context.broker, context.keys, beat)
        endpoint.close()  # last: metrics can be read while they still change
