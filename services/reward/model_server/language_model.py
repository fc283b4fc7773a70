"""A language model's logprobs of given tokens: as much of OpenAI's completions API, and of vLLM's
`/tokenize`, as a teacher needs.

Nothing is generated: the text of an answer is empty. A request that wants more than that is refused.
"""

import time
import uuid
from collections.abc import Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tidemill.services.reward.model_server.requests import MAX_INPUTS, ScoringRequest


class LogprobsRequest(BaseModel):
    """Body of /v1/completions: token ids, and `prompt_logprobs` of at least 0. `priority` is vLLM's."""

    model_config = ConfigDict(extra="ignore")

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


class TokenizeRequest(BaseModel):
    """Body of /tokenize: a text, or a chat."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def scoring(self) -> ScoringRequest:
        """The request whose row has the same tokens."""
        chat: dict[str, Any] = {}
        if self.messages is not None:
            chat["add_generation_prompt"] = self.add_generation_prompt
            chat["continue_final_message"] = self.continue_final_message
        return ScoringRequest(
            input=self.prompt, messages=self.messages, add_special_tokens=self.add_special_tokens, **chat
        )


def completion(model: str, rows: Sequence[Sequence[int]], logprobs: Sequence[list[float]]) -> dict[str, Any]:
    """The answer of /v1/completions: for each prompt a choice, with the logprob of every token but the
    first."""
    choices = [
        {
            "index": index,
            "text": "",
            "finish_reason": "length",
            "logprobs": None,
            "prompt_logprobs": [
                None,
                *({str(i): {"logprob": p}} for i, p in zip(row[1:], own[1:], strict=True)),
            ],
        }
        for index, (row, own) in enumerate(zip(rows, logprobs, strict=True))
    ]
    num_tokens = sum(map(len, rows))
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0},
    }


def tokens(ids: list[int], max_model_len: int) -> dict[str, Any]:
    return {"count": len(ids), "max_model_len": max_model_len, "tokens": ids}
