"""A policy of delays: trains nothing, takes as long as the config says, and remembers what it was given.

Its digest is a hash chain over the keys and advantages of every micro-batch, in order: two runs have one
digest exactly when they trained the same trajectories in the same micro-batches. So exactly-once can be
tested without a model.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from tidemill.common.config.run import RunConfig
from tidemill.common.errors import ConfigError
from tidemill.common.weights.bits import TensorInfo
from tidemill.common.weights.delta import DeltaWriter, delta_name
from tidemill.common.wire.messages import WeightFile
from tidemill.services.trainer.algorithm.coefficients import Coefficients, CurrentCoefficients
from tidemill.services.trainer.algorithm.losses.sums import Sums, count_batch
from tidemill.services.trainer.groups.bins import Layout
from tidemill.services.trainer.groups.columns import SampleColumns
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy.policy import UpdateResult
from tidemill.services.trainer.policy.profiling import CallProfiler
from tidemill.services.trainer.policy.state import PolicyState, SavesState, ShardReader
from tidemill.services.trainer.policy.usage import Usage
from tidemill.services.trainer.weights.store import WEIGHTS_FILE, WeightState, list_files

PROGRESS = TensorInfo("simulated", "I64", (17,))
"""The number of updates, and the 16 bytes of the digest."""
UNCHANGING = TensorInfo("unchanging", "U8", (4096,))
"""Zeros, beside which a change is small: a delta is smaller than a full version."""


class SimulatedPolicy(SavesState):
    """Implements `Policy` with the delays of `trainer.simulated`."""

    layout: Layout = "tree"
    routing = None
    processor = ""

    def __init__(self, config: RunConfig) -> None:
        self._trainer = config.trainer
        self.bins = config.trainer.bin_tokens, config.trainer.num_bins
        self._max_completion_tokens = config.max_completion_tokens
        self._coefficients = CurrentCoefficients(config.trainer.algorithm)
        self._profiler = CallProfiler()
        self._num_updates = 0
        self._chain = xxhash.xxh3_128(b"simulated").digest()
        self._pending: list[bytes] = []
        self._compared = ("", np.zeros(0, dtype=np.int64))
        """Digest and exported numbers of the last comparison."""
        self._changed: np.ndarray[Any, np.dtype[np.int64]] = np.zeros(0, dtype=np.int64)
        """Which numbers of `PROGRESS` differ between the last two comparisons."""

    def accumulate(self, batch: MicroBatch) -> Sums:
        """Take `group_s` for each `group_size` samples."""
        time.sleep(self._trainer.simulated.group_s * len(batch.samples) / self._trainer.group_size)
        for sample in batch.samples:
            self._pending.append(np.array(sample.key, dtype="<i8").tobytes())
            # One number, or where each token has its own, all of them.
            advantage = sample.columns["advantages"] if sample.advantage is None else sample.advantage
            self._pending.append(np.array(advantage, dtype="<f8").tobytes())
        self._pending.append(b"|")
        normalisation = self._trainer.algorithm.normalisation
        num_trained = batch.num_trained
        sums = count_batch(batch, normalisation, self._max_completion_tokens)
        sums["weight_sum"] = float(num_trained)
        sums["weight_max"] = 1.0 if num_trained else 0.0
        return sums

    def update(self, denominator: float) -> UpdateResult:
        """Take `update_s`, and fold what was accumulated into the digest."""
        time.sleep(self._trainer.simulated.update_s)
        self._num_updates += 1
        self._chain = xxhash.xxh3_128(b"".join([self._chain, *self._pending])).digest()
        self.zero()
        return UpdateResult(grad_norm=1.0, lr=self._trainer.optimizer.lr)

    def zero(self) -> None:
        self._pending.clear()

    def precompute(self, samples: Sequence[Sample]) -> list[SampleColumns]:
        """Take `prepare_s` for each `group_size` samples; logprobs of all models are those of the rollout."""
        time.sleep(self._trainer.simulated.prepare_s * len(samples) / self._trainer.group_size)
        algorithm = self._trainer.algorithm
        # Whether a column is needed, and its factor to the rollout's logprob; an entropy is -logprob here.
        factors = {
            "proximal_logprobs": (self._trainer.needs_proximal, 1.0),
            "reference_logprobs": (algorithm.needs_reference, 1.0),
            "values": (algorithm.needs_values, 0.0),
            "start_logprobs": (algorithm.needs_start_logprobs, 1.0),
            "entropies": (algorithm.needs_start_entropies, -1.0),
        }
        wanted = {name: np.float32(factor) for name, (is_needed, factor) in factors.items() if is_needed}
        results = []
        for sample in samples:
            results.append({name: factor * sample.rollout_logprobs for name, factor in wanted.items()})
        return results

    def coefficients(self) -> Coefficients:
        return self._coefficients.current

    def adapt(self, kl: float, entropy: float, num_samples: float) -> None:
        self._coefficients.adapt(kl, entropy, num_samples)

    def hold_weights(self) -> None:
        """Nothing to do: there are no weights."""

    def release_weights(self) -> None:
        """Nothing to do: there are no weights."""

    def named_parameters_for_export(self) -> Iterator[tuple[str, Tensor]]:
        """One tensor with the digest and the number of updates, to tell versions apart; one that never
        changes, so that deltas pay."""
        yield PROGRESS.name, torch.tensor([self._num_updates, *self._chain], dtype=torch.int64)
        yield UNCHANGING.name, torch.zeros(UNCHANGING.shape, dtype=torch.uint8)

    def state(self) -> PolicyState:
        exported = dict(self.named_parameters_for_export())
        tensors = {PROGRESS.name: exported[PROGRESS.name]}
        values = {"policy": "simulated", "updates": self._num_updates}
        return PolicyState(tensors, values | self._coefficients.as_values())

    def load_state(self, folder: Path) -> None:
        state = ShardReader(folder)
        policy = state.values.get("policy")
        if policy != "simulated":
            raise ConfigError(
                f"the checkpoint is of policy {policy!r}, trainer.policy is simulated; "
                "resume with the policy the run was started with"
            )
        updates, *chain = state.read("simulated").tolist()
        self._num_updates = updates
        self._chain = bytes(chain)
        self._coefficients.begin(state.values.get("coefficients"))
        self.zero()

    def compare_weights(self) -> WeightState:
        """The digest is the end of the chain and not of the tensors, so that no worker can check it. Only one
        small tensor changes."""
        digest = self.digest()
        numbers = np.array([self._num_updates, *self._chain], dtype=np.int64)
        digest_before, numbers_before = self._compared
        self._compared = (digest, numbers)
        self._changed = np.flatnonzero(numbers != numbers_before) if digest_before else numbers[:0]
        num_elements = PROGRESS.num_elements + UNCHANGING.num_elements
        num_bytes = PROGRESS.num_bytes + UNCHANGING.num_bytes
        share = len(self._changed) / num_elements if digest_before else -1.0
        return WeightState(digest, digest, digest_before, share, num_bytes)

    def begin_writing(self, folder: Path, version: int, parent: int) -> Future[tuple[WeightFile, ...]]:
        if parent < 0:
            tensors = dict(self.named_parameters_for_export())
            save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        else:
            writer = DeltaWriter(folder / delta_name(0, 1))
            _, numbers = self._compared
            writer.add(PROGRESS, self._changed, numbers[self._changed].view(PROGRESS.bits_dtype))
            writer.write()
        written: Future[tuple[WeightFile, ...]] = Future()
        written.set_result(list_files(folder))
        return written

    def finish_writing(self) -> None:
        """Weights are written at once."""
        self.finish_saving()

    def usage(self) -> Usage:
        return Usage()

    def profile(self, folder: Path | None) -> None:
        self._profiler.profile(folder)

    def leave(self) -> None:
        """Nothing to do: there is nothing on a device."""

    enter = leave

    def digest(self) -> str:
        """The end of the chain, 32 hexadecimal digits."""
        return self._chain.hex()
