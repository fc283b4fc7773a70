"""The policy of real runs: a Hugging Face causal language model with AdamW.

What is trained and its optimizer are float32; the forward pass runs in the configured dtype. What a run may
have beside the model are options, whose hooks are called here (`options.py`).

Guarantees, on the same hardware and number of threads: replaying micro-batches from a checkpoint gives the
same bytes, and `digest` shows it (on GPUs with `trainer.deterministic`). Memory of a forward pass is bounded
by tiles, whatever the size of the micro-batch.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.common.config.run import RunConfig
from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.algorithm.losses.policy_loss import find_loss, policy_loss
from tidemill.services.trainer.algorithm.losses.sums import Sums, TileSums, add_tiles, count_batch
from tidemill.services.trainer.groups.columns import SampleColumns
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy.batch_tokens import BatchTokens
from tidemill.services.trainer.policy.exporting import ExportsWeights
from tidemill.services.trainer.policy.finite import find_broken_weights, refuse_broken_weights
from tidemill.services.trainer.policy.forward import TokenScorer, fill_columns, pick_layout
from tidemill.services.trainer.policy.model_loading import (
    compute_dtype,
    load_model,
    prepare_torch,
    recomputable_layers,
    recompute_layers,
    use_device,
)
from tidemill.services.trainer.policy.optimizer import (
    OPTIMIZER,
    build_optimizer,
    finish_gradients,
    learning_rate,
    load_optimizer,
    optimizer_tensors,
)
from tidemill.services.trainer.policy.options import (
    OptionSettings,
    PictureSettings,
    PolicyOption,
    load_options,
)
from tidemill.services.trainer.policy.packing import CPU_TILE_TOKENS, make_rows, plan_tiles
from tidemill.services.trainer.policy.policy import UpdateResult
from tidemill.services.trainer.policy.state import PolicyState, ShardReader, fill
from tidemill.services.trainer.policy.tile import NO_ROW, NOTHING, Row, Tile, lay_out
from tidemill.services.trainer.policy.usage import ModelFlops, Usage, count_flops, measure_usage
from tidemill.services.trainer.weights.peers import pack, unpack
from tidemill.services.trainer.weights.store import model_tensors

if TYPE_CHECKING:
    from tidemill.common.wire.routes import Routing
    from tidemill.services.trainer.algorithm.coefficients import Coefficients, CurrentCoefficients
    from tidemill.services.trainer.policy.profiling import CallProfiler

T = TypeVar("T")


def by_group(samples: Sequence[Sample]) -> list[list[Sample]]:
    """A list for each group, whose samples are neighbours."""
    return [list(of_group) for _, of_group in groupby(samples, key=lambda sample: sample.key[0])]


def _adaptive_coefficients(algorithm: AlgorithmConfig) -> "CurrentCoefficients | None":
    """None where none is adaptive: they are then those of the config."""
    if not algorithm.is_adaptive:
        return None
    from tidemill.services.trainer.algorithm.coefficients import CurrentCoefficients

    return CurrentCoefficients(algorithm)


def load_policy(config: RunConfig, run_dir: Path | None = None) -> "TransformersPolicy":
    """Load `model.path` and prepare it for training; pictures are in the run's folder. Raises ConfigError:
    the model or the device cannot be used."""
    prepare_torch(config.trainer)
    device = use_device(config.trainer.device)
    model = load_model(config.model, device)
    settings = policy_settings(config) | {"pictures": picture_settings(config, run_dir)}
    policy = TransformersPolicy(model, config.trainer, **settings)
    policy.max_share_changed = config.weights.max_share_changed
    return policy


def policy_settings(config: RunConfig) -> dict[str, Any]:
    """A policy's arguments besides model and `trainer`."""
    return {
        "dtype": compute_dtype(config.model),
        "temperature": config.rollout.sampling.temperature,
        "max_completion_tokens": config.max_completion_tokens,
        "replays_routes": config.rollout.record_routes,
        "max_model_len": config.model.max_model_len,
        "seed": config.seed,
    }


