"""Delays in place of a model, for benchmarks and tests of everything around the engine.

The tokens, and how long they take, depend on the run's seed and the request's id alone. Capacity is a
semaphore: a finished completion frees a slot. Versions change in flight, as in the real engine: a
completion that was half done when an update landed has two spans, split at its middle token.
"""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tidemill.common.config.run import RunConfig
from tidemill.common.errors import EngineError
from tidemill.common.wire.choices import KEPT, Rows
from tidemill.common.wire.segments import Finish, VersionSpan
from tidemill.services.rollout.engines.engine import (
    PART_TOKENS,
    Engine,
    Generation,
    GenerationRequest,
    WeightUpdate,
    check_length,
)
from tidemill.services.rollout.engines.random_numbers import request_key, uniforms


class SimulatedEngine(Engine):
    """An engine that computes nothing: every token is equally likely, with filters one of two, and every
    update succeeds."""

    num_running = 0

    def __init__(self, config: RunConfig, worker: str = "") -> None:
        self._options = config.rollout.simulated
        self._max_model_len = config.model.max_model_len
        self._seed = config.seed
        self._masks = config.rollout.sampling_masks
        self._slots = asyncio.Semaphore(config.rollout.max_num_seqs)
        self._changes: list[tuple[float, int]] = []
        self.is_awake = True

    @property
    def version(self) -> int:
        return self._changes[-1][1] if self._changes else -1

    async def start(self) -> None:
        self._changes = [(_now(), 0)]

    async def generate(self, request: GenerationRequest) -> Generation:
        """Wait as long as the request takes, and return its random tokens."""
        if not self._changes:
            raise EngineError("the simulated engine was never started")
        check_length(request, self._max_model_len)
        key = request_key(self._seed, request.request_id)
        self.num_running += 1
        try:
            async with self._slots:
                started = _now()
                wanted = self._length(key)
                num_tokens = min(wanted, request.sampling.max_tokens)
                left_s = self._duration_s(key, num_tokens)
                if request.on_tokens is not None:
                    part_s = left_s * PART_TOKENS / num_tokens
                    for so_far in range(PART_TOKENS, num_tokens, PART_TOKENS):
                        await asyncio.sleep(part_s)
                        left_s -= part_s
                        request.on_tokens(self._generation(request, key, so_far, started, "length"))
                await asyncio.sleep(left_s)
                finish: Finish = "stop" if num_tokens == wanted else "length"
                return self._generation(request, key, num_tokens, started, finish)
        finally:
            self.num_running -= 1

    def _generation(
        self, request: GenerationRequest, key: int, num_tokens: int, started: float, finish: Finish
    ) -> Generation:
        """The first tokens of a request, which have been sampled since it started."""
        draws = uniforms(np.full(num_tokens, key, dtype=np.uint64), np.arange(num_tokens, dtype=np.uint64))
        vocab_size = self._options.vocab_size
        num_kept = vocab_size
        ids = (draws * vocab_size).astype(np.int64)
        choices = {}
        if self._masks and request.sampling.is_filtered:
            num_kept = 2
            choices[KEPT] = Rows.of_lists([(token, (token + 1) % vocab_size) for token in ids])
        return Generation(
            token_ids=ids.tolist(),
            logprobs=[-math.log(num_kept)] * num_tokens,
            spans=self._spans(started, _now(), num_tokens),
            finish=finish,
            choices=choices,
        )

    @property
    def can_patch(self) -> bool:
        return True

    async def load(
        self, version: int, files: Sequence[Path], deltas: Sequence[Sequence[Path]] = (), digest: str = ""
    ) -> WeightUpdate:
        """Wait `load_s`, then change to `version`. Nothing is read and generation never stands still."""
        started = _now()
        await asyncio.sleep(self._options.load_s)
        self._changes.append((_now(), version))
        return WeightUpdate(version, load_s=_now() - started, paused_s=0.0)

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(f"t{token}" for token in token_ids)

    async def sleep(self) -> None:
        if self.num_running:
            raise EngineError(f"asked to sleep with {self.num_running} requests running")
        self.is_awake = False

    async def wake(self) -> None:
        self.is_awake = True

    async def close(self) -> None:
        """Nothing to free."""

    def _length(self, key: int) -> int:
        """Tokens that the completion would have without a limit: log-normal, by Box and Muller."""
        if not self._options.sigma:
            return self._options.tokens
        keys = np.array([key], dtype=np.uint64)
        radius_draw = float(uniforms(keys, 2**63 + 1)[0])
        angle_draw = float(uniforms(keys, 2**63 + 2)[0])
        normal = math.sqrt(-2.0 * math.log(1.0 - radius_draw)) * math.cos(2.0 * math.pi * angle_draw)
        return max(1, round(self._options.tokens * math.exp(self._options.sigma * normal)))

    def _duration_s(self, key: int, num_tokens: int) -> float:
        """Uniform between (1 - jitter) and (1 + jitter) times the mean; with `sigma`, scaled by tokens."""
        # Draws of tokens count up from 0, and never reach this number.
        spread = 2.0 * float(uniforms(np.array([key], dtype=np.uint64), 2**63)[0]) - 1.0
        share = num_tokens / self._options.tokens if self._options.sigma else 1.0
        return self._options.group_s * share * (1.0 + self._options.jitter * spread)

    def _spans(self, started: float, finished: float, num_tokens: int) -> tuple[VersionSpan, ...]:
        """Split the tokens, spread evenly over the time they took, at each change of version."""
        spans: list[VersionSpan] = []
        for changed, version in reversed(self._changes):
            first = max(0, math.floor(num_tokens * (changed - started) / max(finished - started, 1e-9)))
            # Of two versions that start at the same token, the earlier one produced nothing.
            if first < (spans[-1][1] if spans else num_tokens):
                spans.append((version, first))
            if changed <= started:
                break
        return tuple(reversed(spans))


def _now() -> float:
    return asyncio.get_running_loop().time()
