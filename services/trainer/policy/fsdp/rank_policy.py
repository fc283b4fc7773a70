"""One rank's part of a model that is sharded over all ranks with FSDP2.

Every layer's weights, gradients and moments are split by rows over the ranks that hold a copy of the model
together, gathered for a layer's forward and backward pass in the compute dtype, and summed back once an
update (arXiv 2304.11277). Each rank runs its share of the samples; gradients are sums in float32, so the
result is that of one rank up to rounding. Guarantee: all ranks make the same collective calls in the same
order: they agree on the number of forward passes, and a rank with fewer adds passes of weight zero.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from tidemill.common.config.run import RunConfig
from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.errors import ConfigError
from tidemill.common.wire.choices import Rows
from tidemill.common.wire.images import Image
from tidemill.services.trainer.algorithm.losses.sums import Sums
from tidemill.services.trainer.groups.bins import Layout, split_groups, split_samples
from tidemill.services.trainer.groups.choices import Routes
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.groups.sample import Sample, SegmentTokens, TurnEnd
from tidemill.services.trainer.groups.trie import SCORES_OF_A_TOKEN
from tidemill.services.trainer.policy.attention import layer_configs
from tidemill.services.trainer.policy.columns import cut_tile
from tidemill.services.trainer.policy.forward import TokenScorer
from tidemill.services.trainer.policy.fsdp.experts import expert_weights, split_experts
from tidemill.services.trainer.policy.fsdp.ranks import Ranks
from tidemill.services.trainer.policy.layers import layers_of
from tidemill.services.trainer.policy.model_loading import open_model, prepare_torch
from tidemill.services.trainer.policy.options import PolicyOption
from tidemill.services.trainer.policy.shards import local
from tidemill.services.trainer.policy.state import PolicyState, Shard
from tidemill.services.trainer.policy.tile import Tile
from tidemill.services.trainer.policy.transformers_policy import (
    T,
    TransformersPolicy,
    picture_settings,
    policy_settings,
)
from tidemill.services.trainer.weights.peers import pack, unpack
from tidemill.services.trainer.weights.pretrained import PretrainedWeights, give_storage
from tidemill.services.trainer.weights.shadow import held_rows
from tidemill.services.trainer.weights.store import model_tensors

SAMPLE_KINDS = (Image, Routes, Rows, Sample, SegmentTokens, TurnEnd)
"""Classes in the payloads that rank 0 sends to other ranks."""
SCORES_PER_WIDTH = 4
"""Attention scores that take as long as all else that a layer computes for a token, for each element of its
hidden state: 6 by FLOPs (4 H for a score, 24 H^2 for a token), fewer because other kernels are slower."""
PCI_DEVICES = Path("/sys/bus/pci/devices")


def take_share(device: torch.device, num_ranks: int, environment: Mapping[str, str] = os.environ) -> None:
    """Bind this thread, and those that it starts, to the cores beside the GPU, so that page-locked memory is
    there too; and set torch's number of threads, unless OMP_NUM_THREADS has."""
    # Read before it is narrowed below: a rank's share is one of the host, not of a NUMA node.
    cores = os.sched_getaffinity(0)
    if "OMP_NUM_THREADS" not in environment:
        local = int(environment.get("LOCAL_WORLD_SIZE", num_ranks))
        torch.set_num_threads(max(1, len(cores) // local))
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        address = (
            f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        )
        # In a container perhaps no core is beside the GPU: nothing is bound then.
        beside = cores_beside(address) & cores
        if beside:
            os.sched_setaffinity(0, beside)


def cores_beside(address: str, devices: Path = PCI_DEVICES) -> set[int]:
    """The cores of the GPU's NUMA node; none where the system does not say."""
    try:
        listed = (devices / address / "local_cpulist").read_text(encoding="ascii").strip()
    except OSError:
        return set()
    spans = [span.partition("-") for span in listed.split(",") if span]
    return {core for first, _, last in spans for core in range(int(first), int(last or first) + 1)}


class ShardedModel(nn.Module):
    """The root of the sharding: runs a function of the model with the root's own weights gathered."""

    def __init__(self, model: PreTrainedModel, ranks: Ranks, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        options: dict[str, Any] = {"mesh": ranks.mesh, "mp_policy": _precision(dtype)}
        if ranks.expert_mesh is not None:
            options["shard_placement_fn"] = split_experts(model, ranks.expert_mesh)
        # Layers before the root, which takes what no layer has.
        sharded = [fully_shard(block, **options) for block in layers_of(model)]
        # Also the root's: between two passes only shards exist, which updates and checkpoints work on.
        fully_shard(self, reshard_after_forward=True, **options)
        for block, following in pairwise(sharded):
            block.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([block])
        sum_gradients(self)

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


def sum_gradients(root: nn.Module) -> None:
    """Have FSDP sum gradients, not average them: the denominator is known when the mini-batch is complete."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _precision(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Weights are gathered and multiplied in the compute dtype, gradients summed in that of the masters."""
    if dtype in (torch.float32, torch.float64):
        return MixedPrecisionPolicy()
    # Inputs stay as they are: `precision.py` says where they are rounded.
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def load_rank_policy(config: RunConfig, ranks: Ranks, run_dir: Path | None = None) -> "RankPolicy":
    """Make the model, shard it, and read this rank's shard of its weights; pictures are in the run's
    folder."""
    # Before `prepare_torch`: `trainer.num_threads`, where it is set, has the last word.
    take_share(ranks.device, config.trainer.num_ranks)
    prepare_torch(config.trainer)
    trainer = config.trainer
    ranks.lay_out(trainer.shard_ranks, trainer.context_size, trainer.expert_size)
    model, weights = open_model(config.model, ranks.device)
    digest = ""
    if config.trainer.lora and weights is not None:
        # One rank reads the whole base: the digest in checkpoints is the same for any number of ranks.
        own_digest = weights.digest(model_tensors(model)).encode() if ranks.is_leader else b""
        digest = ranks.broadcast(own_digest).decode()
    settings = policy_settings(config) | {"base_digest": digest}
    settings["pictures"] = picture_settings(config, run_dir)
    policy = RankPolicy(model, config.trainer, ranks, weights, **settings)
    policy.max_share_changed = config.weights.max_share_changed
    return policy


class RankPolicy(TransformersPolicy):
    """Implements `Policy` together with the other ranks; every call has to be made on all of them."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        ranks: Ranks,
        weights: PretrainedWeights | None = None,
        **settings: Any,
    ) -> None:
        """`weights` fill a model that has none yet, and the models beside it."""
        self._ranks = ranks
        self.peers = ranks
        self._pretrained = weights
        self._roots: list[FSDPModule] = []
        """Sharded modules that are trained."""
        self._holds_gradients = False
        """Whether each rank has gradients of its own that are not summed yet."""
        self._width = int(getattr(model.config.get_text_config(), "hidden_size", 0))
        self._context = ranks.context
        if self._context is not None:
            check_heads(model.config, self._context.size)
        super().__init__(model, config, device=ranks.device, **settings)
        self._pretrained = None  # closes its files
        if self._context is not None:
            self.layout = shareable(self.layout, model)

    def _measure_model(self) -> None:
        self._reduces_once = reduces_once(self._model, self._config, self._ranks)

    def _score_with(self, model: PreTrainedModel, options: Sequence[PolicyOption]) -> TokenScorer:
        root = ShardedModel(model, self._ranks, self._dtype)
        if self._pretrained is not None:
            give_storage(root, self._ranks.device)
            self._pretrained.fill(self._base_of(model))
            # Else a slow disk would use up the time limit of the next collective call on the GPU.
            self._ranks.meet()
        self._remember(root)
        self._check_weights(model)
        return TokenScorer(model, self._dtype, options, root)

    def split_layer(self, layer: nn.Module) -> None:
        # As the root: what is gathered for a pass without backward would outlive a change of the weights.
        fully_shard(layer, mesh=self._ranks.mesh, reshard_after_forward=True)
        sum_gradients(layer)
        self._remember(layer)

    def _remember(self, root: nn.Module) -> None:
        if isinstance(root, FSDPModule) and any(weight.requires_grad for weight in root.parameters()):
            self._roots.append(root)

    def accumulate(self, batch: MicroBatch | None) -> Sums:
        """Train this rank's share of the micro-batch that rank 0 has; the metrics are those of all shares."""
        is_at_start = batch is not None and batch.is_at_start
        (samples,), _, is_at_start = self._deal(batch.samples if batch else (), self._split, is_at_start)
        share = MicroBatch(tuple(samples), is_at_start)
        plan = self._plan(share.samples)
        # Before the first pass: in each of them ranks wait for each other.
        num_missing = self._num_missing(plan)
        self._reduce_gradients(not self._reduces_once)
        sums = self._accumulate(share, plan)
        for _ in range(num_missing):
            self._pass_nothing()
        # Where no rank had a token there is none to sum: the update is skipped, as on one rank.
        self._holds_gradients |= self._reduces_once and len(plan) + num_missing > 0
        num_alike = self._config.context_size
        # Ranks that share tiles have the same sums, except positions: each counts its own columns.
        total = Sums()
        for packed_sums in self._ranks.gather(pack(dict(sums)))[::num_alike]:
            total = total + unpack(packed_sums)
        total["positions"] *= num_alike
        return total

    def _num_missing(self, plan: Sequence[Tile]) -> int:
        # Here, for ranks wait in a pass on GPUs for minutes at most, and in `gather` as long as a store is
        # away.
        for option in self.options:
            option.fetch(plan)
        return super()._num_missing(plan)

    def _prepare(self, tile: Tile) -> Tile:
        whole = super()._prepare(tile)
        return whole if self._context is None else cut_tile(whole, self._context)

    def _split(self, samples: Sequence[Sample]) -> list[list[tuple[int, ...]]]:
        size = self._config.num_bins
        tokens = self._config.bin_tokens
        scores_of_a_token = max(SCORES_OF_A_TOKEN, SCORES_PER_WIDTH * self._width)
        return [[members] for members in split_samples(samples, size, tokens, self.layout, scores_of_a_token)]

    def _split_groups(self, samples: Sequence[Sample]) -> list[list[tuple[int, ...]]]:
        return split_groups(samples, self._config.num_bins, self._config.bin_tokens, self.layout)

    def _deal_groups(self, samples: Sequence[Sample] | None) -> tuple[list[list[Sample]], list[int]]:
        parts, order, _ = self._deal(samples or (), self._split_groups)
        return parts, order

    def _deal(
        self,
        samples: Sequence[Sample],
        split: Callable[[Sequence[Sample]], list[list[tuple[int, ...]]]],
        is_at_start: bool = False,
    ) -> tuple[list[list[Sample]], list[int], bool]:
        """This rank's parts of the samples that rank 0 has, on rank 0 the indices of all samples in the order
        of ranks, and rank 0's `is_at_start`. No rank gets the samples of another."""
        if not self._ranks.is_leader:
            parts, is_at_start = unpack(self._ranks.deal(()), *SAMPLE_KINDS)
            return parts, [], is_at_start
        indices = split(samples)
        shares: list[list[list[Sample]]] = []
        order: list[int] = []
        for indices_of_rank in indices:
            share: list[list[Sample]] = []
            for members in indices_of_rank:
                share.append([samples[i] for i in members])
                order.extend(members)
            shares.append(share)
        payloads: list[bytes] = []
        for share in shares:
            payloads += [pack((share, is_at_start))] * self._config.context_size
        # Rank 0 has its own already.
        self._ranks.deal([b"", *payloads[1:]])
        return shares[0], order, is_at_start

    def _join(self, results: Sequence[T], order: Sequence[int]) -> list[T]:
        """The results of all ranks in rank 0's order of the samples; nothing on the others."""
        is_first = self._context is None or self._context.rank == 0
        joined: list[T] = []
        for of_rank in self._ranks.collect(pack(results if is_first else ())):
            joined += unpack(of_rank)
        positions = {i: position for position, i in enumerate(order)}
        return [joined[positions[i]] for i in range(len(order))]

    def _reduce_gradients(self, wanted: bool) -> None:
        """Whether backward passes from now on sum gradients over the ranks, or each rank keeps its own."""
        for root in self._roots:
            root.set_requires_gradient_sync(wanted)

    def _pass_nothing(self) -> None:
        """A forward and backward pass that adds nothing, but takes part in what others gather and sum."""
        tile = self.scorer.score(self._nothing(), self._temperature, keep_hidden=self._keeps_hidden)
        # Times 0 and not left out: the backward pass has to reach every layer in which others sum.
        nothing = 0.0 * tile.logprobs_N.sum()
        for values_N in self._columns_now(tile).values():
            nothing = nothing + 0.0 * values_N.sum()
        nothing.backward()

    def _sum_held_gradients(self) -> None:
        # What each rank holds is not in `.grad` yet, where updates and `zero_grad` look.
        if self._holds_gradients:
            self._reduce_gradients(True)
            self._pass_nothing()
            self._holds_gradients = False

    def own_state(self) -> PolicyState:
        """This rank's shard; nothing where another copy of the model has the same. What is not sharded, and
        values, are with rank 0."""
        state = self.state()
        ranks = self._ranks
        if ranks.replica:
            return PolicyState({})
        named = state.tensors.items()
        first_rows = {name: held_rows(tensor)[0] for name, tensor in named if isinstance(tensor, DTensor)}
        tensors = {}
        for name, tensor in named:
            if name in first_rows or ranks.is_leader:
                tensors[name] = local(tensor)
        shard = Shard(ranks.shard, ranks.shard_size, first_rows)
        return PolicyState(tensors, state.values if ranks.is_leader else {}, shard)


def check_heads(config: PreTrainedConfig, size: int) -> None:
    """Raises ConfigError: the heads of a layer cannot be divided by so many ranks."""
    counts = {int(getattr(layer, "num_attention_heads", 1)) for layer in layer_configs(config)}
    if any(count % size for count in counts):
        # All that divides all of them divides their greatest common divisor.
        fitting = gcd(size, *counts)
        raise ConfigError(
            f"trainer.context_ranks is {size}, which does not divide the attention heads of the model's "
            f"layers ({', '.join(map(str, sorted(counts)))}): each rank attends with as many; take {fitting}"
        )


def shareable(layout: Layout, model: PreTrainedModel) -> Layout:
    """The layout of tiles whose columns ranks share. Raises ConfigError: those of the model cannot be."""
    if not layout.startswith("tree"):
        raise ConfigError(
            f"trainer.context_ranks: forward passes of a {model.config.model_type} are {layout} here; ranks "
            "share packed ones with torch's own attention alone: not with recurrent layers, capped scores, "
            "dense masks or packing: false. Set it to 1"
        )
    return "tree"


def reduces_once(model: PreTrainedModel, config: TrainerConfig, ranks: Ranks) -> bool:
    """Whether gradients are summed over the ranks once an update: each rank holds all of them until then.

    `auto` does where they take at most a quarter of the GPU's memory.
    """
    if config.sum_gradients != "auto" or ranks.device.type != "cuda":
        return config.sum_gradients != "micro_batch"
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    experts = sum(weight.numel() for weight in expert_weights(model) if weight.requires_grad)
    num_bytes = 4 * (sum(weight.numel() for weight in trained) - experts + experts // config.expert_size)
    return num_bytes <= torch.cuda.get_device_properties(ranks.device).total_memory / 4
