"""Copies from a GPU to host memory, beside what the GPU computes.

They run on a stream of their own, into page-locked buffers: on the stream of training each would wait for all
that training has enqueued, and training for each.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

NUM_BUFFERS = 2
"""One is filled while the other is used."""


class _Copy(NamedTuple):
    host: Tensor
    source: Tensor
    """Kept until it has been read: its memory would go to whoever asks next on another stream."""
    arrived: Any
    """An event; None of what is in host memory already."""


class HostCopies:
    """Reads tensors of one device."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * NUM_BUFFERS

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """What is read from now on is what the work that is enqueued now leaves in these tensors. Called by
        the thread that enqueues that work."""
        for device in {tensor.device for tensor in tensors if _is_on_gpu(tensor)}:
            self._stream = self._stream or torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def read(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """The flat tensors in host memory, in their order; each stays as it is until the next is asked
        for."""
        ahead: _Copy | None = None
        for number, tensor in enumerate(tensors):
            # Before the one ahead is handed out: it is copied while that one is used.
            coming = self._begin(tensor, number % NUM_BUFFERS)
            if ahead is not None:
                yield _arrived(ahead)
            ahead = coming
        if ahead is not None:
            yield _arrived(ahead)

    def _begin(self, tensor: Tensor, place: int) -> _Copy:
        if not _is_on_gpu(tensor):
            return _Copy(tensor, tensor, None)
        num_bytes = tensor.numel() * tensor.element_size()
        # Never made smaller: to lock pages takes longer than to copy.
        if len(self._buffers[place]) < num_bytes:
            self._buffers[place] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        host = self._buffers[place][:num_bytes].view(tensor.dtype)
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            arrived = self._stream.record_event()
        return _Copy(host, tensor, arrived)


def _arrived(copy: _Copy) -> Tensor:
    if copy.arrived is not None:
        copy.arrived.synchronize()
    return copy.host


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda
