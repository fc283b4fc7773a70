import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.support.models import run_config, tiny_llama, tiny_model
from tests.support.parity import expected_logprobs, score
from tidemill.common.errors import EngineError, WeightsError
from tidemill.common.weights.digest import digest_of
from tidemill.common.wire.messages import SamplingParams
from tidemill.services.rollout.engines import decoding, transformers
from tidemill.services.rollout.engines.checkpoint import checkpoint_tensors, read_tensors
from tidemill.services.rollout.engines.engine import Generation, GenerationRequest
from tidemill.services.rollout.engines.model import copy_weights, match_weights
from tidemill.services.rollout.engines.transformers import TransformersEngine, choose_batch

EOS_IDS = [1, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), eos_token_id=EOS_IDS)


@pytest.fixture(scope="module")
def model(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def new_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("new"), seed=1, eos_token_id=EOS_IDS) / "model.safetensors"


def make_engine(folder: Path, **options: Any) -> TransformersEngine:
    rollout = {"engine": "transformers", **options}
    return TransformersEngine(run_config(folder, model={"max_model_len": 64}, rollout=rollout))


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[TransformersEngine]:
    engine = make_engine(folder)
    await engine.start()
    yield engine
    await engine.close()


def make_requests(count: int, **sampling: Any) -> list[GenerationRequest]:
    """Prompts of 1 to 9 tokens, each four times in a row, as a group has them."""
    params = SamplingParams.model_validate({"max_tokens": 24} | sampling)
    requests = []
    for i in range(count):
        prompt_ids = [3 + (i // 4 * 5 + j * 7) % 29 for j in range(1 + i // 4 % 9)]
        requests.append(GenerationRequest(f"r{i}", prompt_ids, params))
    return requests


async def generate_all(
    engine: TransformersEngine, requests: list[GenerationRequest]
) -> list[tuple[GenerationRequest, Generation]]:
    results = await asyncio.gather(*(engine.generate(request) for request in requests))
    return list(zip(requests, results, strict=True))


def assert_parity(model: LlamaForCausalLM, request: GenerationRequest, result: Generation) -> None:
    temperature = request.sampling.temperature
    spans = ((0, 0),)
    expected = expected_logprobs(request.prompt_ids, result.token_ids, spans, {0: model}, temperature)
    assert result.logprobs == pytest.approx(expected, abs=1e-4)


async def test_logprobs_equal_those_of_a_plain_forward_pass_whatever_temperatures_and_lengths_share_a_batch(
    engine, model
):
    mixed = [SamplingParams(max_tokens=1 + i % 5, temperature=0.3 + 0.2 * (i % 6)) for i in range(24)]
    requests = [
        *make_requests(60),
        *(GenerationRequest(f"m{i}", [3 + i], sampling) for i, sampling in enumerate(mixed)),
        GenerationRequest("as long as the context", [3] * 40, SamplingParams(max_tokens=24)),
    ]
    for request, result in await generate_all(engine, requests):
        assert_parity(model, request, result)
        assert result.spans == ((0, 0),) and len(result.token_ids) <= request.sampling.max_tokens


async def test_filtered_rows_sample_within_their_filter_and_report_its_logprobs(engine, model):
    filtered = make_requests(16, top_k=2)
    plain = make_requests(16)
    results = await generate_all(engine, [*filtered, *plain])
    for request, result in results[:16]:
        ids_1T = torch.tensor([[*request.prompt_ids, *result.token_ids]])
        with torch.inference_mode():
            top_TK = model(ids_1T).logits[0, len(request.prompt_ids) - 1 : -1].topk(2)
        for token, logprob, values, ids in zip(result.token_ids, result.logprobs, *top_TK, strict=True):
            index = ids.tolist().index(token)
            assert logprob == pytest.approx(torch.log_softmax(values, -1)[index].item(), abs=1e-4)
    for request, result in results[16:]:
        assert_parity(model, request, result)


async def test_every_end_token_ends_a_completion_and_is_its_last_token(engine: TransformersEngine) -> None:
    results = await generate_all(engine, make_requests(128))
    last_ids = set()
    for request, result in results:
        assert not set(result.token_ids[:-1]) & set(EOS_IDS)
        if result.finish == "stop":
            last_ids.add(result.token_ids[-1])
        else:
            assert len(result.token_ids) == request.sampling.max_tokens
            assert result.token_ids[-1] not in EOS_IDS
    assert last_ids == set(EOS_IDS)
    assert {result.finish for _, result in results} == {"stop", "length"}


async def test_a_request_gets_the_same_tokens_in_any_batch(engine: TransformersEngine) -> None:
    requests = make_requests(12)
    together = await generate_all(engine, requests)
    for request, result in together:
        assert (await engine.generate(request)).token_ids == result.token_ids
    group = [result.token_ids for _, result in together[:4]]
    assert len({tuple(ids) for ids in group}) > 1, "the members of a group must differ"


async def test_a_load_waits_for_the_running_batch_and_the_next_one_has_the_new_weights_of_all_files(
    folder, model, new_weights, tmp_path
):
    tensors = load_file(new_weights)
    parts = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for file, names in zip(parts, (sorted(tensors)[::2], sorted(tensors)[1::2]), strict=True):
        save_file({name: tensors[name] for name in names}, file)
    engine = make_engine(folder, max_num_seqs=8)
    await engine.start()
    running = asyncio.create_task(generate_all(engine, make_requests(24)))
    await asyncio.wait_for(engine.generate(make_requests(1)[0]), timeout=60)
    update = await engine.load(1, parts)
    after = await generate_all(engine, make_requests(8))
    new_model = tiny_llama(seed=1)
    assert engine.version == update.version == 1
    assert 0 <= update.paused_s <= update.load_s
    for request, result in [*(await running), *after]:
        assert_parity(model if result.spans == ((0, 0),) else new_model, request, result)
    assert {result.spans for _, result in await running} >= {((0, 0),)}
    assert {result.spans for _, result in after} == {((1, 0),)}
    await engine.close()


async def test_weights_that_do_not_fit_change_nothing(engine, new_weights, tmp_path):
    tensors = load_file(new_weights)
    name = "model.layers.1.mlp.up_proj.weight"
    bad = {
        "lack 1": {key: value for key, value in tensors.items() if key != name},
        "1 names unknown": tensors | {"model.extra": torch.zeros(1)},
        "has shape": tensors | {name: torch.zeros(3, 3)},
    }
    before = await score(engine, [3], [4, 5])
    file = tmp_path / "weights.safetensors"
    for words, content in bad.items():
        save_file(content, file)
        with pytest.raises(WeightsError, match=words):
            await engine.load(1, [file])
    file.write_bytes(b"\x08\0\0\0\0\0\0\0half")
    for files in ([file], [tmp_path / "gone.safetensors"], []):
        with pytest.raises(WeightsError):
            await engine.load(1, files)
    assert engine.version == 0
    assert await score(engine, [3], [4, 5]) == before


async def test_nothing_is_generated_with_weights_that_are_half_written(engine, new_weights):
    norm = engine._model.model.norm.weight
    norm.data = torch.ones(1).expand(norm.shape)  # torch writes to no tensor whose elements share memory
    with pytest.raises(EngineError, match="version 1 could not be written into the model"):
        await engine.load(1, [new_weights])
    assert engine.version == 0
    with pytest.raises(EngineError):
        await engine.generate(make_requests(1)[0])


async def test_a_version_whose_files_are_pruned_as_soon_as_it_is_written_is_loaded_all_the_same(
    engine, new_weights, tmp_path, monkeypatch
):
    file = Path(shutil.copy(new_weights, tmp_path))
    digest = str(digest_of(read_tensors([file]).values()))

    def copy_and_prune(pairs: Any) -> None:
        copy_weights(pairs)
        file.unlink()

    monkeypatch.setattr(transformers, "copy_weights", copy_and_prune)
    update = await engine.load(1, [file], digest=digest)
    assert update.version == engine.version == 1
    assert engine.can_patch, "the next version may be a delta"


async def test_no_delta_is_taken_over_a_version_of_which_nothing_is_proven(engine, new_weights):
    await engine.load(1, [new_weights], digest=str(digest_of(read_tensors([new_weights]).values())))
    assert engine.can_patch
    await engine.load(2, [new_weights], digest="of another kind")
    assert not engine.can_patch


async def test_memory_is_kept_for_the_tensors_of_a_model_on_a_cpu(folder: Path, monkeypatch) -> None:
    kept: list[bool] = []
    monkeypatch.setattr(transformers, "keep_freed_memory", lambda: kept.append(True))
    engine = make_engine(folder)
    await engine.start()
    await engine.close()
    assert kept == [True]


def test_weights_in_the_published_layout_of_a_model_with_experts_are_joined(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    published = MixtralForCausalLM(config)
    model = MixtralForCausalLM(config).eval()
    published.save_pretrained(tmp_path)
    tensors = dict(checkpoint_tensors(read_tensors([tmp_path / "model.safetensors"]), []))
    assert tensors.keys() - model.state_dict().keys(), "the layouts do not differ: this tests nothing"
    copy_weights(match_weights(model, tensors))
    for name, value in published.named_parameters():
        assert torch.equal(model.get_parameter(name), value), name


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 4, "empty prompt"),
        ([3] * 50, 15, "50 prompt tokens .* 15 exceed model.max_model_len 64"),
        ([3, 32], 4, "between 0 and 31, got 3 to 32"),
        ([3, -1], 4, "between 0 and 31, got -1 to 3"),
    ],
)
async def test_requests_that_cannot_be_served_are_refused(engine, prompt, max_tokens, message):
    with pytest.raises(ValueError, match=message):
        await engine.generate(GenerationRequest("a", prompt, SamplingParams(max_tokens=max_tokens)))
    assert engine.num_running == 0


