"""Interface of generation engines, whichever library they use.

Guarantees of every engine: the logprob of a token is that of the distribution it was sampled from, after
temperature, min-p, top-p and top-k (a greedy token has its logprob at temperature 1); `spans` come from the
engine itself and name, for every token, the version of the weights that produced it; `load` returns only when
the engine computes with the new weights.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tidemill.common.config.rollout import RolloutConfig
from tidemill.common.run.special_tokens import Reading
from tidemill.common.wire.choices import Rows
from tidemill.common.wire.images import Image
from tidemill.common.wire.messages import SamplingParams
from tidemill.common.wire.segments import Finish, VersionSpan


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a prompt, with its bytes.

    Example: `image` with `first` 15 and `num_tokens` 4, `png` of 1,204 bytes.
    """

    image: Image
    png: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion to generate. Prompt and completion are token ids, never text.

    Example: `request_id` "train-12-3-1" (sample 3 of ticket 12, first delivery), `prompt_ids` [32, 10, 32,
    28], `ticket` 12.
    """

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    is_urgent: bool = False
    """Served before all waiting requests: evaluation never queues behind training."""
    on_tokens: "OnTokens | None" = None
    """Called on the event loop with the generation so far, about every `PART_TOKENS` tokens."""
    ticket: int = 0
    """Waiting requests with lower tickets go first: their histories are the likeliest to be still cached."""
    pictures: tuple[Picture, ...] = ()
    """The prompt's pictures, by the order of their tokens."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished completion: `token_ids` and `logprobs` have the same length T.

    The stop token, where the model produced one, is the last of `token_ids`; it is trained on too.

    Example: `token_ids` [17, 42, 2], `logprobs` [-0.1, -1.2, -0.01], `spans` ((7, 0), (8, 2)), `finish`
    "stop": version 7 sampled two tokens, then version 8 was loaded and sampled the stop token, 2.
    """

    token_ids: list[int]
    """[T]"""
    logprobs: list[float]
    """[T] of the distribution that was sampled from."""
    spans: tuple[VersionSpan, ...]
    finish: Finish
    num_cached_tokens: int = -1
    """Prompt tokens whose keys and values were in the prefix cache; -1: the engine does not say."""
    choices: dict[str, Rows] = field(default_factory=dict)
    """`kept` has a row for each of `token_ids`; absent if nothing was filtered. `routes` has one for each
    token but the last, those of the prompt included, from `sampling.num_routed` on."""

    def cut(self, num_tokens: int) -> "Generation":
        """Its first tokens, as if it had ended there by itself."""
        num_cut = len(self.token_ids) - num_tokens
        return replace(
            self,
            token_ids=self.token_ids[:num_tokens],
            logprobs=self.logprobs[:num_tokens],
            spans=tuple(span for span in self.spans if span[1] < num_tokens),
            choices={name: rows[: len(rows) - num_cut] for name, rows in self.choices.items()},
            finish="stop",
        )


OnTokens = Callable[[Generation], object]
PART_TOKENS = 1024
"""About the most tokens of a long turn that are generated again when their worker dies."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """How long one update took, in seconds: generation stood still for `paused_s`.

    Example: `version` 8, `load_s` 2.1, `paused_s` 0.2: read and checked beside generation, written in the
    pause.
    """

    version: int
    load_s: float
    paused_s: float


@dataclass(frozen=True, slots=True)
class EngineReport:
    """How full the engine is, after one of its steps.

    Example: `kv_usage` 0.75, `num_waiting` 3, `num_tokens` 200,000: three requests wait, though a quarter is
    free.
    """

    kv_usage: float
    """Share of the KV cache that running requests hold, 0 to 1."""
    num_waiting: int
    """Requests that it has not begun, or has preempted."""
    num_tokens: int = 0
    """Tokens that its KV cache has room for; 0: it does not say."""


class Engine(ABC):
    """Generates completions with one model whose weights are replaced while it runs.

    Lifecycle: `start` once, then `generate` concurrently from many tasks, `load` between or during
    them, `close` once. Engines that share their GPUs are put to sleep in between (`gpu_sharing.py`).
    """

    stands_still = False
    """Whether `sleep` suspends running requests, which go on after `wake`; else it waits for their end."""
    is_reporting = False
    """Whether it calls `on_report`: it has a KV cache of a fixed size."""
    on_report: Callable[[EngineReport], None] | None = None
    """Called on the loop with each report."""
    num_sleeps = 0
    """How often it has slept, which empties its KV cache."""

    @property
    @abstractmethod
    def version(self) -> int:
        """The version the engine computes with; -1 before `start`."""

    @property
    @abstractmethod
    def num_running(self) -> int:
        """Requests accepted and not finished, those that wait inside the engine included."""

    @property
    @abstractmethod
    def can_patch(self) -> bool:
        """Whether `load` takes deltas alone, because the weights that the engine holds are proven."""

    @abstractmethod
    async def start(self) -> None:
        """Load the starting model (version 0) and be ready to generate.

        Raises:
            ConfigError: a library is not installed, the model cannot be used, or the device is not there.
            EngineError: the engine's processes did not come up.
        """

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> Generation:
        """Generate one completion. Cancelling the task aborts the request.

        Raises:
            ValueError: the request can never be served: no prompt, unknown ids, or too long.
            BrokenImageError: a picture cannot be used, or the prompt has other tokens for it.
            EngineError: the engine failed; the process has to be restarted.
        """

    @abstractmethod
    async def load(
        self, version: int, files: Sequence[Path], deltas: Sequence[Sequence[Path]] = (), digest: str = ""
    ) -> WeightUpdate:
        """Replace weights by those of a full version (`files`: safetensors, Hugging Face names) with `deltas`
        written over it: the files of each, oldest first. Without `files` deltas change what the engine holds.

        Example: to version 7: `files` of version 5 and `deltas` [files of 6, files of 7]; where the engine
        holds version 6, no `files` and `deltas` [files of 7].

        `digest` is that of the result. For `files` the caller has proven it, from their bytes; for deltas the
        engine proves it, from its own values.

        Raises:
            WeightsMismatchError: deltas do not lead from what the engine holds to `digest`, or were not held
                when they were read back: then nothing is generated until a full version is loaded.
            WeightsError: the files cannot be used; the engine goes on with the weights it has.
            EngineError: the engine failed, and generates nothing; the process has to be restarted.
        """

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """The whole text of tokens, with or without special ones as the run says (`model.special_tokens`)."""

    def read(
        self, token_ids: Sequence[int], mask: Sequence[bool] | None = None, prompt_ids: Sequence[int] = ()
    ) -> Reading:
        """What rewards and people read of a completion of `prompt_ids`, of which the model wrote the tokens
        with `mask` (None: all)."""
        return Reading(self.decode(token_ids))

    @abstractmethod
    async def sleep(self) -> None:
        """Give the device's memory back, after an update that is under way."""

    @abstractmethod
    async def wake(self) -> None:
        """Take the memory again, with the same weights."""

    @abstractmethod
    async def close(self) -> None:
        """Stop generating and free the model. Running requests fail."""


