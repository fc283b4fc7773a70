"""Tensors as plain bits: dtype names of safetensors, and numpy's unsigned integers of the same width.

bfloat16 has no numpy type, and comparing bits is what deltas need: NaN equals itself, 0.0 and -0.0 differ.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from tidemill.common.errors import WeightsError

Bits = np.ndarray[Any, Any]
"""uint8, uint16, uint32 or uint64, one for each element."""

WIDTHS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F64", "I64", "U64"), 8),
}
"""Bytes of an element, by safetensors' names of dtypes."""
TORCH_NAMES = {
    **{"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BOOL": "bool", "U8": "uint8"},
    **{"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"},
}
"""Torch's names of the dtypes that weights can have."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as a checkpoint names it; `dtype` is safetensors' name, such as `BF16`.

    Example: `name` "model.norm.weight", `dtype` "BF16", `shape` (576,): 576 elements, 1,152 bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * WIDTHS[self.dtype]

    @property
    def bits_dtype(self) -> np.dtype[Any]:
        """Numpy's little-endian unsigned integer of the same width."""
        return np.dtype(f"<u{WIDTHS[self.dtype]}")


MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors itself."""


def find_tensors(path: Path) -> list[tuple[TensorInfo, int]]:
    """The tensors of a safetensors file in the file's order, and the byte at which the values of each begin.

    Raises:
        WeightsError: the file is no safetensors file, or it is cut short.
    """
    with _faults_of(path):
        header, begin = _read_header(path)
        header.pop("__metadata__", None)
        size = path.stat().st_size - begin
        places = []
        for name, item in header.items():
            info = TensorInfo(name, item["dtype"], tuple(item["shape"]))
            start, end = item["data_offsets"]
            if info.dtype not in WIDTHS:
                raise ValueError(f"{name} has the dtype {info.dtype}, expected one of {', '.join(WIDTHS)}")
            if end - start != info.num_bytes or not 0 <= start <= end <= size:
                raise ValueError(f"{name} lies at [{start}, {end}), which does not fit")
            places.append((info, begin + start))
        return sorted(places, key=lambda item: (item[1], item[0].name))


def read_safetensors(path: Path, mode: Literal["r", "r+", "c"] = "r") -> Iterator[tuple[TensorInfo, Bits]]:
    """The tensors of a safetensors file, flat, in the file's order; views of the mapped file, never copied.
    With mode `r+` writes to them go to the file, with `c` to private memory. Raises WeightsError, as
    `find_tensors`."""
    with _faults_of(path):
        places = find_tensors(path)
        data = np.memmap(path, np.uint8, mode)
        for info, begin in places:
            yield info, data[begin : begin + info.num_bytes].view(info.bits_dtype)


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file. Raises WeightsError, as `read_safetensors`."""
    with _faults_of(path):
        return dict(_read_header(path)[0].get("__metadata__", {}))


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, and where in the file the values begin."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        # Before it is read: eight damaged bytes may claim any length.
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
        return json.loads(file.read(length)), 8 + length


@contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"its header lacks {error}" if isinstance(error, KeyError) else str(error)
        raise WeightsError(f"{path} is not a whole safetensors file: {reason}.") from None


def safetensors_layout(
    infos: Iterable[TensorInfo], metadata: Mapping[str, str] = MappingProxyType({"format": "pt"})
) -> tuple[bytes, dict[str, int]]:
    """The bytes before the values of a file with these tensors, and where in the file each begins. The order
    is that of safetensors: wide elements first, then by name."""
    ordered = sorted(infos, key=lambda info: (-WIDTHS[info.dtype], info.name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offsets = {}
    end = 0
    for info in ordered:
        offsets[info.name] = end
        start = end
        end += info.num_bytes
        header[info.name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Values begin at a multiple of 8, for readers that map them with their dtype.
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: begin + at for name, at in offsets.items()}
