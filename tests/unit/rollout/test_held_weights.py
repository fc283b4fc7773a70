"""Where values of a checkpoint lie is found by following the loader; what lies there proves a delta."""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.waits import Waits
from tidemill.common.weights.bits import TensorInfo
from tidemill.common.weights.delta import WINDOW, DeltaWriter
from tidemill.common.weights.digest import Digest, digest_of
from tidemill.services.rollout.engines import held_weights
from tidemill.services.rollout.engines.held_weights import HeldWeights, apply, trace
from tidemill.services.rollout.engines.vllm_worker import RankWeights

Q, K, DOWN = (TensorInfo(name, "BF16", (4, 6)) for name in ("q", "k", "down"))
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


def test_a_trace_changes_nothing_and_names_the_positions_of_every_slice() -> None:
    rank = Rank(1)
    rank.load(random_values().items())
    before = rank.fused.clone(), rank.down.clone()
    held, loaded = trace(rank.load, INFOS)
    assert loaded == {"q", "k", "down"}
    assert torch.equal(rank.fused, before[0]) and torch.equal(rank.down, before[1])
    keys = {piece.key.name: piece.key[1:] for piece in held}
    # Rows 2 and 3 of 4 x 6 begin at 12; columns 3 to 5 begin at 3, and the transpose swaps the strides.
    assert keys == {"q": (12, (2, 6), (6, 1)), "k": (12, (2, 6), (6, 1)), "down": (3, (3, 4), (1, 6))}


def test_pieces_tell_what_of_a_tensor_is_wrong() -> None:
    rank, values = Rank(0), random_values()
    rank.load(values.items())
    held = traced(rank)
    assert [piece.num_wrong(values[piece.key.name]) for piece in held] == [0, 0, 0]
    rank.down[1, 2] += 1
    rank.fused[3] = 7.0
    assert {piece.key.name: piece.num_wrong(values[piece.key.name]) for piece in held} == {
        "q": 0,
        "k": 6,
        "down": 1,
    }


def test_ranks_together_prove_a_delta_before_it_is_written(tmp_path: Path) -> None:
    ranks, values = [Rank(0), Rank(1)], random_values()
    for rank in ranks:
        rank.load(values.items())
    before = digest_over(values)
    deltas = write_delta(tmp_path / "d", values, {"q": [0, 11, 12, 23], "k": [5], "down": [2, 3, 20]})
    staged = [traced(rank).stage(deltas) for rank in ranks]
    assert sum((change for change, _ in staged), before) == digest_over(values)
    assert [sum(len(change.places) for change in changes) for _, changes in staged] == [5, 3]
    for _, changes in staged:
        assert sum(change.num_wrong() for change in changes) == sum(len(c.places) for c in changes)
        assert apply(changes) == 0
        assert not any(change.num_wrong() for change in changes)
    for rank in ranks:
        assert [piece.num_wrong(values[piece.key.name]) for piece in traced(rank)] == [0, 0, 0]


def test_a_change_that_half_fits_on_the_device_lies_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_pause_waits_for_the_device_once(tmp_path: Path) -> None:
    rank, values = Rank(0), random_values()
    rank.load(values.items())
    deltas = write_delta(tmp_path / "d", values, {"q": [0, 11], "k": [5], "down": [2, 3, 20]})
    changes = traced(rank).stage(deltas)[1]
    with Waits() as waits:
        assert apply(changes) == 0
    assert len(changes) == 3 and waits.count == 1


def test_a_value_that_is_not_what_was_committed_shows_in_the_digest(tmp_path: Path) -> None:
    rank, values = Rank(0), random_values()
    rank.load(values.items())
    whole = Rank(1)
    whole.load(values.items())
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
    scale, padded = torch.full((1,), 3.0), torch.ones(6)
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
    shared, coarse = torch.zeros(4, 6, dtype=torch.bfloat16), torch.zeros(4, 6, dtype=torch.float16)
    held, _ = trace(lambda weights: {n for n, w in weights if shared.copy_(w) is not None}, [Q, K])
    assert "q and k share" in held.reason_not_to_patch()
    held, _ = trace(lambda weights: {n for n, w in weights if coarse.copy_(w) is not None}, [Q])
    assert "bfloat16 in the files" in held.reason_not_to_patch()
    assert not traced(Rank(0)).reason_not_to_patch()


def test_what_is_staged_has_arrived_before_it_is_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's stream in name only: what comes in which order is recorded. It is one for all versions: torch
    keeps the memory that is freed on a stream for that stream alone."""
    events: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            assert device == torch.device("cuda", 1), "the model's device, whatever the thread's is"
            events.append("made")

        def synchronize(self) -> None:
            events.append("complete")

    class OnStream:
        def __init__(self, stream: Stream) -> None:
            events.append("on its own stream")

        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", OnStream)
    model = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda", 1))]))
    weights = RankWeights(model, None)
    weights._is_plain, weights.held = True, traced(Rank(0))
    stage = weights.held.stage
    monkeypatch.setattr(weights.held, "stage", lambda *args: events.append("staged") or stage(*args))
    deltas = write_delta(tmp_path / "d", random_values(), {"q": [1], "k": [], "down": []})
    for _ in range(2):
        weights.stage([], [[str(path) for path in paths] for paths in deltas])
    assert events == ["made", *["on its own stream", "staged", "complete"] * 2]
