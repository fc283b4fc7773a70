"""How vLLM is asked, and what becomes of the ways in which it ends a request: one that ends with "error" is
submitted again, a few times. vLLM is not needed for that."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.trajectories import make_config
from tidemill.common.errors import EngineError
from tidemill.common.wire.messages import SamplingParams
from tidemill.services.rollout.engines.engine import GenerationRequest, StopTexts
from tidemill.services.rollout.engines.vllm import ERROR_ATTEMPTS, VllmEngine

GOOD = SimpleNamespace(
    finish_reason="stop",
    token_ids=[5, 1],
    logprobs=SimpleNamespace(logprobs=[-0.5, -0.1]),
    weight_versions=[SimpleNamespace(version="3", start=0)],
    sampling_mask=None,
    routed_experts=None,
)
FAILED = SimpleNamespace(**{**vars(GOOD), "finish_reason": "error", "token_ids": []})
REQUEST = GenerationRequest("r", [3, 4], SamplingParams(max_tokens=4))


def make_engine(monkeypatch: pytest.MonkeyPatch, ends: list[Any]) -> VllmEngine:
    """An engine whose submissions end so, one after the other."""
    engine = VllmEngine(make_config(rollout={"engine": "vllm"}))
    reader = SimpleNamespace(text_of=lambda ids: "".join(map(chr, ids)))
    engine._folder = SimpleNamespace(check=lambda request: None, reader=reader)  # type: ignore[assignment]

    async def submit(request: Any, params: Any, priority: int, stops: StopTexts, pixels: Any) -> Any:
        output = ends.pop(0)
        stops.reach(output.token_ids)
        return SimpleNamespace(outputs=[output], num_cached_tokens=0)

    monkeypatch.setattr(engine, "_sampling_params", lambda request: None)
    monkeypatch.setattr(engine, "_submit", submit)
    return engine


async def test_a_request_that_ends_with_an_error_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [FAILED] * (ERROR_ATTEMPTS - 1) + [GOOD]
    engine = make_engine(monkeypatch, ends)
    generation = await engine.generate(REQUEST)
    assert (generation.token_ids, generation.spans, ends) == ([5, 1], ((3, 0),), [])
    assert engine.num_running == 0


async def test_one_that_always_ends_so_is_the_engines_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [FAILED] * ERROR_ATTEMPTS
    engine = make_engine(monkeypatch, ends)
    with pytest.raises(EngineError, match="'error'"):
        await engine.generate(REQUEST)
    assert not ends


@pytest.mark.parametrize(("stop", "is_end"), [(("!",), True), ((), False), (("?",), False)])
async def test_an_abort_is_an_end_where_a_text_to_stop_at_was_reached_and_nowhere_else(
    monkeypatch, stop, is_end
):
    aborted = SimpleNamespace(**{**vars(GOOD), "finish_reason": "abort", "token_ids": [5, ord("!")]})
    engine = make_engine(monkeypatch, [aborted])
    request = GenerationRequest("r", [3, 4], SamplingParams(max_tokens=4, stop=stop))
    if is_end:
        assert (await engine.generate(request)).finish == "stop"
    else:
        with pytest.raises(EngineError, match="'abort'"):
            await engine.generate(request)


@pytest.mark.parametrize(
    ("masks", "temperature", "top_k", "expected"),
    [
        (False, 0.0, 0, (0.0, 0)),
        (False, 0.7, 0, (0.7, 0)),
        (False, 0.0, 1, (1.0, 1)),  # the same token, and a mask of it
        (True, 0.0, 0, (1.0, 1)),
        (True, 0.7, 0, (0.7, 100)),  # all ids of the vocabulary
        (True, 0.7, 5, (0.7, 5)),
    ],
)
def test_vllm_samples_with_masks_where_it_is_given_top_k_and_a_temperature(
    monkeypatch, masks, temperature, top_k, expected
):
    vllm = SimpleNamespace(SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(CUMULATIVE=0))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    filtered = {"sampling": {"top_p": 0.9}, "sampling_masks": True} if masks else {}
    engine = VllmEngine(make_config(rollout={"engine": "vllm", **filtered}))
    engine._folder = SimpleNamespace(vocab_size=100, eos_ids=[1])  # type: ignore[assignment]
    sampling = SamplingParams(max_tokens=4, temperature=temperature, top_k=top_k)
    params = engine._sampling_params(GenerationRequest("r", [3, 4], sampling))
    assert (params.temperature, params.top_k) == expected
