"""What an engine needs to know about a model before its weights load: tokenizer, end tokens, limits.

Every way in which a model folder can be unusable is reported here, in plain words, before anything
heavy starts. A folder is read without touching the network; only a hub name may use it.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config.data import ModelConfig, is_path
from common.errors import ConfigError
from services.rollout.engine import GenerationRequest


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model that can be loaded: its tokenizer, the ids that end a completion, and its limits."""

    path: str
    tokenizer: Any
    eos_ids: tuple[int, ...]
    vocab_size: int
    max_model_len: int

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, without special tokens and with the spaces the model wrote."""
        text: str = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request that no engine could serve, before it reaches one.

        Raises:
            ValueError: the prompt is empty, holds ids outside the vocabulary, or leaves no room.
        """
        check_length(request, self.max_model_len)
        check_ids(request.prompt_ids, self.vocab_size)


def check_length(request: GenerationRequest, max_model_len: int) -> None:
    """Refuse an empty prompt, and one whose completion might not fit the context."""
    num_prompt, max_tokens = len(request.prompt_ids), request.sampling.max_tokens
    if num_prompt == 0:
        raise ValueError(f"request {request.request_id} has an empty prompt; give at least one token id")
    if num_prompt + max_tokens > max_model_len:
        raise ValueError(
            f"request {request.request_id}: {num_prompt} prompt tokens + max_tokens {max_tokens} exceed "
            f"model.max_model_len {max_model_len}; shorten the prompt or lower max_tokens"
        )


def check_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that the model has no embedding for; inside an engine they would crash it."""
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(
            f"token ids must be between 0 and {vocab_size - 1}, got {lowest} to {highest}; "
            "was the prompt tokenized with this model's tokenizer?"
        )


def open_model(model: ModelConfig) -> ModelFolder:
    """Read tokenizer and configuration of `model.path`, without its weights.

    Raises:
        ConfigError: no such folder or hub model, no tokenizer, or a context shorter than the run's.
    """
    is_local = _is_local(model.path)
    if is_local:
        # Set before the hub library is imported: reading a folder must never wait for a network.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoConfig, AutoTokenizer

    try:
        hf_config = AutoConfig.from_pretrained(model.path, local_files_only=is_local)
    except (OSError, ValueError) as error:
        raise ConfigError(_unusable(model.path, "its configuration cannot be read", error)) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.path, local_files_only=is_local)
    except Exception as error:  # the tokenizer libraries raise anything, down to bare Exception
        reason = "it has no usable tokenizer, save one with tokenizer.save_pretrained"
        raise ConfigError(_unusable(model.path, reason, error)) from None
    text_config = hf_config.get_text_config()
    context = getattr(text_config, "max_position_embeddings", None)
    if context is not None and model.max_model_len > context:
        raise ConfigError(
            f"model.max_model_len is {model.max_model_len}, but {model.path} has a context of {context} "
            "tokens; lower model.max_model_len"
        )
    eos_ids = tuple(sorted(set(_eos_ids(model.path, text_config, tokenizer))))
    if not eos_ids:
        raise ConfigError(
            f"{model.path} names no end-of-sequence token, so completions could never stop; "
            "set eos_token_id in its generation_config.json"
        )
    return ModelFolder(model.path, tokenizer, eos_ids, int(text_config.vocab_size), model.max_model_len)


def _is_local(path: str) -> bool:
    """Whether `path` is a folder on disk; a hub name has at most one slash and no leading dot."""
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"model.path {path} has no config.json; give the folder of a Hugging Face model"
            )
        return True
    if is_path(path):
        raise ConfigError(f"model.path {path} is not a folder; give the folder of a Hugging Face model")
    return False


def _eos_ids(path: str, text_config: Any, tokenizer: Any) -> Iterator[int]:
    """Every id that ends a completion: of the generation config, else the model's, and the tokenizer's."""
    from transformers import GenerationConfig

    found = getattr(text_config, "eos_token_id", None)
    with contextlib.suppress(OSError):  # many models have no generation config
        found = GenerationConfig.from_pretrained(path).eos_token_id or found
    if tokenizer.eos_token_id is not None:
        yield int(tokenizer.eos_token_id)
    if found is not None:
        yield from [found] if isinstance(found, int) else found


def _unusable(path: str, reason: str, error: Exception) -> str:
    lines = str(error).strip().splitlines()
    detail = f" ({lines[0][:200]})" if lines else ""
    return f"model.path {path} cannot be used: {reason}{detail}. Give the folder of a Hugging Face model"
