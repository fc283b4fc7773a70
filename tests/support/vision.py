"""Folders of tiny models that see: config, tokenizer with a chat template, image processor, and weights."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as PilImage
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "llava")
PIECES = ("<pad>", "<unk>", "user", "assistant", "system", ":", ".", *(f"w{number}" for number in range(41)))
"""Ids 0 to 47, split at spaces."""
SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<image>",
)
"""Ids 48 to 54."""
VOCAB = {name: number for number, name in enumerate((*PIECES, *SPECIAL))}
VOCAB_SIZE = 64
QWEN_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


def chat_template(picture: str) -> str:
    """A template that writes `picture` for each part of type `image`."""
    return (
        "{% for m in messages %}<|im_start|> {{ m.role }} : {% for part in m.content %}"
        "{% if part.type == 'image' %}" + picture + "{% else %}{{ part.text }}{% endif %}{% endfor %}"
        " <|im_end|> {% endfor %}{% if add_generation_prompt %}<|im_start|> assistant :{% endif %}"
    )


def make_tokenizer(family: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({name: VOCAB[name] for name in PIECES}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = chat_template("<image>" if family == "llava" else QWEN_PICTURE)
    return tokenizer


def make_config(family: str) -> PreTrainedConfig:
    """Two layers each for tower and text; heads of 32, the least that vLLM takes on a CPU."""
    text: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": VOCAB["<|im_end|>"],
        "pad_token_id": 0,
    }
    ids = {
        "image_token_id": VOCAB["<|image_pad|>"],
        "video_token_id": VOCAB["<|video_pad|>"],
        "vision_start_token_id": VOCAB["<|vision_start|>"],
        "vision_end_token_id": VOCAB["<|vision_end|>"],
        "tie_word_embeddings": False,
    }
    if family == "qwen2_5_vl":
        rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10_000.0}
        vision = {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 14,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.2,
        }
        return Qwen2_5_VLConfig(text_config=text | {"rope_parameters": rope}, vision_config=vision, **ids)
    if family == "qwen3_vl":
        rope = {"rope_type": "default", "mrope_section": [6, 5, 5], "rope_theta": 10_000.0}
        vision = {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 16,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
            "initializer_range": 0.2,
        }
        text = text | {"rope_parameters": rope, "head_dim": 32}
        return Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
    vision_config = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=96,
        projection_dim=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        initializer_range=0.2,
    )
    return LlavaConfig(
        text_config=LlamaConfig(**text),
        vision_config=vision_config,
        image_token_index=VOCAB["<image>"],
        tie_word_embeddings=False,
    )


def make_model(family: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = make_config(family)
    classes: dict[str, Any] = {
        "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
        "qwen3_vl": Qwen3VLForConditionalGeneration,
        "llava": LlavaForConditionalGeneration,
    }
    model: PreTrainedModel = classes[family](config)
    return model.eval()


def write_processor(path: Path, family: str) -> None:
    """`preprocessor_config.json`, as the hub has it for the family."""
    settings: dict[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 16 if family == "qwen3_vl" else 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 3136, "longest_edge": 12_845_056},
    }
    if family == "llava":
        settings = {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
        }
    (path / "preprocessor_config.json").write_text(json.dumps(settings))


def vision_folder(path: Path, family: str = "qwen2_5_vl", seed: int = 0, has_weights: bool = True) -> Path:
    """A model folder of this family, with weights of `seed` where they are wanted."""
    path.mkdir(parents=True, exist_ok=True)
    if has_weights:
        make_model(family, seed).save_pretrained(path)
    else:
        make_config(family).save_pretrained(path)
    make_tokenizer(family).save_pretrained(path)
    write_processor(path, family)
    return path


def noise(width: int, height: int, seed: int = 0) -> PilImage.Image:
    """A picture without two equal patches."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return PilImage.fromarray(pixels)


def file_of(picture: PilImage.Image, kind: str = "PNG", **settings: Any) -> bytes:
    """The bytes of a file with a picture."""
    buffer = io.BytesIO()
    picture.save(buffer, kind, **settings)
    return buffer.getvalue()
