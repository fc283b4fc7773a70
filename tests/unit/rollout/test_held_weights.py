"""Where values of a checkpoint lie is found by following the loader; what lies there proves a delta. A full
version waits in host memory: after the copy the parameters hold it, or it is said that they do not."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.waits import Waits
from tidemill.common.weights.bits import TensorInfo
from tidemill.common.weights.delta import WINDOW, DeltaWriter
from tidemill.common.weights.digest import Digest, digest_of
from tidemill.services.rollout.engines import held_weights
from tidemill.services.rollout.engines.held_weights import (
    HeldWeights,
    HostMemory,
    StagedVersion,
    apply,
    trace,
)
from tidemill.services.rollout.engines.vllm_worker import RankWeights

Q = TensorInfo("q", "BF16", (4, 6))
K = TensorInfo("k", "BF16", (4, 6))
DOWN = TensorInfo("down", "BF16", (4, 6))
INFOS = [Q, K, DOWN]
Load = Callable[[Iterable[tuple[str, Tensor]]], set[str]]


class Rank:
    """One of two ranks: `q` and `k` are fused and cut by rows, `down` is cut by columns and transposed."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.fused = torch.zeros(4, 6, dtype=torch.bfloat16)
        self.down = torch.zeros(3, 4, dtype=torch.float32)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        for name, weight in weights:
            if name == "down":
                self.down.copy_(weight.narrow(1, 3 * self.rank, 3).t())
            else:
                rows = self.fused.narrow(0, 2 * (name == "k"), 2)
                rows.copy_(weight.chunk(2, 0)[self.rank])
            loaded.add(name)
        return loaded


