"""Sessions on a real vLLM engine whose weights are replaced in the middle of them.

The reference is a plain forward pass of transformers over the ids of the trajectory: of each turn, over all
that came before it, whoever wrote it.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.support.models import tiny_llama, tiny_model
from tests.support.parity import expected_logprobs
from tests.support.scripted_model import make_ticket
from tests.support.vllm_machine import need_vllm, vllm_config
from tidemill.common.wire.messages import SamplingParams, Ticket
from tidemill.common.wire.segments import Segment
from tidemill.services.rollout.engines import build_engine
from tidemill.services.rollout.engines.engine import Engine, Generation, GenerationRequest
from tidemill.services.rollout.environments import build_player

need_vllm()

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("forked_engines")]

SESSIONS = 512
TURNS = 3
VERSIONS = 4
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.05}
TOLERANCE = 1e-5
ENVIRONMENT = f"""
class Words:
    def reset(self, row):
        self.number, self.left = row["number"], {TURNS}

    async def step(self, text):
        self.left -= 1
        return f"w{{self.number % 29}} w{{self.left}} w7", None, self.left <= 0
"""


def ticket_of(number: int) -> Ticket:
    ids = np.array([3 + (number * 7 + position * 5) % 29 for position in range(8)], dtype=np.int32)
    return make_ticket("", max_tokens=24, prompt_ids=ids, extra={"number": number}, ticket=number)


class Watched:
    """An engine that notes each turn, and whose weights are replaced whenever so many turns have begun."""

    def __init__(self, engine: Engine, files: dict[int, Path]) -> None:
        self.engine = engine
        self.files = files
        self.turns: dict[int, list[tuple[list[int], Generation]]] = {}
        self.loads: list[asyncio.Task[object]] = []
        self.num_begun = 0

    async def ask(self, number: int, ids: Sequence[int], sampling: SamplingParams) -> Generation:
        turns = self.turns.setdefault(number, [])
        self.num_begun += 1
        if self.num_begun % (SESSIONS * TURNS // VERSIONS // 2) == 0 and len(self.loads) + 1 < VERSIONS:
            version = len(self.loads) + 1
            self.loads.append(asyncio.create_task(self.engine.load(version, [self.files[version]])))
        generation = await self.engine.generate(GenerationRequest(f"{number}-{len(turns)}", ids, sampling))
        turns.append((list(ids), generation))
        return generation


async def test_of_every_turn_ids_are_those_that_the_engine_saw_and_logprobs_those_of_the_trainer(tmp_path):
    folders = {version: tiny_model(tmp_path / f"v{version}", version, **SHAPE) for version in range(VERSIONS)}
    (tmp_path / "words.py").write_text(ENVIRONMENT)
    environment = {"use": f"{tmp_path}/words.py:Words", "max_turns": TURNS}
    config = vllm_config(folders[0], 128, environment, max_num_seqs=64, extra={"block_size": 32})
    engine = build_engine(config, "worker")
    await engine.start()
    watched = Watched(engine, {version: path / "model.safetensors" for version, path in folders.items()})
    player = build_player(config, engine.decode, engine.read)
    await player.start()

    async def play(number: int) -> Segment:
        ticket = ticket_of(number)
        played = await player.play(ticket, str(number), partial(watched.ask, number))
        return played.first

    try:
        segments = await asyncio.gather(*(play(number) for number in range(SESSIONS)))
        await asyncio.gather(*watched.loads)
    finally:
        await player.close()
        await engine.close()

    models = {version: tiny_llama(version, **SHAPE) for version in range(VERSIONS)}
    versions = set()
    worst = 0.0
    for number, segment in enumerate(segments):
        seen = watched.turns[number]
        assert len(segment.turns) == len(seen)
        row = [*segment.prompt_ids.tolist(), *segment.completion_ids.tolist()]
        for turn, (ids, generation) in zip(segment.turns, seen, strict=True):
            start = len(segment.prompt_ids) + turn.first
            assert row[:start] == ids, "what the engine continued"
            assert row[start : start + turn.num_tokens] == generation.token_ids, "what it sampled"
            assert segment.mask[turn.first : turn.end].all()
            expected = expected_logprobs(ids, generation.token_ids, generation.spans, models)
            logprobs = segment.logprobs[turn.first : turn.end]
            worst = max(worst, float(np.abs(logprobs - np.asarray(expected, np.float32)).max()))
            versions.add(tuple(version for version, _ in generation.spans))
        assert int(segment.mask.sum()) == sum(turn.num_tokens for turn in segment.turns)
    assert worst < TOLERANCE
    assert len({version for spans in versions for version in spans}) == VERSIONS
    assert max(map(len, versions)) > 1, "no turn was in the middle of an update"
    assert max(len(segment.turns) for segment in segments) == TURNS
