"""The policy of real runs: a Hugging Face causal language model with AdamW.

What is trained, all weights or LoRA adapters, and its optimizer are float32; the forward pass runs in the
configured dtype. Guarantees, on the same hardware and number of threads: replaying micro-batches from a
checkpoint gives the same bytes, and `digest` shows it (on GPUs with `trainer.deterministic`). Memory of a
forward pass is bounded by tiles, whatever the size of the micro-batch.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tidemill.common.config.run import RunConfig
from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.errors import ConfigError
from tidemill.common.run.routers import find_routers, is_mixture
from tidemill.services.trainer.algorithm.coefficients import HasCoefficients
from tidemill.services.trainer.algorithm.losses.policy_loss import policy_loss
from tidemill.services.trainer.algorithm.losses.routing import rerouted
from tidemill.services.trainer.algorithm.losses.sums import Sums, TileSums, add_tiles, count_batch
from tidemill.services.trainer.algorithm.losses.surrogates import find_loss
from tidemill.services.trainer.groups.columns import SampleColumns
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.groups.sample import Sample, without_choices
from tidemill.services.trainer.policy.batch_tokens import BatchTokens
from tidemill.services.trainer.policy.exporting import ExportsWeights
from tidemill.services.trainer.policy.finite import find_broken_weights, refuse_broken_weights
from tidemill.services.trainer.policy.forward import TokenScorer, fill_columns, pick_layout
from tidemill.services.trainer.policy.model_loading import (
    accelerate_model,
    compute_dtype,
    load_model,
    prepare_torch,
    recompute_layers,
    use_device,
)
from tidemill.services.trainer.policy.offload import LeavesDevice
from tidemill.services.trainer.policy.optimizer import (
    OPTIMIZER,
    build_optimizer,
    finish_gradients,
    learning_rate,
    load_optimizer,
    optimizer_tensors,
)
from tidemill.services.trainer.policy.options import load_option
from tidemill.services.trainer.policy.packing import CPU_TILE_TOKENS, make_rows, plan_tiles
from tidemill.services.trainer.policy.policy import UpdateResult
from tidemill.services.trainer.policy.state import PolicyState, ShardReader, fill
from tidemill.services.trainer.policy.tile import NO_ROW, NOTHING, Row, Tile, lay_out
from tidemill.services.trainer.policy.usage import Measured, Profiled
from tidemill.services.trainer.weights.peers import pack, unpack
from tidemill.services.trainer.weights.store import model_tensors

if TYPE_CHECKING:
    from tidemill.services.trainer.policy.adapters import Adapters
    from tidemill.services.trainer.policy.routers import Routers
    from tidemill.services.trainer.policy.side_models import ReferenceModel, ValueHead

ROWS_PER_COMPARED = 64
"""Samples of an update's first micro-batch, for each row that is scored without routes too."""

T = TypeVar("T")


def by_group(samples: Sequence[Sample]) -> list[list[Sample]]:
    """A list for each group, whose samples are neighbours."""
    return [list(of_group) for _, of_group in groupby(samples, key=lambda sample: sample.key[0])]


def load_policy(config: RunConfig) -> "TransformersPolicy":
    """Load `model.path` and prepare it for training. Raises ConfigError: the model or the device cannot be
    used."""
    prepare_torch(config.trainer)
    device = use_device(config.trainer.device)
    model = load_model(config.model, device)
    policy = TransformersPolicy(model, config.trainer, **policy_options(config, model, device))
    policy.max_share_changed = config.weights.max_share_changed
    return policy


def policy_options(
    config: RunConfig, model: PreTrainedModel, device: torch.device, base_digest: str = ""
) -> dict[str, Any]:
    """A policy's arguments besides model and config. The model gets adapters, kernels and compiled layers
    where they are wanted; `base_digest` as for `Adapters`. Raises ConfigError: it cannot have them."""
    trainer = config.trainer
    dtype = compute_dtype(config.model)
    adapters = None
    if trainer.lora:
        adapters = load_option("adapters")(model, trainer.lora, dtype, config.seed, base_digest)
    accelerate_model(model, trainer, dtype, device)
    return {
        "dtype": dtype,
        "temperature": config.rollout.sampling.temperature,
        "max_completion_tokens": config.max_completion_tokens,
        "replays_routes": config.rollout.record_routes,
        "adapters": adapters,
        "max_model_len": config.model.max_model_len,
    }


