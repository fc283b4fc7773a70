"""What the trainer needs of the thing it trains, whichever library stands behind it.

A mini-batch is: `accumulate` each micro-batch, then `update` once with their denominator; a step has one
mini-batch or several. Gradients accumulate unnormalised, so micro-batches may arrive one by one, before the
size of the mini-batch is known.

Guarantees of every policy: the same micro-batches in the same order, from the same state, give the same
digest; `zero` undoes every `accumulate` since the last update; a skipped update leaves the weights as
they were. Calls are blocking and not thread-safe: one at a time, from any thread.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import ConfigError
from common.wire.arrays import Float32
from services.trainer.groups.micro_batches import MicroBatch
from services.trainer.groups.samples import PreparedTokens, Sample
from services.trainer.policy.fsdp.shard_files import ShardReader

TENSORS_FILE = "policy.safetensors"
VALUES_FILE = "policy.json"

_NO_STATE = "{} holds no state of a policy: {}; resume from another checkpoint"


@dataclass(frozen=True, slots=True)
class MicroBatchMetrics:
    """Sums over the trained tokens of one or more micro-batches; `+` joins two of them.

    Divide a `*_sum` or a count by `tokens` for the mean, `loss_sum` by `denominator`.
    """

    sequences: int = 0
    tokens: int = 0
    """Tokens that carry loss."""
    denominator: float = 0.0
    """What these samples add to the denominator of `update`."""
    loss_sum: float = 0.0
    entropy_sum: float = 0.0
    kl_sum: float = 0.0
    """Estimate of KL(current || reference) by the configured estimator; 0 without a reference."""
    rollout_kl_sum: float = 0.0
    """k3 estimate of KL(rollout || current)."""
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    clipped_dual: float = 0.0
    """Tokens without gradient because the ratio left its range (with `cispo`: with a bounded weight)."""
    weight_sum: float = 0.0
    weight_max: float = 0.0
    """Importance weights against the rollout policy, truncated or masked."""
    weights_bounded: float = 0.0
    """Tokens whose importance weight was truncated or masked."""
    raw_weight_sum: float = 0.0
    raw_weight_square_sum: float = 0.0
    """Importance weights before that; their effective sample size is sum^2 / sum of squares."""
    mismatch_sum: float = 0.0
    mismatch_max: float = 0.0
    """|current - rollout| of the logprobs: staleness plus numerical mismatch."""
    value_loss_sum: float = 0.0
    value_square_error_sum: float = 0.0
    return_sum: float = 0.0
    return_square_sum: float = 0.0
    """Of the value head: its loss, (value at the step's start - return)^2, and the returns."""

    def __add__(self, other: "MicroBatchMetrics") -> "MicroBatchMetrics":
        def join(name: str) -> Any:
            mine, theirs = getattr(self, name), getattr(other, name)
            return max(mine, theirs) if name.endswith("_max") else mine + theirs

        return MicroBatchMetrics(**{item.name: join(item.name) for item in fields(self)})


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """`grad_norm` is after division by the denominator and before clipping.

    A skipped update left the weights as they were; `reason` says why, in words.
    """

    grad_norm: float
    lr: float
    skipped: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PolicyState:
    """All of a policy that a checkpoint keeps. No pickle: `tensors` as safetensors, `values` as JSON.

    Tensors share memory with the policy: write them before the next update.
    """

    tensors: dict[str, Tensor]
    values: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write `policy.safetensors` and `policy.json`; the same state gives the same bytes."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / TENSORS_FILE)
        self.write_values(folder)

    def write_values(self, folder: Path) -> None:
        """Write `policy.json` alone, beside tensors that ranks write."""
        (folder / VALUES_FILE).write_text(json.dumps(self.values, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "PolicyState":
        """Read what `write` wrote, or what ranks wrote, each its shard.

        Raises:
            ConfigError: the folder holds no readable state.
        """
        values = cls.read_values(folder)
        try:
            if (folder / TENSORS_FILE).exists():
                return cls(load_file(folder / TENSORS_FILE), values)
            reader = ShardReader(folder)
            return cls({name: reader.read(name) for name in reader.names}, values)
        except (OSError, SafetensorError) as error:
            raise ConfigError(_NO_STATE.format(folder, error)) from error

    @staticmethod
    def read_values(folder: Path) -> dict[str, Any]:
        """Read `policy.json` alone.

        Raises:
            ConfigError: the folder holds none that is readable.
        """
        try:
            values: dict[str, Any] = json.loads((folder / VALUES_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(_NO_STATE.format(folder, error)) from error
        return values


class Policy(Protocol):
    """A model under training. Lifecycle: `load_state` at most once, then steps; no close."""

    def accumulate(self, batch: MicroBatch) -> MicroBatchMetrics:
        """Add the batch's gradient, unnormalised, to what has been accumulated.

        After an exception the accumulated gradients are undefined: call `zero` and start the step again.
        """
        ...

    def update(self, denominator: float) -> UpdateResult:
        """Divide by the denominator, clip, and take one optimizer step; start accumulating anew.

        Skipped where the gradient norm is not finite, or where the denominator is 0.
        """
        ...

    def zero(self) -> None:
        """Discard what has been accumulated."""
        ...

    def logprobs(self, samples: Sequence[Sample], temperature: float = 1.0) -> list[Float32]:
        """Logprobs of every completion token under the current weights, [T] for each sample."""
        ...

    def prepare(self, samples: Sequence[Sample]) -> list[PreparedTokens]:
        """What the algorithm needs of samples before they are trained, of the weights at the step's start.

        Those are the weights that are held, else the current ones. Rewards and advantages are not looked at.
        """
        ...

    def hold_weights(self) -> None:
        """Keep a copy of the current weights for `prepare`, until `release_weights`."""
        ...

    def release_weights(self) -> None:
        """Let go of the copy, if there is one."""
        ...

    def named_parameters_for_export(self) -> Iterator[tuple[str, Tensor]]:
        """The weights under their Hugging Face names, in the configured dtype; tied ones once."""
        ...

    def save_weights(self, folder: Path) -> list[Path]:
        """Write the weights as safetensors that engines load; return the files."""
        ...

    def state(self) -> PolicyState:
        """What a checkpoint needs to continue bit by bit. Accumulated gradients are not part of it."""
        ...

    def save_state(self, folder: Path) -> None:
        """Write `state()` into a folder."""
        ...

    def load_state(self, source: PolicyState | Path) -> None:
        """Continue from a state, or from the folder it was saved in; accumulated gradients are discarded.

        Raises:
            ConfigError: the state is of another model or policy.
        """
        ...

    def digest(self) -> str:
        """128-bit hash over all parameter bytes, 32 hexadecimal digits."""
        ...


T = TypeVar("T")


class PolicyThread:
    """Runs the policy's calls one at a time."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="policy")

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run one call to its end, also when the caller is cancelled."""
        return await asyncio.shield(
            asyncio.get_running_loop().run_in_executor(self._executor, function, *args)
        )
