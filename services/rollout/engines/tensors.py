"""Torch's dtypes by the names of safetensors, and tensors as bits."""

import torch
from torch import Tensor

from tidemill.common.weights.bits import Bits, TensorInfo

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""By safetensors' names."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by width, to compare bits."""


def as_bits(values: Tensor) -> Tensor:
    """The same memory as integers of the same width."""
    return values.view(BITS[values.element_size()])


def as_tensor(info: TensorInfo, flat: Bits) -> Tensor:
    """The bits as a tensor of its own dtype and shape, in the same memory."""
    if not flat.flags.writeable:
        flat = flat.copy()  # of a file's bytes; torch has no tensors that cannot be written
    signed = torch.from_numpy(flat.view(f"i{flat.dtype.itemsize}" if flat.dtype.itemsize > 1 else "u1"))
    assert signed.dtype == BITS[flat.dtype.itemsize]
    return signed.view(DTYPES[info.dtype]).reshape(info.shape)
