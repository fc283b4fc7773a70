"""The record of a session: segments to train on, and the turns in them.

A session is one play of one sample, in which the model and an environment take turns. Its first segment is in
the fields of the `Trajectory` itself, like a completion of a single turn; `Session` has what only sessions
have. A single turn has no `Session`, so its record is no larger.
"""

from typing import Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from tidemill.common.wire.arrays import BitArray, Bits, Float32Array, Int32Array, is_same
from tidemill.common.wire.images import Image

VersionSpan = tuple[int, int]
"""`(version, first_token)`: from this completion token on, `version` produced the tokens."""

Finish = Literal["stop", "length"]
"""How a generation ended: by itself, or at its limit of tokens."""

SessionEnd = Literal["done", "max_turns", "max_tokens", "timeout"]
"""Why a session ended: the environment or the model was done, or it reached a limit and is truncated."""

Late = Literal["", "session", "call", "reward", "program"]
"""What was late where `timeout` ended a session: the whole `session` (`session_timeout_s`), a `call`, the
call for its `reward`, or an agent's `program` that was silent (`call_timeout_s`)."""

Unread = Literal["not_delivered", "cut", "asked_again"]
"""Why an answer counts as unread. `not_delivered`: its response broke before its end. `cut`: the client went
on with the beginning of its stream alone. `asked_again`: the same was asked again, and another answer
counts; or the agent began again in place of answering its calls."""


class Turn(BaseModel):
    """One generation by the engine: tokens `first` to `first + num_tokens` of its segment's completion.

    Example: `first` 5, `num_tokens` 4, `num_prompt_tokens` 15, `num_cached_tokens` 12: the model wrote tokens
    5 to 8 after a prompt of 10 tokens and 5 tokens of completion, and 12 of these 15 were still in the prefix
    cache.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    first: int = Field(ge=0)
    num_tokens: int = Field(ge=0)
    finish: Finish = Field(
        "stop", description="`length`: cut by a limit of the run; of a client's own, `stop`"
    )
    num_prompt_tokens: int = Field(0, ge=0, description="tokens before it: prompt and completion so far")
    num_cached_tokens: int = Field(-1, ge=-1, description="of those, from the prefix cache; -1: not known")
    num_calls: int = Field(0, ge=0, description="calls of tools in it")
    num_wrong_calls: int = Field(0, ge=0, description="of those, that the tool or its parser refused")
    reward: float | None = Field(None, description="what the environment gave for this turn alone")
    engine_s: float = Field(0.0, ge=0.0)
    environment_s: float = Field(0.0, ge=0.0, description="what the environment took for its answer to it")

    @property
    def end(self) -> int:
        """The token after its last one."""
        return self.first + self.num_tokens


class Segment(BaseModel):
    """One row to train on: T completion tokens, of the model (mask 1) and of the environment (mask 0).

    Example: after the prompt P of 10 tokens the model writes A0 (3 tokens), the environment answers E0 (2),
    and the model writes A1 (4), for which version 8 has replaced version 7:

        prompt_ids      P
        completion_ids  A0 + E0 + A1                            T = 9
        logprobs        of A0, 0.0 twice, of A1
        loss_mask       1 1 1  0 0  1 1 1 1
        spans           (7, 0), (8, 5)
        turns           first 0, num_tokens 3; first 5, num_tokens 4
    """

    model_config = ConfigDict(frozen=True, extra="ignore", arbitrary_types_allowed=True)
    prompt_ids: Int32Array
    """[P] ids before the first token that the model writes."""
    completion_ids: Int32Array
    """[T] ids of the model and of the environment, in their order."""
    logprobs: Float32Array
    """[T] of the distribution that the engine sampled from; 0.0 where the mask is 0."""
    loss_mask: BitArray | None = None
    """[T] which tokens the model wrote; None: all."""
    spans: tuple[VersionSpan, ...]
    turns: tuple[Turn, ...] = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Segment):
            return NotImplemented
        return all(is_same(getattr(self, name), getattr(other, name)) for name in type(self).model_fields)

    @property
    def mask(self) -> Bits:
        """The loss mask with its default filled in. Shape [T], bool."""
        return np.ones(len(self.completion_ids), dtype=np.bool_) if self.loss_mask is None else self.loss_mask

    @property
    def num_tokens(self) -> int:
        """P + T, of prompt and completion."""
        return len(self.prompt_ids) + len(self.completion_ids)

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_tokens(self.completion_ids, self.logprobs, self.loss_mask, self.spans)
        check_turns(self.turns, len(self.completion_ids))
        return self


class UnreadAnswer(BaseModel):
    """An answer of the model that no program has read, as far as the gateway knows; it is not trained.

    Example: an agent's connection breaks before the answer, and it asks again: `why` "asked_again", `message`
    {"role": "assistant", "content": "4"}, `num_tokens` 2.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    why: Unread
    message: dict[str, Any] = Field(
        default_factory=dict, description="what the model said, as a chat message"
    )
    num_tokens: int = Field(0, ge=0)
    engine_s: float = Field(0.0, ge=0.0)


