"""How much of later turns' prompts vLLM has in its prefix cache: a session stays with its engine."""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.support.models import tiny_model
from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError
from tidemill.common.wire.messages import SamplingParams, Ticket
from tidemill.common.wire.segments import Session
from tidemill.services.rollout.engines import build_engine
from tidemill.services.rollout.engines.engine import Generation, GenerationRequest
from tidemill.services.rollout.environments import build_player
from tidemill.services.rollout.sessions.player import Played

SESSIONS, TURNS, TURN_TOKENS, PROMPT_TOKENS = 64, 6, 128, 512
"""A turn that reaches its limit ends its session; the model ends most of them after some 30 tokens."""
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 2048}
"""vLLM has no attention for heads of 8, which tiny models have otherwise."""
ENVIRONMENT = f"""
class Words:
    def __init__(self):
        self.left = {TURNS}

    async def step(self, text):
        self.left -= 1
        return " ".join(f"w{{place % 29}}" for place in range(32)), None, self.left <= 0
"""


@dataclass(frozen=True)
class PrefixHits:
    """Prompt tokens of second and later turns."""

    num_cached: int
    num_tokens: int

    @property
    def rate(self) -> float:
        """Share of them that came from the cache."""
        return self.num_cached / self.num_tokens


async def measure_prefix() -> PrefixHits:
    """Play sessions of six turns on a real vLLM engine; prompts of 512 tokens, turns of some 30."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "words.py").write_text(ENVIRONMENT)
        config = _config(folder)
        try:
            engine = build_engine(config, "bench")
        except ImportError as error:
            raise ConfigError(f"this part needs vLLM, which cannot be imported: {error}") from None
        await engine.start()
        player = build_player(config, engine.decode)
        await player.start()
        counts: Counter[str] = Counter()

        async def play(number: int) -> None:
            turns = iter(range(TURNS + 1))

            async def ask(ids: Sequence[int], sampling: SamplingParams) -> Generation:
                return await engine.generate(GenerationRequest(f"{number}-{next(turns)}", ids, sampling))

            played = await player.play(_ticket(number), str(number), ask)
            assert isinstance(played, Played) and isinstance(played.session, Session)
            for turn in played.session.turns[1:]:
                counts["all"] += turn.num_prompt_tokens
                counts["cached"] += max(0, turn.num_cached_tokens)

        await asyncio.gather(*(play(number) for number in range(SESSIONS)))
        await player.close()
        await engine.close()
    return PrefixHits(counts["cached"], counts["all"])


def _ticket(number: int) -> Ticket:
    ids = np.random.default_rng(number).integers(3, 32, PROMPT_TOKENS)
    return Ticket(
        prompt_ids=ids.astype(np.int32),
        prompt_text="w1",
        ticket=number,
        step=0,
        min_version=0,
        group_size=1,
        sampling=SamplingParams(max_tokens=TURN_TOKENS),
    )


def _config(folder: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {
                "path": str(tiny_model(folder / "model", **SHAPE)),
                "max_model_len": 2048,
            },
            "data": {"train": "unused", "max_prompt_tokens": PROMPT_TOKENS},
            "rollout": {
                "engine": "vllm",
                "num_threads": 1,
                "sampling": {"max_tokens": TURN_TOKENS},
                "max_num_seqs": 64,
                "vllm": {"enforce_eager": True, "extra": {"block_size": 32}},
                "environment": {"use": f"{folder}/words.py:Words", "max_turns": TURNS},
            },
        }
    )
