"""The policy of real runs: a Hugging Face causal language model with AdamW.

Weights and optimizer are float32; the forward pass runs in the configured dtype. Guarantees, on the same
hardware and number of threads: replaying micro-batches from a checkpoint gives the same bytes, and
`digest` shows it (on GPUs with `trainer.deterministic`). Memory of a forward pass is bounded by tiles,
whatever the size of the micro-batch.
"""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.arrays import Float32
from common.config.run import RunConfig
from common.config.trainer import TrainerConfig
from common.errors import ConfigError
from services.trainer.digest import digest_parameters
from services.trainer.export import export_tensors, model_tensors, save_model
from services.trainer.forward import TokenScorer
from services.trainer.losses import LossTerms, denominator, policy_loss, token_weight
from services.trainer.micro_batches import MicroBatch
from services.trainer.model_loading import compute_dtype, load_model, pick_device
from services.trainer.optimizer import (
    build_optimizer,
    finish_gradients,
    learning_rate,
    load_optimizer_tensors,
    optimizer_tensors,
)
from services.trainer.packing import CPU_TILE_TOKENS, Tile, choose_layout, make_rows, make_tiles
from services.trainer.policy import MicroBatchMetrics, PolicyState, UpdateResult
from services.trainer.samples import Sample


def load_policy(config: RunConfig) -> "TransformersPolicy":
    """Load `model.path` and prepare it for training.

    Raises:
        ConfigError: the model or the device cannot be used.
    """
    trainer = config.trainer
    if trainer.num_threads:
        torch.set_num_threads(trainer.num_threads)
    if trainer.deterministic:
        # Read by cuBLAS when its first handle is made, and by transformers' flash attention.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
        torch.use_deterministic_algorithms(True)
    model = load_model(config.model, pick_device(trainer.device))
    return TransformersPolicy(
        model,
        trainer,
        dtype=compute_dtype(config.model),
        temperature=config.rollout.sampling.temperature,
        max_completion_tokens=config.rollout.sampling.max_tokens,
    )