def random_values(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {info.name: torch.randn(info.shape, generator=generator).bfloat16() for info in INFOS}


def digest_over(values: dict[str, Tensor]) -> Digest:
    bits = {name: value.view(torch.int16).numpy().reshape(-1).view("<u2") for name, value in values.items()}
    return digest_of((info, bits[info.name]) for info in INFOS)


def write_delta(path: Path, values: dict[str, Tensor], at: dict[str, list[int]]) -> list[list[Path]]:
    """Values at flat positions of each tensor become -2."""
    writer = DeltaWriter(path)
    for info in INFOS:
        flat = values[info.name].view(-1)
        flat[at[info.name]] = -2.0
        places = np.array(at[info.name], np.int64)
        writer.add(info, places, flat[at[info.name]].view(torch.int16).numpy().view("<u2"))
    writer.write()
    return [[path]]


def traced(rank: Rank) -> HeldWeights:
    return trace(rank.load, INFOS)[0]


def loaded(number: int, values: dict[str, Tensor]) -> Rank:
    rank = Rank(number)
    rank.load(values.items())
    return rank


def num_wrong(rank: Rank, values: dict[str, Tensor]) -> dict[str, int]:
    return {piece.key.name: piece.num_wrong(values[piece.key.name]) for piece in traced(rank)}


RIGHT = {"q": 0, "k": 0, "down": 0}


def test_a_trace_changes_nothing_and_names_the_positions_of_every_slice() -> None:
    rank = loaded(1, random_values())
    before = rank.fused.clone(), rank.down.clone()
    held, names = trace(rank.load, INFOS)
    assert names == {"q", "k", "down"}
    assert torch.equal(rank.fused, before[0]) and torch.equal(rank.down, before[1])
    keys = {piece.key.name: piece.key[1:] for piece in held}
    # Rows 2 and 3 of 4 x 6 begin at 12; columns 3 to 5 begin at 3, and the transpose swaps the strides.
    assert keys == {"q": (12, (2, 6), (6, 1)), "k": (12, (2, 6), (6, 1)), "down": (3, (3, 4), (1, 6))}


def test_pieces_tell_what_of_a_tensor_is_wrong() -> None:
    values = random_values()
    rank = loaded(0, values)
    assert num_wrong(rank, values) == RIGHT
    rank.down[1, 2] += 1
    rank.fused[3] = 7.0
    assert num_wrong(rank, values) == {"q": 0, "k": 6, "down": 1}


def num_places(changes: Iterable[Any]) -> int:
    """How many values they change."""
    return sum(len(change.places) for change in changes)


def test_ranks_together_prove_a_delta_before_it_is_written(tmp_path: Path) -> None:
    values = random_values()
    ranks = [loaded(number, values) for number in (0, 1)]
    before = digest_over(values)
    deltas = write_delta(tmp_path / "d", values, {"q": [0, 11, 12, 23], "k": [5], "down": [2, 3, 20]})
    staged = [traced(rank).stage(deltas) for rank in ranks]
    assert sum((change for change, _ in staged), before) == digest_over(values)
    assert [num_places(changes) for _, changes in staged] == [5, 3]
    for rank, (_, changes) in zip(ranks, staged, strict=True):
        assert sum(change.num_wrong() for change in changes) == num_places(changes)
        with Waits() as waits:
            assert apply(changes) == 0
        assert waits.count == 1, "a pause waits for the device once"
        assert not any(change.num_wrong() for change in changes)
        assert num_wrong(rank, values) == RIGHT


def test_a_change_that_half_fits_on_the_device_lies_in_one_place(tmp_path, monkeypatch):
    """A window of the tensor fits, the next does not. Memory without contents stands in for the host's."""
    info = TensorInfo("q", "BF16", (2, WINDOW))
    weight = torch.zeros(info.shape, dtype=torch.bfloat16)
    held, _ = trace(lambda weights: {n for n, w in weights if weight.copy_(w) is not None}, [info])
    writer = DeltaWriter(tmp_path / "d")
    writer.add(info, np.array([1, WINDOW + 1]), np.array([1, 2], "<u2"))
    writer.write()
    room = iter([True, False])
    monkeypatch.setattr(held_weights, "_has_room", lambda _: next(room))
    monkeypatch.setattr(held_weights, "_to_host", lambda tensor: tensor.to("meta"))
    (change,) = held.stage([[tmp_path / "d"]])[1]
    assert change.values.is_meta and change.places.is_meta
    assert len(change.values) == len(change.places) == 2


def test_a_value_that_is_not_what_was_committed_shows_in_the_digest(tmp_path: Path) -> None:
    values = random_values()
    rank = loaded(0, values)
    whole = loaded(1, values)
    before = digest_over(values)
    deltas = write_delta(tmp_path / "d", values, {"q": [1], "k": [], "down": []})
    rank.fused[0, 1] += 1
    change = traced(rank).stage(deltas)[0] + traced(whole).stage(deltas)[0]
    assert before + change != digest_over(values)


@pytest.mark.parametrize(
    "compute",
    [lambda weight: weight * 2, lambda weight: torch.cat([weight, weight])[:4], lambda weight: weight.sum()],
)
def test_a_loader_that_computes_cannot_be_followed(compute: Callable[[Tensor], Tensor]) -> None:
    target = torch.zeros(4, 6)

    def load(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return {name for name, weight in weights if target.copy_(compute(weight)) is not None}

    with pytest.raises(ValueError, match="loader"):
        trace(load, [Q])
    assert torch.Tensor.copy_.__name__ == "copy_" and torch.zeros(2).copy_(torch.ones(2)).sum() == 2


def test_a_value_that_a_loader_fills_in_is_followed_and_padding_stays() -> None:
    scale = torch.full((1,), 3.0)
    padded = torch.ones(6)
    info = TensorInfo("scale", "BF16", ())

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, weight in weights:
            scale.fill_(weight.item())
            padded[4:].fill_(0)

    (piece,) = trace(load, [info])[0]
    assert scale.item() == 3.0 and padded.sum() == 6
    assert piece.key[1:] == (0, (1,), (1,)) and piece.num_wrong(torch.tensor(3.0).bfloat16()) == 0
    assert piece.num_wrong(torch.tensor(4.0).bfloat16()) == 1


def test_parameters_that_two_tensors_share_or_that_round_are_not_proven() -> None:
    shared = torch.zeros(4, 6, dtype=torch.bfloat16)
    coarse = torch.zeros(4, 6, dtype=torch.float16)
    held, _ = trace(lambda weights: {n for n, w in weights if shared.copy_(w) is not None}, [Q, K])
    assert "q and k share" in held.reason_not_to_patch()
    held, _ = trace(lambda weights: {n for n, w in weights if coarse.copy_(w) is not None}, [Q])
    assert "bfloat16 in the files" in held.reason_not_to_patch()
    assert not traced(Rank(0)).reason_not_to_patch()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU's streams in name only: what comes in which order is recorded."""
    events: list[str] = []

    class Stream:
        def __init__(self, device: Any = None) -> None:
            self.device = device
            self.num_copies = 0

        def synchronize(self) -> None:
            events.append("complete")

        def wait_stream(self, stream: Any) -> None:
            events.append("copies follow the engine")

        def record_event(self) -> int:
            self.num_copies += 1
            events.append(f"copy {self.num_copies}")
            return self.num_copies

        def wait_event(self, number: int) -> None:
            events.append(f"arrived {number}")

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        events.append(f"on a stream of {stream.device}")
        yield

    for name, stand_in in {"Stream": Stream, "stream": on, "current_stream": Stream}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return events


def test_what_is_staged_has_arrived_before_it_is_applied(tmp_path, monkeypatch, cuda):
    """One stream for all versions: torch keeps what is freed for the stream that had it."""
    model = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda", 1))]))
    weights = RankWeights(model, None)
    weights._can_read_back = True
    weights.held = traced(Rank(0))
    stage = weights.held.stage
    monkeypatch.setattr(weights.held, "stage", lambda *args: cuda.append("staged") or stage(*args))
    deltas = write_delta(tmp_path / "d", random_values(), {"q": [1], "k": [], "down": []})
    files = [list(map(str, paths)) for paths in deltas]
    streams = []
    for _ in range(2):
        weights.stage([], files)
        streams.append(weights._stream)
    assert cuda == ["on a stream of cuda:1", "staged", "complete"] * 2 and streams[0] is streams[1]


def test_each_rank_gets_its_parts_in_the_dtype_of_its_parameters() -> None:
    values = random_values()
    memory = HostMemory()
    for rank in (Rank(0), Rank(1)):
        version = StagedVersion(traced(rank), values.items(), memory)
        assert not rank.fused.any(), "nothing is written before the pause"
        assert version.write()
        assert num_wrong(rank, values) == RIGHT


def test_what_the_parameters_do_not_hold_afterwards_is_noticed() -> None:
    version = StagedVersion(traced(Rank(0)), random_values().items(), HostMemory())
    version._parts[1][1].view(torch.int16)[0, 0] ^= 1  # what arrives is not what was read
    assert not version.write()


def test_copies_and_their_proof_go_side_by_side(monkeypatch: pytest.MonkeyPatch, cuda: list[str]) -> None:
    """All copies are begun on a stream of their own; the engine's stream waits for each in turn."""
    monkeypatch.setattr(held_weights, "_is_on_gpu", lambda _: True)
    locked: list[int] = []
    cudart = SimpleNamespace(cudaHostRegister=lambda address, size, flags: locked.append(size))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda _: None)
    rank = Rank(0)
    memory = HostMemory()
    for seed in range(2):
        assert StagedVersion(traced(rank), random_values(seed).items(), memory).write()
    order = ["copies follow the engine", "on a stream of cpu"]
    order += [f"{event} {number}" for event in ("copy", "arrived") for number in (1, 2, 3)]
    assert cuda == order * 2
    assert locked == [3 * 256], "memory is locked once, and is no larger than the parts"
