"""Puts the virtual world in the place of the real one, and takes it away again. The only place that patches.

What is replaced: clocks, chance, names of processes, the disk's operations that change something, the way to
Redis, child processes, and what costs time without being simulated (HTTP endpoints, loading a tokenizer).
"""

import asyncio
import builtins
import contextlib
import dataclasses
import fcntl
import gc
import logging
import os
import random
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pydantic
import structlog
import yaml

import tidemill.common.process.service
import tidemill.common.redis.broker
import tidemill.common.redis.client
import tidemill.services.reward.rewards.weighted_sum
import tidemill.services.rollout.engines.simulated
import tidemill.services.rollout.service
import tidemill.services.trainer.durable.checkpointing
import tidemill.services.trainer.durable.commits
import tidemill.services.trainer.service
from tests.simulation.archiving import spawn
from tests.simulation.disk import WRITING
from tests.simulation.loop import OWNER
from tests.simulation.redis.client import MemoryClient
from tests.simulation.reward import SimulatedReward, make_reward
from tests.simulation.watch import Watch
from tests.simulation.world import World
from tidemill.common.errors import CodecError, StoreError
from tidemill.common.process.lease_keeper import LeaseKeeper
from tidemill.common.redis.broker import WAIT_VARIABLE
from tidemill.common.redis.client import URL_VARIABLE
from tidemill.common.run.state import RUNS_DIR_VARIABLE
from tidemill.common.store.claims import ClaimStore
from tidemill.common.streams.consumer import Consumer
from tidemill.common.wire import codec
from tidemill.common.wire.messages import Trajectory
from tidemill.services.reward.worker import RewardLane
from tidemill.services.rollout.engines.simulated import SimulatedEngine
from tidemill.services.rollout.worker import RolloutWorker
from tidemill.services.trainer.algorithm.losses.sums import Sums
from tidemill.services.trainer.batch.prompts import load_tokenizer
from tidemill.services.trainer.batch.stream_join import StreamJoin
from tidemill.services.trainer.evaluation import Evaluations, Evaluator
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.policy.policy import UpdateResult
from tidemill.services.trainer.policy.simulated_policy import SimulatedPolicy

REAL_TIMES: dict[Any, str] = {time.time: "time", time.monotonic: "monotonic", os.getpid: "getpid"}
"""Functions that fields have as their defaults since their classes were made."""

known_tokenizer = cache(load_tokenizer)


class NoEndpoint:
    """In place of the HTTP endpoint of a service."""

    def __init__(self, port: int, host: str = "", *_: Any, **__: Any) -> None:
        self.port = port
        self.host = host

    def beat(self) -> None:
        """No effect."""

    def close(self) -> None:
        """Nothing to close."""


