"""From a request's text, chat or token ids to rows of token ids within the model's bounds."""

from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from common.errors import RewardError
from services.reward.model_server.protocol import ScoringRequest


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
        rows = [self._truncated(row, request) for row in self._ids(request)]
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
