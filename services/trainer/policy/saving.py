"""How a policy's state leaves it for a checkpoint: copied to host memory, and written beside training.

Training waits for the copy alone. Each rank copies and writes its own shard; nothing is gathered. The copy
stays until the next one: a write that failed can be tried again, whatever the policy has become since. The
buffers stay too (12 bytes for each parameter of the shard that is trained, page-locked where the policy is on
a GPU): making them takes several times as long as filling them.
"""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import msgpack
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from tidemill.common.files import StorageError, storage_errors
from tidemill.services.trainer.policy.state import PolicyState
from tidemill.services.trainer.weights.peers import Alone, Peers

WHAT = "the policy's state"


class SavesState:
    """The part of a policy that writes its state. Where several ranks train, all make each call."""

    _staged: PolicyState | None = None
    _saving: Future[None] | None = None

    def state(self) -> PolicyState:
        raise NotImplementedError

    def own_state(self) -> PolicyState:
        return self.state()

    @property
    def peers(self) -> Peers:
        """The ranks that train this model."""
        return Alone()

    @cached_property
    def _saver(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    @cached_property
    def _stager(self) -> DefaultStager:
        is_cuda = any(tensor.is_cuda for tensor in self.own_state().tensors.values())
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=is_cuda,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=is_cuda,
            )
        )

    def stage_state(self) -> None:
        """Copy the state to host memory, after the one before is written."""
        # The buffers are filled in place, and the write before reads them.
        self.finish_saving()
        self._staged = None  # where tensors have moved since, its buffers are not those that are filled now
        state = self.own_state()
        tensors = self._stager.stage(state.tensors)
        assert isinstance(tensors, dict), "not a future: staged here and now"
        self._staged = replace(state, tensors=tensors)

    def begin_saving(self, folder: Path) -> Future[None]:
        """Start to write what was staged."""
        assert self._staged is not None, "`stage_state` comes first"
        self._saving = self._saver.submit(self._save, self._staged, folder)
        return self._saving

    def finish_saving(self) -> None:
        """Wait until no state is being written."""
        if self._saving is not None:
            wait([self._saving])

    def save_state(self, folder: Path) -> None:
        """Write the state here and now."""
        self.stage_state()
        self.begin_saving(folder).result()

    def _save(self, state: PolicyState, folder: Path) -> None:
        receipt = b""
        try:
            with storage_errors(WHAT, folder):
                state.write(folder)
        except StorageError as error:
            receipt = msgpack.packb([error.errno, error.reason])
        # All ranks learn of it: the folder is complete, or to be given up, only when none writes any more.
        for rank, failed in enumerate(self.peers.gather_state(receipt)):
            if failed:
                number, reason = msgpack.unpackb(failed)
                where = f" (rank {rank})" if self.peers.size > 1 else ""
                raise StorageError(WHAT, folder, number, f"{reason}{where}")
