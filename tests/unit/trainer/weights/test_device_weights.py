"""Weights on a device: what is compared and written is what it is on a CPU, and the device is rarely waited
for. A CPU stands in for the device."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.models import make_policy
from tests.support.waits import Waits
from tidemill.common.weights import digest
from tidemill.services.trainer.weights import shadow
from tidemill.services.trainer.weights.shadow import HostCopies


@pytest.mark.parametrize("share", [0.02, 0.9])
def test_a_comparison_on_a_device_finds_the_same_and_waits_once_a_chunk(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = [make_policy(dtype=torch.bfloat16) for _ in range(2)]
    states = []
    for policy, on_device in zip(policies, (False, True), strict=True):
        if on_device:
            monkeypatch.setattr(shadow, "_is_on_device", lambda _: True)
            monkeypatch.setattr(digest, "_is_on_device", lambda _: True)
        policy.compare_weights()
        torch.manual_seed(1)
        for parameter in policy._model.parameters():
            parameter.data[torch.rand(parameter.shape) < share] += 0.25
        with Waits() as waits:
            states.append(policy.compare_weights())
    assert states[0] == states[1] and states[0].share_changed == pytest.approx(share, abs=0.01)
    assert waits.count == len(policies[1]._writer.shadow.parts), "each part is one chunk"


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What happens on a device whose copies arrive when they are waited for."""
    found: list[tuple[str, int]] = []

    class Stream:
        def __init__(self, device: Any = None) -> None:
            self.num_copies = 0

        def wait_stream(self, other: Any) -> None:
            found.append(("follows training", 0))

        def record_event(self) -> Any:
            number, self.num_copies = self.num_copies, self.num_copies + 1
            found.append(("begun", number))
            return SimpleNamespace(synchronize=lambda: found.append(("arrived", number)))

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        assert isinstance(stream, Stream), "never the stream of training"
        yield

    cuda = SimpleNamespace(Stream=Stream, stream=on, current_stream=lambda _: None)
    empty = lambda *sizes, pin_memory=False, **options: torch.empty(*sizes, **options)  # noqa: E731
    monkeypatch.setattr(shadow, "torch", SimpleNamespace(cuda=cuda, empty=empty, uint8=torch.uint8))
    monkeypatch.setattr(shadow, "_is_on_device", lambda _: True)
    return found


def test_copies_wait_for_training_once_and_run_ahead_of_who_writes(events: list[tuple[str, int]]) -> None:
    copies, tensors = HostCopies(), [torch.full((size,), size, dtype=torch.int16) for size in (3, 5, 4)]
    copies.follow(tensors)
    for number, (found, tensor) in enumerate(zip(copies.read(tensors), tensors, strict=True)):
        events.append(("written", number))
        assert torch.equal(found, tensor)
    assert events == [
        ("follows training", 0),
        ("begun", 0),
        ("begun", 1),
        ("arrived", 0),
        ("written", 0),
        ("begun", 2),
        ("arrived", 1),
        ("written", 1),
        ("arrived", 2),
        ("written", 2),
    ]


def test_weights_are_back_on_the_device_when_the_thread_that_writes_them_may_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It reads on a stream of its own, which does not wait for copies that are only enqueued."""
    policy, is_enqueued, to = make_policy(dtype=torch.bfloat16), list[bool](), torch.Tensor.to
    policy.compare_weights()
    policy._device = torch.device("meta")

    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        is_enqueued.append(kwargs.get("non_blocking", False))
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", noted)
    policy.enter()
    assert is_enqueued and not any(is_enqueued)
