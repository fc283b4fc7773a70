"""Measures prompts as the model will read them, without its libraries; converts epochs to steps.

Needs a model folder with a tokenizer.json.
"""

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.common.config import DataConfig, RunConfig, is_path, parse_config
from tidemill.common.data.dataset import Row, read_training_rows
from tidemill.common.data.prompt_text import chat_messages, plain_prompt
from tidemill.common.errors import ConfigError
from tidemill.common.run.appended_tokens import num_appended
from tidemill.common.run.chat_template import ChatTemplate, RenderError
from tidemill.common.run.hub import told_while_waiting

if TYPE_CHECKING:
    from tokenizers import Encoding

BATCH_ROWS = 1024
TOKENIZER_FILE = "tokenizer.json"


class Ruler:
    """Measures prompts as the model will read them: chat template, suffix and special tokens included."""

    def __init__(self, folder: Path, data: DataConfig) -> None:
        from tokenizers import Tokenizer

        self.data = data
        self._file = folder / TOKENIZER_FILE
        try:
            self._tokenizer = Tokenizer.from_file(str(self._file))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{self._file} is not a tokenizer that can be loaded: {error}.") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = ChatTemplate.of(folder) if data.chat_template != "never" else None
        self.num_ends = 0
        """Tokens that the tokenizer writes behind every text, and that prompts are without."""
        if self._template is None:
            self.num_ends = num_appended(lambda text, special: self._encode([text], special)[0].ids)

    @property
    def unknown_token(self) -> str:
        """The token that stands for what the tokenizer does not know; empty where it can encode every text,
        as those on bytes can."""
        if self._unknown_id is None:
            return ""
        return self._tokenizer.id_to_token(self._unknown_id) or ""

    @cached_property
    def _unknown_id(self) -> int | None:
        from tokenizers.models import Unigram

        model = self._tokenizer.model
        unknown_id: int | None
        if isinstance(model, Unigram):  # its object has no attributes for them
            section = json.loads(self._tokenizer.to_str())["model"]
            has_bytes = section.get("byte_fallback", False)
            unknown_id = section["unk_id"]
        else:
            has_bytes = getattr(model, "byte_fallback", False)
            token = getattr(model, "unk_token", None)
            unknown_id = self._tokenizer.token_to_id(token) if token else None
        return None if has_bytes else unknown_id

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def overlong(self, rows: Sequence[Row]) -> Iterable[tuple[int, str]]:
        """Length in tokens and origin of each prompt above the limit; prompts with pictures are left out."""
        limit = self.data.max_prompt_tokens
        for start in range(0, len(rows), BATCH_ROWS):
            # How many tokens a picture takes only the image processor knows.
            batch = [row for row in rows[start : start + BATCH_ROWS] if not row.images]
            texts = [(row.origin, self._text(row)) for row in batch]
            long = [(origin, text) for origin, text in texts if len(text.encode()) >= limit]
            # A chat template contains the special tokens itself.
            encoded = self._encode([text for _, text in long], self._template is None)
            for (origin, _), encoding in zip(long, encoded, strict=True):
                num_tokens = len(encoding.ids) - self.num_ends
                if num_tokens > limit:
                    yield num_tokens, origin

    def unknown(self, rows: Iterable[Row]) -> Iterable[tuple[str, str]]:
        """Text that the tokenizer does not know and origin of each prompt with such text: what is read as
        `unknown_token`. Prompts with pictures are left out."""
        if self._unknown_id is None:
            return
        remaining = (row for row in rows if not row.images)
        while batch := list(islice(remaining, BATCH_ROWS)):
            texts = [self._text(row) for row in batch]
            encoded = self._encode(texts, self._template is None)
            for row, text, encoding in zip(batch, texts, encoded, strict=True):
                for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
                    # A prompt may have the token itself in it; one that is put before a prompt has no text.
                    is_text = start < end and text[start:end] != self.unknown_token
                    if token_id == self._unknown_id and is_text:
                        yield text[start:end], row.origin
                        break

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> "list[Encoding]":
        """Raises ConfigError: a text has something that the tokenizer neither knows nor has a token for."""
        try:
            return self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(
                f"{self._file} cannot encode a prompt: {error}. Its vocabulary must have a token for text "
                "that it does not know."
            ) from None

    def _text(self, row: Row) -> str:
        if self._template is None:
            return plain_prompt(row, self.data)
        messages = chat_messages(row, self.data)
        return self._template.render(messages, add_generation_prompt=messages[-1]["role"] != "assistant")


class NotMeasuredError(ConfigError):
    """Prompts that are dropped for their length cannot be counted, for want of a tokenizer or template."""


def with_steps(config: RunConfig, rows: Sequence[Row] | None = None, fetches: bool = True) -> RunConfig:
    """The config with `trainer.steps` from `trainer.epochs`: usable rows // groups_per_step * epochs.

    `rows` are those of the training set, if they have been read already. With `fetches`, a tokenizer may be
    downloaded from the hub to measure them.

    Raises:
        NotMeasuredError: the rows that are trained on cannot be counted here.
        ConfigError: the config gives another `steps`, or an epoch has no whole step.
    """
    trainer = config.trainer
    if trainer.epochs is None:
        return config
    if rows is None:
        rows = read_training_rows(config.data)[""]
    num_rows = _count_used(config, rows, fetches)
    steps = int(num_rows // trainer.groups_per_step * trainer.epochs)
    groups = f"{trainer.groups_per_step:,} groups a step"
    plan = f"trainer.epochs: {trainer.epochs:g} over {num_rows:,} rows, {groups},"
    if steps < 1:
        raise ConfigError(
            f"{plan} is not one whole step; lower trainer.groups_per_step, or give trainer.steps"
        )
    if "steps" in trainer.model_fields_set and trainer.steps != steps:
        raise ConfigError(
            f"{plan} is {steps:,} steps, but trainer.steps is {trainer.steps:,}; leave one of both out"
        )
    tree = config.model_dump(mode="json")
    tree["trainer"]["steps"] = steps
    return parse_config(tree, f"trainer.epochs: {trainer.epochs:g}, which is {steps:,} steps")


def _count_used(config: RunConfig, rows: Sequence[Row], fetches: bool) -> int:
    """Rows that are trained on: all but those that are dropped for their length."""
    if config.data.overlong_prompts != "drop":
        return len(rows)
    if config.images is not None:
        raise NotMeasuredError(
            "trainer.epochs counts the rows that data.overlong_prompts: drop leaves, and prompts with "
            "pictures are measured only as the trainer starts. Give trainer.steps in its place."
        )
    path = config.model.path
    folder = (
        _fetch_tokenizer(path) if fetches and not is_path(path) and not Path(path).is_dir() else Path(path)
    )
    reason = f"model.path {path} is no folder with a {TOKENIZER_FILE}"
    if (folder / TOKENIZER_FILE).is_file():
        try:
            return len(rows) - sum(1 for _ in Ruler(folder, config.data).overlong(rows))
        except RenderError as error:
            reason = str(error)
    raise NotMeasuredError(
        "trainer.epochs counts the rows that data.overlong_prompts: drop leaves, and they cannot be measured "
        f"here: {reason}. Give trainer.steps in its place."
    )


def _fetch_tokenizer(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        with told_while_waiting(f"the tokenizer of {name}"):
            return Path(snapshot_download(name, allow_patterns=["tokenizer*", "*.jinja"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise NotMeasuredError(
            f"trainer.epochs: the tokenizer of model.path {name}, which data.overlong_prompts: drop measures "
            f"with, cannot be had: {error}. Give a folder, or trainer.steps in place of trainer.epochs."
        ) from None
