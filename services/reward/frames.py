"""Frames between a worker and its scoring processes: four bytes of length, then a msgpack map.

Imported by scoring processes too, so it stays light.
"""

import struct
from typing import Any, BinaryIO

import msgpack

from common.packing import pack

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