class TransformersPolicy:
    """Implements `Policy` for one model on one device."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        *,
        dtype: torch.dtype,
        temperature: float,
        max_completion_tokens: int,
    ) -> None:
        self._model = model
        self._config = config
        self._dtype = dtype
        self._temperature = temperature
        self._max_completion_tokens = max_completion_tokens
        self._parameters = list(model.named_parameters())
        self._optimizer = build_optimizer(self._parameters, config.optimizer)
        self._num_updates = 0
        self._held: dict[str, Tensor] | None = None
        self._scorer = TokenScorer(model, dtype)
        is_recurrent = bool(getattr(model, "_is_stateful", False))
        self.layout = choose_layout(config.packing, model.device, model.config, is_recurrent)
        self._tile_tokens = config.micro_batch_tokens
        if model.device.type == "cpu":
            self._tile_tokens = min(CPU_TILE_TOKENS, config.micro_batch_tokens)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()  # transformers checkpoints in training mode only; dropout is 0 in both

    def accumulate(self, batch: MicroBatch) -> MicroBatchMetrics:
        """Forward and backward, tile by tile; one synchronisation with the device at the end."""
        rows = make_rows(batch.samples, [sample.mask for sample in batch.samples])
        normalisation = self._config.algorithm.normalisation
        num_sequences, num_trained = len(batch.samples), batch.num_trained
        metrics = MicroBatchMetrics(
            sequences=num_sequences,
            tokens=num_trained,
            denominator=denominator(normalisation, num_sequences, num_trained, self._max_completion_tokens),
        )
        parts = [self._train_tile(tile, batch) for tile in make_tiles(rows, self.layout, self._tile_tokens)]
        return metrics + _sum_metrics(parts)

    def _train_tile(self, tile: Tile, batch: MicroBatch) -> tuple[LossTerms, Tensor]:
        """Add one tile's gradient; return its terms and the sum of its entropies, still on the device."""
        logprobs_N, entropies_N = self._scorer.score(tile, self._temperature)
        algorithm, device = self._config.algorithm, logprobs_N.device
        samples = [batch.samples[i] for i in tile.samples]
        counts = [len(row.targets) for row in tile.rows]
        weights = [token_weight(algorithm.normalisation, count) for count in counts]
        # Divisions happen in float64 on the host; the product with the loss in the dtype of the logprobs.
        per_token = np.stack(
            [
                np.concatenate([sample.rollout_logprobs[sample.mask] for sample in samples]),
                np.repeat([sample.advantage for sample in samples], counts),
                np.repeat(weights, counts),
            ]
        )
        rollout_N, advantages_N, weights_N = torch.from_numpy(per_token).to(device, logprobs_N.dtype)
        terms = policy_loss(
            logprobs_N, rollout_N, advantages_N, weights_N, algorithm, self._proximal(samples, logprobs_N)
        )
        terms.loss.backward()
        return terms, entropies_N.sum()

    def _proximal(self, samples: Sequence[Sample], logprobs_N: Tensor) -> Tensor | None:
        """The proximal logprobs of a tile's trained tokens [N]; None where they are the current ones."""
        given = [s.proximal_logprobs[s.mask] for s in samples if s.proximal_logprobs is not None]
        if not given:
            return None
        assert len(given) == len(samples), "a micro-batch is prepared as a whole or not at all"
        return torch.from_numpy(np.concatenate(given)).to(logprobs_N)

    def update(self, denominator: float) -> UpdateResult:
        """One AdamW step, or none where the gradients are not finite or there is nothing to divide by."""
        lr = learning_rate(
            self._config.optimizer, self._num_updates, self._config.steps, self._config.mini_batches
        )
        # Counted also where it is skipped: the rate follows the steps of the run.
        self._num_updates += 1
        # Masked sequences count in some denominators, so the denominator alone does not tell.
        if not denominator > 0.0 or all(p.grad is None for _, p in self._parameters):
            self.zero()
            return UpdateResult(0.0, lr, skipped=True, reason="no sequence of the step has a trained token")
        norm = finish_gradients(self._parameters, denominator, self._config.optimizer.max_grad_norm)
        if not math.isfinite(norm):
            self.zero()
            return UpdateResult(norm, lr, skipped=True, reason=f"the gradient norm is {norm}")
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.zero()
        return UpdateResult(norm, lr)

    def zero(self) -> None:
        """Discard accumulated gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def hold_weights(self) -> None:
        """Copy the weights, in master precision on their device."""
        self._held = {name: tensor.clone() for name, tensor in model_tensors(self._model).items()}

    def release_weights(self) -> None:
        """Free the copy."""
        self._held = None

    def proximal_logprobs(self, samples: Sequence[Sample]) -> list[Float32]:
        """Under the held weights, which take the place of the current ones for the length of the call."""
        if self._held is None:
            return self.logprobs(samples, self._temperature)
        current = model_tensors(self._model)
        saved = {name: tensor.clone() for name, tensor in current.items()}
        with torch.no_grad():
            for name, tensor in current.items():
                tensor.copy_(self._held[name])
        try:
            return self.logprobs(samples, self._temperature)
        finally:
            with torch.no_grad():
                for name, tensor in current.items():
                    tensor.copy_(saved[name])

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample], temperature: float = 1.0) -> list[Float32]:
        """Logprobs of all completion tokens, trained or not. float32, [T] for each sample, in order."""
        rows = make_rows(samples, [np.ones(len(sample.completion_ids), dtype=np.bool_) for sample in samples])
        results = [np.zeros(0, dtype=np.float32) for _ in samples]
        for tile in make_tiles(rows, self.layout, self._tile_tokens):
            logprobs_N = self._scorer.score(tile, temperature)[0].float().cpu()
            pieces = logprobs_N.split([len(row.targets) for row in tile.rows])
            for i, piece in zip(tile.samples, pieces, strict=True):
                results[i] = piece.numpy()
        return results

    def named_parameters_for_export(self) -> Iterator[tuple[str, Tensor]]:
        """The weights under their Hugging Face names, in the configured dtype; tied ones once."""
        return export_tensors(self._model, self._dtype)

    def save_weights(self, folder: Path) -> list[Path]:
        """Write `model.safetensors`; returns its path."""
        return save_model(self._model, self._dtype, folder)

    def state(self) -> PolicyState:
        """Master weights, moments, random state; and the number of updates, which fixes the rate."""
        tensors = {f"model.{name}": tensor for name, tensor in model_tensors(self._model).items()}
        moments = optimizer_tensors(self._optimizer, self._parameters)
        tensors.update((f"optimizer.{name}", tensor) for name, tensor in moments.items())
        tensors["rng.cpu"] = torch.get_rng_state()
        if self._model.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self._model.device)
        return PolicyState(tensors, {"policy": "transformers", "updates": self._num_updates})

    def save_state(self, folder: Path) -> None:
        """Write `state()` into a folder."""
        self.state().write(folder)

    @torch.no_grad()
    def load_state(self, source: PolicyState | Path) -> None:
        """Copy a state into this policy; the weights are checked before anything is changed."""
        state = source if isinstance(source, PolicyState) else PolicyState.read(source)
        own = model_tensors(self._model)
        given = _strip(state.tensors, "model.")
        wrong = sorted(
            name
            for name in own.keys() | given.keys()
            if name not in own or name not in given or own[name].shape != given[name].shape
        )
        if wrong or state.values.get("policy") != "transformers":
            policy = state.values.get("policy")
            raise ConfigError(
                f"the checkpoint is of policy {policy!r} and {len(wrong)} of its weights do not fit the "
                f"model ({', '.join(wrong[:3])}); resume with the model the run was started with"
            )
        load_optimizer_tensors(self._optimizer, self._parameters, _strip(state.tensors, "optimizer."))
        for name, tensor in own.items():
            tensor.copy_(given[name])
        self._num_updates = int(state.values["updates"])
        torch.set_rng_state(state.tensors["rng.cpu"].cpu())
        if self._model.device.type == "cuda" and "rng.cuda" in state.tensors:
            torch.cuda.set_rng_state(state.tensors["rng.cuda"].cpu(), self._model.device)
        self.zero()

    def digest(self) -> str:
        """Over the float32 master weights: stricter than over what engines load."""
        return digest_parameters(self._parameters)


def _strip(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _sum_metrics(parts: Sequence[tuple[LossTerms, Tensor]]) -> MicroBatchMetrics:
    """Join the terms of tiles; the only point where the host waits for the device."""
    if not parts:
        return MicroBatchMetrics()
    names = ("loss", "clipped_low", "clipped_high", "kl_sum", "weight_sum", "weights_capped", "mismatch_sum")
    sums_PK = torch.stack(
        [
            torch.stack([getattr(terms, name).detach().double() for name in names] + [entropy.double()])
            for terms, entropy in parts
        ]
    )
    maxima_PK = torch.stack([torch.stack([terms.weight_max, terms.mismatch_max]) for terms, _ in parts])
    sums = dict(zip((*names, "entropy_sum"), sums_PK.sum(0).tolist(), strict=True))
    weight_max, mismatch_max = maxima_PK.amax(0).tolist()
    return MicroBatchMetrics(
        loss_sum=sums["loss"],
        entropy_sum=sums["entropy_sum"],
        kl_sum=sums["kl_sum"],
        clipped_low=int(sums["clipped_low"]),
        clipped_high=int(sums["clipped_high"]),
        weight_sum=sums["weight_sum"],
        weight_max=weight_max,
        weights_capped=int(sums["weights_capped"]),
        mismatch_sum=sums["mismatch_sum"],
        mismatch_max=mismatch_max,
    )