class Session(BaseModel):
    """Fields of a trajectory of several turns, besides its first segment.

    Example: a client that rewrites its history after the second turn: `environment` "agent", `turns` the two
    of the first segment, `forks` one `Segment` whose prompt is the rewritten history, `end` "done", `reward`
    1.0, `histories` {"clean": 2, "forked": 1}.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", arbitrary_types_allowed=True)
    environment: str = Field(description="as `rollout.environment.use` names it")
    turns: tuple[Turn, ...] = Field((), description="those of the first segment")
    forks: tuple[Segment, ...] = Field(
        (), description="further segments, in the order of their last answers: the last one ends the session"
    )
    messages: tuple[dict[str, Any], ...] = Field(
        (), description="what was said after the prompt, by the model and the environment, as chat messages"
    )
    end: SessionEnd = "done"
    late: Late = Field(
        "", description="what was late, where `end` is `timeout`; older releases left it empty"
    )
    reward: float | None = Field(None, description="the environment's own; absent where it gives none")
    metrics: dict[str, float] = Field(default_factory=dict, description="what the environment counted")
    histories: dict[str, int] = Field(
        default_factory=dict,
        description="how often a client's history was `clean`, `realigned`, `forked`; empty without a client",
    )
    unread: tuple[UnreadAnswer, ...] = Field(
        (), description="answers that no program has read; they are in no segment and not in `messages`"
    )
    num_faults: int = Field(0, ge=0, description="tries before this one that ended in an environment's fault")
    row_images: tuple[Image, ...] | None = Field(
        None,
        description="the row's pictures, where a program wrote the prompts; absent where no program did, as "
        "then they are those of the first prompt",
        exclude_if=lambda images: images is None,
    )


def check_tokens(completion_ids: Any, logprobs: Any, loss_mask: Any, spans: tuple[VersionSpan, ...]) -> None:
    """Check arrays of T completion tokens against each other. Raises ValueError: they do not fit."""
    num_tokens = len(completion_ids)
    if len(logprobs) != num_tokens:
        raise ValueError(f"{num_tokens} completion ids but {len(logprobs)} logprobs")
    if loss_mask is not None and len(loss_mask) != num_tokens:
        raise ValueError(f"{num_tokens} completion ids but a loss mask of {len(loss_mask)}")
    if not spans or spans[0][1] != 0:
        raise ValueError(f"version spans must start at token 0, got {spans}")
    if len(spans) > 1:
        firsts = [first for _, first in spans]
        is_rising = firsts == sorted(set(firsts))
        # An empty completion may have later spans, too.
        is_within = num_tokens == 0 or firsts[-1] < num_tokens
        if not is_rising or not is_within:
            raise ValueError(f"version spans {spans} do not fit {num_tokens} completion tokens")
    if min(version for version, _ in spans) < 0:
        raise ValueError(f"versions cannot be negative, got {spans}")


def check_turns(turns: tuple[Turn, ...], num_tokens: int) -> None:
    """Check that turns follow each other within T completion tokens. Raises ValueError: they do not."""
    end = 0
    for turn in turns:
        if turn.first < end or turn.end > num_tokens:
            raise ValueError(
                f"a turn of tokens {turn.first} to {turn.end} does not fit after token {end} of {num_tokens}"
            )
        end = turn.end
