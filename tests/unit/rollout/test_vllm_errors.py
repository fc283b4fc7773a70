"""A request that vLLM ends with "error" is submitted again, a few times. vLLM is not needed for that."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.trajectories import make_config
from tidemill.common.errors import EngineError
from tidemill.common.wire.messages import SamplingParams
from tidemill.services.rollout.engines.engine import GenerationRequest
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
    engine._folder = SimpleNamespace(check=lambda request: None)  # type: ignore[assignment]

    async def submit(*_: Any) -> Any:
        return SimpleNamespace(outputs=[ends.pop(0)], num_cached_tokens=0)

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