class TransformersPolicy(ExportsWeights, LeavesDevice, HasCoefficients, Profiled, Measured):
    """Implements `Policy` for one model on one device."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        *,
        dtype: torch.dtype,
        temperature: float,
        max_completion_tokens: int,
        adapters: "Adapters | None" = None,
        replays_routes: bool = False,
        max_model_len: int = 64,
        device: torch.device | None = None,
    ) -> None:
        """`device` is where the weights will be, if the model has none yet."""
        self._model = model
        self._adapters = adapters
        self._device = device or model.device
        self._are_weights_checked = False
        self._config = config
        self._dtype = dtype
        self._temperature = temperature
        self._max_completion_tokens = max_completion_tokens
        algorithm = config.algorithm
        self._set_coefficients(algorithm)
        self._surrogate = find_loss(algorithm)
        self._reference: ReferenceModel | None = None
        """None with adapters: the reference is the model with its adapters off."""
        if algorithm.needs_reference and adapters is None:
            self._reference = load_option("reference")(model, algorithm.reference, self._make_scorer)
        self._value_head = self._make_value_head(model)
        # Last: ranks shard the model, and what is beside it begins as a copy of the whole.
        measures = algorithm.router.is_on
        routers: Routers | None = None
        if measures or (replays_routes and (is_mixture(model.config) or find_routers(model))):
            routers = load_option("routers")(model, measures, replays_routes)
        self.routing = None if routers is None else routers.routing
        self._scorer = self._make_scorer(model, routers if measures or self.routing else None)
        head_parameters = self._value_head.named() if self._value_head else []
        trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        self._parameters = [*trained, *head_parameters]
        self._beside_model = frozenset(name for name, _ in head_parameters)
        # A critic's gradients are clipped by themselves: they have nothing to do with the policy's.
        self._bounded = (
            [trained, head_parameters]
            if self._value_head is not None and self._value_head.is_clipped_alone
            else [self._parameters]
        )
        head_lr = algorithm.value.lr or config.optimizer.lr
        own_rates = {name: head_lr for name, _ in head_parameters}
        self._optimizer = build_optimizer(
            self._parameters, config.optimizer, own_rates, offloads=config.offload_optimizer
        )
        self._num_updates = 0
        self._begins_update = True
        self._held: dict[str, Tensor] | None = None
        self.layout = pick_layout(model, self._scorer, config.packing, max_model_len)
        self.bins = config.bin_tokens, config.num_bins
        # Losses over whole sequences need all segments of a session in one forward pass.
        self._keeps_samples = algorithm.needs_whole_sequences
        self._tile_tokens = config.bin_tokens
        """Most tokens of one forward pass."""
        if model.device.type == "cpu":
            self._tile_tokens = min(CPU_TILE_TOKENS, config.bin_tokens)
        if config.gradient_checkpointing is True:  # and not `auto`: then nothing has chosen yet
            recompute_layers(model)
            for beside in self._value_head.models() if self._value_head else ():
                recompute_layers(beside)

    def _make_scorer(self, model: PreTrainedModel, routers: "Routers | None" = None) -> TokenScorer:
        self._check_weights(model)
        return TokenScorer(model, self._dtype, routers)

    def _check_weights(self, model: PreTrainedModel) -> None:
        """Check that what was read is finite; the models beside the policy begin as copies of it.

        Raises:
            ConfigError: it is not; on all ranks alike, for one that stopped alone would leave others waiting.
        """
        if self._are_weights_checked:
            return
        self._are_weights_checked = True
        broken: set[str] = set()
        for answer in self.peers.gather(pack(find_broken_weights(model.named_parameters()))):
            broken.update(unpack(answer))
        refuse_broken_weights(sorted(broken))

    def _make_value_head(self, model: PreTrainedModel) -> "ValueHead | None":
        algorithm = self._config.algorithm
        if not algorithm.needs_values:
            return None
        if algorithm.value.model == "own":
            critic: ValueHead = load_option("critic")(model, self._make_scorer, self._device)
            return critic
        head: ValueHead = load_option("value_head")(model, algorithm.value.detach, self._device)
        return head

    def accumulate(self, batch: MicroBatch) -> Sums:
        """Forward and backward, tile by tile; one synchronisation with the device at the end."""
        return self._accumulate(batch, self._plan(batch.samples))

    def _plan(self, samples: Sequence[Sample]) -> list[Tile]:
        rows = make_rows(samples, [sample.mask for sample in samples])
        most_shared = self._config.bin_tokens
        return plan_tiles(rows, self.layout, self._tile_tokens, self._keeps_samples, most_shared)

    def _num_missing(self, plan: Sequence[Tile]) -> int:
        """How many forward passes this rank has fewer than the one with the most."""
        most: int = max(unpack(answer) for answer in self.peers.gather(pack(len(plan))))
        return most - len(plan)

    def _plan_scored(self, parts: Sequence[Sequence[Sample]]) -> list[Tile]:
        """Tiles with every completion token, trained or not; no tile has samples of two parts."""
        tiles: list[Tile] = []
        first = 0
        for samples in parts:
            everything = [np.ones(len(sample.completion_ids), dtype=np.bool_) for sample in samples]
            rows = make_rows(samples, everything, first)
            tiles += plan_tiles(rows, self.layout, self._tile_tokens, most_shared=self._config.bin_tokens)
            first += len(samples)
        return tiles

    def _lay_out(self, tile: Tile) -> Tile:
        return lay_out(tile)

    def _accumulate(self, batch: MicroBatch, plan: Sequence[Tile]) -> Sums:
        lengths = [len(row) for tile in plan for row in tile.rows]
        compared = self._compare_routes(batch, plan) if self._begins_update else Sums()
        self._begins_update = False
        batch_tokens = BatchTokens(plan, batch, self._config.algorithm.normalisation)
        sums: list[TileSums] = []
        positions = 0
        # In the order of the plan: gradients are added up in it, and with another order a replay would give
        # other digests.
        for number, planned in enumerate(plan):
            tile = self._lay_out(planned)
            positions += tile.ids_BT.numel()
            sums.append(self._train_tile(tile, number, batch_tokens))
        counts = count_batch(batch, self._config.algorithm.normalisation, self._max_completion_tokens)
        counts["positions"] = positions
        counts["row_tokens"] = sum(lengths)
        counts["row_pairs"] = sum(length * (length + 1) // 2 for length in lengths)
        return counts + add_tiles(sums) + compared

    @torch.no_grad()
    def _compare_routes(self, batch: MicroBatch, plan: Sequence[Tile]) -> Sums:
        """How far logprobs of some rows are from the engine's, with its routes and with the routers' own
        choice: two passes, which the other ranks make too."""
        if self.routing is None:
            return Sums()
        # Without demonstrations: no engine has chosen for them, nor said a logprob.
        rows = [row for tile in plan[:1] for row in tile.rows if row.routes is not None]
        rows = rows[: max(1, len(batch.samples) // ROWS_PER_COMPARED)]
        with_routes = self._gap_to_engine(batch, rows)
        without_routes = self._gap_to_engine(batch, [replace(row, routes=None) for row in rows])
        return Sums(
            compared_tokens=sum(len(row.targets) for row in rows),
            replayed_gap_sum=with_routes,
            unreplayed_gap_sum=without_routes,
        )

    def _gap_to_engine(self, batch: MicroBatch, rows: Sequence[Row]) -> float:
        """The sum of |logprob - the engine's| over the tokens of rows that fit into one pass."""
        tile = self._lay_out(plan_tiles(rows or [NO_ROW], self.layout, self._tile_tokens)[0])
        logprobs_N = self._scorer.score(tile, self._temperature).logprobs_N.double().cpu().numpy()
        if not rows:
            return 0.0
        of_engine = [batch.samples[row.sample].rollout_logprobs[row.places] for row in tile.rows]
        return float(np.abs(logprobs_N - np.concatenate(of_engine)).sum())

    def _train_tile(self, tile: Tile, number: int, batch_tokens: BatchTokens) -> TileSums:
        """Add the gradient of the plan's tile of this number; return its sums, still on the device."""
        algorithm = self._algorithm
        head = self._value_head
        scores = self._scorer.score(
            tile,
            self._temperature,
            entropy_gradient=algorithm.entropy_coefficient > 0.0,
            keep_hidden=head is not None and head.reads_policy,
        )
        values_N = head(tile, scores.hidden_NH) if head is not None else None
        tokens = batch_tokens.of_tile(number, scores, values_N)
        loss, sums = policy_loss(tokens, algorithm, self._surrogate)
        loss.backward()
        return sums if scores.changed_N is None else sums | rerouted(scores.changed_N)

    def update(self, denominator: float) -> UpdateResult:
        """One AdamW step, or none where the gradients are not finite or there is nothing to divide by. At the
        end of a step the reference model follows, where that is due."""
        result = self._update(denominator)
        num_steps, updates_within = divmod(self._num_updates, self._config.updates_per_step)
        is_end_of_step = updates_within == 0
        if self._reference is not None and is_end_of_step and self._reference.is_due(num_steps):
            self._reference.update(self._model)
        return result

    def _sum_held(self) -> None:
        """For ranks: sum the gradients that each of them holds, once for all micro-batches of an update."""

    def _update(self, denominator: float) -> UpdateResult:
        self._sum_held()
        lr = learning_rate(
            self._config.optimizer, self._num_updates, self._config.steps, self._config.updates_per_step
        )
        # Counted also where it is skipped: the rate follows the steps of the run.
        self._num_updates += 1
        # Masked sequences count in some denominators: the denominator may be positive without any gradient.
        if not denominator > 0.0 or all(p.grad is None for _, p in self._parameters):
            self.zero()
            return UpdateResult(0.0, lr, skipped=True, reason="the update has no token to train on")
        bound = self._config.optimizer.max_grad_norm
        norms = [finish_gradients(parameters, denominator, bound) for parameters in self._bounded]
        norm = norms[0]
        unbounded = [infinite for infinite in norms if not math.isfinite(infinite)]
        if unbounded:
            norm = unbounded[0]
            self.zero()
            return UpdateResult(norm, lr, skipped=True, reason=f"the gradient norm is {norm}")
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group["lr_share"]
        self._optimizer.step()
        self.zero()
        return UpdateResult(norm, lr)

    def zero(self) -> None:
        self._sum_held()
        self._begins_update = True
        # None and not zeros: by it `_update` recognises that nothing was trained.
        self._optimizer.zero_grad(set_to_none=True)

    def hold_weights(self) -> None:
        """Copy what is trained, in master precision on its device."""
        self._held = {name: tensor.clone() for name, tensor in self._weights().items()}

    def release_weights(self) -> None:
        self._held = None

    def _weights(self) -> dict[str, Tensor]:
        """Everything that updates change: of the model, and of the value head; views."""
        if self._adapters is not None:
            return {name: parameter.detach() for name, parameter in self._parameters}
        head = self._value_head.named() if self._value_head else []
        return model_tensors(self._model) | {name: parameter.detach() for name, parameter in head}

    def precompute(self, samples: Sequence[Sample]) -> list[SampleColumns]:
        parts, order = self._deal_groups(samples)
        algorithm = self._config.algorithm
        computed = [SampleColumns() for group in parts for _ in group]
        wanted = {
            "proximal_logprobs": ("logprobs", self._config.needs_proximal),
            "values": ("values", self._value_head is not None),
            "start_logprobs": ("logprobs", algorithm.needs_start_logprobs),
            "entropies": ("entropies", algorithm.needs_start_entropies),
        }
        needed = {field: name for field, (name, is_needed) in wanted.items() if is_needed}
        if needed:
            with self._held_weights():
                start = self._score_all(parts, self._scorer, self._temperature, self._value_head)
            for columns, scores in zip(computed, start, strict=True):
                for field, name in needed.items():
                    columns[field] = scores[name]
        if algorithm.needs_reference:
            scorer = self._reference.scorer if self._reference else self._scorer
            # A reference makes its own choices.
            own_choices = [list(map(without_choices, group)) for group in parts]
            with self._adapters.off() if self._adapters else nullcontext():
                scored = self._score_all(own_choices, scorer, self._temperature)
            for columns, scores in zip(computed, scored, strict=True):
                columns["reference_logprobs"] = scores["logprobs"]
        return self._join(computed, order)

    def _deal_groups(self, samples: Sequence[Sample]) -> tuple[list[list[Sample]], list[int]]:
        """The samples that this process scores, and the indices of all samples in the order of scoring."""
        return by_group(samples), list(range(len(samples)))

    def _join(self, results: Sequence[T], order: Sequence[int]) -> list[T]:
        """The results of all samples, in the order of the samples."""
        return list(results)

    @contextmanager
    @torch.no_grad()
    def _held_weights(self) -> Iterator[None]:
        """The held weights, where there are any, take the place of the current ones."""
        if self._held is None:
            yield
            return
        current = self._weights()
        saved = {name: tensor.clone() for name, tensor in current.items()}
        # In place: the optimizer and the sharding hold these very tensors.
        for name, tensor in current.items():
            tensor.copy_(self._held[name])
        try:
            yield
        finally:
            for name, tensor in current.items():
                tensor.copy_(saved[name])

    @torch.no_grad()
    def _score_all(
        self,
        parts: Sequence[Sequence[Sample]],
        scorer: TokenScorer,
        temperature: float,
        head: "ValueHead | None" = None,
    ) -> list[SampleColumns]:
        """`logprobs` of all completion tokens, `entropies` where they are needed, `values` where a head is
        given; in the order of the parts. Only samples of one part share a forward pass. float32, or float64
        for a model of that precision."""
        # float64, so that comparisons of gradients are not rounded.
        wide = np.float64 if self._dtype == torch.float64 else np.float32
        names = ["logprobs"]
        if self._config.algorithm.needs_start_entropies:
            names.append("entropies")
        if head is not None:
            names.append("values")
        columns: list[SampleColumns] = []
        for sample in chain.from_iterable(parts):
            num_tokens = len(sample.completion_ids)
            columns.append({name: np.zeros(num_tokens, dtype=wide) for name in names})
        plan = self._plan_scored(parts)
        # As many passes as the other ranks make: in each of them they wait for each other.
        for tile in chain(map(self._lay_out, plan), repeat(NOTHING, self._num_missing(plan))):
            scores = scorer.score(tile, temperature, keep_hidden=head is not None and head.reads_policy)
            fill_columns("logprobs", scores.logprobs_N, tile, columns)
            if "entropies" in names:
                fill_columns("entropies", scores.entropies_N, tile, columns)
            if head is not None:
                fill_columns("values", head(tile, scores.hidden_NH), tile, columns)
        return columns

    def state(self) -> PolicyState:
        """Master weights, moments, random state; and the number of updates, which fixes the rate."""
        tensors = self._saved_weights()
        moments = optimizer_tensors(self._optimizer, self._parameters)
        tensors.update((f"{OPTIMIZER}{name}", tensor) for name, tensor in moments.items())
        tensors["rng.cpu"] = torch.get_rng_state()
        if self._device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self._device)
        values = {"policy": "transformers", "updates": self._num_updates}
        values |= self._coefficients.as_values(self._config.algorithm)
        return PolicyState(tensors, values | ({"base": self._adapters.identity} if self._adapters else {}))

    def _saved_weights(self) -> dict[str, Tensor]:
        """The weights of a checkpoint: what is trained, and an updated reference; views."""
        head = dict(self._value_head.named()) if self._value_head else {}
        tensors = {
            name if name in head else f"model.{name}": tensor for name, tensor in self._weights().items()
        }
        if self._reference is not None:
            prefix = self._reference.prefix
            tensors |= {f"{prefix}{name}": tensor for name, tensor in self._reference.tensors().items()}
        return tensors

    @torch.no_grad()
    def load_state(self, folder: Path) -> None:
        """Read a state into this policy, tensor by tensor, on ranks each its rows; all is checked before
        anything is changed."""
        state = ShardReader(folder)
        values = state.values
        weights = self._saved_weights()
        self._check_state(values, state.shapes, weights)
        load_optimizer(self._optimizer, self._parameters, state)
        for name, tensor in weights.items():
            fill(tensor, state, name)
        self._num_updates = int(values["updates"])
        self._set_coefficients(self._config.algorithm, values.get("coefficients"))
        torch.set_rng_state(state.read("rng.cpu").cpu())
        if self._device.type == "cuda" and "rng.cuda" in state.shapes:
            torch.cuda.set_rng_state(state.read("rng.cuda").cpu(), self._device)
        self.zero()
        # Wait here, without a limit: a rank with a slow disk would exceed that of the next call on GPUs.
        self.peers.gather(b"")

    def _check_state(
        self, values: dict[str, Any], shapes: dict[str, tuple[int, ...]], weights: dict[str, Tensor]
    ) -> None:
        saved = {name for name in shapes if not name.startswith((OPTIMIZER, "rng."))}
        wrong = sorted(
            name
            for name in weights.keys() | saved
            if name not in weights or name not in saved or tuple(weights[name].shape) != shapes[name]
        )
        policy = values.get("policy")
        if wrong or policy != "transformers":
            raise ConfigError(
                f"the checkpoint is of policy {policy!r} and {len(wrong)} of its weights do not fit the "
                f"model ({', '.join(wrong[:3])}); resume with the model, the adapters, the value head and "
                "the reference the run was started with"
            )
        base = self._adapters.identity if self._adapters else None
        if values.get("base") != base:
            raise ConfigError(
                f"the checkpoint's adapters belong to the model {values.get('base')}, and this is "
                f"{base}; resume with the model.path and trainer.lora the run was started with"
            )
