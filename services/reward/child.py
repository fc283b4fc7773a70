"""What runs in a process of its own: load the function once, then answer one request after another.

Frames on the given socket, both ways: four bytes of length, then a msgpack map. The first answer says
whether the function loaded. The process ends when its parent closes the socket or dies.
"""

import ctypes
import os
import signal
import socket
import struct
import sys
from typing import Any, BinaryIO

import msgpack

from common.errors import ConfigError
from services.reward.functions import load_function
from services.reward.group_functions import load_group_function
from services.reward.outcome import AttemptError
from services.reward.request import Callee, Request

LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Serve the socket `descriptor` until process `parent` closes it."""
    _die_with(parent)
    os.set_inheritable(descriptor, False)  # what the function starts must not keep the socket open
    with socket.socket(fileno=descriptor) as channel, channel.makefile("rb") as frames:
        hello = _receive(frames)
        if hello is None:
            return
        try:
            function = _load(hello)
        except ConfigError as error:
            _send(channel, {"error": str(error)})
            return
        _send(channel, {})
        while (request := _receive(frames)) is not None:
            _send(channel, _answer(function, request))


def _load(spec: dict[str, Any]) -> Callee:
    return load_group_function(**spec) if spec.pop("is_group", False) else load_function(**spec)


def _answer(function: Callee, request: dict[str, Any]) -> dict[str, Any]:
    try:
        outcomes = function.call(Request.from_wire(request))
    except AttemptError as error:
        kind = {"kind": error.kind, "retry_after_s": error.retry_after_s}
        return {"error": str(error), "is_timeout": error.is_timeout, "is_final": error.is_final, **kind}
    return {"outcomes": [(outcome.value, outcome.components, outcome.detail) for outcome in outcomes]}


def _receive(frames: BinaryIO) -> dict[str, Any] | None:
    head = frames.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    frame: dict[str, Any] = msgpack.unpackb(frames.read(LENGTH.unpack(head)[0]), strict_map_key=False)
    return frame


def _send(channel: socket.socket, frame: dict[str, Any]) -> None:
    body = msgpack.packb(frame)
    channel.sendall(LENGTH.pack(len(body)) + body)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, also in the middle of a call."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()  # it died before the line above
