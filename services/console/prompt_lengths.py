"""Finds prompts that are too long for the run, with the `tokenizers` library alone.

A token covers at least one byte, so only prompts with more bytes than the limit has tokens are encoded: of
most datasets none. The trainer tokenises every prompt at its start and has the last word; what cannot be
rendered here (a template that fails, a tokenizer without tokenizer.json) is left to it, with a note.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.chat_template import ChatTemplate, RenderError
from common.config import DataConfig
from common.dataset import Row
from common.errors import ConfigError
from services.console.model_folder import ModelFacts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BATCH_ROWS = 1024
CHECKED_AT_START = "prompt lengths are checked when the trainer starts"


def check_lengths(
    rows: Mapping[str, Sequence[Row]], model: ModelFacts | None, data: DataConfig, notes: list[str]
) -> None:
    """Hold every prompt to `data.max_prompt_tokens`; what cannot be checked here is said in `notes`.

    Raises:
        ConfigError: a prompt is too long and `data.overlong_prompts` is `error`, or all are too long.
    """
    if model is None or model.is_remote or not rows:
        return
    if not (model.path / "tokenizer.json").is_file():
        notes.append(f"{model.path} has no tokenizer.json: {CHECKED_AT_START}")
        return
    ruler = Ruler(model.path, data)
    for name, found in rows.items():
        try:
            overlong = list(ruler.overlong(found))
        except RenderError as error:
            notes.append(f"{name}: {error}: {CHECKED_AT_START}")
            continue
        if not overlong:
            continue
        if data.overlong_prompts == "error" or len(overlong) == len(found):
            raise ConfigError(_complaint(overlong, len(found), data))
        notes.append(f"{name}: {len(overlong):,} of {len(found):,} prompts are too long and will be left out")


class Ruler:
    """Measures prompts as the model will read them: chat template, suffix and special tokens included."""

    def __init__(self, folder: Path, data: DataConfig) -> None:
        self.data = data
        self._tokenizer = _open_tokenizer(folder / "tokenizer.json")
        self._template = ChatTemplate.of(folder) if data.chat_template != "never" else None

    def overlong(self, rows: Sequence[Row]) -> Iterable[tuple[int, str]]:
        """Length in tokens, and origin, of each prompt above the limit."""
        limit = self.data.max_prompt_tokens
        for start in range(0, len(rows), BATCH_ROWS):
            texts = [(row.origin, self._text(row)) for row in rows[start : start + BATCH_ROWS]]
            long = [(origin, text) for origin, text in texts if len(text.encode()) >= limit]
            # A template writes the special tokens itself.
            encoded = self._tokenizer.encode_batch(
                [text for _, text in long], add_special_tokens=self._template is None
            )
            for (origin, _), encoding in zip(long, encoded, strict=True):
                if len(encoding.ids) > limit:
                    yield len(encoding.ids), origin

    def _text(self, row: Row) -> str:
        if self._template is None:
            content = row.prompt if isinstance(row.prompt, str) else row.prompt[0]["content"]
            return str(content) + self.data.prompt_suffix
        messages = (
            [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else list(row.prompt)
        )
        if self.data.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.data.system_prompt})
        last = messages[-1]
        messages[-1] = {**last, "content": last["content"] + self.data.prompt_suffix}
        return self._template.render(messages, add_generation_prompt=True)


def _open_tokenizer(file: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{file} is not a tokenizer that can be loaded: {error}.") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _complaint(overlong: Sequence[tuple[int, str]], num_rows: int, data: DataConfig) -> str:
    (length, origin), longest = overlong[0], max(length for length, _ in overlong)
    if len(overlong) == num_rows and data.overlong_prompts == "drop":
        return (
            f"all {num_rows:,} prompts have more than data.max_prompt_tokens ({data.max_prompt_tokens:,}) "
            f"tokens; the first is {origin} with {length:,}. Raise the limit."
        )
    return (
        f"{origin}: the prompt has {length:,} tokens, data.max_prompt_tokens is {data.max_prompt_tokens:,}. "
        f"{len(overlong):,} of {num_rows:,} prompts are too long, the longest has {longest:,} tokens. Raise "
        "the limit (and model.max_model_len), or set data.overlong_prompts to drop."
    )
