"""Dataset rows as token ids, in an order that needs only an integer position.

`PromptSource.prompt_at(position)` is a pure function of rows, seed and position: position p lies in epoch p
// N, and each epoch visits every row once in an order of its own. So a checkpoint needs only the position,
and `fingerprint`, which tells whether the rows are still the same. `prompt_plan.py` says which position of
which source a ticket has.
"""

import dataclasses
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import structlog
import xxhash
from jinja2 import TemplateError
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tidemill.common.config.data import DataConfig
from tidemill.common.config.run import is_path
from tidemill.common.data.dataset import Row, read_evaluation_rows, read_training_rows
from tidemill.common.data.prompt_text import chat_messages, fate_of_overlong, plain_prompt
from tidemill.common.errors import BrokenImageError, ConfigError
from tidemill.common.run.appended_tokens import num_appended_by
from tidemill.common.wire.arrays import Int32
from tidemill.common.wire.images import Image

if TYPE_CHECKING:
    from tidemill.common.images.door import StoredPicture
    from tidemill.services.trainer.batch.row_pictures import RowPictures
    from tidemill.services.trainer.batch.streamed_prompts import StreamedPrompts

log = structlog.get_logger(__name__)

Prompts: TypeAlias = "Sequence[Prompt] | StreamedPrompts"

BATCH_ROWS = 1024
"""Rows handed to the tokenizer at once."""
PROGRESS_ROWS = 10_000
"""From this many rows on, a terminal shows a progress bar."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a ticket needs of a row.

    `text` is what the model reads, chat template included; `own_text` is the row's own, where that is text
    and the model reads more than it. A chat's own messages travel in `extra`.

    Example: `ids` [32, 10, 32, 28], `text` "2+2=", `data_source` "arith", `ground_truth` "4", `extra`
    {"split": "train", "index": 7}, `row` 7.
    """

    ids: Int32
    """[P], the generation prompt of a chat template included."""
    text: str
    data_source: str
    ground_truth: Any
    extra: dict[str, Any]
    row: int
    own_text: str = ""
    source: str = ""
    images: tuple[Image, ...] = ()

    def ticket_fields(self) -> dict[str, Any]:
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return fields | {"prompt_ids": fields.pop("ids"), "prompt_text": fields.pop("text")}

    @property
    def rest(self) -> bytes:
        """For a demonstration, the bytes of what follows the prompt; else empty."""
        return b""


