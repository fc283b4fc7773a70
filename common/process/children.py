"""Processes that run users' code for a service, exchange frames with it, and are killed with their children.

A frame is a length and a map in msgpack. The child ends when its parent closes the socket or dies.
"""

import contextlib
import ctypes
import io
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from asyncio import StreamReader
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, BinaryIO

import msgpack

from tidemill.common.process.programs import ROOT, Child
from tidemill.common.process.shortage import machine_faults, shortage_number
from tidemill.common.wire.codec import pack

Send = Callable[..., None]
"""Sends frames to the parent, in one write; called from any thread of a child."""
LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1

PRIVATE = ("TIDEMILL_REDIS_", "TIDEMILL_SENTINEL_", "TIDEMILL_WEIGHTS_TOKEN")
"""Prefixes of variables for access to the run's Redis and weights: users' code never gets these."""
PASS_VARIABLE = "TIDEMILL_PASS_ENV"
"""Names of further variables for users' code, with commas between them; `SERPER_*` stands for several."""
HANDED_ON = (
    "PATH", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "LANG", "LC_*", "TMP", "TEMP", "TMPDIR", "HOSTNAME",
    "HOME", "*_HOME", "*PATH", "*_DIR", "*_ROOT", "*_CACHE", "XDG_*", "VIRTUAL_ENV", "CONDA_*", "PYTHON*",
    "*_PROXY", "*_proxy", "SSL_*", "*_CA_BUNDLE", "DOCKER_*", "CONTAINER_HOST", "CONTAINERS_*",
    "NODE_*", "NPM_*", "OMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "MALLOC_*", "CUDA_*", "NVIDIA_*",
    "HIP_*", "ROCR_*", "ROCM_*", "TORCH*", "TRITON_*", "HF_*", "TRANSFORMERS_*", "TOKENIZERS_*",
    "COVERAGE_*", "COV_*", "TIDEMILL_*",
)  # fmt: skip
"""Variables that programs need. No others are handed on: any variable may hold a key."""
_SECRET = re.compile("KEY|TOKEN(?!IZERS)|SECRET|PASS|CREDENTIAL|AUTH")

# The child gets its parent's import path by arguments: a variable would be inherited by what it starts.
_BOOTSTRAP = (
    "import sys; fd, parent, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]; "
    "sys.path[:] = sys.argv[4:]; import tidemill; del sys.path[0]; "
    "import importlib; importlib.import_module(name).main(fd, parent)"
)


def spawn(child: Child) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process that calls `main(descriptor, parent)` of the module; returns it with our end of the
    socket.

    Raises:
        MachineFaultError: the machine is short of processes, descriptors or memory.
    """
    with machine_faults(f"a process of {child.value} could not be started"):
        return _spawn(child)


def _spawn(child: Child) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    # Closed here: while this process holds its copy, the child's end would never look closed to us.
    with theirs, contextlib.ExitStack() as on_error:
        on_error.push(ours)
        command = [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno()), str(os.getpid()), child.value]
        command += [str(ROOT), *sys.path]  # ROOT first, only until tidemill is imported
        # A session of its own: Ctrl-C must not reach it, and its group can be killed as a whole.
        process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=variables_for_users(),
            start_new_session=True,
        )
        on_error.pop_all()
    return process, ours


def variables_for_users() -> dict[str, str]:
    """This process's variables without those that may hold a secret: users' code may run what a model wrote,
    and show the model what it prints."""
    named = tuple(name.strip() for name in os.environ.get(PASS_VARIABLE, "").split(",") if name.strip())
    return {name: value for name, value in os.environ.items() if _is_for_users(name, named)}


def _is_for_users(name: str, named: Sequence[str]) -> bool:
    if name.startswith(PRIVATE):
        return False
    allowed = named if _SECRET.search(name) else (*named, *HANDED_ON)
    return any(fnmatchcase(name, pattern) for pattern in allowed)


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process that `spawn` started, with all that it started itself."""
    if process.returncode is None:  # not reaped yet, so the number is still its own
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def frame_of(tree: dict[str, Any]) -> bytes:
    body = pack(tree)
    return LENGTH.pack(len(body)) + body


def content_of(body: bytes) -> dict[str, Any]:
    tree: dict[str, Any] = msgpack.unpackb(body, strict_map_key=False)
    return tree


async def receive(reader: StreamReader) -> dict[str, Any]:
    """The next frame. Raises IncompleteReadError: the other process is gone."""
    (num_bytes,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return content_of(await reader.readexactly(num_bytes))


class FrameDecoder:
    """Decodes the frames in a stream of bytes, which comes in pieces of any size."""

    def __init__(self) -> None:
        self._unread = bytearray()
        """The beginning of a frame whose end has not come yet."""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The frames that are complete with `data`, in their order."""
        buffer: bytes | bytearray = data
        if self._unread:
            self._unread += data
            buffer = self._unread
        frames = []
        start = 0
        while len(buffer) - start >= LENGTH.size:
            (num_bytes,) = LENGTH.unpack_from(buffer, start)
            body = start + LENGTH.size
            if len(buffer) - body < num_bytes:
                break
            start = body + num_bytes
            frames.append(content_of(bytes(buffer[body:start])))
        if buffer is self._unread:
            del self._unread[:start]
        else:
            self._unread += data[start:]
        return frames


def become_child(descriptor: int, parent: int, may_outlive: bool = False) -> socket.socket:
    """First call in a child's `main`; returns its end of the socket.

    With `may_outlive`, the child is not killed when its parent dies: it has to end when the socket closes.
    """
    if not may_outlive:
        end_with_parent(parent)
    elif os.getppid() != parent:
        sys.exit()
    # Its session gets no Ctrl-C; with Python's own handler `asyncio.run` would need the main thread.
    signal.signal(signal.SIGINT, lambda *_: None)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # printing must not fail a call
    os.set_inheritable(descriptor, False)  # what users' code starts must not keep the socket open
    channel = socket.socket(fileno=descriptor)
    _keep_from_forks(channel)
    return channel


def _keep_from_forks(channel: socket.socket) -> None:
    """Have no child that users' code forks read frames or send any: both are its parent's."""
    nowhere = os.open(os.devnull, os.O_RDWR)

    def cut_off() -> None:
        if channel.fileno() >= 0:
            os.dup2(nowhere, channel.fileno(), inheritable=False)

    os.register_at_fork(after_in_child=cut_off)


def end_with_parent(parent: int) -> None:
    """Have this process killed when the thread that started it, in the process `parent`, ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()  # the parent died before the line above


def startup_failure(error: BaseException) -> dict[str, Any]:
    """The frame by which a child says that it cannot start."""
    return {"error": str(error) or type(error).__name__, "shortage": shortage_number(error)}


def read_frame(frames: BinaryIO) -> dict[str, Any] | None:
    """The child's next frame; None at the end, also where the parent was killed."""
    try:
        head = frames.read(LENGTH.size)
        return content_of(frames.read(LENGTH.unpack(head)[0])) if len(head) == LENGTH.size else None
    except ConnectionError:
        return None


def sender(channel: socket.socket, on_gone: Callable[[], None] = lambda: None) -> Send:
    """A function that sends frames, from any thread of the child. `on_gone` is called where the parent no
    longer takes them; without it, whoever reads the socket notices that."""
    lock = threading.Lock()

    def send(*frames: dict[str, Any]) -> None:
        data = b"".join(map(frame_of, frames))
        try:
            with lock:
                channel.sendall(data)
        except OSError:
            on_gone()

    return send
