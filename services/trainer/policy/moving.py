"""Gives the device to others between steps: weights, moments and the last version wait in host memory.

Guarantee: every bit is what it was. Checkpoints can be written meanwhile; nothing else is called.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from tidemill.services.trainer.policy.optimizer import MOMENTS, AdamW
from tidemill.services.trainer.policy.shards import on_host

MoveTensor = Callable[[Tensor], Tensor]


def mover(to: torch.device, home: torch.device) -> MoveTensor:
    """What brings a tensor to the host, or home to the policy's own device."""

    def moved(tensor: Tensor) -> Tensor:
        is_away = tensor.device.type == to.type != home.type
        if is_away or (tensor.is_cuda and to.type == "cuda"):
            return tensor  # there already: an attempt before this one ended half-way
        # Not enqueued alone: the thread that writes weights reads on a stream of its own.
        return on_host(tensor) if to.type == "cpu" else tensor.to(to)

    return moved


def move_modules(modules: Iterable[nn.Module], moved: MoveTensor) -> None:
    for module in modules:
        # By module and not by tensor: a sharded module has its rows in a buffer of its own.
        module._apply(moved)


def move_moments(optimizer: AdamW, moved: MoveTensor) -> None:
    if optimizer.moves_moments:
        for state in optimizer.state.values():
            state.update({name: moved(value) for name, value in state.items() if name in MOMENTS})


def free_device(device: torch.device) -> None:
    """Wait for what is on its way, and give back the memory that the allocator keeps: it is of no use to the
    process that has the GPU now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
