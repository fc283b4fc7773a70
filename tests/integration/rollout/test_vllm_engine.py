"""One real vLLM engine, started once: logprobs, versions, updates in flight, and its end.

The reference is always a plain forward pass of transformers. Where a completion spans two versions, the
reference does what the engine is meant to do: the old weights' KV cache up to the update, the new
weights from there on. So a label that is one token off, or a cache that is reused wrongly, shows.
"""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
from prometheus_client import REGISTRY
from transformers import LlamaForCausalLM

from tests.support.models import tiny_llama, tiny_model
from tests.support.parity import expected_logprobs, score
from tests.support.vllm_machine import need_vllm, vllm_config
from tests.support.waiting import wait_until
from tidemill.common.errors import EngineError, WeightsError
from tidemill.common.wire.messages import SamplingParams
from tidemill.services.rollout.engines import build_engine, vllm
from tidemill.services.rollout.engines.engine import EngineReport, Generation, GenerationRequest
from tidemill.services.rollout.engines.vllm import VllmEngine

need_vllm()

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("forked_engines")]

EOS_IDS = [1, 5]
VOCAB_SIZE = 256
SHAPE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": EOS_IDS,
    "initializer_range": 0.1,
}  # fmt: skip
BLOCK_TOKENS = 32
"""Tokens in a block of vLLM's cache: a prompt shares only whole blocks, so shared prompts are longer."""
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The weight file of each version; version 0 has the starting model's folder."""
    return {
        seed: tiny_model(tmp_path_factory.mktemp(f"v{seed}"), seed, **SHAPE) / "model.safetensors"
        for seed in range(8)
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(files: dict[int, Path]) -> AsyncIterator[VllmEngine]:
    config = vllm_config(files[0].parent, 256, max_num_seqs=16, extra={"block_size": BLOCK_TOKENS})
    engine = build_engine(config, "test-worker")
    assert isinstance(engine, VllmEngine)
    await engine.start()
    yield engine
    await engine.close()


def reference(version: int) -> LlamaForCausalLM:
    return tiny_llama(version, **SHAPE)


def make_requests(
    name: str, count: int, prompt_tokens: int = 12, **sampling: float
) -> list[GenerationRequest]:
    params = SamplingParams.model_validate({"max_tokens": 24} | sampling)
    requests = []
    for i in range(count):
        prompt_ids = [6 + (i * 17 + j * 29) % 250 for j in range(prompt_tokens)]
        requests.append(GenerationRequest(f"{name}{i}", prompt_ids, params))
    return requests


def versions_of(generation: Generation) -> tuple[int, ...]:
    return tuple(version for version, _ in generation.spans)


async def generate_all(engine: VllmEngine, requests: Sequence[GenerationRequest]) -> list[Generation]:
    return await asyncio.gather(*(engine.generate(request) for request in requests))


def assert_parity(requests: Sequence[GenerationRequest], results: Sequence[Generation]) -> None:
    models = {version: reference(version) for result in results for version, _ in result.spans}
    for request, result in zip(requests, results, strict=True):
        expected = expected_logprobs(
            request.prompt_ids, result.token_ids, result.spans, models, request.sampling.temperature
        )
        assert result.logprobs == pytest.approx(expected, abs=TOLERANCE), request.request_id


async def test_logprobs_equal_those_of_a_plain_forward_pass(engine: VllmEngine) -> None:
    requests = [
        *make_requests("plain", 8),
        *make_requests("cold", 8, temperature=0.6),
        *make_requests("greedy", 4, temperature=0.0),
        *make_requests("short", 4, prompt_tokens=1),
    ]
    results = await generate_all(engine, requests)
    assert_parity(requests, results)
    assert {result.spans for result in results} == {((0, 0),)}
    for request, result in list(zip(requests, results, strict=True))[16:20]:
        ids = torch.tensor([[*request.prompt_ids, *result.token_ids]])
        greedy = reference(0)(ids).logits[0, len(request.prompt_ids) - 1 : -1].argmax(-1)
        assert result.token_ids == greedy.tolist()


async def test_filtered_sampling_reports_logprobs_of_the_filtered_distribution(engine: VllmEngine) -> None:
    requests = make_requests("filtered", 8, top_k=2)
    model = reference(0)
    for request, result in zip(requests, await generate_all(engine, requests), strict=True):
        ids = torch.tensor([[*request.prompt_ids, *result.token_ids]])
        with torch.inference_mode():
            top_TK = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].topk(2)
        for token, logprob, values, choices in zip(result.token_ids, result.logprobs, *top_TK, strict=True):
            expected = torch.log_softmax(values, -1)[choices.tolist().index(token)].item()
            assert logprob == pytest.approx(expected, abs=TOLERANCE)


async def test_every_end_token_ends_a_completion_and_is_its_last_token(engine: VllmEngine) -> None:
    results = await generate_all(engine, make_requests("end", 64, max_tokens=100))
    last_ids = set()
    for result in results:
        assert not set(result.token_ids[:-1]) & set(EOS_IDS)
        if result.finish == "stop":
            last_ids.add(result.token_ids[-1])
        else:
            assert len(result.token_ids) == 100
    assert last_ids == set(EOS_IDS)
    assert {result.finish for result in results} == {"stop", "length"}


async def test_an_unreadable_file_changes_nothing(engine: VllmEngine, tmp_path: Path) -> None:
    (tmp_path / "torn.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0half")
    for broken in ([tmp_path / "torn.safetensors"], [tmp_path / "gone.safetensors"], []):
        with pytest.raises(WeightsError):
            await engine.load(1, broken)
    assert engine.version == 0
    requests = make_requests("still", 2)
    assert_parity(requests, await generate_all(engine, requests))


async def test_updates_in_flight_label_every_token_with_the_weights_that_sampled_it(engine, files):
    for version in (1, 2, 3):
        requests = make_requests(f"flight{version}-", 64, max_tokens=100)
        running = [asyncio.create_task(engine.generate(request)) for request in requests]
        # Once one is finished, others are under way and, with 16 at a time, most still wait.
        await engine.generate(make_requests(f"first{version}-", 1, max_tokens=1)[0])
        update = await engine.load(version, [files[version]])
        assert engine.version == update.version == version
        assert 0.0 < update.paused_s < update.load_s
        results = await asyncio.gather(*running)
        kinds = {versions_of(result) for result in results}
        assert (version - 1, version) in kinds, "no request was under way: nothing is tested"
        assert (version,) in kinds, "no request was waiting: nothing is tested"
        assert_parity(requests, results)
        # The probe: what the engine computes with now is what was in the file.
        prompt = [7, 8, 9, 10]
        completion = [11, 12, 13, 14, 1]
        expected = expected_logprobs(prompt, completion, ((version, 0),), {version: reference(version)})
        assert await score(engine, prompt, completion) == pytest.approx(expected, abs=TOLERANCE)


async def test_a_new_version_reuses_no_prompt_that_an_older_one_computed(engine, files):
    prompt = [6 + j % 250 for j in range(3 * BLOCK_TOKENS)]
    requests = [GenerationRequest(f"stale{i}", prompt, SamplingParams(max_tokens=32)) for i in range(48)]
    assert_parity(requests[:2], await generate_all(engine, requests[:2]))
    await engine.load(4, [files[4]])
    results = await generate_all(engine, requests[:2])
    assert_parity(requests[:2], results)
    # The probe computes every token, also of a prompt that is in the cache by now.
    scores = await score(engine, prompt, results[0].token_ids)
    assert scores == pytest.approx(results[0].logprobs, abs=TOLERANCE)

    # The same for requests that were already inside the engine, waiting, when the update came.
    running = [asyncio.create_task(engine.generate(request)) for request in requests]
    await engine.generate(GenerationRequest("first", prompt, SamplingParams(max_tokens=1)))
    await engine.load(5, [files[5]])
    results = await asyncio.gather(*running)
    assert sum(result.spans == ((5, 0),) for result in results) >= 16
    assert_parity(requests, results)


async def test_requests_that_arrive_during_the_pause_belong_to_the_new_version(engine, files, monkeypatch):
    prompt = [6 + j % 250 for j in range(2 * BLOCK_TOKENS)]
    requests = [GenerationRequest(f"pause{i}", prompt, SamplingParams(max_tokens=8)) for i in range(8)]
    assert_parity(requests[:1], [await engine.generate(requests[0])])
    running: list[asyncio.Task[Generation]] = []
    llm = engine._running_llm()
    call = llm.collective_rpc

    async def call_and_submit(method: str, **options: Any) -> Any:
        result = await call(method, **options)
        if options.get("args") == ("apply",):
            running.extend(asyncio.create_task(engine.generate(request)) for request in requests)
            await llm.is_paused()  # an answer from the engine: by now it has the requests too
        return result

    monkeypatch.setattr(llm, "collective_rpc", call_and_submit)
    await engine.load(6, [files[6]])
    results = await asyncio.gather(*running)
    assert {result.spans for result in results} == {((6, 0),)}
    assert_parity(requests, results)


async def test_who_is_asleep_goes_on_with_the_same_tokens_and_takes_new_weights_when_it_wakes(engine, files):
    other_version = engine.version - 1 if engine.version else 1
    requests = make_requests("asleep", 32, max_tokens=100)
    running = [asyncio.create_task(engine.generate(request)) for request in requests]
    await engine.generate(make_requests("awake", 1, max_tokens=1)[0])
    await engine.sleep()
    await engine._running_llm().is_paused()  # an answer of the engine: what it had sent is here
    loading = asyncio.create_task(engine.load(other_version, [files[other_version]]))
    still = [task for task in running if not task.done()]
    await asyncio.wait({loading, *still}, timeout=0.3)
    assert still and not any(task.done() for task in (loading, *still)), "nothing moves"
    await engine.wake()
    await loading
    results = await asyncio.gather(*running)
    assert any(len(result.spans) == 2 for result in results), "none was under way: nothing is tested"
    assert_parity(requests, results)


