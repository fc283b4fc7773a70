"""Looks at a model folder from outside: is it complete, and is its context long enough?

Reads the small JSON files only. The services load the model with their own libraries and may still refuse it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import ModelConfig, is_path
from common.errors import ConfigError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model folder says about itself. A hub name has no folder yet."""

    path: Path
    is_remote: bool = False
    architecture: str = ""
    context: int | None = None
    """Positions the model knows, None where it does not say."""
    weight_bytes: int = 0


def inspect_model(model: ModelConfig, needs_weights: bool = True) -> ModelFacts:
    """Check the folder at `model.path`.

    Raises:
        ConfigError: it is missing or incomplete, or its context is shorter than `model.max_model_len`.
    """
    folder = Path(model.path)
    if not folder.is_dir():
        if is_path(model.path):
            raise ConfigError(
                f"model.path {model.path} is not a folder; give the folder of a Hugging Face model with its "
                "tokenizer. Relative paths in a config start at the config's folder."
            )
        return ModelFacts(folder, is_remote=True)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"model folder {folder} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); save it there "
            "with tokenizer.save_pretrained."
        )
    if not needs_weights and not (folder / "config.json").is_file():
        return ModelFacts(folder)
    tree = _read_config(folder)
    weights = {file for pattern in WEIGHT_PATTERNS for file in folder.glob(pattern)}
    if needs_weights and not weights:
        raise ConfigError(
            f"model folder {folder} has no weights ({' or '.join(WEIGHT_PATTERNS)}); save them there with "
            "model.save_pretrained."
        )
    facts = ModelFacts(
        folder,
        architecture=str((tree.get("architectures") or [tree.get("model_type", "")])[0]),
        context=_context_of(tree),
        weight_bytes=sum(file.stat().st_size for file in weights),
    )
    if facts.context is not None and model.max_model_len > facts.context:
        raise ConfigError(
            f"model.max_model_len is {model.max_model_len}, but {folder} has a context of {facts.context} "
            "tokens; lower model.max_model_len."
        )
    return facts


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        ConfigError: it is missing, damaged, or something else.
    """
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}.") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} must hold a JSON object, got {type(tree).__name__}.")
    return tree


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model folder {folder} has no config.json; give the folder of a Hugging Face model."
        )
    return read_json(folder / "config.json")


def _context_of(tree: dict[str, Any]) -> int | None:
    """Models of text and images keep it one level down."""
    inner = tree.get("text_config")
    for part in (inner if isinstance(inner, dict) else {}, tree):
        if isinstance(found := part.get("max_position_embeddings"), int):
            return found
    return None