class NoHttpClient:
    """In place of a client that is not used, and that would read all certificates when it is made."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    async def aclose(self) -> None:
        """Nothing to close."""


class NoLeaseKeeper(LeaseKeeper):
    """In place of the thread that renews leases while a loop is blocked: no loop is, in virtual time."""

    def start(self) -> None:
        """No thread is started."""

    def stop(self) -> None:
        """Nothing to end."""


@contextlib.contextmanager
def installed(world: World, watch: Watch) -> Iterator[None]:
    """Everything inside runs in the virtual world."""
    rewire_defaults()
    state = random.getstate()
    were_collected = gc.isenabled()
    gc.disable()
    random.seed(f"chance {world.seed}")
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in _replacements(world, watch):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
        stack.enter_context(_environment(world))
        stack.enter_context(_logs(world))
        try:
            yield
        finally:
            random.setstate(state)
            if were_collected:
                gc.enable()


def _replacements(world: World, watch: Watch) -> list[tuple[Any, str, Any]]:
    clocks = world.clocks
    rng = random.Random(f"names {world.seed}")
    return [
        (tidemill.common.process.service, "LeaseKeeper", NoLeaseKeeper),
        (time, "time", clocks.wall_s),
        (time, "monotonic", clocks.monotonic_s),
        (time, "time_ns", lambda: int(1e9 * clocks.wall_s())),
        (time, "monotonic_ns", lambda: int(1e9 * clocks.monotonic_s())),
        (time, "sleep", clocks.sleep),
        (secrets, "token_hex", lambda num_bytes=16: rng.randbytes(num_bytes).hex()),
        (uuid, "uuid4", lambda: uuid.UUID(bytes=rng.randbytes(16), version=4)),
        (os, "getpid", lambda: OWNER.get(world.loop.world).pid),
        # Each would freeze what all simulated processes have left: no thread of it would ever end.
        (gc, "freeze", lambda: None),
        *_disk_replacements(world),
        *_watched(world, watch),
        (asyncio, "create_subprocess_exec", spawn(world)),
        (os, "kill", lambda pid, number: _signal(world, pid, number)),
        (os, "_exit", lambda code: world.end(OWNER.get(world.loop.world), code)),
        (tidemill.common.redis.broker, "make_client", lambda url: MemoryClient(world.cluster)),
        (tidemill.common.process.service, "HttpEndpoint", NoEndpoint),
        (tidemill.common.process.service, "LAG_PROBE_S", 5.0),
        (tidemill.services.rollout.service, "SAMPLE_S", 1.0),
        (tidemill.services.rollout.engines.simulated, "PART_TOKENS", world.part_tokens),
        (tidemill.services.reward.rewards.weighted_sum, "make_reward", make_reward),
        (tidemill.services.reward.rewards.weighted_sum, "FunctionReward", SimulatedReward),
        (tidemill.services.trainer.service, "load_tokenizer", known_tokenizer),
        (httpx, "AsyncClient", NoHttpClient),
        (ClaimStore, "_read", _unless_away(world, ClaimStore._read)),
        (ClaimStore, "_write", _unless_away(world, ClaimStore._write, "claimed")),
        (codec, "_check_needs", _needs_checked_by(world)),
        (yaml, "SafeLoader", yaml.CSafeLoader),  # the same, in a tenth of the time
        (yaml, "SafeDumper", yaml.CSafeDumper),
        (tidemill.services.trainer.durable.checkpointing, "KEPT_COMMITS", world.kept_commits),
        (tidemill.services.trainer.durable.commits, "KEPT_COMMITS", world.kept_commits),
    ]


def _unless_away(world: World, function: Callable[..., Any], trap: str = "") -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if world.is_store_away and OWNER.get(world.loop.world) is not world.loop.world:
            raise StoreError("the store of claims is away")
        result = function(*args)
        if trap:
            world.disk.spring(trap)
        return result

    return call


def _needs_checked_by(world: World) -> Callable[[Any, Any], None]:
    check = codec._check_needs

    def checked(needs: Any, message_type: Any) -> None:
        if OWNER.get(world.loop.world).name in world.older:
            raise CodecError(f"{message_type.kind}: it needs {needs}, which an older release did not know")
        check(needs, message_type)

    return checked


def _watched(world: World, watch: Watch) -> list[tuple[Any, str, Any]]:
    """Let the engine draw other tokens each time, as real ones do, and report to `watch` what services do."""
    accumulate = SimulatedPolicy.accumulate
    update = SimulatedPolicy.update
    zero = SimulatedPolicy.zero
    request_key = tidemill.services.rollout.engines.simulated.request_key

    def new_key(seed: int, request_id: str) -> int:
        watch.generates(request_id)
        return request_key(seed, f"{request_id} {watch.num_generated}")

    say = SimulatedEngine._generation

    def say_watched(engine: SimulatedEngine, request: Any, key: int, *others: Any) -> Any:
        return watch.makes(engine, request, key, say(engine, request, key, *others))

    load = SimulatedEngine.load

    async def load_watched(engine: SimulatedEngine, version: int, *files: Any) -> Any:
        update = await load(engine, version, *files)
        vars(engine).setdefault("digests", {})[version] = files[-1]
        return update

    def accumulate_watched(policy: SimulatedPolicy, batch: MicroBatch) -> Sums:
        watch.accumulated(policy, batch.samples)
        return accumulate(policy, batch)

    def update_watched(policy: SimulatedPolicy, denominator: float) -> UpdateResult:
        trained = watch.pending_of(policy)
        result = update(policy, denominator)
        watch.updated(policy.digest(), trained)
        return result

    def zero_watched(policy: SimulatedPolicy) -> None:
        watch.zeroed(policy)
        zero(policy)

    check_in = RolloutWorker._checked_in

    async def check_in_watched(worker: RolloutWorker, sample: Trajectory) -> Trajectory:
        watch.publishes(sample, worker.engine)
        watch.holds(worker.follower)
        return await check_in(worker, sample)

    hold = Consumer._hold

    def hold_watched(consumer: Consumer[Any], raw_id: bytes, *others: Any) -> Any:
        held = hold(consumer, raw_id, *others)
        watch.given(consumer.name, consumer.key, raw_id, held)
        return held

    lose = Consumer._lose

    def lose_watched(consumer: Consumer[Any], entry_id: str) -> None:
        watch.loses(consumer.name, consumer.key, entry_id)
        lose(consumer, entry_id)

    reread = StreamJoin.reread

    def reread_watched(join: StreamJoin, history: int = 0) -> None:
        reread(join, history)
        watch.reread(join)

    take = StreamJoin._take

    def take_watched(join: StreamJoin, entry: Any) -> None:
        before = watch.counted(join, entry)
        take(join, entry)
        watch.takes(join, entry, before)

    fetch = RewardLane.fetch

    async def fetch_watched(lane: RewardLane, count: int) -> Any:
        watch.fetches(lane)
        return await fetch(lane, count)

    evaluate = Evaluator.evaluate

    async def evaluate_watched(evaluator: Evaluator, version: int) -> Evaluations:
        watch.evaluates(version)
        return await evaluate(evaluator, version)

    return [
        (Evaluator, "evaluate", evaluate_watched),
        (Consumer, "_hold", hold_watched),
        (Consumer, "_lose", lose_watched),
        (StreamJoin, "reread", reread_watched),
        (StreamJoin, "_take", take_watched),
        (RewardLane, "fetch", fetch_watched),
        (RolloutWorker, "_checked_in", check_in_watched),
        (tidemill.services.rollout.engines.simulated, "request_key", new_key),
        (SimulatedEngine, "_generation", say_watched),
        (SimulatedEngine, "load", load_watched),
        (SimulatedPolicy, "accumulate", accumulate_watched),
        (SimulatedPolicy, "update", update_watched),
        (SimulatedPolicy, "zero", zero_watched),
    ]


def _disk_replacements(world: World) -> list[tuple[Any, str, Any]]:
    disk = world.disk

    def guarded(function: Callable[..., Any], is_growing: bool = False) -> Callable[..., Any]:
        def call(path: Any, *others: Any, **options: Any) -> Any:
            disk.step_growing(path) if is_growing else disk.step(path)
            return function(path, *others, **options)

        return call

    def fsync(descriptor: int) -> None:
        disk.step_growing(os.readlink(f"/proc/self/fd/{descriptor}") if disk.is_full else descriptor)
        disk.flush(descriptor)

    def naming(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(source: Any, target: Any, **options: Any) -> Any:
            disk.step(source)
            if not options:
                disk.give_name(source, target)
            return function(source, target, **options)

        return call

    def flock(file: Any, operation: int) -> None:
        if not operation & fcntl.LOCK_UN:
            disk.lock(file, is_waiting=not operation & fcntl.LOCK_NB)

    real_open = builtins.open

    def open_guarded(file: Any, mode: str = "r", *others: Any, **options: Any) -> Any:
        if any(letter in mode for letter in WRITING):
            # A file that is there needs no room to be opened.
            disk.step(file) if isinstance(file, int) or os.path.exists(file) else disk.step_growing(file)
        return real_open(file, mode, *others, **options)

    names = ("unlink", "rmdir")
    return [
        (os, "replace", naming(os.replace)),
        (os, "rename", naming(os.rename)),
        *((os, name, guarded(getattr(os, name))) for name in names),
        (os, "mkdir", guarded(os.mkdir, is_growing=True)),
        (os, "fsync", fsync),
        (fcntl, "flock", flock),
        (builtins, "open", open_guarded),
    ]


def _signal(world: World, pid: int, number: int) -> None:
    for process in world.processes:
        if process.pid == pid and not process.is_dead:
            world.signal(process, number)
            return
    raise ProcessLookupError(pid)


@contextlib.contextmanager
def _environment(world: World) -> Iterator[None]:
    wanted = {URL_VARIABLE: "redis://simulated", RUNS_DIR_VARIABLE: str(world.folder), WAIT_VARIABLE: "300"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _logs(world: World) -> Iterator[None]:
    """Log lines go into the trace, or nowhere."""
    before = structlog.get_config()
    is_configured = structlog.is_configured()
    level = logging.INFO if world.is_traced else logging.CRITICAL

    def note(_: Any, level: str, event: dict[str, Any]) -> str:
        text = str(event.pop("event"))
        details = " ".join(f"{name}={value}" for name, value in event.items())
        process = OWNER.get(world.loop.world)
        world.trace.append(f"{world.loop.now - 1000:10.4f} {process.name:12} [{level}] {text} {details}")
        raise structlog.DropEvent

    structlog.configure(
        processors=[note],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.reset_defaults()
        if is_configured:
            structlog.configure(**before)


@cache
def rewire_defaults() -> None:
    """Let fields whose default is a clock look it up when they are asked: it may be a virtual one.

    Their classes hold on to the functions; the new ones do the same as long as nothing is replaced.
    """
    late: dict[str, Callable[[], Any]] = {
        "time": lambda: time.time(),
        "monotonic": lambda: time.monotonic(),
        "getpid": lambda: os.getpid(),
    }
    for module in [
        m for n, m in sys.modules.items() if n.startswith(("tidemill.common.", "tidemill.services."))
    ]:
        for kind in [item for item in vars(module).values() if isinstance(item, type)]:
            if issubclass(kind, pydantic.BaseModel):
                _rewire_model(kind, late)
            elif dataclasses.is_dataclass(kind):
                _rewire_dataclass(kind, late)


def _rewire_model(kind: type[pydantic.BaseModel], late: dict[str, Callable[[], Any]]) -> None:
    fields = [field for field in kind.model_fields.values() if _real_name(field.default_factory)]
    for field in fields:
        field.default_factory = late[_real_name(field.default_factory)]
    if fields:
        kind.model_rebuild(force=True)


def _rewire_dataclass(kind: type, late: dict[str, Callable[[], Any]]) -> None:
    for cell in getattr(kind.__init__, "__closure__", None) or ():
        if name := _real_name(cell.cell_contents):
            cell.cell_contents = late[name]


def _real_name(function: Any) -> str:
    try:
        return REAL_TIMES.get(function, "")
    except TypeError:
        return ""


def run_folder(world: World) -> Path:
    """The folder of the simulated run."""
    return world.folder / world.run_id
