"""How a policy's weights leave it: which are published, and how they are compared, digested and written.

The digest covers what engines get, in the dtype in which they get it, so that they can prove it; it needs no
gather and is the same for any number of ranks. It does not see differences of master weights that this dtype
rounds away: a replay that diverges is noticed as soon as one weight rounds differently, with float32 at once.
What is trained and not exported (value head, adapters before they are merged) has a sum of its own, after a
`+`, in commits.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tidemill.common.files import StorageError
from tidemill.common.weights.bits import TensorInfo
from tidemill.common.weights.digest import PREFIX, Digest, DigestSum, header_digest
from tidemill.common.wire.messages import WeightFile
from tidemill.services.trainer.policy.options import PolicyOption
from tidemill.services.trainer.policy.shards import local
from tidemill.services.trainer.policy.state import SavesState
from tidemill.services.trainer.weights.exported import DTYPES
from tidemill.services.trainer.weights.peers import write_together
from tidemill.services.trainer.weights.shadow import owned_range
from tidemill.services.trainer.weights.shard_writer import ShardWriter, sum_over_ranks
from tidemill.services.trainer.weights.store import WeightState, model_tensors, whole_tensor


class ExportsWeights(SavesState):
    """The part of `TransformersPolicy` that publishes weights, and saves its state. Where several ranks
    train, all make each call."""

    _model: PreTrainedModel
    _dtype: torch.dtype
    options: Sequence[PolicyOption]
    _beside_model: Collection[str]
    """Names of trained parameters that are not the model's."""
    _parameters: Sequence[tuple[str, nn.Parameter]]
    max_share_changed = 1.0
    """Where a larger share of the weights changes, no delta is written: `weights.max_share_changed`."""

    @cached_property
    def _writer(self) -> ShardWriter:
        # Only shapes are needed. `_sources` has the same ones, but would merge adapters, a call of all ranks.
        tensors = self._base_of(self._model)
        return ShardWriter(self._model, tensors, self._dtype, self.peers, max_share=self.max_share_changed)

    def _sources(self) -> dict[str, Tensor]:
        """The published weights, by the names of `_base_of`."""
        tensors = model_tensors(self._model)
        for option in self.options:
            tensors = option.published(tensors, self._dtype)
        return tensors

    def _base_of(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """The tensors of the model, or of one beside it, as its files have them; views."""
        tensors = model_tensors(model)
        for option in self.options:
            tensors = option.base_of(tensors)
        return tensors

    @property
    def _is_model_frozen(self) -> bool:
        return any(option.freezes_model for option in self.options)

    def named_parameters_for_export(self) -> Iterator[tuple[str, Tensor]]:
        # All first, in the model's order: each is a call of all ranks, and none may depend on the conversion.
        whole = {name: whole_tensor(tensor) for name, tensor in self._sources().items()}
        for name, tensor in revert_weight_conversion(self._model, whole).items():
            yield name, tensor.detach().to(self._dtype) if tensor.is_floating_point() else tensor.detach()

    def compare_weights(self) -> WeightState:
        comparison = self._writer.compare(self._sources())
        has_delta = comparison.before is not None and self._writer.shadow.is_held
        return WeightState(
            digest=str(comparison.digest),
            committed=self._committed(comparison.digest),
            before=str(comparison.before) if has_delta else "",
            share_changed=comparison.share_changed if has_delta else -1.0,
            num_bytes=comparison.num_bytes,
        )

    def begin_writing(self, folder: Path, version: int, parent: int) -> Future[tuple[WeightFile, ...]]:
        content = f"the files beside version {version}"
        try:
            # A call of all ranks: one that raised alone would from then on be a call behind the others.
            write_together(self.peers, "policy", content, folder, partial(self._save_beside, folder))
        except StorageError as error:
            # Not raised: on ranks other than 0 nobody waits for the disk and calls again.
            refused: Future[tuple[WeightFile, ...]] = Future()
            refused.set_exception(error)
            return refused
        return self._writer.begin(self._sources, folder, version, parent)

    def _save_beside(self, folder: Path) -> None:
        for option in self.options:
            option.save_beside(folder, writes=self.peers.rank == 0)

    def finish_writing(self) -> None:
        self._writer.wait()
        self.finish_saving()

    def move_version(self, moved: Callable[[Tensor], Tensor]) -> None:
        """Move the version that was compared last, where there is one."""
        writer: ShardWriter | None = self.__dict__.get("_writer")  # `self._writer` would make it
        if writer is not None:
            writer.shadow.move(moved)

    def digest(self) -> str:
        """Digest of the current weights, in the form that commits have."""
        return self._committed(self._writer.measure(self._sources()))

    def _committed(self, exported: Digest) -> str:
        """The digest of exported weights, and where something else is trained the sum of that, to which each
        rank adds its rows."""
        trained: list[tuple[str, Tensor]] = []
        for name, parameter in self._parameters:
            if self._is_model_frozen or name in self._beside_model:
                trained.append((name, parameter.detach()))
        for option in self.options:
            trained += option.marks().items()
        if not trained:
            return str(exported)
        is_leader = self.peers.rank == 0
        parts = DigestSum()
        headers = Digest()
        for name, tensor in trained:
            info = TensorInfo(name, DTYPES[tensor.dtype], tuple(tensor.shape))
            low, high = owned_range(tensor, is_leader)
            if low < high:
                parts.add_run(info, low, _words(local(tensor)))
            headers += header_digest(info) if is_leader else Digest()
        sum_of_trained = sum_over_ranks(parts.read() + headers, self.peers)
        return f"{exported}+{str(sum_of_trained).removeprefix(PREFIX)}"


def _words(tensor: Tensor) -> Tensor:
    """Its bits as `DigestSum` takes them: flat, 16-bit words, or bytes where an element has one."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8 if flat.element_size() == 1 else torch.int16)
