"""Counts operations that would wait for a device; a CPU takes its place."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

WAITS = ("aten._local_scalar_dense", "aten.nonzero")
"""Operations that need a value, or a number of values, from the device."""


class Waits(TorchDispatchMode):
    """A context that counts them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func).startswith(WAITS)
        return func(*args, **(kwargs or {}))
