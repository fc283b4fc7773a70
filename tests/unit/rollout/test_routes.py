"""Routes as engines record them and sessions join them: what a model's routers choose in a row of its own."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tests.support.architectures import make_model
from tests.support.models import run_config, tiny_model, write_tokenizer
from tests.support.routes import choice_of
from tidemill.common.errors import ConfigError
from tidemill.common.process.vllm_machine import is_cpu_build
from tidemill.common.wire.choices import ROUTES, Rows
from tidemill.common.wire.messages import SamplingParams
from tidemill.services.rollout.engines.engine import Generation, GenerationRequest
from tidemill.services.rollout.engines.transformers import TransformersEngine
from tidemill.services.rollout.engines.vllm_launch import start_vllm
from tidemill.services.rollout.sessions.recorder import SegmentRecorder, choices_of


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("Mixtral", experts_implementation="eager", num_local_experts=4)


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(run_config(folder, rollout={"engine": "transformers"}))
    await engine.start()
    yield engine
    await engine.close()


def request(name: str, prompt: Sequence[int], num_routed: int = 0, **sampling: int) -> GenerationRequest:
    params = SamplingParams.model_validate({"max_tokens": 12, "num_routed": num_routed} | sampling)
    return GenerationRequest(name, prompt, params)


def expected(model: PreTrainedModel, ids: Sequence[int]) -> NDArray[np.uint8]:
    return choice_of(model, np.array(ids, dtype=np.int32))


async def test_every_token_but_the_last_has_its_experts(engine, model) -> None:
    """Prompts of unlike lengths share a batch, some of them a prefill; rows end at different times."""
    requests = []
    for i in range(20):
        prompt = [3 + (7 * i + 5 * j) % 29 for j in range(1 + i // 2 % 5)]
        requests.append(request(f"r{i}", prompt, max_tokens=1 + i % 7))
    generations = await asyncio.gather(*map(engine.generate, requests))
    for asked, generation in zip(requests, generations, strict=True):
        routes = generation.choices[ROUTES].values
        assert routes.dtype == np.uint8
        ids = [*asked.prompt_ids, *generation.token_ids]
        np.testing.assert_array_equal(np.sort(routes), np.sort(expected(model, ids)))


async def test_turns_of_a_session_bring_new_rows_and_keep_the_old_ones(engine, model) -> None:
    recorder = SegmentRecorder([3, 4, 5])
    ticket = SamplingParams(max_tokens=4)
    for context in ([], [7, 8], [9]):
        sampling = recorder.asking(ticket, len(recorder.completion_ids))
        ids = [*recorder.ids, *context]
        generation = await engine.generate(GenerationRequest(f"t{len(ids)}", ids, sampling))
        num_tokens = len(ids) + len(generation.token_ids)
        assert len(generation.choices[ROUTES]) == num_tokens - 1 - sampling.num_routed
        recorder.add_context(context)
        recorder.add_turn(generation)
        # As if the weights had changed: what was computed before them stays as it was.
        recorder.routes[-1] = Rows(recorder.routes[-1].values + 10 * len(recorder.turns))
    fork = SegmentRecorder([6, 7])
    fork.add_turn(await engine.generate(request("fork", [6, 7], max_tokens=3)))
    rows = choices_of([recorder, fork])[ROUTES].values
    num_own = len(recorder.ids) - 1
    whole = np.sort(rows[:num_own] % 10), np.sort(rows[num_own:])
    np.testing.assert_array_equal(whole[0], np.sort(expected(model, recorder.ids)))
    np.testing.assert_array_equal(whole[1], np.sort(expected(model, fork.ids)))
    turns = rows[:num_own, 0, 0] // 10
    ends = [len(recorder.prompt_ids) + turn.end - 1 for turn in recorder.turns]
    assert turns.tolist() == np.repeat([1, 2, 3], np.diff([0, *ends])).tolist()


def generation(num_tokens: int, num_rows: int) -> Generation:
    choices = {ROUTES: Rows(np.arange(4 * num_rows, dtype=np.uint8).reshape(-1, 2, 2))} if num_rows else {}
    return Generation([4] * num_tokens, [-1.0] * num_tokens, ((0, 0),), "stop", choices=choices)


def test_rows_follow_what_a_client_rewrites() -> None:
    recorder = SegmentRecorder([3, 4, 5])
    recorder.add_turn(generation(4, 6))
    assert recorder.asking(SamplingParams(max_tokens=4), 2).num_routed == 5
    recorder.rewind(2)
    assert len(choices_of([recorder])[ROUTES]) == 4, "its last token has none"
    recorder.add_context([9])
    recorder.add_turn(generation(2, 2))
    assert choices_of([recorder])[ROUTES].values[:, 0, 0].tolist() == [0, 4, 8, 12, 16, 0, 4]
    cut = generation(5, 7).cut(2)
    assert len(cut.choices[ROUTES]) == 4


def test_a_missing_row_leaves_the_sample_without_routes() -> None:
    whole = SegmentRecorder([3, 4])
    gap = SegmentRecorder([3, 4])
    whole.add_turn(generation(2, 3))
    for turn in (generation(2, 3), generation(2, 0)):
        gap.add_turn(turn)
    assert ROUTES in choices_of([whole])
    assert not choices_of([gap]) and not choices_of([whole, gap])


async def test_it_is_recorded_where_there_are_experts_and_nobody_says_no(folder, tmp_path) -> None:
    for path, fields in ((folder, {"record_routes": False}), (tiny_model(tmp_path), {})):
        engine = TransformersEngine(run_config(path, rollout={"engine": "transformers", **fields}))
        await engine.start()
        assert not (await engine.generate(request("r", [3]))).choices
        await engine.close()


def test_vllm_on_a_cpu_records_none(folder) -> None:
    if not is_cpu_build():
        pytest.skip("this vLLM is for GPUs")
    with pytest.raises(ConfigError, match=r"rollout\.record_routes: false"):
        start_vllm(run_config(folder), "w", records_routes=True)
