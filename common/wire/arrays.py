"""Array fields of wire messages: numpy in memory, raw little-endian bytes on the wire.

Decoding does not copy: the array is a read-only view on the bytes that came from Redis.
"""

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Bits = NDArray[np.bool_]

MAX_TOKENS = 1 << 22
"""Longest array a message may hold, in elements; checked before anything is built from it."""
RAW = (bytes, bytearray, memoryview)
_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")


def _as_array(value: Any, dtype: np.dtype[Any], kind: str) -> NDArray[Any]:
    """View bytes as a one-dimensional array, or check an array that is one already."""
    if isinstance(value, RAW):
        num_values, remainder = divmod(len(value), dtype.itemsize)
        if remainder:
            raise ValueError(
                f"{len(value)} bytes are not a whole number of {kind} values of {dtype.itemsize} bytes"
            )
        if num_values > MAX_TOKENS:
            raise ValueError(f"{num_values} {kind} values exceed the limit of {MAX_TOKENS}")
        return np.frombuffer(value, dtype=dtype)
    array = _one_dimension(np.asarray(value))
    # By kinds: `issubdtype` and `array_equal` would take most of the time of a short array.
    if array.size and (array.dtype.kind == "f") != (dtype.kind == "f"):
        raise ValueError(f"expected {kind}, got dtype {array.dtype}")
    cast = np.ascontiguousarray(array, dtype=dtype)
    if array.dtype.kind in "iu" and array.dtype != dtype and not (cast == array).all():
        raise ValueError(f"values do not fit {kind}: they lie between {array.min()} and {array.max()}")
    return cast


def _one_dimension(array: NDArray[Any]) -> NDArray[Any]:
    if array.ndim != 1 or len(array) > MAX_TOKENS:
        raise ValueError(f"expected one dimension of at most {MAX_TOKENS} values, got shape {array.shape}")
    return array


def unpack_bits(value: Any) -> Bits:
    """Check a mask, or unpack packed bits, whose first byte holds the number of padding bits (0..7)."""
    if isinstance(value, RAW):
        data = bytes(value)
        if not data:
            return np.zeros(0, dtype=np.bool_)
        padding = data[0]
        packed = np.frombuffer(data, dtype=np.uint8, offset=1)
        if padding > 7 or padding > 8 * len(packed) or 8 * len(packed) > MAX_TOKENS:
            raise ValueError(f"a mask of {len(packed)} packed bytes cannot have {padding} padding bits")
        return np.unpackbits(packed, count=8 * len(packed) - padding).astype(np.bool_)
    array = _one_dimension(np.asarray(value))
    is_mask = array.dtype == np.bool_ or (array.dtype.kind in "iu" and bool(np.isin(array, (0, 1)).all()))
    if array.size and not is_mask:
        raise ValueError(f"expected a mask of booleans, got dtype {array.dtype}")
    return np.ascontiguousarray(array, dtype=np.bool_)


def pack_bits(mask: Bits) -> bytes:
    """Pack a mask into bits, preceded by one byte that counts the padding bits."""
    return bytes([-len(mask) % 8]) + np.packbits(mask).tobytes()


Int32Array = Annotated[Int32, BeforeValidator(lambda value: _as_array(value, _INT32, "int32"))]
Float32Array = Annotated[Float32, BeforeValidator(lambda value: _as_array(value, _FLOAT32, "float32"))]
BitArray = Annotated[Bits, BeforeValidator(unpack_bits)]


def is_same(mine: Any, theirs: Any) -> bool:
    """Equality as a single bool, also for arrays, whose dtypes are compared, too."""
    if isinstance(mine, np.ndarray) or isinstance(theirs, np.ndarray):
        return type(mine) is type(theirs) and mine.dtype == theirs.dtype and np.array_equal(mine, theirs)
    return bool(mine == theirs)
