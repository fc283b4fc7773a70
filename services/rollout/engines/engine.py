"""What a generation engine must do, whichever library stands behind it.

Guarantees that every engine gives: the logprob of a token is that of the distribution it was sampled
from, after temperature, top-p and top-k (a greedy token has its logprob at temperature 1); `spans` come
from the engine itself and name, for every token, the version of the weights that produced it; `load`
returns only when the new weights are what the engine computes with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from common.wire.messages import SamplingParams, VersionSpan


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion to generate. Prompt and completion are token ids, never text."""

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    is_urgent: bool = False
    """Goes before what waits already: evaluation never queues behind training."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished completion: `token_ids` and `logprobs` have the same length T.

    The stop token, where the model produced one, is the last of `token_ids`; it is trained on too.
    """

    token_ids: list[int]
    logprobs: list[float]
    spans: tuple[VersionSpan, ...]
    finish: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """How long one update took, in seconds: generation stood still for `paused_s`."""

    version: int
    load_s: float
    paused_s: float


class Engine(Protocol):
    """Generates completions with one model whose weights are replaced while it runs.

    Lifecycle: `start` once, then `generate` concurrently from many tasks, `load` between or during
    them, `close` once.
    """

    @property
    def version(self) -> int:
        """The version the engine computes with; -1 before the first `load` or `start`."""
        ...

    @property
    def num_running(self) -> int:
        """Requests accepted and not finished."""
        ...

    async def start(self) -> None:
        """Load the starting model (version 0) and be ready to generate."""
        ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Generate one completion. Cancelling the task aborts the request.

        Raises:
            ValueError: the request can never be served: no prompt, unknown ids, or too long.
            EngineError: the engine failed; the process has to be restarted.
        """
        ...

    async def load(self, version: int, files: Sequence[Path]) -> WeightUpdate:
        """Replace all weights by those in `files` (safetensors, Hugging Face names).

        Raises:
            WeightsError: the files cannot be used; the engine goes on with the weights it has.
            EngineError: the engine failed; the process has to be restarted.
        """
        ...

    async def score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[float]:
        """Logprobs (temperature 1) the current weights give to the completion: the parity probe.

        Prompt and completion together must be shorter than `model.max_model_len`.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion, without special tokens: for people and reward functions."""
        ...

    async def close(self) -> None:
        """Stop generating and free the model."""
        ...