def picture_settings(config: RunConfig, run_dir: Path | None) -> PictureSettings | None:
    """None for a run of text."""
    if config.images is None:
        return None
    if run_dir is None:
        raise ConfigError("images: the pictures of a run are in its folder, and none was given")
    return PictureSettings(config.model.path, config.images, run_dir, config.streams.claim_check_url)


class TransformersPolicy(ExportsWeights):
    """Implements `Policy` for one model on one device, and `PolicyCore` for its options."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        *,
        dtype: torch.dtype,
        temperature: float,
        max_completion_tokens: int,
        replays_routes: bool = False,
        max_model_len: int = 64,
        seed: int = 0,
        base_digest: str = "",
        pictures: PictureSettings | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`device` is where the weights will be, if the model has none yet; `base_digest`, `replays_routes`,
        `seed` and `pictures` as in `OptionSettings`. Raises ConfigError: the model cannot be trained as the
        config says."""
        self._model = model
        self.device = device or model.device
        self._are_weights_checked = False
        self._config = config
        self._dtype = dtype
        self._temperature = temperature
        self._max_completion_tokens = max_completion_tokens
        algorithm = config.algorithm
        self._coefficients = _adaptive_coefficients(algorithm)
        self._surrogate = find_loss(algorithm)
        settings = OptionSettings(config, dtype, self.device, seed, base_digest, replays_routes, pictures)
        self.options = load_options(settings, model)
        for option in self.options:
            option.change_model(model)
        self._measure_model()
        for option in self.options:
            option.join(model, self)
        # Last: ranks split the model, and what stands beside it begins as a copy of the whole.
        self.scorer = self._score_with(model, self.options)
        self._list_parameters()
        kinds = [option.optimizer for option in self.options if option.optimizer is not None]
        kind = kinds[0] if kinds else None
        self._optimizer = build_optimizer(self._parameters, config.optimizer, self._rates, kind)
        self._profiler: CallProfiler | None = None
        self._num_updates = 0
        """Updates of the run so far, those that were skipped included."""
        self._begins_update = True
        """Whether the next micro-batch is the first of an update."""
        self._start_weights: dict[str, Tensor] | None = None
        """The weights at the start of the step, where `hold_weights` keeps them; else None."""
        self.layout = pick_layout(model, self.scorer, config.packing, max_model_len)
        self.bins = (config.bin_tokens, config.num_bins)
        """Most tokens of a bin, and bins of a micro-batch."""
        # Losses over whole sequences need all segments of a session in one forward pass.
        self._keeps_samples = algorithm.needs_whole_sequences
        self._keeps_hidden = any(option.reads_hidden for option in self.options)
        self._tile_tokens = config.bin_tokens
        """Most tokens of one forward pass."""
        if model.device.type == "cpu":
            self._tile_tokens = min(CPU_TILE_TOKENS, config.bin_tokens)
        if config.gradient_checkpointing is True:  # and not `auto`: then nothing has chosen yet
            self._recompute_layers()

    def _list_parameters(self) -> None:
        """List what is trained: of the model, and beside it."""
        of_model = [(name, weight) for name, weight in self._model.named_parameters() if weight.requires_grad]
        self._parameters = [*of_model]
        self._rates: dict[str, float] = {}
        """Peak learning rates by name, where an option has its own."""
        # In this order, too: their norm is a sum, which rounds otherwise in another one.
        clipped_together = [*of_model]
        self._clipped = [clipped_together]
        """Parameters whose gradients have one norm, and are clipped by it; first those of the model."""
        for option in self.options:
            beside = option.beside_model()
            if beside is None:
                continue
            self._parameters += beside.parameters
            if beside.lr is not None:
                self._rates |= {name: beside.lr for name, _ in beside.parameters}
            if beside.is_clipped_alone:
                self._clipped.append(beside.parameters)
            else:
                clipped_together += beside.parameters
        self._beside_model = {name for name, _ in self._parameters[len(of_model) :]}

    def _recompute_layers(self) -> None:
        """Have layers computed again for their gradient, of the model and of what is trained beside it."""
        recompute_layers(self._model)
        for option in self.options:
            for module in option.modules():
                is_trained = any(weight.requires_grad for weight in module.parameters())
                if is_trained and recomputable_layers(module):
                    recompute_layers(module)

    @property
    def processor(self) -> str:
        return next((option.processor for option in self.options if option.processor), "")

    @property
    def routing(self) -> "Routing | None":
        for option in self.options:
            if option.routing is not None:
                return option.routing
        return None

    def _measure_model(self) -> None:
        """For ranks: measure the model, while it is whole and it is known what of it is trained."""

    def make_scorer(self, model: PreTrainedModel) -> TokenScorer:
        return self._score_with(model, ())

    def _score_with(self, model: PreTrainedModel, options: Sequence[PolicyOption]) -> TokenScorer:
        self._check_weights(model)
        return TokenScorer(model, self._dtype, options)

    def split_layer(self, layer: nn.Module) -> None:
        """For ranks: split a layer that is called by itself."""

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
        """Tiles with every completion token, trained or not, but for those of pictures; no tile has samples
        of two parts."""
        tiles: list[Tile] = []
        first = 0
        for samples in parts:
            rows = make_rows(samples, [sample.text_mask for sample in samples], first)
            tiles += plan_tiles(rows, self.layout, self._tile_tokens, most_shared=self._config.bin_tokens)
            first += len(samples)
        return tiles

    def _lay_out(self, tile: Tile) -> Tile:
        """A planned tile, ready for its pass."""
        return self._prepare(lay_out(tile))

    def _prepare(self, tile: Tile) -> Tile:
        """A tile that has tensors, ready for its pass. Ranks that share a pass cut it to their columns."""
        return self._complete(tile)

    def _nothing(self) -> Tile:
        """A pass of no sample, for a rank that has none while others make theirs: all ranks take part in the
        calls within a pass."""
        return self._complete(NOTHING)

    def _complete(self, tile: Tile) -> Tile:
        """A tile that has tensors, with its options' inputs."""
        for option in self.options:
            tile = option.complete_tile(tile)
        return tile

    def _accumulate(self, batch: MicroBatch, plan: Sequence[Tile]) -> Sums:
        lengths = [len(row) for tile in plan for row in tile.rows]
        measured = Sums()
        if self._begins_update:
            for option in self.options:
                measured = measured + option.begin_update(batch, plan, self)
        self._begins_update = False
        batch_tokens = BatchTokens(plan, batch, self._config.algorithm.normalisation)
        sums: list[TileSums] = []
        positions = 0
        # All before the first pass, after which the processor's caches would have none of what this needs.
        laid_out = deque(lay_out(planned) for planned in plan)
        # In the order of the plan: gradients are added up in it, and with another order a replay would give
        # other digests.
        for number in range(len(plan)):
            # Each is let go of with its pass.
            tile = self._prepare(laid_out.popleft())
            positions += tile.ids_BT.numel()
            sums.append(self._train_tile(tile, number, batch_tokens))
        counts = count_batch(batch, self._config.algorithm.normalisation, self._max_completion_tokens)
        counts["positions"] = positions
        counts["row_tokens"] = sum(lengths)
        counts["row_pairs"] = sum(length * (length + 1) // 2 for length in lengths)
        return counts + add_tiles(sums) + measured

    def score_rows(self, rows: Sequence[Row]) -> Tile:
        tile = self._lay_out(plan_tiles(rows or [NO_ROW], self.layout, self._tile_tokens)[0])
        return self.scorer.score(tile, self._temperature)

    def _train_tile(self, tile: Tile, number: int, batch_tokens: BatchTokens) -> TileSums:
        """Add the gradient of the plan's tile of this number; return its sums, still on the device."""
        algorithm = self._coefficients.algorithm if self._coefficients else self._config.algorithm
        tile = self.scorer.score(
            tile,
            self._temperature,
            entropy_gradient=algorithm.entropy_coefficient > 0.0,
            keep_hidden=self._keeps_hidden,
        )
        tokens = batch_tokens.of_tile(number, tile, self._columns_now(tile))
        loss, sums = policy_loss(tokens, algorithm, self._surrogate)
        loss.backward()
        for option in self.options:
            sums |= option.sums_of(tile)
        return sums

    def _columns_now(self, tile: Tile) -> dict[str, Tensor]:
        """Columns of a scored tile's tokens that options compute, [N]."""
        columns: dict[str, Tensor] = {}
        for option in self.options:
            columns |= option.columns_of(tile)
        return columns

    def update(self, denominator: float) -> UpdateResult:
        """One AdamW step, or none where the gradients are not finite or there is nothing to divide by."""
        result = self._update(denominator)
        num_steps, updates_within = divmod(self._num_updates, self._config.updates_per_step)
        if updates_within == 0:
            for option in self.options:
                option.end_step(num_steps, self._model)
        return result

    def _sum_held_gradients(self) -> None:
        """For ranks: sum the gradients that each of them holds, once for all micro-batches of an update."""

    def _update(self, denominator: float) -> UpdateResult:
        self._sum_held_gradients()
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
        norms = [finish_gradients(parameters, denominator, bound) for parameters in self._clipped]
        broken = [norm for norm in norms if not math.isfinite(norm)]
        if broken:
            self.zero()
            return UpdateResult(broken[0], lr, skipped=True, reason=f"the gradient norm is {broken[0]}")
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group["lr_share"]
        self._optimizer.step()
        self.zero()
        return UpdateResult(norms[0], lr)

    def zero(self) -> None:
        self._sum_held_gradients()
        self._begins_update = True
        # None and not zeros: by it `_update` recognises that nothing was trained.
        self._optimizer.zero_grad(set_to_none=True)

    def coefficients(self) -> "Coefficients":
        assert self._coefficients is not None, "they are adaptive"
        return self._coefficients.current

    def adapt(self, kl: float, entropy: float, num_samples: float) -> None:
        if self._coefficients is not None:
            self._coefficients.adapt(kl, entropy, num_samples)

    def hold_weights(self) -> None:
        """Copy what is trained, in master precision on its device."""
        self._start_weights = {name: tensor.clone() for name, tensor in self._weights().items()}

    def release_weights(self) -> None:
        self._start_weights = None

    def _weights(self) -> dict[str, Tensor]:
        """Everything that updates change, of the model and beside it; views."""
        trained = {name: parameter.detach() for name, parameter in self._parameters}
        if self._is_model_frozen:
            return trained
        beside = {name: tensor for name, tensor in trained.items() if name in self._beside_model}
        return model_tensors(self._model) | beside

    def precompute(self, samples: Sequence[Sample]) -> list[SampleColumns]:
        parts, order = self._deal_groups(samples)
        algorithm = self._config.algorithm
        # Column -> the score that fills it, and whether the algorithm needs it.
        wanted = {
            "proximal_logprobs": ("logprobs", self._config.needs_proximal),
            "start_logprobs": ("logprobs", algorithm.needs_start_logprobs),
            "entropies": ("entropies", algorithm.needs_start_entropies),
        }
        needed = {column: score for column, (score, is_needed) in wanted.items() if is_needed}
        for option in self.options:
            needed |= {column: column for column in option.columns}
        computed = [SampleColumns() for group in parts for _ in group]
        if needed:
            with self._at_start_weights():
                start = self._score_all(parts, self.scorer, self._temperature, self.options)
            for columns, scores in zip(computed, start, strict=True):
                for column, score in needed.items():
                    columns[column] = scores[score]
        for option in self.options:
            of_option = option.precompute(parts, self)
            if of_option:
                for columns, more in zip(computed, of_option, strict=True):
                    columns.update(more)
        return self._join(computed, order)

    def _deal_groups(self, samples: Sequence[Sample]) -> tuple[list[list[Sample]], list[int]]:
        """The samples that this process scores, and the indices of all samples in the order of scoring."""
        return by_group(samples), list(range(len(samples)))

    def _join(self, results: Sequence[T], order: Sequence[int]) -> list[T]:
        """The results of all samples, in the order of the samples."""
        return list(results)

    @contextmanager
    @torch.no_grad()
    def _at_start_weights(self) -> Iterator[None]:
        """Within the block, the weights at the start of the step take the place of the current ones, where
        `hold_weights` has kept them."""
        if self._start_weights is None:
            yield
            return
        current = self._weights()
        saved = {name: tensor.clone() for name, tensor in current.items()}
        # In place: the optimizer and the sharding hold these very tensors.
        for name, tensor in current.items():
            tensor.copy_(self._start_weights[name])
        try:
            yield
        finally:
            for name, tensor in current.items():
                tensor.copy_(saved[name])

    def score_samples(self, parts: Sequence[Sequence[Sample]], scorer: TokenScorer) -> list[SampleColumns]:
        return self._score_all(parts, scorer, self._temperature)

    @torch.no_grad()
    def _score_all(
        self,
        parts: Sequence[Sequence[Sample]],
        scorer: TokenScorer,
        temperature: float,
        options: Sequence[PolicyOption] = (),
    ) -> list[SampleColumns]:
        """`logprobs` of all completion tokens, `entropies` where they are needed, and columns of these
        options; in the order of the parts. Only samples of one part share a forward pass. float32, or float64
        for a model of that precision."""
        # float64, so that comparisons of gradients are not rounded.
        wide = np.float64 if self._dtype == torch.float64 else np.float32
        names = ["logprobs"]
        if self._config.algorithm.needs_start_entropies:
            names.append("entropies")
        for option in options:
            names += option.columns
        columns: list[SampleColumns] = []
        for sample in chain.from_iterable(parts):
            num_tokens = len(sample.completion_ids)
            columns.append({name: np.zeros(num_tokens, dtype=wide) for name in names})
        keeps_hidden = any(option.reads_hidden for option in options)
        plan = self._plan_scored(parts)
        # As many passes as the other ranks make: in each of them they wait for each other.
        num_missing = self._num_missing(plan)
        for tile in chain(map(self._lay_out, plan), repeat(self._nothing(), num_missing)):
            scores = scorer.score(tile, temperature, keep_hidden=keeps_hidden)
            numbers = {"logprobs": scores.logprobs_N, "entropies": scores.entropies_N}
            for option in options:
                numbers |= option.columns_of(scores)
            for name in names:
                fill_columns(name, numbers[name], tile, columns)
        return columns

    def state(self) -> PolicyState:
        """Master weights, moments, random state; and the number of updates, which fixes the rate."""
        tensors = self._saved_weights()
        moments = optimizer_tensors(self._optimizer, self._parameters)
        tensors.update((f"{OPTIMIZER}{name}", tensor) for name, tensor in moments.items())
        tensors["rng.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        values = {"policy": "transformers", "updates": self._num_updates}
        if self._coefficients is not None:
            values |= self._coefficients.as_values()
        for option in self.options:
            values |= option.state().values
        return PolicyState(tensors, values)

    def _saved_weights(self) -> dict[str, Tensor]:
        """The weights of a checkpoint: what is trained, and what options keep; views."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in self._weights().items():
            tensors[name if name in self._beside_model else f"model.{name}"] = tensor
        for option in self.options:
            tensors |= option.state().tensors
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
        if self._coefficients is not None:
            self._coefficients.begin(values.get("coefficients"))
        torch.set_rng_state(state.read("rng.cpu").cpu())
        if self.device.type == "cuda" and "rng.cuda" in state.shapes:
            torch.cuda.set_rng_state(state.read("rng.cuda").cpu(), self.device)
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
        for option in self.options:
            option.check_state(values)

    def leave(self) -> None:
        self._move(torch.device("cpu"))

    def enter(self) -> None:
        """Take the device again. Raises torch.OutOfMemoryError: another process has not freed its memory yet;
        call it again."""
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        # Only where a run shares a GPU with its engine.
        from tidemill.services.trainer.policy.moving import free_device, move_modules, move_moments, mover

        moved = mover(device, self.device)
        move_modules([self.scorer.module], moved)
        for option in self.options:
            move_modules(option.modules(), moved)
        move_moments(self._optimizer, moved)
        self.move_version(moved)
        free_device(self.device)

    @cached_property
    def _flops(self) -> ModelFlops:
        return count_flops(self._model)

    def usage(self) -> Usage:
        return measure_usage(self._flops, self.peers)

    def profile(self, folder: Path | None) -> None:
        if self._profiler is None:
            # Only where somebody wants to see a step.
            from tidemill.services.trainer.policy.profiling import CallProfiler

            self._profiler = CallProfiler()
        self._profiler.profile(folder)
