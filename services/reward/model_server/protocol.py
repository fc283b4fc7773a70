"""The requests and answers of vLLM's pooling API, as far as reward models need them.

What vLLM offers beyond that (images, base64 answers, a template in the request) is refused by name, never
ignored: a silently different score is the worst answer.
"""

import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_INPUTS = 4096


class ScoringRequest(BaseModel):
    """Body of /classify and /pooling: either `input` or `messages`."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    input: str | list[int] | list[str] | list[list[int]] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None
    priority: int = Field(0, ge=-(2**31), le=2**31)
    task: Literal["classify", "token_classify"] | None = None
    encoding_format: Literal["float"] = "float"
    request_id: str = Field(default_factory=lambda: uuid.uuid4().hex, max_length=200)
    user: str | None = None

    @model_validator(mode="after")
    def _is_one_of_both(self) -> "ScoringRequest":
        if (self.input is None) == (self.messages is None):
            raise ValueError("give either input (text or token ids) or messages (a chat)")
        if self.messages is not None and not self.messages:
            raise ValueError("messages is empty")
        if isinstance(self.input, list) and not len(self.input) > 0:
            raise ValueError("input is empty")
        if (
            isinstance(self.input, list)
            and not isinstance(self.input[0], int)
            and len(self.input) > MAX_INPUTS
        ):
            raise ValueError(f"input has {len(self.input)} sequences; at most {MAX_INPUTS} a request")
        return self


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
