"""Demonstrations: rows that are trained as they are, with an imitation loss.

Which tokens are trained is known exactly, or the row is refused: from the chat template's generation blocks;
without those, by rendering the chat up to the beginning and the end of each of the assistant's messages,
which has to give a prefix of the whole chat. A completion ends with the template's end of a turn; where there
is no template, with the tokenizer's end of text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import structlog
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from tidemill.common.archive.completions import opener_of
from tidemill.common.config.data import DataConfig
from tidemill.common.errors import ConfigError
from tidemill.common.run.dataset import IDS, ChatMessage, Row, read_training_rows
from tidemill.common.run.prompt_lengths import chat_messages
from tidemill.common.wire.arrays import Bits, Int32
from tidemill.common.wire.messages import Trajectory
from tidemill.services.trainer.batch.prompts import Prompt, PromptSource, read_prompts, uses_template

log = structlog.get_logger(__name__)

WORKER = "trainer"
"""Worker that trajectories of demonstrations name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration(Prompt):
    """A prompt with the completion that is imitated: T tokens, of which those with `mask` are trained."""

    completion_ids: Int32
    mask: Bits
    completion: str

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
            worker=WORKER,
            data_source=self.data_source,
            source=self.source,
        )


def load_demonstrations(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int, max_tokens: int
) -> list[PromptSource]:
    """Read, tokenise and check the sources of demonstrations, in order. Raises ConfigError: a row cannot be
    used, or has more than `max_tokens` tokens (where `overlong_prompts` is not `drop`); it is named."""
    if not data.demonstrations:
        return []
    encode = partial(_encoded, tokenizer=tokenizer, data=data, max_tokens=max_tokens)
    return [
        PromptSource(read_prompts(rows, encode, data), seed, data.shuffle, name)
        for name, rows in read_training_rows(data, data.demonstrations, opener_of).items()
    ]


def _encoded(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, data: DataConfig, max_tokens: int
) -> Iterator[Demonstration]:
    use_template, num_dropped = uses_template(tokenizer, data), 0
    for row in rows:
        ids, mask = _tokens(row, tokenizer, data, use_template)
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
            what = "nothing before its first token" if len(trained) else "no token"
            raise ConfigError(f"{row.origin}: the demonstration has {what} that is trained.")
        first, end = trained[0], trained[-1] + 1  # what follows the last one predicts nothing
        prompt_ids, completion_ids, mask = ids[:first], ids[first:end], mask[first:end]
        for array in (prompt_ids, completion_ids, mask):
            array.flags.writeable = False
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
            completion=str(tokenizer.decode(completion_ids)),
        )
    if num_dropped == len(rows):
        raise ConfigError(
            f"all {num_dropped:,} demonstrations of {rows[0].source!r} have more than model.max_model_len "
            f"({max_tokens:,}) tokens; raise the limit."
        )
    if num_dropped:
        log.warning("demonstrations left out: too long", count=num_dropped, limit=max_tokens)


def _tokens(
    row: Row, tokenizer: PreTrainedTokenizerBase, data: DataConfig, use_template: bool
) -> tuple[Int32, Bits]:
    """Ids of prompt and completion, and which of them are trained."""
    if isinstance(row.completion, dict):
        return _given(row, row.completion, tokenizer)
    if use_template:
        return _of_chat(row, tokenizer, data)
    if not isinstance(row.prompt, str) or not isinstance(row.completion, str):
        raise ConfigError(
            f"{row.origin}: the demonstration is a chat, but no chat template is in use; use "
            "data.chat_template 'auto' with a model that has one, or give prompt and completion as text."
        )
    prompt = row.prompt + data.prompt_suffix
    head, ids = (_numbers(tokenizer(text)) for text in (prompt, prompt + row.completion))
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

    if "{% generation" in str(tokenizer.chat_template).replace("{%-", "{%"):
        found = render(chat, return_assistant_tokens_mask=True)
        ids, mask = _numbers(found), np.array(found["assistant_masks"], np.bool_)
        if any(message["role"] == "assistant" for message in prompt):
            mask[: length(prompt, add_generation_prompt=True)] = False
        return np.array(ids, np.int32), mask
    ids = _numbers(render(chat))
    mask = np.zeros(len(ids), np.bool_)
    for place in range(len(prompt), len(chat)):
        if chat[place]["role"] == "assistant":
            first = length(chat[:place], add_generation_prompt=True)
            mask[first : length(chat[: place + 1])] = True
    return np.array(ids, np.int32), mask


def _given(row: Row, columns: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[Int32, Bits]:
    """Ids and mask from columns of ids, such as those of another run."""
    try:
        prompt, completion = (np.asarray(columns[name], np.int32) for name in IDS)
        mask = np.ones(len(completion), np.bool_)
        if (given := columns.get("loss_mask")) is not None:
            mask = np.asarray(given, np.bool_)
        ids, all_masks = np.concatenate([prompt, completion]), [np.zeros(len(prompt), np.bool_), mask]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{row.origin}: {' and '.join(IDS)} must be lists of whole numbers: {error}."
        ) from None
    if len(mask) != len(completion):
        raise ConfigError(f"{row.origin}: {len(completion)} completion_ids and a loss_mask of {len(mask)}.")
    is_other = len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(tokenizer)
    if is_other or not _is_of(row.prompt, str(tokenizer.decode(prompt))):
        raise ConfigError(
            f"{row.origin}: its token ids are of another tokenizer than this model's; give the texts as "
            "prompt and completion."
        )
    return ids, np.concatenate(all_masks)


def _is_of(text: Any, decoded: str) -> bool:
    """Whether a text is that of its ids; tokenizers may add spaces and special tokens."""
    return "".join(str(text).split()) in "".join(decoded.split())


def _numbers(encoding: Any) -> list[int]:
    return list(encoding["input_ids"])
