"""One rank's part of a model that is sharded over all ranks with FSDP2.

Every layer's weights, gradients and moments are split by rows over the ranks, gathered for a layer's forward
and backward pass, and summed back (arXiv 2304.11277). Each rank runs its share of the samples; gradients are
sums, so the result is that of one rank up to rounding. Guarantee: all ranks make the same collective calls in
the same order: they agree on the number of forward passes, and a rank with fewer adds passes of weight zero.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from tidemill.common.config.run import RunConfig
from tidemill.common.wire.arrays import Float32
from tidemill.services.trainer.algorithm.losses.totals import MicroBatchMetrics
from tidemill.services.trainer.groups.samples import MicroBatch, Sample
from tidemill.services.trainer.policy.forward import ScoredSamples, TileScores, TokenScorer
from tidemill.services.trainer.policy.fsdp.ranks import Ranks
from tidemill.services.trainer.policy.packing import Tile
from tidemill.services.trainer.policy.side_models import ValueHead
from tidemill.services.trainer.policy.state import PolicyState, ShardReader, rows_of, write_shard
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy, policy_parts


class ShardedModel(nn.Module):
    """The root of the sharding: runs a function of the model with the root's own weights gathered."""

    def __init__(self, model: PreTrainedModel, ranks: Ranks) -> None:
        super().__init__()
        self.model = model
        blocks = set(model._no_split_modules or ())
        # The blocks that are gathered one after the other.
        for layer in [module for module in model.modules() if type(module).__name__ in blocks]:
            fully_shard(layer, mesh=ranks.mesh)
        # Also the root's: between two passes only shards exist, which updates and checkpoints work on.
        fully_shard(self, mesh=ranks.mesh, reshard_after_forward=True)
        for module in self.modules():
            if isinstance(module, FSDPModule):
                # Sums, as on one rank: what they are divided by is known when the mini-batch is complete.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`."""
        return function(*args)


class ShardedScorer(TokenScorer):
    """Scores tiles through the root of the sharding; construct before the model is sharded."""

    root: ShardedModel

    def score(
        self, tile: Tile, temperature: float, *, entropy_gradient: bool = False, keep_hidden: bool = False
    ) -> TileScores:
        """As one rank does."""

        def tensors() -> tuple[Tensor, ...]:
            # The sharding follows gradients through tuples of tensors, and of those that are no views.
            scores = TokenScorer.score(
                self, tile, temperature, entropy_gradient=entropy_gradient, keep_hidden=keep_hidden
            )
            hidden = () if scores.hidden_NH is None else (scores.hidden_NH,)
            return (scores.logprobs_N.clone(), scores.entropies_N, *hidden)

        return TileScores(*self.root(tensors))


def load_rank_policy(config: RunConfig, ranks: Ranks) -> "RankPolicy":
    """Load the model on this rank's device, and shard it."""
    model, options = policy_parts(config, ranks.device)
    return RankPolicy(model, config.trainer, ranks, **options)


