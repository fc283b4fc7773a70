"""PPO's value head: estimates the reward to come from the last hidden state of the policy.

It starts at zero: the first estimates are zero, and its first gradients reach no hidden state. It is saved in
checkpoints and counts in the digest; engines never see it.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tidemill.services.trainer.policy.options import BesideModel, OptionSettings, PolicyCore, PolicyOption
from tidemill.services.trainer.policy.tile import Tile

PREFIX = "value_head."
"""Prefix of its parameters' names among those of the policy."""


class ValueHead(PolicyOption):
    """One linear layer in the dtype of the master weights. With `value.detach`, without gradient to the
    hidden states."""

    reads_hidden = True
    columns = ("values",)

    def __init__(self, settings: OptionSettings) -> None:
        self._config = settings.trainer.algorithm.value

    def join(self, model: PreTrainedModel, policy: PolicyCore) -> None:
        self._make_layer(model, policy.device)
        policy.split_layer(self.layer)

    def _make_layer(self, model: PreTrainedModel, device: torch.device) -> None:
        width = model.get_output_embeddings().weight.shape[1]
        self.layer = nn.Linear(int(width), 1, device=device, dtype=model.dtype)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def beside_model(self) -> BesideModel:
        named = self.layer.named_parameters()
        return BesideModel([(f"{PREFIX}{name}", parameter) for name, parameter in named], self._config.lr)

    def modules(self) -> list[nn.Module]:
        return [self.layer]

    def columns_of(self, tile: Tile) -> dict[str, Tensor]:
        """The value before each of the tile's tokens is chosen, in the dtype of the head."""
        hidden_NH = self._hidden_of(tile)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            values_N: Tensor = self.layer(hidden_NH.to(self.layer.weight.dtype)).squeeze(-1)
        return {"values": values_N if tile.columns is None else tile.columns.joined(values_N)}

    def _hidden_of(self, tile: Tile) -> Tensor:
        assert tile.hidden_NH is not None, "the policy's hidden states were asked for"
        return tile.hidden_NH.detach() if self._config.detach else tile.hidden_NH
