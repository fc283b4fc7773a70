"""Demonstrations: rows that are trained as they are, with an imitation loss.

Which tokens are trained is known exactly, or the row is refused: from the chat template's generation blocks;
without those, by rendering the chat up to the beginning and the end of each of the assistant's messages,
which has to give a prefix of the whole chat. A completion ends with the template's end of a turn; where there
is no template, with the tokenizer's end of text.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import structlog
from jinja2 import TemplateError
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from tidemill.common.archive.completions import opener_of
from tidemill.common.config.data import DataConfig
from tidemill.common.config.run import ModelConfig
from tidemill.common.data.dataset import ChatMessage, Row, read_training_rows
from tidemill.common.data.demonstration import IDS
from tidemill.common.data.prompt_text import chat_messages
from tidemill.common.errors import ConfigError
from tidemill.common.run.appended_tokens import num_appended_by
from tidemill.common.run.special_tokens import TokenReader, end_ids_of, reader_of
from tidemill.common.wire.arrays import Bits, Int32
from tidemill.common.wire.messages import Trajectory
from tidemill.services.trainer.batch.prompts import Prompt, PromptSource, read_prompts, uses_template

log = structlog.get_logger(__name__)

GENERATION = re.compile(r"\{%-?\s*generation\b")
SHOWN = 20
"""Characters of a chat that an error shows on each side of a border."""
WORKER = "trainer"
"""Worker that trajectories of demonstrations name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration(Prompt):
    """A prompt with the completion that is imitated: T tokens, of which those with `mask` are trained."""

    completion_ids: Int32
    mask: Bits
    completion: str
    thought: str | None = None
    """As a trajectory has it."""

    @property
    def rest(self) -> bytes:
        return self.completion_ids.tobytes() + self.mask.tobytes()

    def trajectory(self, ticket: int, step: int, version: int) -> Trajectory:
        """Its entry in the stream, the same bytes each time; no version has produced its tokens, `version` is
        a placeholder."""
        return Trajectory(
            ticket=ticket,
            index=0,
            step=step,
            group_size=1,
            prompt_ids=self.ids,
            prompt_text=self.text,
            completion_ids=self.completion_ids,
            logprobs=np.zeros(len(self.completion_ids), np.float32),
            loss_mask=self.mask,
            spans=((version, 0),),
            text=self.completion,
            thought=self.thought,
            worker=WORKER,
            data_source=self.data_source,
            source=self.source,
        )


def load_demonstrations(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int, model: ModelConfig
) -> list[PromptSource]:
    """Read, tokenise and check the sources of demonstrations, in order. Raises ConfigError: a row cannot be
    used, or has more tokens than `model.max_model_len` (where `overlong_prompts` is not `drop`); it is named.
    """
    if not data.demonstrations:
        return []
    encode = partial(_encoded, data=data, model=_Model.of(model, tokenizer))
    return [
        PromptSource(read_prompts(rows, encode, data), seed, data.shuffle, name)
        for name, rows in read_training_rows(data, data.demonstrations, opener_of).items()
    ]


