"""A full version that waits in host memory: after the copy the parameters hold it, or it is said that they do
not."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.rollout.test_held_weights import Rank, random_values, traced
from tidemill.services.rollout.engines import held_weights
from tidemill.services.rollout.engines.held_weights import HostMemory, StagedVersion


def test_each_rank_gets_its_parts_in_the_dtype_of_its_parameters() -> None:
    values, memory = random_values(), HostMemory()
    for rank in (Rank(0), Rank(1)):
        version = StagedVersion(traced(rank), values.items(), memory)
        assert not rank.fused.any(), "nothing is written before the pause"
        assert version.write()
        assert [piece.num_wrong(values[piece.key.name]) for piece in traced(rank)] == [0, 0, 0]


def test_what_the_parameters_do_not_hold_afterwards_is_noticed() -> None:
    version = StagedVersion(traced(Rank(0)), random_values().items(), HostMemory())
    version._parts[1][1].view(torch.int16)[0, 0] ^= 1  # what arrives is not what was read
    assert not version.write()


def test_copies_and_their_proof_go_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU all copies are begun on a stream of their own; the engine's stream waits for each in turn."""
    events: list[str] = []

    class Stream:
        def __init__(self, device: Any = None) -> None:
            self.num_copies = 0

        def wait_stream(self, other: Any) -> None:
            events.append("copies follow the engine")

        def record_event(self) -> int:
            self.num_copies += 1
            events.append(f"copy {self.num_copies}")
            return self.num_copies

        def wait_event(self, number: int) -> None:
            events.append(f"arrived {number}")

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        yield

    monkeypatch.setattr(held_weights, "_is_on_gpu", lambda _: True)
    locked: list[int] = []
    cudart = SimpleNamespace(cudaHostRegister=lambda address, size, flags: locked.append(size))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    rank, memory = Rank(0), HostMemory()
    for seed in range(2):
        assert StagedVersion(traced(rank), random_values(seed).items(), memory).write()
    order = ["copies follow the engine", *(f"{what} {n}" for what in ("copy", "arrived") for n in (1, 2, 3))]
    assert events == order * 2
    assert locked == [3 * 256], "memory is locked once, and is no larger than the parts"
