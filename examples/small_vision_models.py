"""Small models that see, with random weights: for tests, and for demos that teach them something first.

Each is of one family: 2 layers that read text and 2 that read pictures, in float32, with heads of 32 numbers
(vLLM on CPUs takes no smaller ones). Folders are as on the hub: weights have the names that the family's
models have there, beside them are the tokenizer, its chat template, and the settings of the image processor.

Pictures of 56 by 56 pixels become 4 tokens (Qwen2.5-VL), 4 (Qwen3-VL) and 16 (LLaVA, whatever their size).
"""

from __future__ import annotations

import json
import string
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent))
from small_models import piece_tokenizer

CHARACTERS = [*string.ascii_letters, *string.digits, *string.punctuation, " ", "\n"]
"""Each is a token; words may be more of them."""
QWEN_MARKERS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
QWEN_MARKERS += ["<|video_pad|>"]
QWEN_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}{{ '\n' }}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'text' -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}<|im_end|>{{ '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\n' }}{%- endif -%}
"""
LLAVA_TEMPLATE = """\
{%- for message in messages -%}
{{ message.role | upper }}:{{ ' ' }}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<image>{{ '\n' }}
{%- elif part.type == 'text' -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}{{ ' ' }}
{%- endfor -%}
{%- if add_generation_prompt -%}ASSISTANT:{%- endif -%}
"""
MOST_PIXELS = 28 * 28 * 64


def _text_sizes(tokenizer: PreTrainedTokenizerFast, **changes: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        # Large enough for logprobs to differ between tokens, and between pictures.
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return sizes | changes


def _vision_sizes(**changes: Any) -> dict[str, Any]:
    """Of Qwen's towers."""
    sizes: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 2,
        "out_hidden_size": 64,
        "initializer_range": 0.15,
    }
    return sizes | changes


def _qwen_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    return {
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    }


def _qwen2_5_vl(tokenizer: PreTrainedTokenizerFast, **changes: Any) -> PreTrainedConfig:
    from transformers import Qwen2_5_VLConfig

    rope = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [4, 6, 6]}
    return Qwen2_5_VLConfig(
        text_config=_text_sizes(tokenizer, rope_parameters=rope, **changes),
        vision_config=_vision_sizes(patch_size=14, window_size=56, fullatt_block_indexes=[1]),
        **_qwen_ids(tokenizer),
    )


def _qwen3_vl(tokenizer: PreTrainedTokenizerFast, **changes: Any) -> PreTrainedConfig:
    from transformers import Qwen3VLConfig

    rope = {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    }
    return Qwen3VLConfig(
        text_config=_text_sizes(tokenizer, rope_parameters=rope, head_dim=32, **changes),
        vision_config=_vision_sizes(patch_size=16, num_position_embeddings=64, deepstack_visual_indexes=[0]),
        tie_word_embeddings=True,
        **_qwen_ids(tokenizer),
    )


def _llava(tokenizer: PreTrainedTokenizerFast, **changes: Any) -> PreTrainedConfig:
    from transformers import LlavaConfig

    rope = {"rope_type": "default", "rope_theta": 1000.0}
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
        "projection_dim": 32,
        "initializer_factor": 4.0,
    }
    return LlavaConfig(
        text_config={"model_type": "llama"} | _text_sizes(tokenizer, rope_parameters=rope, **changes),
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
        # As on the hub: the tower's last layer is not used.
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )


QWEN_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 28 * 28 * 4, "longest_edge": MOST_PIXELS},
    # As on the hub: vLLM would normalise pixels by these.
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
LLAVA_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "crop_size": {"height": 56, "width": 56},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_resize": True,
    "resample": 3,
    "size": {"shortest_edge": 56},
    "processor_class": "LlavaProcessor",
}


@dataclass(frozen=True)
class SmallFamily:
    """How a small model of a family is made."""

    make_config: Callable[..., PreTrainedConfig]
    markers: list[str]
    """Pieces of the tokenizer that no text has."""
    chat_template: str
    processor: dict[str, Any]
    """preprocessor_config.json."""
    names: dict[str, str]
    """How names of weights begin in memory, and in the hub's files."""
    picture_text: str
    """What stands for one picture in a prompt's text."""
    whole_processor: dict[str, Any] | None = None
    """processor_config.json."""


SMALL_FAMILIES = {
    "qwen2_5_vl": SmallFamily(
        make_config=_qwen2_5_vl,
        markers=QWEN_MARKERS,
        chat_template=QWEN_TEMPLATE,
        processor=QWEN_PROCESSOR | {"patch_size": 14, "processor_class": "Qwen2_5_VLProcessor"},
        names={"model.language_model.": "model.", "model.visual.": "visual."},
        picture_text="<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "qwen3_vl": SmallFamily(
        make_config=_qwen3_vl,
        markers=QWEN_MARKERS,
        chat_template=QWEN_TEMPLATE,
        processor=QWEN_PROCESSOR
        | {
            "patch_size": 16,
            "processor_class": "Qwen3VLProcessor",
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        names={},
        picture_text="<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "llava": SmallFamily(
        make_config=_llava,
        markers=["<image>"],
        chat_template=LLAVA_TEMPLATE,
        processor=LLAVA_PROCESSOR,
        names={
            "model.language_model.": "language_model.model.",
            "lm_head.": "language_model.lm_head.",
            "model.vision_tower.": "vision_tower.vision_model.",
            "model.multi_modal_projector.": "multi_modal_projector.",
        },
        picture_text="<image>\n",
        whole_processor={
            "processor_class": "LlavaProcessor",
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "image_token": "<image>",
            "num_additional_image_tokens": 1,
        },
    ),
}
"""By `model_type`."""


def vision_tokenizer(family: str, words: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Each word and each character is a token, and so is each of the family's markers."""
    row = SMALL_FAMILIES[family]
    words = list(words)
    pattern = "|".join([*sorted(words, key=len, reverse=True), r"[\s\S]"])
    return piece_tokenizer(
        [*CHARACTERS, *words, *row.markers],
        pattern,
        extra_special_tokens=row.markers,
        chat_template=row.chat_template,
        model_max_length=512,
    )


def vision_model(family: str, tokenizer: PreTrainedTokenizerFast, seed: int = 0, **changes: Any) -> Any:
    """A model with random weights, in eval mode; `changes` are of its text part."""
    config = SMALL_FAMILIES[family].make_config(tokenizer, **changes)
    torch.manual_seed(seed)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()


def save_vision_model(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a folder as on the hub, readable by workers and servers that run as another user."""
    row = SMALL_FAMILIES[model.config.model_type]
    folder.mkdir(parents=True, exist_ok=True)
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    tensors = {
        _hub_name(name, row.names): tensor.detach().clone().contiguous()
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # written as 0600
    model.config.dtype = torch.float32
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    files = {"preprocessor_config.json": row.processor, "generation_config.json": generation}
    if row.whole_processor:
        files["processor_config.json"] = row.whole_processor
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def make_vision_model(
    folder: Path, family: str, seed: int = 0, words: Iterable[str] = (), **changes: Any
) -> Path:
    """Write a model with random weights and its tokenizer into a folder; returns the folder."""
    tokenizer = vision_tokenizer(family, words)
    save_vision_model(vision_model(family, tokenizer, seed, **changes), tokenizer, folder)
    return folder


def _hub_name(name: str, names: dict[str, str]) -> str:
    for prefix, of_hub in names.items():
        if name.startswith(prefix):
            return of_hub + name.removeprefix(prefix)
    return name