@dataclass(frozen=True, slots=True)
class _Model:
    """What demonstrations need of the model."""

    tokenizer: PreTrainedTokenizerBase
    reader: TokenReader
    vocab_size: int
    """Number of ids that it has embeddings for: often more than its tokenizer knows, and all are sampled."""
    max_tokens: int

    @classmethod
    def of(cls, config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> "_Model":
        vocab_size = len(tokenizer)
        configured = None
        with contextlib.suppress(OSError, ValueError):  # a simulated policy has a tokenizer alone
            text_config = AutoConfig.from_pretrained(config.path).get_text_config()
            vocab_size = max(vocab_size, int(getattr(text_config, "vocab_size", 0)))
            configured = getattr(text_config, "eos_token_id", None)
        generated = None
        with contextlib.suppress(OSError):  # many models have no generation config
            generated = GenerationConfig.from_pretrained(config.path).eos_token_id
        reader = reader_of(config, tokenizer, end_ids_of(tokenizer, generated, configured))
        return cls(tokenizer, reader, vocab_size, config.max_model_len)


def _encoded(rows: Sequence[Row], data: DataConfig, model: _Model) -> Iterator[Demonstration]:
    tokenizer = model.tokenizer
    max_tokens = model.max_tokens
    use_template = uses_template(tokenizer, data)
    num_dropped = 0
    for row in rows:
        ids, mask = _tokens(row, model, data, use_template)
        if len(ids) > max_tokens:
            if data.overlong_prompts != "drop":
                raise ConfigError(
                    f"{row.origin}: the demonstration has {len(ids):,} tokens, model.max_model_len is "
                    f"{max_tokens:,}. Raise the limit, or set data.overlong_prompts to drop."
                )
            num_dropped += 1
            continue
        trained = np.flatnonzero(mask)
        if not len(trained) or not trained[0]:
            lack = "nothing before its first token" if len(trained) else "no token"
            raise ConfigError(f"{row.origin}: the demonstration has {lack} that is trained.")
        first = trained[0]
        end = trained[-1] + 1  # what follows the last one predicts nothing
        prompt_ids = ids[:first]
        completion_ids = ids[first:end]
        mask = mask[first:end]
        for array in (prompt_ids, completion_ids, mask):
            array.flags.writeable = False
        reading = model.reader.read(completion_ids.tolist(), mask.tolist(), prompt_ids.tolist())
        yield Demonstration(
            prompt_ids,
            str(tokenizer.decode(prompt_ids)),
            row.data_source,
            row.ground_truth,
            row.extra,
            row.number,
            source=row.source,
            completion_ids=completion_ids,
            mask=mask,
            completion=reading.text,
            thought=reading.thought,
        )
    if num_dropped == len(rows):
        raise ConfigError(
            f"all {num_dropped:,} demonstrations of {rows[0].source!r} have more than model.max_model_len "
            f"({max_tokens:,}) tokens; raise the limit."
        )
    if num_dropped:
        log.warning("demonstrations left out: too long", count=num_dropped, limit=max_tokens)


def _tokens(row: Row, model: _Model, data: DataConfig, use_template: bool) -> tuple[Int32, Bits]:
    """Ids of prompt and completion, and which of them are trained."""
    tokenizer = model.tokenizer
    if isinstance(row.completion, dict):
        return _of_ids(row, row.completion, model)
    if use_template:
        return _of_chat(row, tokenizer, data)
    if not isinstance(row.prompt, str) or not isinstance(row.completion, str):
        raise ConfigError(
            f"{row.origin}: the demonstration is a chat, but no chat template is in use; use "
            "data.chat_template 'auto' with a model that has one, or give prompt and completion as text."
        )
    num_ends = num_appended_by(tokenizer)
    prompt = row.prompt + data.prompt_suffix
    head = _without_last(_numbers(tokenizer(prompt)), num_ends)
    ids = _without_last(_numbers(tokenizer(prompt + row.completion)), num_ends)
    if ids[: len(head)] != head:
        raise ConfigError(
            f"{row.origin}: tokens of the prompt's end and the completion's beginning merge, and a prompt "
            "alone would have others; move the border, such as a space from the prompt to the completion."
        )
    if tokenizer.eos_token_id is not None and ids[-1] != tokenizer.eos_token_id:
        ids.append(int(tokenizer.eos_token_id))
    return np.array(ids, np.int32), np.arange(len(ids)) >= len(head)


def _of_chat(row: Row, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> tuple[Int32, Bits]:
    prompt = chat_messages(row, data)
    said = row.completion
    chat = [*prompt, *(said if isinstance(said, list) else [{"role": "assistant", "content": said}])]

    def render(messages: Sequence[ChatMessage], **options: Any) -> Any:
        try:
            return tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=True, **options)
        except (TemplateError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{row.origin}: the demonstration does not fit the model's chat template: {error}"
            ) from None

    def length(messages: Sequence[ChatMessage], **options: Any) -> int:
        """Number of tokens of these first messages, with which the whole chat has to begin."""
        begun = _numbers(render(messages, **options))
        if ids[: len(begun)] != begun:
            raise ConfigError(
                f"{row.origin}: the chat template renders {len(messages)} messages otherwise when others "
                "follow, so which tokens are the assistant's is not known. Give each of its turns a row of "
                "its own (prompt: the messages before it, completion: that one), or the model a template "
                "with {% generation %} blocks."
            )
        return len(begun)

    template = tokenizer.get_chat_template()
    if GENERATION.search(template):
        ids, mask = _of_blocks(row, chat, tokenizer, template)
        if any(message["role"] == "assistant" for message in prompt):
            mask[: length(prompt, add_generation_prompt=True)] = False
        return np.array(ids, np.int32), mask
    ids = _numbers(render(chat))
    mask = np.zeros(len(ids), np.bool_)
    for number in range(len(prompt), len(chat)):
        if chat[number]["role"] == "assistant":
            first = length(chat[:number], add_generation_prompt=True)
            mask[first : length(chat[: number + 1])] = True
    return np.array(ids, np.int32), mask


def _of_blocks(
    row: Row, chat: Sequence[ChatMessage], tokenizer: PreTrainedTokenizerBase, template: str
) -> tuple[list[int], Bits]:
    """Ids of a chat, and which of them are in the template's generation blocks.

    A block's tokens are known where the text up to its beginning and up to its end has the tokens with which
    the whole chat begins. They are not where a token reaches over a border: one that merges text of both
    sides, or a special token that takes the white space beside it (`lstrip`, `rstrip`).
    """
    options: dict[str, Any] = {**tokenizer.special_tokens_map, "return_assistant_tokens_mask": True}
    try:
        rendered: Any = render_jinja_template([list(chat)], chat_template=template, **options)
    except (TemplateError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{row.origin}: the demonstration does not fit the model's chat template: {error}"
        ) from None
    text: str = rendered[0][0]
    blocks: list[tuple[int, int]] = rendered[1][0]
    ids = _numbers(tokenizer(text, add_special_tokens=False))
    mask = np.zeros(len(ids), np.bool_)
    for start, end in blocks:
        borders = []
        for border in (start, end):
            before = _numbers(tokenizer(text[:border], add_special_tokens=False))
            if ids[: len(before)] != before:
                before_border = text[max(0, border - SHOWN) : border]
                raise ConfigError(
                    f"{row.origin}: a token reaches over a border of the chat template's {{% generation %}} "
                    f"block, at {before_border!r} | {text[border : border + SHOWN]!r}, "
                    "so whether it is the assistant's is not known. Move white space at the border into the "
                    "block or out of it in the template; a special token with lstrip or rstrip takes what is "
                    "beside it."
                )
            borders.append(len(before))
        mask[borders[0] : borders[1]] = True
    return ids, mask


def _of_ids(row: Row, columns: dict[str, Any], model: _Model) -> tuple[Int32, Bits]:
    """Ids and mask from columns of ids, such as those of another run."""
    try:
        arrays = [np.asarray(columns[name], np.int32) for name in IDS]
        prompt, completion = arrays
        mask = np.ones(len(completion), np.bool_)
        if columns.get("loss_mask") is not None:
            mask = np.asarray(columns["loss_mask"], np.bool_)
        ids = np.concatenate(arrays)
        all_masks = [np.zeros(len(prompt), np.bool_), mask]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{row.origin}: {' and '.join(IDS)} must be lists of whole numbers: {error}."
        ) from None
    if len(mask) != len(completion):
        raise ConfigError(f"{row.origin}: {len(completion)} completion_ids and a loss_mask of {len(mask)}.")
    is_other = len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < model.vocab_size
    if is_other or not _is_of(row.prompt, str(model.tokenizer.decode(prompt))):
        raise ConfigError(
            f"{row.origin}: its token ids are of another tokenizer than this model's; give the texts as "
            "prompt and completion."
        )
    return ids, np.concatenate(all_masks)


def _is_of(text: Any, decoded: str) -> bool:
    """Whether a text is that of its ids; tokenizers may add spaces and special tokens."""
    return "".join(str(text).split()) in "".join(decoded.split())


def _without_last(ids: list[int], count: int) -> list[int]:
    return ids[: len(ids) - count]


def _numbers(encoding: Any) -> list[int]:
    return list(encoding["input_ids"])
