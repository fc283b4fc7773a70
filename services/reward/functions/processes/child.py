"""What runs in a process of its own: load the function once, then answer calls, several at a time.

Frames on the given socket, both ways (`frames.py`). The first answer says whether the function loaded. Then
every call has a number, and its answer carries the same. A `beat` says twice a second that this process still
runs Python code: a call that holds the interpreter lock silences it. The process ends when its parent closes
the socket or dies, whatever the function is doing.
"""

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

import msgpack

from common.errors import ConfigError
from common.wire.codec import pack
from services.reward.functions.functions import load_function
from services.reward.functions.processes import child_threads
from services.reward.functions.processes.child_loop import LoopCalls
from services.reward.functions.processes.child_threads import ThreadCalls
from services.reward.functions.request import Callee
from services.reward.groups.group_functions import load_group_function

LENGTH = struct.Struct("<I")


def frame_of(tree: dict[str, Any]) -> bytes:
    """One frame."""
    body = pack(tree)
    return LENGTH.pack(len(body)) + body


def content_of(body: bytes) -> dict[str, Any]:
    """What a frame holds, without its length."""
    tree: dict[str, Any] = msgpack.unpackb(body, strict_map_key=False)
    return tree


def read_frame(frames: BinaryIO) -> dict[str, Any] | None:
    """The next frame; None at the end."""
    head = frames.read(LENGTH.size)
    return content_of(frames.read(LENGTH.unpack(head)[0])) if len(head) == LENGTH.size else None


_PR_SET_PDEATHSIG = 1
BEAT_S = 0.5

Send = Callable[[dict[str, Any]], None]


class Calls(Protocol):
    """How a process runs its calls."""

    def take(self, frame: dict[str, Any]) -> None:
        """A call has come, or the wish to break one off; called from the thread that reads."""

    def state(self) -> dict[str, Any]:
        """What a beat says beside that there is one."""

    def serve(self) -> None:
        """Run what `take` was given, for ever; called by the main thread."""


def main(descriptor: int, parent: int) -> None:
    """Serve the socket `descriptor` until process `parent` closes it."""
    _die_with(parent)
    # Nobody can send it Ctrl-C; with Python's own handler `asyncio.run` would want the main thread.
    signal.signal(signal.SIGINT, lambda *_: None)
    os.set_inheritable(descriptor, False)  # what the function starts must not keep the socket open
    child_threads.watch()
    with socket.socket(fileno=descriptor) as channel, channel.makefile("rb") as frames:
        hello = read_frame(frames)
        if hello is None:
            return
        send = _sender(channel)
        try:
            function = _load(hello)
        except ConfigError as error:
            send({"error": str(error)})
            return
        send({})
        child_threads.forget()
        calls: Calls = LoopCalls(function, send) if function.is_async else ThreadCalls(function, send)
        threading.Thread(target=_read_for_ever, args=(frames, calls), daemon=True).start()
        threading.Thread(target=_beat_for_ever, args=(calls, send), daemon=True).start()
        calls.serve()


def _load(spec: dict[str, Any]) -> Callee:
    return load_group_function(**spec) if spec.pop("is_group", False) else load_function(**spec)


def _sender(channel: socket.socket) -> Send:
    lock = threading.Lock()

    def send(frame: dict[str, Any]) -> None:
        data = frame_of(frame)
        with lock, contextlib.suppress(OSError):  # the parent is gone: the reader ends the process
            channel.sendall(data)

    return send


def _read_for_ever(frames: BinaryIO, calls: Calls) -> None:
    with contextlib.suppress(OSError):
        while (frame := read_frame(frames)) is not None:
            calls.take(frame)
    sys.stdout.flush()
    os._exit(0)  # calls may be running that nobody waits for any more


def _beat_for_ever(calls: Calls, send: Send) -> None:
    while True:
        time.sleep(BEAT_S)
        send({"beat": calls.state()})


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, also in the middle of a call."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()  # it died before the line above
