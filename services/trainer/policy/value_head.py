"""A value head: estimates of the reward to come from the policy's last hidden state.

It starts at zero, so the first estimates are zero, no random numbers are drawn, and its first gradients do
not reach the policy. It is saved in checkpoints and counts in the digest; engines never see it.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

PREFIX = "value_head."
"""Of its parameters' names, among those of the policy."""


class ValueHead(nn.Module):
    """One linear layer in the dtype of the master weights. `detach`: no gradient to the hidden states."""

    def __init__(self, model: PreTrainedModel, detach: bool) -> None:
        super().__init__()
        self._detach = detach
        width = model.get_output_embeddings().weight.shape[1]
        self.layer = nn.Linear(int(width), 1, device=model.device, dtype=model.dtype)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, hidden_NH: Tensor) -> Tensor:
        """The value before each token is chosen. Shape [N], in the dtype of the head."""
        hidden_NH = hidden_NH.detach() if self._detach else hidden_NH
        with torch.autocast(hidden_NH.device.type, enabled=False):
            values: Tensor = self.layer(hidden_NH.to(self.layer.weight.dtype))
        return values.squeeze(-1)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Its parameters, under the names that optimizer, digest and checkpoint use."""
        return [(f"{PREFIX}{name}", parameter) for name, parameter in self.layer.named_parameters()]
