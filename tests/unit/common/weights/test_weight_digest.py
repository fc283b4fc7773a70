"""The additive digest, by its formula, in parts, and from changes."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from tidemill.common.weights import digest as digest_module
from tidemill.common.weights.bits import TensorInfo
from tidemill.common.weights.digest import Digest, DigestSum, digest_of, header_digest, is_additive

pytestmark = pytest.mark.unit

MASK = (1 << 64) - 1
INFO = TensorInfo("layer.weight", "BF16", (4, 70_001))
RNG = np.random.default_rng(14)
BITS = RNG.integers(0, 1 << 16, INFO.num_elements).astype("<u2")


def run_digest(info: TensorInfo, start: int, bits: Any) -> Digest:
    total = DigestSum()
    total.add_run(info, start, bits)
    return total.read()


def updated(digest: Digest, info: TensorInfo, positions: Any, old: Any, new: Any) -> Digest:
    total = DigestSum()
    total.add_change(info, positions, old, new)
    return digest + total.read()


def key(seed: int, counter: int) -> int:
    """splitmix64 in Python's integers."""
    state = ((counter + 1) * 0x9E3779B97F4A7C15 + seed) & MASK
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
    return (state ^ (state >> 31)) | 1


def by_formula(info: TensorInfo, words: dict[int, int]) -> Digest:
    lanes = []
    for lane in range(2):
        seed = xxhash.xxh3_64_intdigest(info.name.encode(), seed=lane + 1)
        columns = 0x9E3779B97F4A7C15 * (lane + 1)
        terms = (key(seed, i >> 16) * key(columns, i & 0xFFFF) * word for i, word in words.items())
        lanes.append(sum(terms) & MASK)
    return Digest(*lanes)


def test_it_is_the_sum_of_its_formula():
    words = {0: 1, 1: 0xFFFF, 65_535: 7, 65_536: 8, 280_003: 0x8000}
    bits = np.zeros(INFO.num_elements, "<u2")
    bits[list(words)] = list(words.values())
    assert run_digest(INFO, 0, bits) == by_formula(INFO, words)
    assert digest_of([(INFO, bits)]) == by_formula(INFO, words) + header_digest(INFO)


def test_a_float_counts_as_two_words_and_a_byte_as_one():
    wide = TensorInfo("w", "F32", (3,))
    narrow = TensorInfo("n", "U8", (3,))
    bits = np.array([0x00020001, 0, 0x80000000], "<u4")
    assert run_digest(wide, 0, bits) == by_formula(wide, {0: 1, 1: 2, 5: 0x8000})
    assert run_digest(narrow, 1, np.array([5, 255], np.uint8)) == by_formula(narrow, {1: 5, 2: 255})


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_add_up_in_any_order_and_in_torch_too(size):
    bounds = [INFO.num_elements * i // size for i in range(size + 1)]
    total = header_digest(INFO)
    for start, end in sorted(pairwise(bounds), reverse=True):
        total += run_digest(INFO, start, torch.from_numpy(BITS[start:end].view(np.int16)))
    assert total == digest_of([(INFO, BITS)])
    assert Digest.parse(str(total)) == total and is_additive(str(total))


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F64", "U8"])
def test_changes_update_it(dtype):
    info = TensorInfo("w", dtype, (150_000,))
    old = RNG.integers(0, 250, 150_000).astype(info.bits_dtype)
    positions = np.sort(RNG.choice(150_000, 999, replace=False))
    new = old.copy()
    new[positions] += 1
    before = digest_of([(info, old)])
    after = digest_of([(info, new)])
    assert before != after == updated(before, info, positions, old[positions], new[positions])
    pair = torch.from_numpy(positions), torch.from_numpy(old[positions]), torch.from_numpy(new[positions])
    assert updated(before, info, *pair) == after


@pytest.mark.parametrize("dtype", ["BF16", "F32", "U8"])
def test_a_device_sums_the_same(dtype, monkeypatch):
    info = TensorInfo("w", dtype, (700_000,))
    old = RNG.integers(0, 250, 700_000).astype(info.bits_dtype)
    positions = np.sort(RNG.choice(700_000, 999, replace=False))
    new = old.copy()
    new[positions] += 1
    expected = run_digest(info, 11, old[11:]) - run_digest(info, 5, old[5:11])
    change = updated(Digest(), info, positions, old[positions], new[positions])
    monkeypatch.setattr(digest_module, "_is_on_device", lambda _: True)
    total = DigestSum()
    bits = torch.from_numpy(old.view(f"i{old.itemsize}" if old.itemsize > 1 else "u1"))
    total.add_run(info, 11, bits[11:])
    total.add_run(info, 5, bits[5:11], sign=-1)
    assert total.read() == expected
    places = torch.from_numpy(positions)
    total.add_change(info, places, bits[places], bits[places] + 1)
    assert total.read() == expected + change


def test_a_device_is_not_waited_for_before_the_sum_is_read():
    """A tensor without memory has no value to wait for: who asks for one gets an error."""
    total = DigestSum()
    bits = torch.empty(300_000, dtype=torch.int16, device="meta")
    places = torch.empty(5, dtype=torch.int64, device="meta")
    total.add_run(INFO, 70_000, bits)
    total.add_change(INFO, places, bits[:5], bits[5:10])
    with pytest.raises(NotImplementedError):
        total.read()


def test_names_shapes_and_moved_values_count():
    zeros = np.zeros(6, "<u2")
    infos = [TensorInfo("a", "BF16", (6,)), TensorInfo("a", "BF16", (2, 3)), TensorInfo("b", "BF16", (6,))]
    infos.append(TensorInfo("a", "F16", (6,)))
    assert len({digest_of([(info, zeros)]) for info in infos}) == len(infos)
    assert run_digest(INFO, 0, zeros + 1) != run_digest(INFO, 1, zeros + 1)


def test_a_digest_of_an_older_release_is_told_apart():
    assert not is_additive("0" * 32)
    with pytest.raises(ValueError, match="not a digest over weights"):
        Digest.parse("0" * 32)
