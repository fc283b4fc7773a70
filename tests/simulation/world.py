"""All that is simulated: processes on one loop, their Redis, clocks and disk, and what came of it."""

import contextvars
import random
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from tests.simulation.clock import Clocks
from tests.simulation.cluster import Cluster
from tests.simulation.disk import Disk
from tests.simulation.history import History
from tests.simulation.loop import OWNER, SimulatedLoop
from tests.simulation.process import Process
from tidemill.common.streams.log import KEPT_COMMITS
from tidemill.common.wire.keys import Keys
from tidemill.services.rollout.engines.engine import PART_TOKENS

INPUTS_NAME = b"/tidemill-simulation-inputs-"
INPUTS = re.compile(rb"[^\"]*" + INPUTS_NAME + rb"[^/]*/")
"""The folder of data and tokenizer, which the config names."""


@dataclass
class World:
    """One run of a schedule. `folder` is the disk that all machines share."""

    seed: int
    folder: Path
    run_id: str = "sim"
    is_traced: bool = False
    kept_commits: int = KEPT_COMMITS
    part_tokens: int = PART_TOKENS
    loop: SimulatedLoop = field(init=False)
    trace: list[str] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys = Keys(self.run_id)
        self.loop = SimulatedLoop(self.seed)
        self.clocks = Clocks(self.loop)
        self.rng = random.Random(f"world {self.seed}")
        self.history = History(self.keys)
        self.disk = Disk(self.folder, self.kill)
        self._digest = xxhash.xxh3_64()
        self._folder = str(self.folder).encode()
        rng = random.Random(f"network {self.seed}")
        self.cluster = Cluster(self.loop, self.clocks, rng, self.kill, self._note_command)
        self.watch_server()
        self.was_emptied = False
        """Whether Redis once held nothing: what it holds later may be taken back."""
        self.is_store_away = False
        """Whether no payload of claims can be read or written."""
        self.older: set[str] = set()
        """Processes of a release that does not understand claims."""
        self.on_append: Callable[[Any], None] | None = None

    @property
    def digest(self) -> str:
        """A hash over every command of the schedule, with its time and its bytes."""
        return self._digest.hexdigest()

    def watch_server(self) -> None:
        """Note what is appended to the server that answers now."""
        self.cluster.server.on_append = self._note_entry

    def tell(self, who: str, text: str) -> None:
        """One line of the trace."""
        self._digest.update(f"{self.loop.now:.9f}{who}{text}".encode().replace(self._folder, b"/"))
        if self.is_traced:
            self.trace.append(f"{self.loop.now - 1000:10.4f} {who:12} {text}")

    def start(
        self,
        name: str,
        role: str,
        main: Callable[[], Coroutine[Any, Any, int]],
        on_end: Callable[[Process, int, BaseException | None], None],
        wall_offset_s: float = 0.0,
    ) -> Process:
        """Start a process; `on_end` is called at its end, with exit code -9 where it was killed."""
        process = Process(name, role, 1000 + len(self.processes), wall_offset_s, self.loop.now)
        process.on_end = on_end
        self.processes.append(process)
        context = contextvars.Context()
        context.run(OWNER.set, process)
        self.tell(name, "starts")
        context.run(self._run_main, process, main)
        return process

    def kill(self, process: Process) -> None:
        """SIGKILL: nothing of it runs any more."""
        if not process.is_dead:
            self.tell(process.name, "is killed")
            self._note_end(process, -9, None)

    def end(self, process: Process, code: int) -> None:
        """A process ends itself at once, as at a second SIGTERM."""
        if not process.is_dead:
            self._note_end(process, code, None)

    def freeze(self, process: Process) -> None:
        """Freeze a process; its connections stay open."""
        if not process.is_dead and not process.is_frozen:
            self.tell(process.name, "freezes")
            process.is_frozen = True
            self.loop.drop(process)

    def thaw(self, process: Process) -> None:
        """Let a frozen process go on, which does not notice the time between."""
        if not process.is_dead and process.is_frozen:
            self.tell(process.name, "wakes up")
            process.is_frozen = False
            process.woken_at = self.loop.now
            process.disturbed_at = max(process.disturbed_at, self.loop.now)
            self.loop.resume(process)

    def signal(self, process: Process, number: int) -> None:
        """Deliver a signal; a process without a handler dies of it."""
        if process.is_dead:
            return
        process.is_asked_to_leave = True
        if number not in process.signals:
            self._note_end(process, -number, None)
            return
        callback, args, context = process.signals[number]
        self.loop.call_soon(callback, *args, context=context)

    def _run_main(self, process: Process, main: Callable[[], Coroutine[Any, Any, int]]) -> None:
        task = self.loop.create_task(main(), name=process.name)

        def ended(task: Any) -> None:
            if process.is_dead:
                return
            error = None if task.cancelled() else task.exception()
            self._note_end(process, 1 if error or task.cancelled() else task.result(), error)

        task.add_done_callback(ended)

    def _note_end(self, process: Process, code: int, error: BaseException | None) -> None:
        process.is_dead = True
        process.code = code
        self.loop.drop(process)
        self.cluster.disconnect(process)
        self.disk.free_locks(process)
        if process.on_end is not None:
            context = contextvars.Context()
            self.loop.call_soon(process.on_end, process, code, error, context=context)

    def _note_command(self, who: str, name: str, body: bytes) -> None:
        self._digest.update(f"{self.loop.now:.9f}{who}{name}".encode())
        # Folders have other names each time.
        if INPUTS_NAME in body:
            body = INPUTS.sub(b"/", body)
        self._digest.update(body.replace(self._folder, b"/"))
        if self.is_traced and name not in ("XREAD", "XREADGROUP") and b"workers" not in body[:60]:
            self.trace.append(f"{self.loop.now - 1000:10.4f} {who:12} {name} {body[:150]!r}")

    def _note_entry(self, key: bytes, entry_id: tuple[int, int], fields: list[bytes]) -> None:
        unit = len(self.cluster.server.log) - 1
        record = self.history.note(key, entry_id, fields, unit, self.loop.now)
        if self.on_append is not None:
            self.on_append(record)