class PromptSource:
    """An endless sequence of prompts: epoch after epoch, each in a seeded order of its own."""

    def __init__(self, prompts: "Prompts", seed: int, shuffle: bool, name: str = "") -> None:
        if not prompts:
            raise ValueError("a prompt source needs at least one prompt")
        self.name = name
        if isinstance(prompts, Sequence):
            self.rows, content = content_of(prompts)
        else:
            self.rows = prompts.rows
            content = prompts.content
        self.prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        order = f"{len(prompts)} {seed if shuffle else 'in order'}"
        self.fingerprint = xxhash.xxh3_128_hexdigest(f"{order} {content}".encode())
        """Digest over everything that decides which prompt is at which position, and its ground truth."""
        # Two epochs: a curriculum's search, and demonstrations that are published again, may need the other.
        self._order = lru_cache(maxsize=2)(self._compute_order)

    def __len__(self) -> int:
        return len(self.prompts)

    def prompt_at(self, position: int) -> Prompt:
        """The prompt at a position, from 0 on without end."""
        if position < 0:
            raise ValueError(f"a position counts from 0, got {position}")
        return self.prompts[self.index_at(position)]

    def index_at(self, position: int) -> int:
        """The place of that prompt in `prompts`."""
        epoch, position_in_epoch = divmod(position, len(self.prompts))
        return int(self._order(epoch)[position_in_epoch])

    def place_of(self, row: int) -> int | None:
        """The place in `prompts` of the prompt in a row of the dataset; None where it was left out."""
        index = int(np.searchsorted(self.rows, row))
        return index if index < len(self.rows) and self.rows[index] == row else None

    def _compute_order(self, epoch: int) -> NDArray[np.int64]:
        num_rows = len(self.prompts)
        if not self._shuffle:
            return np.arange(num_rows)
        # Raw bits are the same in every numpy release; `Generator.permutation` is free to change.
        # A source with a name has an order of its own, also where two have the same rows.
        entropy = [self._seed, epoch, *self.name.encode()]
        keys = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(num_rows)
        # Stable: equal keys have the same order on every machine.
        return np.argsort(keys, kind="stable")


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name. Raises ConfigError: there is none, or it cannot be
    loaded."""
    if is_path(path) and not Path(path).is_dir():
        raise ConfigError(
            f"model.path {path} is not a folder on this machine; give the folder of a Hugging Face model."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, ImportError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"model folder {path} has no tokenizer that can be loaded: {lines[0]} "
            "Put tokenizer.json and tokenizer_config.json beside the model, or set model.path."
        ) from None
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def load_training_prompts(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    pictures: "RowPictures | None" = None,
) -> list[PromptSource]:
    """Read, tokenise and check the training files: each source of prompts in order; one without a name where
    `train` names files."""
    settings = {source.name: data.of_source(source) for source in data.sources}
    encode = _encoder(tokenizer, data, pictures)
    return [
        PromptSource(read_prompts(rows, encode, data), seed, settings.get(name, data).shuffle, name)
        for name, rows in read_training_rows(data, data.prompt_sources).items()
    ]


def load_eval_prompts(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_prompts: int | None = None,
    pictures: "RowPictures | None" = None,
) -> dict[str, list[Prompt]]:
    """Each evaluation set by name: its rows in order, at most the first `max_prompts`."""
    sets = read_evaluation_rows(data, max_prompts)
    return {name: encode_rows(rows, tokenizer, data, pictures) for name, rows in sets.items()}


def encode_rows(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    pictures: "RowPictures | None" = None,
) -> list[Prompt]:
    """Tokenise rows and hold them to `data.max_prompt_tokens`.

    Raises:
        ConfigError: a prompt is too long (where `overlong_prompts` is `error`), has no tokens, or does not
            fit the chat template. The message names the row.
    """
    return list(_encoder(tokenizer, data, pictures)(rows))


Encode = Callable[[Sequence[Row]], Iterator[Prompt]]


def _encoder(tokenizer: PreTrainedTokenizerBase, data: DataConfig, pictures: "RowPictures | None") -> Encode:
    use_template = uses_template(tokenizer, data)
    return partial(_encoded, tokenizer=tokenizer, data=data, use_template=use_template, pictures=pictures)


def read_prompts(rows: Sequence[Row], encode: Encode, data: DataConfig) -> "Prompts":
    if not data.stream:
        return list(encode(rows))
    from tidemill.services.trainer.batch.streamed_prompts import StreamedPrompts

    return StreamedPrompts(rows, encode)


def _encoded(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    use_template: bool,
    pictures: "RowPictures | None",
) -> Iterator[Prompt]:
    overlong: list[tuple[int, str]] = []
    broken: list[tuple[str, str]] = []
    num_made = 0
    # The model continues a prompt: what the tokenizer writes behind every text would end it.
    num_ends = 0 if use_template else num_appended_by(tokenizer)
    starts = range(0, len(rows), BATCH_ROWS)
    quiet = len(rows) < PROGRESS_ROWS or not sys.stderr.isatty()
    console = Console(stderr=True)
    for start in track(starts, "tokenising prompts", console=console, disable=quiet, transient=True):
        batch = []
        texts = []
        for row in rows[start : start + BATCH_ROWS]:
            try:
                texts.append(_render(row, tokenizer, data, use_template, pictures))
                batch.append(row)
            except BrokenImageError as error:
                broken.append((row.origin, str(error)))
        if not batch:
            continue
        # A template writes the special tokens itself; doubling them would shift every logprob.
        encoded = tokenizer(texts, add_special_tokens=not use_template, return_attention_mask=False)
        pictures_of_rows: list[list[StoredPicture]] = [[] for _ in batch]
        if pictures is not None:
            pictures_of_rows = pictures.take(batch)
        for row, text, numbers, of_row in zip(
            batch, texts, encoded["input_ids"], pictures_of_rows, strict=True
        ):
            ids = np.asarray(numbers[: len(numbers) - num_ends], dtype=np.int32)
            if not len(ids):
                raise ConfigError(f"{row.origin}: the prompt has no tokens; its text is {text!r}.")
            images: tuple[Image, ...] = ()
            if pictures is not None:
                try:
                    ids, images = pictures.expand(ids, of_row, row)
                except BrokenImageError as error:
                    broken.append((row.origin, str(error)))
                    continue
            if len(ids) > data.max_prompt_tokens:
                if data.overlong_prompts == "error" or data.overlong_prompts == "drop":
                    overlong.append((len(ids), row.origin))
                    continue
                if images:
                    limit = data.max_prompt_tokens
                    reason = f"its {len(ids):,} tokens are more than data.max_prompt_tokens ({limit:,})"
                    broken.append((row.origin, f"{reason}, and no prompt with pictures is cut"))
                    continue
                overlong.append((len(ids), row.origin))
                ids = cut(ids, data.max_prompt_tokens, data.overlong_prompts)
                text = str(tokenizer.decode(ids, skip_special_tokens=False))
            # Every ticket of this prompt shares the array.
            ids.flags.writeable = False
            original = ""
            if isinstance(row.prompt, str) and row.prompt != text:
                original = row.prompt
            about = (row.data_source, row.ground_truth, row.extra, row.number)
            num_made += 1
            yield Prompt(ids, text, *about, original, row.source, images)
    if overlong and (len(rows) > 1 or data.overlong_prompts in ("error", "drop")):
        _report_overlong(overlong, len(rows), data)
    if pictures is not None:
        pictures.report(broken, num_made)


def cut(ids: Int32, limit: int, side: Literal["left", "right", "middle"]) -> Int32:
    """The ids without those beyond `limit`, cut off at one side or in the middle (verl's `truncation`): with
    an odd limit, the end keeps one more than the beginning."""
    if len(ids) <= limit:
        return ids
    first = {"left": 0, "right": limit, "middle": limit // 2}[side]
    return np.concatenate([ids[:first], ids[len(ids) - (limit - first) :]])


def uses_template(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> bool:
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if data.chat_template == "always" and not has_template:
        raise ConfigError(
            "data.chat_template is 'always', but the tokenizer has no chat template; use 'auto' or 'never', "
            "or a model with a template."
        )
    use_template = has_template and data.chat_template != "never"
    if data.system_prompt and not use_template:
        log.warning("data.system_prompt has no effect without a chat template")
    return use_template


def _render(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    use_template: bool,
    pictures: "RowPictures | None",
) -> str:
    if not use_template:
        return plain_prompt(row, data)
    messages = chat_messages(row, data)
    if pictures is not None:
        pictures.check_text(messages)
    is_prefilled = messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=not is_prefilled,
            continue_final_message=is_prefilled,
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{row.origin}: the prompt does not fit the model's chat template: {error}"
        ) from None
    assert isinstance(text, str)
    return text


def _report_overlong(overlong: Sequence[tuple[int, str]], num_rows: int, data: DataConfig) -> None:
    becomes = fate_of_overlong(overlong, num_rows, data)
    log.warning(
        f"prompts that are too long are {becomes}",
        num_overlong=len(overlong),
        num_rows=num_rows,
        limit=data.max_prompt_tokens,
        longest=max(overlong)[0],
    )


def content_of(prompts: Iterable[Prompt]) -> tuple[NDArray[np.int64], str]:
    """The dataset's row of each prompt, ascending, and a digest over all of them."""
    rows = array("q")
    digest = xxhash.xxh3_128()
    for prompt in prompts:
        rows.append(prompt.row)
        # With lengths and separators: other rows with their borders elsewhere must not give the same bytes.
        digest.update(f"|{prompt.row} {len(prompt.ids)} {prompt.ground_truth!r}|".encode())
        digest.update(prompt.ids.tobytes() + prompt.rest)
        for image in prompt.images:
            digest.update(image.digest.encode())
    return np.array(rows, dtype=np.int64), digest.hexdigest()
