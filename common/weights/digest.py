"""The digest of a version: a sum over all its tensors' bits, so that parts can be added in any order.

Every tensor is a sequence of 16-bit words w[0], w[1], ...: a bfloat16 element is one word, a float32 element
two (low one first); an element of one byte is a word too. Each lane is, modulo 2^64,

    sum over tensors of  header(name, dtype, shape)
                         + sum over i of  row(name, i >> 16) * column(i & 0xffff) * w[i]

with odd pseudo-random 64-bit keys; two lanes with keys of their own make 128 bits. It is linear in the words.
So shards add up, whatever the layout; a delta changes it by `keys * (new - old)`; a single wrong word always
changes it, as keys are odd, and other random errors cancel in both lanes with a probability of about 2^-98.
It does not detect deliberate changes. Zeros add nothing, so headers make missing tensors show.

The arithmetic is that of int64 with wrap-around, the same in numpy and torch: arrays of both are accepted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import xxhash

from tidemill.common.weights.bits import WIDTHS, TensorInfo

PREFIX = "w1:"
"""Prefix of digests as text; those without it are of an older release, over the trainer's float32 weights."""

ROW = 1 << 16
"""Number of words in a row."""
_LANES = 2
_MASK = (1 << 64) - 1
_CPU_ROWS = 4
_GPU_ROWS = 64
"""Rows that are summed at once: int64 copies of them must fit the cache of a core, or of a GPU (32 MiB)."""


@dataclass(frozen=True, slots=True)
class Digest:
    """The sum of some tensors, or parts of them (by default none); two unsigned 64-bit integers.

    Example: `digest_of(all) - digest_of(old) + digest_of(new)` is the digest after `new` has replaced `old`.
    """

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
    """The header term of a tensor: added once, however many ranks hold parts of it."""
    text = f"{info.name}|{info.dtype}|{','.join(map(str, info.shape))}"
    number = xxhash.xxh3_128_intdigest(text.encode())
    return Digest(number & _MASK, number >> 64)


class DigestSum:
    """Adds up the digests of parts. Tensors on a device are summed there, with keys made there: nothing waits
    for the device until `read`."""

    def __init__(self) -> None:
        self._on_host = Digest()
        self._devices: dict[Any, tuple[_Keys, Any]] = {}
        """The keys on each device, and its sums: int64, one for each lane."""

    def add_run(self, info: TensorInfo, start: int, bits: Any, sign: int = 1) -> None:
        """Consecutive elements from flat position `start` on. `bits` is flat and contiguous: numpy's unsigned
        integers, or a torch tensor viewed as integers."""
        words = _as_words(bits)
        self._add(words, _run_sums(info, start, words, self._keys(words)), sign)

    def add_change(self, info: TensorInfo, positions: Any, old: Any, new: Any) -> None:
        """Elements that changed: `positions` are int64, flat, ascending; `old` and `new` as in `add_run`."""
        if not len(positions):
            return
        words = _as_words(new)
        before = _as_words(old)
        if _is_numpy(words) and not _is_numpy(positions):
            positions = positions.numpy()
        change = _as_int64(words) - _as_int64(before)
        self._add(words, _sparse_sums(info, positions, change, self._keys(words)))

    def read(self) -> Digest:
        total = self._on_host
        for _, sums in self._devices.values():
            low, high = sums.tolist()
            total += Digest(low & _MASK, high & _MASK)
        return total

    def _keys(self, words: Any) -> "_Keys":
        if _is_numpy(words):
            return _host_keys()
        if words.device not in self._devices:
            like = words[:0].long()
            self._devices[words.device] = _Keys(like), like.new_zeros(_LANES)
        return self._devices[words.device][0]

    def _add(self, words: Any, sums: Sequence[Any], sign: int = 1) -> None:
        if _is_numpy(words):
            # Python's integers do not wrap around by themselves.
            low, high = sums
            self._on_host += Digest(sign * int(low) & _MASK, sign * int(high) & _MASK)
            return
        for lane, value in enumerate(sums):
            self._devices[words.device][1][lane] += sign * value


def digest_of(tensors: Iterable[tuple[TensorInfo, Any]]) -> Digest:
    """The digest of whole tensors, each flat, in any order."""
    headers = Digest()
    values = DigestSum()
    for info, bits in tensors:
        headers += header_digest(info)
        values.add_run(info, 0, bits)
    return headers + values.read()


def _run_sums(info: TensorInfo, start: int, words: Any, keys: "_Keys") -> list[Any]:
    """The sum of a run of elements in each lane.

    Words 65,000 to 200,000 are the end of row 0, rows 1 and 2 in one block, and the beginning of row 3.
    """
    sums: list[Any] = [0] * _LANES
    begin = start * max(1, WIDTHS[info.dtype] // 2)
    first = begin
    end = first + len(words)
    at_once = _CPU_ROWS if _is_numpy(words) else _GPU_ROWS
    while first < end:
        num_rows = min(at_once, (end - first) // ROW)
        if first % ROW or not num_rows:  # a ragged end of the run is a part of a row
            num_rows = 1
            stop = min(end, first - first % ROW + ROW)
        else:
            stop = first + num_rows * ROW
        block = _as_int64(words[first - begin : stop - begin]).reshape(num_rows, -1)
        for lane in range(_LANES):
            columns = keys.columns(lane)[first % ROW :][: block.shape[1]]
            # Only CPUs have matrix products of integers.
            row_sums = block @ columns if _is_numpy(block) else (block * columns).sum(-1)
            of_block = (row_sums * keys.rows(info.name, lane, first // ROW, num_rows)).sum()
            sums[lane] = sums[lane] + (int(of_block) if _is_numpy(block) else of_block)
        first = stop
    return sums


def _sparse_sums(info: TensorInfo, positions: Any, words: Any, keys: "_Keys") -> list[Any]:
    """The sum of single elements, given as int64 words, in each lane."""
    per_element = WIDTHS[info.dtype] // 2
    if per_element > 1:
        positions = positions[:, None] * per_element + _counted(positions, 0, per_element)
        positions = positions.reshape(-1)
    columns = positions & (ROW - 1)
    return [
        (keys.rows_of(info.name, lane, positions >> 16) * keys.columns(lane)[columns] * words).sum()
        for lane in range(_LANES)
    ]


def _is_numpy(array: Any) -> bool:
    return isinstance(array, np.ndarray)


def _is_on_device(tensor: Any) -> bool:
    return bool(tensor.device.type != "cpu")


def _as_words(bits: Any) -> Any:
    """Flat words; a tensor in the CPU's memory as numpy's, which sums integers faster."""
    if not _is_numpy(bits):
        if _is_on_device(bits):
            return bits if bits.element_size() <= 2 else bits.view(bits[:0].short().dtype)
        bits = bits.numpy()
    return bits.view(np.uint8 if bits.dtype.itemsize == 1 else np.dtype("<u2"))


def _as_int64(words: Any) -> Any:
    """The words as int64, with their unsigned values."""
    # torch's 16-bit words are signed: without the mask, large ones would count as negative.
    return words.astype(np.int64) if _is_numpy(words) else words.long() & 0xFFFF


class _Keys:
    """Keys of rows and columns, in numpy or on a device. They are made there: copying them would wait for the
    device's queued work."""

    def __init__(self, like: Any) -> None:
        """`like` is an empty int64 array, in numpy or on the device of the keys."""
        self._like = like
        numbers = _counted(like, 0, ROW)
        self._columns = [_mixed(0x9E3779B97F4A7C15 * (lane + 1), numbers) for lane in range(_LANES)]

    def columns(self, lane: int) -> Any:
        return self._columns[lane]

    def rows(self, name: str, lane: int, first: int, count: int) -> Any:
        return _mixed(_row_seed(name, lane), _counted(self._like, first, count))

    def rows_of(self, name: str, lane: int, numbers: Any) -> Any:
        """Keys of the rows `numbers`, which ascend."""
        if not _is_numpy(numbers):
            return _mixed(_row_seed(name, lane), numbers)
        first = int(numbers[0])  # few distinct rows, each many times
        last = int(numbers[-1])
        return self.rows(name, lane, first, last - first + 1)[numbers - first]


@cache
def _host_keys() -> _Keys:
    return _Keys(np.empty(0, np.int64))


def _counted(like: Any, first: int, count: int) -> Any:
    """int64 [count]: first, first + 1, ..., in numpy or on the device, as `like`."""
    if _is_numpy(like):
        return np.arange(first, first + count)
    return like.new_ones(count).cumsum(0) + (first - 1)


def _row_seed(name: str, lane: int) -> int:
    return xxhash.xxh3_64_intdigest(name.encode(), seed=lane + 1)


def _mixed(seed: int, numbers: Any) -> Any:
    """Odd pseudo-random int64 from counters: splitmix64 (Steele et al. 2014)."""
    state = (numbers + 1) * _signed(0x9E3779B97F4A7C15) + _signed(seed)
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    return (state ^ _shifted(state, 31)) | 1


def _shifted(values: Any, places: int) -> Any:
    """Logical shift to the right, without the sign."""
    return (values >> places) & ((1 << 64 - places) - 1)


def _signed(number: int) -> int:
    """The int64 with the same 64 bits."""
    return ((number & _MASK) ^ (1 << 63)) - (1 << 63)
