"""The `model` and `data` sections: what is trained, on which prompts."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from common.config.section import Section


def is_path(model: str) -> bool:
    """Whether `model.path` can only mean a folder: a hub name is `name` or `owner/name`."""
    return Path(model).is_absolute() or model.startswith((".", "~")) or model.count("/") > 1


class ModelConfig(Section):
    """The starting model: version 0 of the run."""

    path: str
    """Folder of a Hugging Face causal language model with its tokenizer (or a hub name)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the forward pass, in the trainer and in the engine. Master weights are float32."""
    max_model_len: int = Field(2048, ge=8, le=1 << 20)
    """Prompt plus completion, in tokens; at most the model's context."""


class DataConfig(Section):
    """Datasets are JSONL or Parquet, in verl's columns or in GSM8K's `question` and `answer`."""

    train: str | list[str]
    """File or files with the training prompts."""
    eval: dict[str, str] = Field(default_factory=dict)
    """Evaluation sets by name; each is scored by the rewards of the run whose `lanes` hold `eval`."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    system_prompt: str = ""
    """Put before the prompt where the tokenizer has a chat template."""
    prompt_suffix: str = ""
    """Appended to every prompt text, for instance the request for an answer format."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """`auto` applies the tokenizer's chat template where it has one."""
    max_prompt_tokens: int = Field(1024, ge=1, le=1 << 20)
    """A longer prompt is an error that names its row; see `overlong_prompts`."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """`drop` leaves out prompts above the limit and logs how many."""
    shuffle: bool = True
    """Visit the rows in a new seeded order each epoch."""
