"""Array fields of wire messages: numpy in memory, raw little-endian bytes on the wire.

Decoding does not copy: the array is a read-only view on the bytes that came from Redis.
"""

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Bits = NDArray[np.bool_]

MAX_TOKENS = 1 << 22
"""Longest array a message may hold, in elements; checked before anything is built from it."""


def _as_array(value: Any, dtype: str, what: str) -> NDArray[Any]:
    """View bytes as a one-dimensional array, or check an array that is one already."""
    size = np.dtype(dtype).itemsize
    if isinstance(value, bytes | bytearray | memoryview):
        num_bytes = len(value)
        if num_bytes % size:
            raise ValueError(f"{num_bytes} bytes are not a whole number of {what} values of {size} bytes")
        if num_bytes // size > MAX_TOKENS:
            raise ValueError(f"{num_bytes // size} {what} values exceed the limit of {MAX_TOKENS}")
        return np.frombuffer(value, dtype=dtype)
    array = np.asarray(value)
    if array.ndim != 1 or len(array) > MAX_TOKENS:
        raise ValueError(f"expected one dimension of at most {MAX_TOKENS} values, got shape {array.shape}")
    if array.size and np.issubdtype(array.dtype, np.floating) != np.issubdtype(np.dtype(dtype), np.floating):
        raise ValueError(f"expected {what}, got dtype {array.dtype}")
    return np.ascontiguousarray(array, dtype=dtype)


def _int32(value: Any) -> Int32:
    return _as_array(value, "<i4", "int32")


def _float32(value: Any) -> Float32:
    return _as_array(value, "<f4", "float32")


def _bits(value: Any) -> Bits:
    """Unpack packed bits: the first byte of the wire form holds the number of padding bits (0..7)."""
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        if not data:
            return np.zeros(0, dtype=np.bool_)
        padding, packed = data[0], np.frombuffer(data, dtype=np.uint8, offset=1)
        if padding > 7 or padding > 8 * len(packed) or 8 * len(packed) > MAX_TOKENS:
            raise ValueError(f"a mask of {len(packed)} packed bytes cannot have {padding} padding bits")
        return np.unpackbits(packed, count=8 * len(packed) - padding).astype(np.bool_)
    return np.ascontiguousarray(value, dtype=np.bool_)


def pack_bits(mask: Bits) -> bytes:
    """Pack a mask into bits, preceded by one byte that counts the padding bits."""
    return bytes([-len(mask) % 8]) + np.packbits(mask).tobytes()


Int32Array = Annotated[Int32, BeforeValidator(_int32)]
Float32Array = Annotated[Float32, BeforeValidator(_float32)]
BitArray = Annotated[Bits, BeforeValidator(_bits)]
