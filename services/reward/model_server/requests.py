"""Requests and answers of vLLM's pooling API, as far as reward models need them, and of OpenAI's completions
and vLLM's /tokenize, as far as teachers do.

Fields that would change the score and are not offered here (images, base64 answers, a template in the
request) are refused by name: a silently different score is the worst answer. Other unknown fields have no
effect, as in vLLM: clients also send fields for other servers.
"""

import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from jinja2 import TemplateError
from pydantic import AliasChoices, BaseModel, Field, field_validator, model_validator
from transformers import AutoTokenizer

from tidemill.common.process.json_api import InputError

MAX_INPUTS = 4096
NOT_OFFERED = {
    "chat_template": "start the server with --chat-template FILE",
    "dimensions": "scores have as many as the model has labels",
    "mm_processor_kwargs": "this server scores text",
    "media_io_kwargs": "this server scores text",
    "normalize": "use use_activation",
}
"""Fields of vLLM that would change the score -> what to do instead; null and {} are accepted."""


class ClassifyRequest(BaseModel):
    """Body of /classify and /pooling: either `input` or `messages`."""

    model: str | None = None
    input: str | list[int] | list[str] | list[list[int]] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    padding: Literal["do_not_pad"] | None = None
    use_activation: bool | None = Field(  # what vLLM called it before 0.11.2, and verl still does
        None, validation_alias=AliasChoices("use_activation", "activation", "softmax")
    )
    priority: int = Field(0, ge=-(2**63), le=2**63 - 1)
    task: str | None = Field(None, max_length=100)
    encoding_format: Literal["float"] = "float"
    request_id: str = Field(default_factory=lambda: uuid.uuid4().hex, max_length=200)

    @model_validator(mode="before")
    @classmethod
    def _is_offered(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        for name, remedy in NOT_OFFERED.items():
            if tree.get(name) not in (None, {}):
                raise ValueError(f"{name} is not offered here: {remedy}")
        return {name: value for name, value in tree.items() if value is not None}

    @field_validator("messages")
    @classmethod
    def _are_text(cls, messages: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        """Join contents in parts, as in OpenAI's API, into text."""
        return None if messages is None else [_as_text(message) for message in messages]

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.input is None) == (self.messages is None):
            raise ValueError("give either input (text or token ids) or messages (a chat)")
        if self.messages is not None and not self.messages:
            raise ValueError("messages is empty")
        if self.messages and self.add_generation_prompt and self.continue_final_message:
            raise ValueError("add_generation_prompt and continue_final_message exclude each other")
        if isinstance(self.input, list):
            if not self.input:
                raise ValueError("input is empty")
            if not isinstance(self.input[0], int) and len(self.input) > MAX_INPUTS:
                raise ValueError(f"input has {len(self.input)} sequences; at most {MAX_INPUTS} a request")
        return self


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for piece in content:
        kind = piece.get("type") if isinstance(piece, dict) else piece
        if kind != "text" or not isinstance(piece.get("text"), str):
            raise ValueError(f"a message holds {kind!r}: this server scores text")
        texts.append(piece["text"])
    return {**message, "content": "".join(texts)}


class LogprobsRequest(BaseModel):
    """Body of /v1/completions: token ids, and `prompt_logprobs` of 0 or 1. `priority` is vLLM's.

    Nothing is generated. A request that wants more than logprobs of the prompt's tokens is refused.
    """

    model: str | None = None
    prompt: list[int] | list[list[int]] = Field(min_length=1, max_length=1 << 24)
    prompt_logprobs: int = Field(ge=0)
    max_tokens: int = Field(1, ge=0)
    stream: bool = False
    n: int = 1
    priority: int = Field(0, ge=-(2**63), le=2**63 - 1)

    @property
    def rows(self) -> list[list[int]]:
        single = [token for token in self.prompt if isinstance(token, int)]
        return [single] if single else [row for row in self.prompt if isinstance(row, list)]

    @model_validator(mode="after")
    def _asks_for_logprobs_alone(self) -> Self:
        if self.stream or self.n != 1 or self.max_tokens > 1:
            raise ValueError(
                "this server generates nothing: it gives logprobs of the prompt's tokens. Ask with "
                "max_tokens 1, and without n and stream"
            )
        if self.prompt_logprobs > 1:
            raise ValueError("prompt_logprobs: only those of the tokens themselves are given here; ask for 0")
        if not isinstance(self.prompt[0], int) and len(self.prompt) > MAX_INPUTS:
            raise ValueError(f"prompt has {len(self.prompt)} sequences; at most {MAX_INPUTS} a request")
        return self


class TokenizeRequest(ClassifyRequest):
    """Body of /tokenize: a text, or a chat."""

    input: str | None = Field(None, validation_alias="prompt")
    add_generation_prompt: bool = True


def answer(kind: str, model: str, num_tokens: int, id: str = "", **content: Any) -> dict[str, Any]:
    """An answer with the fields that all kinds have; `content` is the rest."""
    return {
        "id": f"{kind}-{id or uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        **content,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0},
    }


def completion(model: str, rows: Sequence[Sequence[int]], logprobs: Sequence[list[float]]) -> dict[str, Any]:
    """The answer of /v1/completions: for each prompt a choice, with the logprob of every token but the
    first."""
    choices = []
    for index, (row, row_logprobs) in enumerate(zip(rows, logprobs, strict=True)):
        prompt_logprobs: list[dict[str, dict[str, float]] | None] = [None]
        for token, logprob in zip(row[1:], row_logprobs[1:], strict=True):
            prompt_logprobs.append({str(token): {"logprob": logprob}})
        choices.append(
            {
                "index": index,
                "text": "",
                "finish_reason": "length",
                "logprobs": None,
                "prompt_logprobs": prompt_logprobs,
            }
        )
    return answer("cmpl", model, sum(map(len, rows)), object="text_completion", choices=choices)


class Inputs:
    """Turns requests into rows of token ids. Only text and chats need the tokenizer."""

    def __init__(self, path: str, vocab_size: int, max_len: int, chat_template: str | None = None) -> None:
        self._vocab_size = vocab_size
        self.max_len = max_len
        self._chat_template = chat_template
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError, KeyError):
            self._tokenizer = None
        if self._tokenizer is not None and not Path(path).exists():
            self.max_len = min(max_len, self._tokenizer.model_max_length)

    def rows(self, request: ClassifyRequest) -> list[list[int]]:
        """The rows of one request.

        Raises:
            InputError: an id is unknown, a row is empty or too long, or text cannot be read.
        """
        return self.checked([self._truncated(row, request) for row in self._ids(request)])

    def checked(self, rows: list[list[int]]) -> list[list[int]]:
        """The rows, unchanged. Raises InputError: the model cannot take one of them."""
        for index, row in enumerate(rows):
            if not row:
                raise InputError(f"input {index} is empty: there is no token to score")
            if len(row) > self.max_len:
                raise InputError(
                    f"input {index} has {len(row)} tokens, but the model takes {self.max_len}. Shorten it, "
                    "or set truncate_prompt_tokens and truncation_side"
                )
            if min(row) < 0 or max(row) >= self._vocab_size:
                wrong = min(row) if min(row) < 0 else max(row)
                raise InputError(
                    f"input {index} has the token id {wrong}; the model has ids from 0 to "
                    f"{self._vocab_size - 1}. Are these ids of another tokenizer? Send text then"
                )
        return rows

    def _ids(self, request: ClassifyRequest) -> list[list[int]]:
        inputs: Any = [request.input] if isinstance(request.input, str) else request.input
        if inputs is None:
            return [self._encode(self._render(request), bool(request.add_special_tokens))]
        if isinstance(inputs[0], str):
            return [self._encode(text, request.add_special_tokens is not False) for text in inputs]
        return [inputs] if isinstance(inputs[0], int) else inputs

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._needed()(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def _render(self, request: ClassifyRequest) -> str:
        tokenizer = self._needed()
        if not (self._chat_template or tokenizer.chat_template):
            raise InputError(
                "the reward model's tokenizer has no chat template: start the server with --chat-template "
                "FILE, or send input"
            )
        try:
            text: str = tokenizer.apply_chat_template(
                request.messages,
                chat_template=self._chat_template,
                tokenize=False,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                **request.chat_template_kwargs,
            )
        except (TemplateError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"the chat template cannot render these messages: {error}") from None
        return text

    def _needed(self) -> Any:
        if self._tokenizer is None:
            raise InputError("the reward model has no tokenizer: send token ids, not text")
        return self._tokenizer

    def _truncated(self, row: list[int], request: ClassifyRequest) -> list[int]:
        limit = request.truncate_prompt_tokens
        if limit is None:
            return row
        limit = self.max_len if limit == -1 else min(limit, self.max_len)
        side = request.truncation_side or getattr(self._tokenizer, "truncation_side", "right")
        return row[:limit] if side == "right" else row[len(row) - min(limit, len(row)) :]
