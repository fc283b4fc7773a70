"""A full version in page-locked host memory, as an engine's parameters have it.

Everything that takes long is done before generation pauses: files are read, deltas merged, dtypes converted,
a rank's parts cut out, and their digest taken. In the pause parts are copied, and the digest of what the
parameters hold is summed on the device beside the copies that follow; one number is read.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from tidemill.common.weights.bits import TensorInfo
from tidemill.common.weights.digest import Digest, DigestSum
from tidemill.services.rollout.engines.held_weights import HeldWeights, Piece
from tidemill.services.rollout.engines.tensors import DTYPES, as_bits

ALIGNMENT = 256
CHUNK = 1 << 24
"""Elements of a part that are on the device for its digest."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class HostMemory:
    """Page-locked, of exactly the size asked for, and kept: to lock it takes longer than to fill it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int, is_locked: bool) -> Tensor:
        """So many bytes; what was taken before is overwritten."""
        if len(self._memory) < num_bytes:
            if is_locked and len(self._memory):
                torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr()))
            # Torch's own page-locked memory is rounded up to a power of two.
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
            if is_locked:
                cudart = torch.cuda.cudart()
                torch.cuda.check_error(cudart.cudaHostRegister(self._memory.data_ptr(), num_bytes, 0))
        return self._memory[:num_bytes]


class StagedVersion:
    """Every part of one version that a rank holds."""

    def __init__(self, held: HeldWeights, tensors: Iterable[tuple[str, Tensor]], memory: HostMemory) -> None:
        """Called on a stream of its own where the parameters are on a GPU."""
        self._parts: list[tuple[Piece, Tensor]] = []
        self._is_on_gpu = any(_is_on_gpu(piece.tensor) for piece in held)
        places, num_bytes = _places(held)
        buffer = memory.take(num_bytes, is_locked=self._is_on_gpu)
        for name, whole in tensors:
            for piece in held.pieces.get(name, []):
                size = piece.tensor.numel() * piece.tensor.element_size()
                host = buffer[places[id(piece)] :][:size].view(piece.tensor.dtype).view(piece.tensor.shape)
                self._parts.append((piece, host.copy_(piece.part(whole))))
        self._expected = self._digest(host for _, host in self._parts)

    def write(self) -> bool:
        """Copy all of it, and read it back; returns whether the parameters hold it now."""
        return self._digest(self._copied()) == self._expected

    def _copied(self) -> Iterator[Tensor]:
        """The parameters' parts, each once its values are there, for this thread's stream."""
        if not self._is_on_gpu:
            for piece, host in self._parts:
                yield piece.tensor.copy_(host)
            return
        device = self._parts[0][0].tensor.device
        mine, copying = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        copying.wait_stream(mine)
        arrivals = []
        with torch.cuda.stream(copying):
            for piece, host in self._parts:
                piece.tensor.copy_(host, non_blocking=True)
                arrivals.append(copying.record_event())
        for (piece, _), arrived in zip(self._parts, arrivals, strict=True):
            mine.wait_event(arrived)
            yield piece.tensor

    def _digest(self, tensors: Iterable[Tensor]) -> Digest:
        total = DigestSum()
        for place, ((piece, _), tensor) in enumerate(zip(self._parts, tensors, strict=True)):
            # By its place: parts that were mixed up do not pass for one another.
            info = TensorInfo(str(place), NAMES[tensor.dtype], tuple(tensor.shape))
            flat = tensor.reshape(-1)
            for start in range(0, len(flat), CHUNK):
                chunk = flat[start : start + CHUNK].to(piece.tensor.device, non_blocking=True)
                total.add_run(info, start, as_bits(chunk))
        return total.read()


def _places(held: HeldWeights) -> tuple[dict[int, int], int]:
    """Where each part begins, by the piece's identity, and how many bytes all take."""
    places, end = {}, 0
    for piece in held:
        places[id(piece)] = end
        num_bytes = piece.tensor.numel() * piece.tensor.element_size()
        end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return places, end


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda
