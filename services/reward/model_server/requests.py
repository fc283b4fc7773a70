"""The requests and answers of vLLM's pooling API, as far as reward models need them.

Every field that vLLM knows, now or before it was renamed, is taken. What would change the score and is not
offered here (images, base64 answers, a template in the request) is refused by name, never ignored: a
silently different score is the worst answer. So is a name that looks like a slip of a known one; any other
unknown name is ignored with a warning, as vLLM does, for clients send along what other servers want.
"""

import difflib
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from torch import Tensor
from transformers import AutoTokenizer

from tidemill.common.errors import RewardError

MAX_INPUTS = 4096
FORMER_ACTIVATION = ("activation", "softmax")
"""What vLLM called `use_activation` before 0.11.2; verl still does."""
NOT_OFFERED = {
    "chat_template": "start the server with --chat-template FILE",
    "dimensions": "scores have as many as the model has labels",
    "mm_processor_kwargs": "this server scores text",
    "media_io_kwargs": "this server scores text",
    "normalize": "use use_activation",
}
"""Fields of vLLM's that would change the score, and what to do instead; null and nothing are fine."""
WITHOUT_EFFECT = frozenset(("cache_salt", "embed_dtype", "endianness", "user"))
"""Fields of vLLM's that change nothing here: there is no prefix cache, and answers are JSON."""
CLOSE = 0.85
"""From this likeness on, an unknown name is taken for a slip."""


class ScoringRequest(BaseModel):
    """Body of /classify and /pooling: either `input` or `messages`."""

    model_config = ConfigDict(extra="allow")

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
    use_activation: bool | None = None
    priority: int = Field(0, ge=-(2**63), le=2**63 - 1)
    task: str | None = Field(None, max_length=100)
    encoding_format: Literal["float"] = "float"
    request_id: str = Field(default_factory=lambda: uuid.uuid4().hex, max_length=200)

    @property
    def unknown(self) -> list[str]:
        """Names of fields that have no effect, and that nobody has heard of."""
        return [name for name in self.model_extra or () if name not in WITHOUT_EFFECT]

    @model_validator(mode="before")
    @classmethod
    def _has_known_fields(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        for name, remedy in NOT_OFFERED.items():
            if tree.get(name) not in (None, {}):
                raise ValueError(f"{name} is not offered here: {remedy}")
        known = {*cls.model_fields, *NOT_OFFERED, *WITHOUT_EFFECT, *FORMER_ACTIVATION}
        for name in tree.keys() - known:
            if close := difflib.get_close_matches(str(name), known, n=1, cutoff=CLOSE):
                raise ValueError(f"{name} is unknown; did you mean {close[0]}?")
        return _with_activation({name: value for name, value in tree.items() if name not in NOT_OFFERED})

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _may_be_null(cls, given: Any) -> Any:
        return {} if given is None else given

    @field_validator("messages")
    @classmethod
    def _are_text(cls, messages: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        """Contents in parts, as OpenAI's API has them, as the text that they hold."""
        return None if messages is None else [_as_text(message) for message in messages]

    @model_validator(mode="after")
    def _is_one_of_both(self) -> "ScoringRequest":
        if (self.input is None) == (self.messages is None):
            raise ValueError("give either input (text or token ids) or messages (a chat)")
        if self.messages is not None and not self.messages:
            raise ValueError("messages is empty")
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("add_generation_prompt and continue_final_message exclude each other")
        if isinstance(self.input, list) and not len(self.input) > 0:
            raise ValueError("input is empty")
        if (
            isinstance(self.input, list)
            and not isinstance(self.input[0], int)
            and len(self.input) > MAX_INPUTS
        ):
            raise ValueError(f"input has {len(self.input)} sequences; at most {MAX_INPUTS} a request")
        return self


def _with_activation(tree: dict[str, Any]) -> dict[str, Any]:
    """The body with `use_activation` under its present name; several that differ are refused."""
    names = ("use_activation", *FORMER_ACTIVATION)
    said = {name: tree[name] for name in names if tree.get(name) is not None}
    if len({bool(value) for value in said.values()}) > 1:
        raise ValueError(f"{' and '.join(said)} are names of one thing, and differ")
    rest = {name: value for name, value in tree.items() if name not in names}
    return rest | ({"use_activation": next(iter(said.values()))} if said else {})


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    others = [part.get("type") if isinstance(part, dict) else part for part in content if not _is_text(part)]
    if others:
        raise ValueError(f"a message holds {others[0]!r}: this server scores text")
    return {**message, "content": "".join(part["text"] for part in content)}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def classification(
    request: ScoringRequest,
    model: str,
    labels: dict[int, str],
    scores: Sequence[list[float]],
    num_tokens: int,
) -> dict[str, Any]:
    """The answer of /classify; `probs` are raw scores where no activation was wanted."""
    data = [
        {
            "index": index,
            "label": labels.get(max(range(len(row)), key=row.__getitem__)),
            "probs": row,
            "num_classes": len(row),
        }
        for index, row in enumerate(scores)
    ]
    return _answer("classify", request, model, data, num_tokens)


def pooling(request: ScoringRequest, model: str, scores: Sequence[Any], num_tokens: int) -> dict[str, Any]:
    """The answer of /pooling: of each input a list of scores, or one such list for each token."""
    data = [{"index": index, "object": "pooling", "data": row} for index, row in enumerate(scores)]
    return _answer("pooling", request, model, data, num_tokens)


def failure(message: str, kind: str, code: int) -> dict[str, Any]:
    """An error as OpenAI and vLLM say it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _answer(prefix: str, request: ScoringRequest, model: str, data: Any, num_tokens: int) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{request.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0},
    }


def activate(scores: Tensor, config: Any) -> Tensor:
    """Sigmoid of one label, softmax over several; the config's `problem_type` goes first, as in vLLM."""
    problem = getattr(config, "problem_type", None)
    if problem == "regression":
        return scores
    if problem == "multi_label_classification" or (problem is None and config.num_labels < 2):
        return scores.sigmoid()
    return scores.sigmoid() if config.num_labels < 2 else scores.softmax(dim=-1)


class InputError(RewardError):
    """The request can never be served as it is."""


class Inputs:
    """Makes rows. The tokenizer is needed for text and chats only; a model without one takes ids."""

    def __init__(self, path: str, vocab_size: int, max_len: int, chat_template: str | None = None) -> None:
        self._vocab_size, self.max_len, self._chat_template = vocab_size, max_len, chat_template
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError, KeyError):
            self._tokenizer = None
        if self._tokenizer is not None and not Path(path).exists():
            self.max_len = min(max_len, self._tokenizer.model_max_length)

    def rows(self, request: ScoringRequest) -> list[list[int]]:
        """The rows of one request.

        Raises:
            InputError: an id is unknown, a row is empty or too long, or text cannot be read.
        """
        return self.checked([self._truncated(row, request) for row in self._ids(request)])

    def checked(self, rows: list[list[int]]) -> list[list[int]]:
        """Rows of ids as they are. Raises InputError: the model cannot take one of them."""
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

    def _ids(self, request: ScoringRequest) -> list[list[int]]:
        given = request.input
        if request.messages is not None:
            return [self._encode(self._render(request), bool(request.add_special_tokens))]
        assert given is not None
        if isinstance(given, str):
            given = [given]
        if isinstance(given[0], int):
            return [given]
        if isinstance(given[0], list):
            return given
        return [self._encode(str(text), request.add_special_tokens is not False) for text in given]

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._needed()(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def _render(self, request: ScoringRequest) -> str:
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

    def _truncated(self, row: list[int], request: ScoringRequest) -> list[int]:
        limit = request.truncate_prompt_tokens
        if limit is None:
            return row
        limit = self.max_len if limit == -1 else min(limit, self.max_len)
        side = request.truncation_side or getattr(self._tokenizer, "truncation_side", "right")
        return row[:limit] if side == "right" else row[len(row) - min(limit, len(row)) :]
