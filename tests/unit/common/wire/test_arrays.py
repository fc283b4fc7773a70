"""Array fields: what is accepted, and that bits come out as they went in."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, ValidationError

from tidemill.common.wire.arrays import MAX_TOKENS, BitArray, Float32Array, Int32Array, pack_bits


class Fields(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    ids: Int32Array = np.zeros(0, dtype=np.int32)
    values: Float32Array = np.zeros(0, dtype=np.float32)
    bits: BitArray = np.zeros(0, dtype=np.bool_)


@given(st.lists(st.booleans(), max_size=70))
def test_bits_survive_packing_at_every_length(bits):
    packed = pack_bits(np.array(bits, dtype=np.bool_))
    assert len(packed) == 1 + (len(bits) + 7) // 8
    unpacked = Fields(bits=packed).bits
    assert unpacked.dtype == np.bool_
    assert unpacked.tolist() == bits


def test_bits_are_packed_first_bit_highest_behind_the_number_of_padding_bits():
    assert pack_bits(np.array([True, False, True])) == bytes([5, 0b10100000])
    assert pack_bits(np.zeros(0, dtype=np.bool_)) == b"\x00"


@pytest.mark.parametrize("container", [bytes, bytearray, memoryview])
def test_bytes_are_viewed_and_not_copied(container):
    data = container(np.arange(5, dtype="<i4").tobytes())
    ids = Fields(ids=data).ids
    assert ids.tolist() == [0, 1, 2, 3, 4]
    assert np.shares_memory(ids, np.frombuffer(data, dtype=np.uint8))


def test_an_array_of_the_right_type_is_kept_as_it_is():
    ids = np.arange(5, dtype=np.int32)
    assert np.shares_memory(Fields(ids=ids).ids, ids)


def test_lists_and_wider_arrays_are_converted():
    fields = Fields(ids=[1, 2], values=np.array([0.5], dtype=np.float64))
    assert fields.ids.dtype == np.int32
    assert fields.values.dtype == np.float32
    assert Fields(ids=[]).ids.dtype == np.int32


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("ids", b"123", "3 bytes are not a whole number of int32 values"),
        ("ids", np.zeros((2, 2), dtype=np.int32), r"got shape \(2, 2\)"),
        ("ids", np.int32(3), r"got shape \(\)"),
        ("ids", [0.5], "expected int32, got dtype float64"),
        ("ids", [2**31], "do not fit int32"),
        ("values", [1, 2], "expected float32, got dtype int64"),
        ("ids", bytes(4 * (MAX_TOKENS + 1)), f"exceed the limit of {MAX_TOKENS}"),
        ("bits", b"\x00" + bytes(MAX_TOKENS // 8 + 1), "cannot have"),
        ("bits", b"\x08\xff\xff", "cannot have 8 padding bits"),
        ("bits", b"\x01", "cannot have 1 padding bits"),
        ("ids", ["a", "b"], "ids"),
        ("ids", {"a": 1}, "ids"),
        ("ids", None, "ids"),
        ("bits", "text", r"got shape \(\)"),
        ("bits", [0.0, 1.0], "expected a mask of booleans"),
        ("bits", [0, 2], "expected a mask of booleans"),
    ],
)
def test_what_is_not_such_an_array_is_refused(field, value, says):
    with pytest.raises(ValidationError, match=says):
        Fields(**{field: value})
