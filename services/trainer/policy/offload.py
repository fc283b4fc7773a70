"""The optimizer's moments in host memory.

Guarantee: every bit is what it would be on the device. AdamW works on each element by itself, so moments can
pass over the device in slices.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tidemill.services.trainer.policy.optimizer import MOMENTS, AdamW
from tidemill.services.trainer.policy.options import PolicyOption
from tidemill.services.trainer.policy.shards import host_like, local

SLICE = 1 << 25
"""Elements of a parameter whose moments are on the device at once; a multiple of every vector's width, so
that a CPU rounds them as it would the whole."""
PLACES = 2
"""Slices on the device: while one is updated, the one before leaves and the one after comes."""


class OffloadedAdamW(AdamW):
    """AdamW, whose moments are in host memory between updates and pass over the device in each.

    On a GPU they come and go on streams of their own, beside the update, out of pinned memory. What is on the
    device is `PLACES * SLICE` elements of both moments, whatever the model's size. `state` has the tensors
    that torch's AdamW has.
    """

    moves_moments = False
    slice_size = SLICE

    def make_room(self, parameter: Tensor) -> Tensor:
        return host_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update; returns when it is enqueued."""
        assert closure is None, "gradients are there before the update"
        lanes: _Lanes | None = None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    lanes = lanes or _Lanes(local(parameter), self._longest())
                    self._update(group, parameter, lanes)
        if lanes is not None:
            lanes.join()

    def _longest(self) -> int:
        numbers = [local(p).numel() for group in self.param_groups for p in group["params"]]
        return min(self.slice_size, max(numbers))

    def _update(self, group: dict[str, Any], parameter: Tensor, lanes: "_Lanes") -> None:
        if not self.state[parameter]:
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **{name: host_like(parameter).zero_() for name in MOMENTS},
            }
        assert parameter.grad is not None, "parameters without a gradient stay as they are"
        state = self.state[parameter]
        weight = _flat(parameter)
        gradient = _flat(parameter.grad)
        moments = [_flat(state[name]) for name in MOMENTS]
        for begin in range(0, len(weight), self.slice_size):
            piece = slice(begin, begin + self.slice_size)
            with lanes.passing([moment[piece] for moment in moments]) as (first, second):
                # The kernel counts the step up; every slice begins from the same.
                adamw(
                    [weight[piece]],
                    [gradient[piece]],
                    [first],
                    [second],
                    [],
                    [state["step"].clone()],
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    fused=True,
                    amsgrad=False,
                    maximize=False,
                )
        state["step"] += 1


class OffloadedMoments(PolicyOption):
    """`trainer.offload_optimizer`."""

    optimizer = OffloadedAdamW


class _Place(NamedTuple):
    buffers: tuple[Tensor, Tensor]
    emptied: Any
    """The event that the buffers' content is back on the host."""


class _Lanes:
    """Copies moments to the device and back, through alternating places, on a GPU with a stream each way."""

    def __init__(self, like: Tensor, size: int) -> None:
        self._device = like.device
        self._coming = torch.cuda.Stream(like.device) if like.is_cuda else None
        self._leaving = torch.cuda.Stream(like.device) if like.is_cuda else None
        self._places = [
            _Place((like.new_empty(size), like.new_empty(size)), torch.cuda.Event() if like.is_cuda else None)
            for _ in range(PLACES)
        ]
        if self._coming is not None:
            # The buffers may be memory that work before this is still reading.
            self._coming.wait_stream(self._updating())

    @contextmanager
    def passing(self, host: list[Tensor]) -> Iterator[list[Tensor]]:
        """Copies of these on the device, for an update within the block; then they are copied back."""
        buffers = self._places.pop(0)
        self._places.append(buffers)
        assert buffers.buffers[0].dtype == host[0].dtype, "all that is trained is of one dtype"
        if self._coming is not None:
            # The slice that was here before may still be on its way back to the host.
            self._coming.wait_event(buffers.emptied)
        with self._on(self._coming):
            device = [
                buffer[: len(on_host)].copy_(on_host, non_blocking=True)
                for buffer, on_host in zip(buffers.buffers, host, strict=True)
            ]
        if self._coming is not None:
            self._updating().wait_stream(self._coming)
        yield device
        if self._leaving is not None:
            self._leaving.wait_stream(self._updating())
        with self._on(self._leaving):
            for on_host, on_device in zip(host, device, strict=True):
                on_host.copy_(on_device, non_blocking=True)
            if self._leaving is not None:
                buffers.emptied.record(self._leaving)

    def join(self) -> None:
        """Wait until all are back: checkpoints read them on the CPU."""
        if self._leaving is not None:
            self._leaving.synchronize()

    def _updating(self) -> Any:
        """The stream of the update: of the moments' device, which need not be this thread's."""
        return torch.cuda.current_stream(self._device)

    def _on(self, stream: Any) -> Any:
        return nullcontext() if stream is None else torch.cuda.stream(stream)


def _flat(tensor: Tensor) -> Tensor:
    """This rank's elements as a vector."""
    own_elements = local(tensor.detach())
    assert own_elements.is_contiguous(), "weights, gradients and moments are dense rows"
    return own_elements.view(-1)