class StopTexts:
    """Texts at which one generation ends, looked for while it grows.

    What was sampled is never changed: generation ends with the token that completes a text. The caller cuts.
    """

    MARGIN_TOKENS = 8
    """Further tokens that are decoded before a text: decoders treat the very first one differently."""

    def __init__(self, texts: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._texts = tuple(texts)
        self._decode = decode
        # A token has at least a byte, so a text has no more tokens than bytes.
        longest = max((len(text.encode()) for text in texts), default=0)
        self._most_tokens = longest + self.MARGIN_TOKENS
        self._num_seen = 0
        self.is_reached = False

    def reach(self, token_ids: Sequence[int]) -> bool:
        """Look at the ids generated so far. Returns whether one of the texts is newly in them."""
        if self.is_reached or not self._texts:
            return False
        # A text may have begun among tokens that were looked at before.
        text = self._decode(token_ids[max(0, self._num_seen - self._most_tokens) :])
        self._num_seen = len(token_ids)
        self.is_reached = any(stop in text for stop in self._texts)
        return self.is_reached


def share_cores(rollout: RolloutConfig) -> int:
    """Set what OpenMP reads when it is loaded, so call this before torch is imported.

    Returns the number of threads: as configured, or an even share of the cores for each of this
    machine's workers, less one core for everything else. The user's own environment wins over the share.
    """
    # Threads that spin while they wait take cores from the other workers.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if rollout.num_threads:
        os.environ["OMP_NUM_THREADS"] = str(rollout.num_threads)
    else:
        # The cores that this process may use: `cpu_count` would count those of the whole machine.
        share = max(1, (len(os.sched_getaffinity(0)) - 1) // rollout.workers)
        os.environ.setdefault("OMP_NUM_THREADS", str(share))
    # OpenMP takes a list, with a number for each level of nesting; ours is the first.
    return int(os.environ["OMP_NUM_THREADS"].split(",")[0])


def check_length(request: GenerationRequest, max_model_len: int) -> None:
    """Refuse an empty prompt, and one whose completion might not fit the context."""
    num_prompt = len(request.prompt_ids)
    max_tokens = request.sampling.max_tokens
    if num_prompt == 0:
        raise ValueError(f"request {request.request_id} has an empty prompt; give at least one token id")
    if num_prompt + max_tokens > max_model_len:
        raise ValueError(
            f"request {request.request_id}: {num_prompt} prompt tokens + max_tokens {max_tokens} exceed "
            f"model.max_model_len {max_model_len}; shorten the prompt or lower max_tokens"
        )
