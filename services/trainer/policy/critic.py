"""A critic: a value head on a model of its own, which begins as a copy of the policy's. Nothing that it
learns moves the policy."""

import copy

from torch import Tensor, nn
from transformers import PreTrainedModel

from tidemill.services.trainer.policy.options import BesideModel, PolicyCore
from tidemill.services.trainer.policy.tile import Tile
from tidemill.services.trainer.policy.value_head import PREFIX, ValueHead


class Critic(ValueHead):
    """The value head, and the copy of the policy's model whose hidden states it reads."""

    reads_hidden = False

    def join(self, model: PreTrainedModel, policy: PolicyCore) -> None:
        self._make_layer(model, policy.device)
        self.model = copy.deepcopy(model)
        head = self.model.get_output_embeddings()
        if head is not None:
            embeddings = self.model.get_input_embeddings()
            # Its logits are never computed; a matrix that is also the embeddings' goes on learning.
            head.requires_grad_(head.weight is embeddings.weight)
        self._scorer = policy.make_scorer(self.model)
        policy.split_layer(self.layer)

    def beside_model(self) -> BesideModel:
        """The head's parameters, and those of the model that are trained. Their gradients are clipped by
        themselves: they have nothing to do with the policy's."""
        parameters = super().beside_model().parameters
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                parameters.append((f"{PREFIX}model.{name}", parameter))
        return BesideModel(parameters, self._config.lr, is_clipped_alone=True)

    def modules(self) -> list[nn.Module]:
        return [self.layer, self._scorer.module]

    def _hidden_of(self, tile: Tile) -> Tensor:
        return self._scorer.hidden(tile)
