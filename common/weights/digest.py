"""The digest of a version: a sum over all its tensors' bits, so that parts can be added in any order.

Every tensor is a sequence of 16-bit words w[0], w[1], ...: a bfloat16 element is one word, a float32 element
two (low one first); an element of one byte is a word too. Each lane is, modulo 2^64,

    sum over tensors of  header(name, dtype, shape)
                         + sum over i of  row(name, i >> 16) * column(i & 0xffff) * w[i]

with odd pseudo-random 64-bit keys; two lanes with keys of their own make 128 bits. It is linear in the words.
So shards add up, whatever the layout; a delta changes it by `keys * (new - old)`; one wrong word always
shows, as keys are odd, and what else goes wrong by chance cancels in both lanes with a probability of about
2^-98. It is no protection against someone who wants to deceive. Zeros count nothing, so headers count
tensors.

The arithmetic is that of int64 with wrap-around, which numpy and torch have alike: arrays of both go in.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import xxhash

from tidemill.common.weights.bits import WIDTHS, TensorInfo

PREFIX = "w1:"
"""Of digests as text: those without are of an older release, over the trainer's float32 weights."""

ROW = 1 << 16
"""Words of a row."""
_LANES = 2
_MASK = (1 << 64) - 1
_CPU_ROWS, _GPU_ROWS = 4, 256
"""Rows that are summed at once: int64 copies of them must fit the cache, or fill a GPU."""


@dataclass(frozen=True, slots=True)
class Digest:
    """The sum of some tensors, or parts of them; two unsigned 64-bit integers. The default is of nothing."""

    low: int = 0
    high: int = 0

    def __add__(self, other: "Digest") -> "Digest":
        return Digest((self.low + other.low) & _MASK, (self.high + other.high) & _MASK)

    def __sub__(self, other: "Digest") -> "Digest":
        return Digest((self.low - other.low) & _MASK, (self.high - other.high) & _MASK)

    def __str__(self) -> str:
        return f"{PREFIX}{self.high:016x}{self.low:016x}"

    @classmethod
    def parse(cls, text: str) -> "Digest":
        """The inverse of `str`. Raises ValueError: the text is a digest of another kind."""
        if not is_additive(text) or len(text) != len(PREFIX) + 32:
            raise ValueError(f"{text!r} is not a digest over weights ({PREFIX} and 32 hexadecimal digits)")
        number = int(text.removeprefix(PREFIX), 16)
        return cls(number & _MASK, number >> 64)


def is_additive(text: str) -> bool:
    """Whether a digest is of this kind, and not of an older release."""
    return text.startswith(PREFIX)


def header_digest(info: TensorInfo) -> Digest:
    """What a tensor counts beside its values: once, however many ranks hold parts of it."""
    text = f"{info.name}|{info.dtype}|{','.join(map(str, info.shape))}"
    number = xxhash.xxh3_128_intdigest(text.encode())
    return Digest(number & _MASK, number >> 64)


def run_digest(info: TensorInfo, start: int, bits: Any) -> Digest:
    """Of consecutive elements from flat position `start` on. `bits` is flat and contiguous: numpy's unsigned
    integers, or a torch tensor viewed as int16 (as uint8 where elements have one byte)."""
    words, first = _as_words(bits), start * _words_per_element(info)
    sums, end, at_once = [0] * _LANES, first + len(words), _CPU_ROWS if _is_numpy(words) else _GPU_ROWS
    begin = first
    while first < end:
        num_rows = min(at_once, (end - first) // ROW)
        if first % ROW or not num_rows:  # a ragged end of the run is a part of a row
            num_rows, stop = 1, min(end, first - first % ROW + ROW)
        else:
            stop = first + num_rows * ROW
        block = _as_int64(words[first - begin : stop - begin]).reshape(num_rows, -1)
        for lane in range(_LANES):
            columns = _like(block, _column_keys(lane)[first % ROW :][: block.shape[1]])
            rows = _like(block, _row_keys(info.name, lane, first // ROW, num_rows))
            # Only CPUs have matrix products of integers.
            row_sums = block @ columns if _is_numpy(block) else (block * columns).sum(-1)
            sums[lane] += int((row_sums * rows).sum())
        first = stop
    return Digest(sums[0] & _MASK, sums[1] & _MASK)


def sparse_digest(info: TensorInfo, positions: Any, bits: Any) -> Digest:
    """Of single elements: `positions` are int64, flat, ascending; `bits` as in `run_digest`."""
    return _sparse(info, positions, _as_int64(_as_words(bits)))


def updated(digest: Digest, info: TensorInfo, positions: Any, old: Any, new: Any) -> Digest:
    """The digest after the elements at `positions` changed from `old` to `new`."""
    return digest + _sparse(info, positions, _as_int64(_as_words(new)) - _as_int64(_as_words(old)))


def _sparse(info: TensorInfo, positions: Any, words: Any) -> Digest:
    if not len(positions):
        return Digest()
    per_element = _words_per_element(info)
    positions = positions.numpy() if _is_numpy(words) and not _is_numpy(positions) else positions
    if per_element > 1:
        positions = positions[:, None] * per_element + _like(positions, np.arange(per_element))
        positions = positions.reshape(-1)
    first, last = int(positions[0]) // ROW, int(positions[-1]) // ROW
    rows, columns, sums = (positions >> 16) - first, positions & (ROW - 1), []
    for lane in range(_LANES):
        keys = _like(words, _row_keys(info.name, lane, first, last - first + 1))[rows]
        sums.append(int((keys * _like(words, _column_keys(lane))[columns] * words).sum()))
    return Digest(sums[0] & _MASK, sums[1] & _MASK)


def digest_of(tensors: Iterable[tuple[TensorInfo, Any]]) -> Digest:
    """Of whole tensors, in any order; each is given flat."""
    total = Digest()
    for info, bits in tensors:
        total += header_digest(info) + run_digest(info, 0, bits)
    return total


def _words_per_element(info: TensorInfo) -> int:
    return max(1, WIDTHS[info.dtype] // 2)


def _is_numpy(array: Any) -> bool:
    return isinstance(array, np.ndarray)


def _as_words(bits: Any) -> Any:
    """Flat words; a tensor in the CPU's memory as numpy's, which sums integers faster."""
    if not _is_numpy(bits):
        if bits.device.type != "cpu":
            return bits
        bits = bits.numpy()
    return bits.view(np.uint8 if bits.dtype.itemsize == 1 else np.dtype("<u2"))


def _as_int64(words: Any) -> Any:
    """The words as int64, unsigned as they are."""
    return words.astype(np.int64) if _is_numpy(words) else words.long() & 0xFFFF


def _like(array: Any, values: np.ndarray[Any, Any]) -> Any:
    """The values where `array` lives."""
    return values if _is_numpy(array) else array.new_tensor(values)


@cache
def _column_keys(lane: int) -> np.ndarray[Any, Any]:
    return _keys(0x9E3779B97F4A7C15 * (lane + 1), 0, ROW)


def _row_keys(name: str, lane: int, first: int, count: int) -> np.ndarray[Any, Any]:
    """Of rows [first, first + count) of a tensor."""
    return _keys(xxhash.xxh3_64_intdigest(name.encode(), seed=lane + 1), first, count)


def _keys(seed: int, first: int, count: int) -> np.ndarray[Any, Any]:
    """Odd pseudo-random int64 of the counters [first, first + count): splitmix64 (Steele et al. 2014)."""
    state = np.arange(first + 1, first + 1 + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state += np.uint64(seed & _MASK)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((state ^ (state >> np.uint64(31))) | np.uint64(1)).view(np.int64)
