"""The models of the proof: published shapes with random weights, made on the spot, or tiny ones."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.device import free, is_gpu
from tests.support.models import write_tokenizer

PUBLISHED = Path(__file__).parents[2] / "docs/operations/models"
SHAPES = {"0.6b": "Qwen3-0.6B", "4b": "Qwen3-4B", "8b": "Qwen3-8B", "moe": "Qwen3-30B-A3B"}
MOE_LAYERS = 6
"""Layers, of 48: 4.3e9 parameters, which a GPU of 80 GB holds with all that is measured."""
TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
TINY_MOE = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
SPREAD = 0.05
"""Standard deviation of random weights: with the usual 0.02 the next token is nearly uniform in any model."""


def shape_of(name: str, dry: bool, layers: int | None = None) -> Any:
    """Transformers' configuration of a model; `layers` takes the place of the published number."""
    changes: dict[str, Any] = {"num_hidden_layers": MOE_LAYERS} if name == "moe" else {}
    if dry:
        changes = TINY | (TINY_MOE if name == "moe" else {})
    changes |= {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "initializer_range": SPREAD}
    if layers is not None:
        changes["num_hidden_layers"] = layers
    tree = json.loads((PUBLISHED / SHAPES[name] / "config.json").read_text()) | changes
    return AutoConfig.for_model(tree.pop("model_type"), **tree)


def make_model(config: Any, folder: Path) -> None:
    """Write random weights in bfloat16, and a tokenizer of as many words as there are ids."""
    torch.manual_seed(0)
    with torch.device("cuda") if is_gpu() else nullcontext():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    write_tokenizer(folder, num_pieces=config.vocab_size)
    del model
    free()
