"""The models beside the policy: the reference model of KL penalties, and PPO's value head.

A frozen reference is the model that the run started with, also after a restart; an updated one is part of the
checkpoint, and moves only in `update`. The value head estimates the reward to come from the last hidden state
of the policy, or of a model of its own (a critic). It starts at zero: the first estimates are zero, no random
numbers are drawn, and its first gradients reach no hidden state. It is saved in checkpoints and counts in the
digest; engines never see it.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tidemill.common.config.algorithm_sections import ReferenceConfig
from tidemill.services.trainer.policy.forward import TokenScorer
from tidemill.services.trainer.policy.tile import Tile
from tidemill.services.trainer.weights.store import model_tensors

MakeScorer = Callable[[PreTrainedModel], TokenScorer]
"""Makes the scorer of a model, which may be split over ranks."""


class ReferenceModel:
    """A copy of the policy's model. Make it before the first update and before a checkpoint is loaded."""

    prefix = "reference."
    """Prefix of its weights' names in a checkpoint."""

    def __init__(self, model: PreTrainedModel, config: ReferenceConfig, make_scorer: MakeScorer) -> None:
        self._config = config
        self._model = copy.deepcopy(model).requires_grad_(False).eval()
        if config.dtype == "bfloat16":  # else in that of the policy's master weights
            self._model.to(torch.bfloat16)
        self.scorer = make_scorer(self._model)

    def is_due(self, num_steps: int) -> bool:
        """Whether the reference is to follow the policy after so many steps."""
        return self._config.model == "updated" and num_steps % self._config.every == 0

    @torch.no_grad()
    def update(self, model: PreTrainedModel) -> None:
        """Move every weight by `mixup` of its distance to the policy's: 1 copies it."""
        current = model_tensors(model)
        for name, tensor in model_tensors(self._model).items():
            # Whole numbers cannot be mixed.
            if tensor.is_floating_point() and self._config.mixup < 1.0:
                tensor.lerp_(current[name].to(tensor.dtype), self._config.mixup)
            else:
                tensor.copy_(current[name])

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps: the weights of an updated reference; views."""
        return model_tensors(self._model) if self._config.model == "updated" else {}


VALUE_PREFIX = "value_head."
"""Prefix of its parameters' names among those of the policy."""


class ValueHead(nn.Module):
    """One linear layer in the dtype of the master weights. `detach`: no gradient to the hidden states."""

    reads_policy = True
    """Whether its input is the policy's hidden states."""
    is_clipped_alone = False
    """Whether its gradients are clipped by themselves, and not with the policy's."""

    def __init__(self, model: PreTrainedModel, detach: bool, device: torch.device) -> None:
        super().__init__()
        self._detach = detach
        width = model.get_output_embeddings().weight.shape[1]
        self.layer = nn.Linear(int(width), 1, device=device, dtype=model.dtype)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, tile: Tile, hidden_NH: Tensor | None) -> Tensor:
        """The value before each of the tile's tokens is chosen. Shape [N], in the dtype of the head."""
        assert hidden_NH is not None, "the policy's hidden states were asked for"
        hidden_NH = hidden_NH.detach() if self._detach else hidden_NH
        with torch.autocast(hidden_NH.device.type, enabled=False):
            values: Tensor = self.layer(hidden_NH.to(self.layer.weight.dtype)).squeeze(-1)
        return values if tile.columns is None else tile.columns.joined(values)

    def models(self) -> list[PreTrainedModel]:
        """Its models, whose layers may be computed again for their gradient."""
        return []

    def modules_to_move(self) -> list[nn.Module]:
        return [self.layer]

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Its parameters, under the names that optimizer, digest and checkpoint use."""
        return [(f"{VALUE_PREFIX}{name}", parameter) for name, parameter in self.layer.named_parameters()]


class Critic(ValueHead):
    """A value head on a model of its own, which begins as a copy of the policy's: nothing that it learns
    moves the policy. Make it before the first update and before a checkpoint is loaded."""

    reads_policy = False
    is_clipped_alone = True

    def __init__(self, model: PreTrainedModel, make_scorer: MakeScorer, device: torch.device) -> None:
        super().__init__(model, detach=False, device=device)
        self.model = copy.deepcopy(model)
        head = self.model.get_output_embeddings()
        if head is not None:
            embeddings = self.model.get_input_embeddings()
            # Its logits are never computed; a matrix that is also the embeddings' goes on learning.
            head.requires_grad_(head.weight is embeddings.weight)
        self._scorer = make_scorer(self.model)

    def forward(self, tile: Tile, hidden_NH: Tensor | None) -> Tensor:
        """Like the head's; the policy's hidden states are not used."""
        return super().forward(tile, self._scorer.hidden(tile))

    def models(self) -> list[PreTrainedModel]:
        return [self.model]

    def modules_to_move(self) -> list[nn.Module]:
        return [self.layer, self._scorer.module]

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """The head's parameters, and those of the model that are trained."""
        of_model = [(f"{VALUE_PREFIX}model.{name}", weight) for name, weight in self.model.named_parameters()]
        return [*super().named(), *((name, weight) for name, weight in of_model if weight.requires_grad)]
