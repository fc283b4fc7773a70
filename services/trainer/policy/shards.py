"""A tensor's part on this rank, and copies of it in the host's memory."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's shard: a DTensor's local tensor itself, not a view of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def host_like(tensor: Tensor) -> Tensor:
    """Room for a copy in the host's memory, pinned where the tensor is on a GPU; for a DTensor, a DTensor."""
    return torch.empty_like(tensor.detach(), device="cpu", pin_memory=tensor.is_cuda)


@torch.no_grad()
def on_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, as `host_like` makes it."""
    room = host_like(tensor)
    local(room).copy_(local(tensor.detach()))
    return room