class RankPolicy(TransformersPolicy):
    """Implements `Policy` together with the other ranks; every call has to be made on all of them."""

    def __init__(self, model: PreTrainedModel, config: Any, ranks: Ranks, **options: Any) -> None:
        self._ranks = ranks
        super().__init__(model, config, **options)

    def _make_scorer(self, model: PreTrainedModel) -> TokenScorer:
        scorer = ShardedScorer(model, self._dtype)
        scorer.root = ShardedModel(model, self._ranks)
        return scorer

    def accumulate(self, batch: MicroBatch) -> MicroBatchMetrics:
        """This rank's share; the metrics are those of all shares."""
        shares = split_samples(batch.samples, self._ranks.size)
        tiles = [self._tiles_of(MicroBatch(tuple(batch.samples[i] for i in share))) for share in shares]
        num_passes = max(map(len, tiles))
        own = MicroBatch(tuple(batch.samples[i] for i in shares[self._ranks.rank]))
        metrics = self._accumulate(own, tiles[self._ranks.rank])
        for _ in range(num_passes - len(tiles[self._ranks.rank])):
            scores = self._scorer.score(_empty_pass(batch), self._temperature)
            (0.0 * scores.logprobs_N.sum()).backward()
        parts = self._ranks.gather(msgpack.packb(asdict(metrics)))
        return sum((MicroBatchMetrics(**msgpack.unpackb(part)) for part in parts), MicroBatchMetrics())

    @torch.no_grad()
    def _score_all(
        self,
        samples: Sequence[Sample],
        scorer: TokenScorer,
        temperature: float,
        head: ValueHead | None = None,
    ) -> ScoredSamples:
        """This rank's share, gathered with the others'."""
        shares = split_samples(samples, self._ranks.size)
        counts = [len(self._scored_tiles([samples[i] for i in share])) for share in shares]
        mine = shares[self._ranks.rank]
        scored = super()._score_all([samples[i] for i in mine], scorer, temperature)
        if isinstance(scorer, ShardedScorer):
            for _ in range(max(counts) - counts[self._ranks.rank]):
                scorer.score(_empty_pass(MicroBatch(tuple(samples))), temperature)
        pairs = zip(scored.logprobs, scored.entropies, strict=True)
        arrays = [[[str(a.dtype), a.tobytes()] for a in pair if a is not None] for pair in pairs]
        logprobs: list[Float32 | None] = [None] * len(samples)
        entropies = list(logprobs)
        gathered = self._ranks.gather(msgpack.packb(arrays))
        for share, part in zip(shares, gathered, strict=True):
            for i, pair in zip(share, msgpack.unpackb(part), strict=True):
                found = [np.frombuffer(data, dtype=dtype) for dtype, data in pair]
                logprobs[i], entropies[i] = found[0], found[1] if len(found) > 1 else None
        return ScoredSamples(logprobs, entropies, [None] * len(samples))

    def save_weights(self, folder: Path) -> list[Path]:
        """Batched by all, written by rank 0."""
        if self._ranks.is_leader:
            return super().save_weights(folder)
        for _ in self.named_parameters_for_export():
            pass
        return []

    def save_state(self, folder: Path) -> None:
        """This rank's shard; returns when all are written."""
        state = self.state()
        local = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in state.tensors.items()}
        tensors = {name: tensor.contiguous() for name, tensor in local.items()}
        rows = {name: len(t) for name, t in state.tensors.items() if isinstance(t, DTensor)}
        if not self._ranks.is_leader:
            tensors = {name: tensor for name, tensor in tensors.items() if name in rows}
        write_shard(folder, self._ranks.rank, self._ranks.size, tensors, rows)
        if self._ranks.is_leader:
            PolicyState({}, state.values).write_values(folder)
        self._ranks.gather(b"")

    def load_state(self, source: PolicyState | Path) -> None:
        """This rank's rows of every tensor."""
        assert isinstance(source, Path), "ranks read a state from a folder that all of them see"
        reader = ShardReader(source)
        shapes: dict[str, Tensor] = {f"model.{n}": tensor for n, tensor in self._model.named_parameters()}
        tensors = {name: self._read(reader, name, shapes) for name in reader.names}
        super().load_state(PolicyState(tensors, PolicyState.read_values(source)))

    def _read(self, reader: ShardReader, name: str, parameters: dict[str, Tensor]) -> Tensor:
        own = parameters.get(name)
        if own is None and name.startswith("optimizer.") and not name.endswith(".step"):
            own = parameters.get(f"model.{name.removeprefix('optimizer.').rpartition('.')[0]}")
        if not isinstance(own, DTensor):
            return reader.read(name)
        local = reader.read(name, *rows_of(own.shape[0], self._ranks.rank, self._ranks.size))
        return DTensor.from_local(
            local.to(self._ranks.device),
            self._ranks.mesh,
            [Shard(0)],
            run_check=False,
            shape=own.shape,
            stride=own.stride(),
        )


def split_samples(samples: Sequence[Sample], size: int) -> list[list[int]]:
    """Indices of each rank's samples: longest first, each to the rank with the fewest tokens so far."""
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    for i in sorted(range(len(samples)), key=lambda i: (-samples[i].num_tokens, samples[i].key)):
        least = loads.index(min(loads))
        shares[least].append(i)
        loads[least] += samples[i].num_tokens
    return shares


def _empty_pass(batch: MicroBatch) -> Tile:
    """A forward pass over one token."""
    ids_BT = torch.from_numpy(batch.samples[0].prompt_ids[:1].astype(np.int64))[None]
    return Tile(rows=(), ids_BT=ids_BT, sources_N=torch.zeros(1).long(), targets_N=torch.zeros(1).long())