async def test_cancelling_a_request_leaves_the_others_alone(engine: VllmEngine) -> None:
    requests = make_requests("cancel", 32, max_tokens=60)
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    cancelled = [task for task in tasks[::2] if task.cancel()]
    await asyncio.gather(*tasks, return_exceptions=True)
    assert cancelled and all(task.cancelled() for task in cancelled)
    kept = [number for number, task in enumerate(tasks) if task not in cancelled]
    assert_parity([requests[number] for number in kept], [tasks[number].result() for number in kept])
    assert engine.num_running == 0


async def test_a_text_to_stop_at_ends_the_generation_and_its_tokens_keep_logprobs_and_versions(engine):
    greedy = SamplingParams(max_tokens=120, temperature=0.0)
    whole = await engine.generate(GenerationRequest("whole", [7, 8, 9], greedy))
    stop = engine.decode(whole.token_ids[5:7])
    stopped = greedy.model_copy(update={"stop": ("never", stop)})
    cut = await engine.generate(GenerationRequest("cut", [7, 8, 9], stopped))
    assert cut.finish == "stop" and stop in engine.decode(cut.token_ids)
    assert len(cut.token_ids) < len(whole.token_ids) and len(cut.logprobs) == len(cut.token_ids)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert [version for version, _ in cut.spans] == [engine.version]


async def test_who_asks_hears_while_it_grows_of_a_long_generation_with_its_versions(
    engine, files, monkeypatch
):
    monkeypatch.setattr(vllm, "PART_TOKENS", 16)
    heard: list[Generation] = []
    sampling = SamplingParams(max_tokens=200, temperature=1.0)
    requests = [
        GenerationRequest(f"grows{i}", [7, 8, 9 + i], sampling, on_tokens=heard.append) for i in range(8)
    ]
    running = asyncio.ensure_future(generate_all(engine, requests))
    await wait_until(lambda: len(heard) >= 4)
    await engine.load(engine.version + 1, [files[(engine.version + 1) % 8]])
    results = await running
    assert len(heard) > 4
    for so_far in heard:
        count = len(so_far.token_ids)
        (whole,) = [result for result in results if result.token_ids[:count] == so_far.token_ids]
        assert count >= 16 and so_far.logprobs == whole.logprobs[:count]
        assert so_far.spans == tuple(span for span in whole.spans if span[1] < count)


async def test_metrics_of_vllm_are_where_those_of_the_worker_are(engine: VllmEngine) -> None:
    (generation,) = await asyncio.gather(*map(engine.generate, make_requests("counted", 1)))
    families = {family.name: family.samples for family in REGISTRY.collect()}
    assert "tidemill_requests_running" in families
    assert "vllm:kv_cache_usage_perc" in families
    tokens = [s.value for s in families["vllm:generation_tokens"] if s.name.endswith("_total")]
    assert sum(tokens) >= len(generation.token_ids)


async def test_each_step_reports_how_full_the_cache_is(engine: VllmEngine) -> None:
    reports: list[EngineReport] = []
    engine.on_report = reports.append
    results = await generate_all(engine, make_requests("reported", 64, max_tokens=40))
    engine.on_report = None
    assert len(reports) >= max(len(result.token_ids) for result in results)
    assert 0.0 < max(report.kv_usage for report in reports) <= 1.0
    assert reports[-1].num_waiting == 0


async def test_of_waiting_requests_evaluation_goes_first_and_then_the_oldest_ticket(engine):
    order: list[str] = []

    async def generate(request: GenerationRequest) -> None:
        await engine.generate(request)
        order.append(request.request_id[0])

    requests = make_requests("full", 16, max_tokens=40)  # as many as the engine runs at once
    for name, ticket, is_urgent in ("9", 9, False), ("2", 2, False), ("e", 10, True):
        requests += [
            replace(request, ticket=ticket, is_urgent=is_urgent)
            for request in make_requests(name, 4, max_tokens=1)
        ]
    await asyncio.gather(*map(generate, requests))
    assert [name for name in order if name != "f"] == ["e"] * 4 + ["2"] * 4 + ["9"] * 4


async def test_a_dead_engine_fails_its_requests(engine: VllmEngine) -> None:
    """Last in this file: it ends the engine that the others share."""
    running = [asyncio.create_task(engine.generate(request)) for request in make_requests("doomed", 16)]
    (core,) = [process for process in multiprocessing.active_children() if "EngineCore" in process.name]
    workers = psutil.Process(core.pid).children()  # one computes; another may only keep count of files
    os.kill(max(workers, key=lambda process: process.memory_info().rss).pid, signal.SIGKILL)
    results = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(result, EngineError) for result in results)
    with pytest.raises(EngineError):
        await engine.generate(make_requests("late", 1)[0])
