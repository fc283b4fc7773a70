"""A config in which everything is right, with the model folder and data that it names."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers


def make_folder(path: Path, context: int = 64, **settings: Any) -> Path:
    """A model folder whose tokenizer makes one token of each word."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(
        json.dumps({"architectures": ["Tiny"], "max_position_embeddings": context})
    )
    (path / "model.safetensors").write_bytes(b"\0" * 100)
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "c": 3, "d": 4}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def write_run(folder: Path) -> Path:
    """Model, data and config; returns the config's path."""
    make_folder(folder / "model")
    row = {"prompt": "a b", "reward_model": {"ground_truth": "1"}}
    (folder / "train.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    (folder / "config.yaml").write_text(
        "model: {path: model, max_model_len: 64}\n"
        "data: {train: train.jsonl, eval: {held: train.jsonl}, max_prompt_tokens: 16}\n"
        "rollout: {engine: transformers, sampling: {max_tokens: 16}}\n"
        "trainer: {steps: 5, groups_per_step: 4, group_size: 2, max_staleness: 0, checkpoint_every: 2}\n"
    )
    return folder / "config.yaml"
