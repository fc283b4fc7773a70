"""FLOPs of a model's tower, which reads pictures."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tidemill.services.trainer.policy.layers import layers_of, tower_of


def count_tower_flops(model: PreTrainedModel) -> tuple[float, float]:
    """`per_picture_token` and `per_picture_pair`; zeros for a model without a tower of patches."""
    vision: Any = getattr(model.config, "vision_config", None)
    tower = tower_of(model)
    if not tower or not hasattr(vision, "patch_size"):
        return 0.0, 0.0
    # Patches that a token of the text stands for: of Qwen a square of them, of LLaVA one.
    num_patches = int(getattr(vision, "spatial_merge_size", 1)) ** 2
    text_modules = set(model.get_decoder().modules())
    block_modules: set[nn.Module] = set()
    for block in layers_of(model):
        if block not in text_modules:
            block_modules.update(block.modules())
    per_token = 0.0
    for section in tower:
        for module in section.modules():
            # A row of an embedding is added, and multiplied by nothing.
            if isinstance(module, nn.Embedding):
                continue
            # Blocks and the first convolution see patches; what joins and projects them sees tokens.
            takes_patches = module in block_modules or isinstance(module, nn.Conv2d | nn.Conv3d)
            for weight in module.parameters(recurse=False):
                if weight.ndim >= 2:
                    flops = (6.0 if weight.requires_grad else 2.0) * weight.numel()
                    per_token += flops * (num_patches if takes_patches else 1)
    is_trained = any(weight.requires_grad for section in tower for weight in section.parameters())
    # Scores of a patch with another one, and its value: 2 products, backward 4 more.
    patch_pair = (12.0 if is_trained else 4.0) * int(vision.hidden_size)
    num_layers = int(getattr(vision, "depth", None) or vision.num_hidden_layers)
    # In these layers a patch attends to all of its picture, in the others to those of its window.
    full_layers = getattr(vision, "fullatt_block_indexes", None)
    num_full = num_layers if full_layers is None else len(full_layers)
    if num_full < num_layers:
        window_patches = (int(vision.window_size) // int(vision.patch_size)) ** 2
        per_token += (num_layers - num_full) * patch_pair * window_patches * num_patches
    return per_token, num_full * patch_pair * num_patches**2