async def test_cancelling_a_request_leaves_the_others_alone(folder: Path, model: LlamaForCausalLM) -> None:
    engine = make_engine(folder, max_num_seqs=4)
    await engine.start()
    requests = make_requests(12)
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    cancelled = [task for task in tasks[1::2] if task.cancel()]
    await asyncio.gather(*tasks, return_exceptions=True)
    assert cancelled and all(task.cancelled() for task in cancelled)
    for request, task in zip(requests, tasks, strict=True):
        if task not in cancelled:
            assert_parity(model, request, task.result())
    assert engine.num_running == 0
    await engine.close()


async def test_closing_fails_what_runs_and_what_waits(folder: Path) -> None:
    engine = make_engine(folder, max_num_seqs=4)
    await engine.start()
    tasks = [asyncio.create_task(engine.generate(request)) for request in make_requests(64)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await engine.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    assert errors and all(isinstance(error, EngineError) for error in errors)
    with pytest.raises(EngineError, match="not running"):
        await engine.generate(make_requests(1)[0])


async def test_a_completion_is_returned_when_it_ends_and_not_with_its_batch(engine, model, monkeypatch):
    is_short_returned = threading.Event()
    advance = decoding._Batch.advance

    def advance_late(batch: Any, ids_B: torch.Tensor) -> torch.Tensor:
        assert is_short_returned.wait(60)
        return advance(batch, ids_B)

    monkeypatch.setattr(decoding._Batch, "advance", advance_late)
    short = GenerationRequest("short", [3, 4, 5], SamplingParams(max_tokens=1))
    long = GenerationRequest("long", [3, 4, 5], SamplingParams(max_tokens=8))
    generating = asyncio.create_task(engine.generate(long))
    assert_parity(model, short, await asyncio.wait_for(engine.generate(short), timeout=60))
    assert not generating.done()
    is_short_returned.set()
    assert_parity(model, long, await generating)


def row_of(num_prompt: int, is_urgent: bool = False) -> decoding.DecodingRow:
    request = GenerationRequest("r", [3] * num_prompt, SamplingParams(max_tokens=1), is_urgent)
    stops: Any = None
    done: Any = None
    return decoding.DecodingRow(request, 0, stops, done)


@pytest.mark.parametrize(
    ("lengths", "size", "expected"),
    [
        ([4, 20, 5, 21], 2, [4, 5]),
        ([20, 4, 21, 5], 2, [20, 21]),  # the first one is always taken
        ([9, 4, 20], 2, [4, 9]),
        ([20, 4, 9], 2, [9, 20]),  # and a batch is full where enough wait
        ([7, 20], 4, [7, 20]),
        ([7, 20, 21, 22, 6, 7], 2, [7, 20]),  # later ones do not overtake
    ],
)
def test_prompts_of_like_length_are_decoded_together(lengths, size, expected):
    queue = [row_of(length) for length in lengths]
    assert [row.num_prompt for row in choose_batch(queue, size)] == expected


def test_urgent_requests_are_in_the_next_batch_whatever_their_length():
    urgent = [row_of(length, is_urgent=True) for length in (30, 4)]
    queue = [*urgent, *(row_of(length) for length in (5, 6, 7, 8))]
    assert [row.num_prompt for row in choose_batch(queue, 3)] == [4, 30, 5]


async def test_urgent_requests_go_before_others_in_the_order_in_which_they_came(folder: Path) -> None:
    engine = make_engine(folder, max_num_seqs=1)
    await engine.start()
    await engine.sleep()
    ended: list[str] = []
    params = SamplingParams(max_tokens=1)

    async def generate(name: str, is_urgent: bool) -> None:
        await engine.generate(GenerationRequest(name, [3, 4, 5], params, is_urgent))
        ended.append(name)

    async with asyncio.TaskGroup() as group:
        for name in ("training", "first", "second", "third"):
            group.create_task(generate(name, is_urgent=name != "training"))
        await asyncio.sleep(0)
        await engine.wake()
    assert ended == ["first", "second", "third", "training"]
    await engine.close()


def test_no_request_waits_for_ever_while_others_of_another_length_come():
    queue = [row_of(5), row_of(30), row_of(5), row_of(5)]
    long = queue[1]
    for _ in range(3):
        chosen = choose_batch(queue, 2)
        queue = [row for row in queue if row not in chosen] + [row_of(5), row_of(5)]
    assert long not in queue


async def test_a_failing_model_is_an_engine_error(engine, monkeypatch):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("tidemill.services.rollout.engines.decoding.decode_batch", fail)
    with pytest.raises(EngineError, match="out of memory"):
        await engine.generate(make_requests(1)[0])


async def test_who_asks_hears_of_a_long_generation_while_it_grows(engine, monkeypatch):
    monkeypatch.setattr(decoding, "PART_TOKENS", 4)
    heard: dict[int, list[Generation]] = {number: [] for number in range(8)}
    params = SamplingParams(max_tokens=24)
    wholes = await asyncio.gather(
        *(
            engine.generate(GenerationRequest(f"r{n}", [3, 4, 5], params, on_tokens=parts.append))
            for n, parts in heard.items()
        )
    )
    for parts, whole in zip(heard.values(), wholes, strict=True):
        expected = [count for count in range(4, 24, 4) if count < len(whole.token_ids)]
        assert [len(report.token_ids) for report in parts] == expected, "not at the end"
        for report, count in zip(parts, expected, strict=True):
            assert report.token_ids == whole.token_ids[:count] and report.logprobs == whole.logprobs[:count]
            assert report.spans == whole.spans
    assert any(heard.values())


async def test_who_no_longer_asks_hears_nothing_of_a_row_that_is_still_decoded(engine, monkeypatch):
    monkeypatch.setattr(decoding, "PART_TOKENS", 4)
    params = SamplingParams(max_tokens=24)
    requests = [GenerationRequest(f"r{number}", [3, 4, 5], params) for number in range(8)]
    longest, whole = max(await generate_all(engine, requests), key=lambda pair: len(pair[1].token_ids))
    assert len(whole.token_ids) > 4
    has_begun = asyncio.Event()
    is_cancelled = threading.Event()
    loop = asyncio.get_running_loop()
    advance = decoding._Batch.advance

    def advance_late(batch: Any, ids_B: torch.Tensor) -> torch.Tensor:
        loop.call_soon_threadsafe(has_begun.set)
        assert is_cancelled.wait(60)
        return advance(batch, ids_B)

    monkeypatch.setattr(decoding._Batch, "advance", advance_late)
    # One of eight is too few to be dropped from the batch.
    monkeypatch.setattr(decoding, "_COMPACT_BELOW", 0.1)
    heard: list[Generation] = []
    others = [asyncio.create_task(engine.generate(each)) for each in requests if each is not longest]
    cancelled = asyncio.create_task(engine.generate(replace(longest, on_tokens=heard.append)))
    await has_begun.wait()
    cancelled.cancel()
    await asyncio.wait([cancelled])
    is_cancelled.set()
    await asyncio.gather(*others)
    assert heard == []


async def test_a_completion_whose_answer_cannot_be_made_fails_its_caller(engine, monkeypatch):
    def fail(row: decoding.DecodingRow) -> None:
        raise RuntimeError("rows of routes do not fit each other")

    monkeypatch.setattr(decoding.DecodingRow, "choices", property(fail))
    with pytest.raises(EngineError, match="rows of routes do not fit each other"):
        await asyncio.wait_for(engine.generate(make_requests(1)[0]), timeout=10)


async def test_a_generation_ends_with_the_token_that_completes_a_text_to_stop_at(engine):
    params = SamplingParams(max_tokens=24)
    requests = [GenerationRequest(f"r{number}", [3, 4, 5], params) for number in range(32)]
    request, whole = max(await generate_all(engine, requests), key=lambda pair: len(pair[1].token_ids))
    stop = engine.decode(whole.token_ids[4:6])
    sampling = params.model_copy(update={"stop": ("never", stop)})
    cut = await engine.generate(GenerationRequest(request.request_id, [3, 4, 5], sampling))
    assert cut.finish == "stop" and len(cut.token_ids) < len(whole.token_ids)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)] and len(cut.logprobs) == len(cut.token_ids)
    assert stop in engine.decode(cut.token_ids) and stop not in engine.decode(cut.token_ids[:-1])


async def test_logits_of_nan_are_an_error_in_words(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, eos_token_id=EOS_IDS)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "layers.0" in name)
    tensors[name].view(-1)[0] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    engine = make_engine(folder)
    await engine.start()
    for temperature in (1.0, 0.0):
        (request, *_) = make_requests(1, temperature=temperature)
        with pytest.raises(EngineError, match="logits are NaN"):
            await engine.generate(request)
    await engine.close()
