"""An agent's session on a real engine whose weights change in the middle of it."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.models import run_config, tiny_model, write_tokenizer
from tests.support.parity import score
from tests.support.playing import make_ticket
from tidemill.common.wire.messages import SamplingParams
from tidemill.services.rollout.engines import build_engine
from tidemill.services.rollout.engines.engine import Generation, GenerationRequest
from tidemill.services.rollout.environments import build_player

TEMPLATE = (
    "{% for m in messages %}w1 {{ m.content }} <eos> {% endfor %}{% if add_generation_prompt %}w2{% endif %}"
)


async def test_ids_logprobs_and_versions_of_every_turn_are_the_engines(tmp_path: Path) -> None:
    environment = {"use": "agent", "agent": "tests.support.agents:twice"}
    config = run_config(
        tiny_model(tmp_path / "model", eos_token_id=[1]),
        model={"max_model_len": 120},
        rollout={"engine": "transformers", "environment": environment, "sampling": {"max_tokens": 20}},
    )
    write_tokenizer(tmp_path / "model", TEMPLATE)
    new = tiny_model(tmp_path / "new", seed=1, eos_token_id=[1]) / "model.safetensors"
    engine = build_engine(config)
    await engine.start()
    player = build_player(config, engine.decode)
    seen: list[list[int]] = []
    said: list[list[int]] = []
    scores: list[list[float]] = []

    async def ask(ids: Sequence[int], sampling: SamplingParams) -> Generation:
        generation = await engine.generate(GenerationRequest(f"t{len(seen)}", ids, sampling))
        seen.append(list(ids))
        said.append(generation.token_ids)
        scores.append(await score(engine, ids, generation.token_ids))
        if len(seen) == 1:
            await engine.load(1, [new])
        return generation

    ticket = make_ticket("w7 w8", max_tokens=20, ground_truth="")
    try:
        await player.start()
        played = await player.play(ticket, "s", ask)
    finally:
        await player.close()
        await engine.close()
    first, second = played.first.turns
    assert played.session is not None and played.session.histories == {"clean": 1}
    assert played.first.spans == ((0, 0), (1, second.first))
    ids = [*played.first.prompt_ids.tolist(), *played.first.completion_ids.tolist()]
    for turn, prompt, tokens, expected in zip((first, second), seen, said, scores, strict=True):
        start = turn.num_prompt_tokens
        assert ids[:start] == prompt and ids[start : start + turn.num_tokens] == tokens
        assert played.first.logprobs[turn.first : turn.end].tolist() == pytest.approx(expected, abs=1e-5)
