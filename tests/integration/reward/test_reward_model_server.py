"""The reward model server: vLLM's forms over HTTP, clear refusals, bounded queues, an orderly end; and
scores that are those of a plain forward pass, whatever stands beside a row."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from tests.support.models import tiny_model
from tests.support.preloaded import REPO
from tests.support.reward_models import (
    server_url,
    start_server,
    tiny_classifier,
    tiny_encoder,
    tiny_token_scorer,
)
from tests.support.waiting import wait_until
from tidemill.common.errors import ConfigError
from tidemill.common.process.replicas import LANE_HEADER
from tidemill.services.reward.model_server.app import ScoringApp
from tidemill.services.reward.model_server.batcher import Batcher
from tidemill.services.reward.model_server.options import ServerOptions
from tidemill.services.reward.model_server.requests import Inputs
from tidemill.services.reward.model_server.scoring_model import ScoringModel

ROWS = [[5, 6, 7], [9] * 20, [3]]


def options_of(**fields: Any) -> ServerOptions:
    wanted: dict[str, Any] = {
        "max_batch_tokens": 4096,
        "max_batch_rows": 64,
        "flush_ms": 5.0,
        "max_queued_rows": 8,
    }
    return ServerOptions(model="m", max_padding=0.3, **wanted | fields)


class StandingModel:
    """A model whose device stands still until it is let go: what a real one cannot be made to do."""

    def __init__(self, model: ScoringModel) -> None:
        self.inner = model
        self.batches = []  # type: ignore[var-annotated]
        self.go = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.fails_on = 0

    def score(self, rows: list[list[int]]) -> list[Tensor]:
        self.batches.append([list(row) for row in rows])
        asyncio.run_coroutine_threadsafe(self.go.wait(), self.loop).result(30)
        if any(len(row) == self.fails_on for row in rows):
            raise RuntimeError("out of memory")
        return self.inner.score(rows)


@contextlib.asynccontextmanager
async def batching(device: Any, **options: Any) -> AsyncIterator[Batcher]:
    batcher = Batcher(device, options_of(**options))
    batcher.start()
    yield batcher
    await batcher.close()


def client_of(model: ScoringModel, path: Path, batcher: Batcher) -> httpx.AsyncClient:
    inputs = Inputs(str(path), model.vocab_size, model.max_model_len)
    app = ScoringApp("rm", model, inputs, batcher, gate=None)
    transport = httpx.ASGITransport(app=Starlette(routes=app.routes()))
    return httpx.AsyncClient(transport=transport, base_url="http://server")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_classifier(tmp_path_factory.mktemp("classifier"), num_labels=2)


@pytest.fixture(scope="module")
def model(path: Path) -> ScoringModel:
    return ScoringModel(ServerOptions(model=str(path)))


@pytest_asyncio.fixture
async def server(model: ScoringModel, path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with batching(model) as batcher, client_of(model, path, batcher) as client:
        yield client


async def raw(client: httpx.AsyncClient, lane: str = "train", **body: Any) -> list[list[float]]:
    settings = {"use_activation": False, **body}
    response = await client.post("/classify", json=settings, headers={LANE_HEADER: lane})
    assert response.status_code == 200, response.text
    return [item["probs"] for item in response.json()["data"]]


async def test_ids_text_and_chat_give_the_scores_of_the_same_tokens(server, model):
    expected = [score.tolist() for score in model.score(ROWS)]
    for got, wanted in zip(await raw(server, input=ROWS), expected, strict=True):
        assert got == pytest.approx(wanted, abs=1e-5)
    assert await raw(server, input=[3, 4]) == await raw(server, input="w0 w1")
    assert await raw(server, input=["w0 w1"]) == await raw(server, input="w0 w1", add_special_tokens=False)
    for content in ("w0", [{"type": "text", "text": "w0"}]):
        chat = [{"role": "user", "content": content}, {"role": "assistant", "content": "w1"}]
        assert await raw(server, messages=chat) == await raw(server, input="<user> w0 <assistant> w1 ")


async def test_answers_have_the_fields_of_vllm(server: httpx.AsyncClient) -> None:
    answer = (await server.post("/classify", json={"input": ROWS, "model": "rm"})).json()
    assert answer["object"] == "list"
    assert answer["usage"]["prompt_tokens"] == 24
    for item in answer["data"]:
        assert set(item) == {"index", "label", "probs", "num_classes"}
        assert sum(item["probs"]) == pytest.approx(1.0)
        assert item["label"] == f"LABEL_{item['probs'].index(max(item['probs']))}"
    pooled = (await server.post("/pooling", json={"input": ROWS, "use_activation": False})).json()
    assert [item["data"] for item in pooled["data"]] == await raw(server, input=ROWS)
    (card,) = (await server.get("/v1/models")).json()["data"]
    assert (card["id"], card["max_model_len"]) == ("rm", 256)


async def test_token_scores_come_from_pooling(tmp_path: Path) -> None:
    path = tiny_token_scorer(tmp_path / "model")
    model = ScoringModel(ServerOptions(model=str(path)))
    async with batching(model) as batcher, client_of(model, path, batcher) as client:
        body = {"input": ROWS, "use_activation": False, "task": "token_classify"}
        items = (await client.post("/pooling", json=body)).json()["data"]
        assert [len(item["data"]) for item in items] == [3, 20, 1]
        for item, scores in zip(items, model.score(ROWS), strict=True):
            assert torch.allclose(torch.tensor(item["data"]), scores, atol=1e-5)
        refused = await client.post("/classify", json={"input": ROWS})
        assert (refused.status_code, "scores tokens" in refused.text) == (400, True)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "either input"),
        ({"input": []}, "input is empty"),
        ({"input": [[]]}, "input 0 is empty"),
        ({"input": [[5], [5] * 257]}, "input 1 has 257 tokens, but the model takes 256"),
        ({"input": [5, 99]}, "token id 99; the model has ids from 0 to 31"),
        ({"input": "w1", "model": "other"}, "has the model 'rm', not 'other'"),
        ({"input": "w1", "encoding_format": "base64"}, "encoding_format"),
        ({"input": "w1", "dimensions": 8}, "dimensions"),
        ({"input": "w1", "padding": "max_length"}, "padding"),
        ({"messages": [{"role": "user", "content": "w1"}], "chat_template": "x"}, "--chat-template"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image_url"),
        (
            {
                "messages": [{"role": "user", "content": "w1"}],
                "add_generation_prompt": True,
                "continue_final_message": True,
            },
            "continue_final_message",
        ),
        ({"input": "w1", "task": "token_classify"}, "does 'classify'"),
        ("no json", "Invalid JSON"),
    ],
)
async def test_what_can_never_work_is_refused_in_words(server, body, said):
    content = body if isinstance(body, str) else json.dumps(body)
    response = await server.post("/classify", content=content)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


async def test_bodies_of_verl_and_of_older_clients_work_unchanged(server, path):
    wanted = await raw(server, input="w0 w1")
    for body in (
        {"model": str(path), "input": "w0 w1", "activation": False},  # verl's reward loop
        {"model": path.name, "input": "w0 w1", "softmax": False, "user": "me", "cache_salt": "salt"},
        {"input": "w0 w1", "use_activation": False, "activation": False, "return_text_in_prompt": True},
    ):
        response = await server.post("/classify", json=body)
        assert response.status_code == 200, response.text
        assert [item["probs"] for item in response.json()["data"]] == wanted
    activated = (await server.post("/classify", json={"input": "w0 w1", "activation": True})).json()
    assert sum(activated["data"][0]["probs"]) == pytest.approx(1.0)


@pytest.mark.parametrize("kind", ["Completion", "Chat"])
@pytest.mark.parametrize("where", ["classify", "pooling"])
async def test_every_field_that_vllm_knows_is_taken_at_its_default(server, kind, where):
    protocol = pytest.importorskip(f"vllm.entrypoints.pooling.{where}.protocol")
    request = getattr(protocol, f"{'Classification' if where == 'classify' else 'Pooling'}{kind}Request")
    chat = [{"role": "user", "content": "w0"}, {"role": "assistant", "content": "w1"}]
    content = {"input": "w0 w1"} if kind == "Completion" else {"messages": chat}
    body = request(**content, use_activation=False).model_dump(mode="json")
    answer = await server.post(f"/{where}", json=body)
    assert answer.status_code == 200, answer.text
    scored = answer.json()["data"][0]["probs" if where == "classify" else "data"]
    assert [scored] == await raw(server, **content)


async def test_a_long_input_is_cut_where_the_request_says_so(server: httpx.AsyncClient) -> None:
    ids = [3 + i % 29 for i in range(300)]
    cut = {"input": ids, "truncate_prompt_tokens": 4}
    assert await raw(server, **cut, truncation_side="left") == await raw(server, input=ids[-4:])
    assert await raw(server, **cut, truncation_side="right") == await raw(server, input=ids[:4])


async def test_a_full_queue_says_when_to_retry_and_evaluation_goes_first(model, path):
    standing = StandingModel(model)
    pairs = batching(standing, max_batch_rows=2, max_queued_rows=4)
    async with pairs as batcher, client_of(model, path, batcher) as client:
        asked = [asyncio.create_task(raw(client, input=[3]))]
        await wait_until(lambda: standing.batches)
        asked += [asyncio.create_task(raw(client, input=[4 + i])) for i in range(4)]
        await wait_until(lambda: len(batcher.waiting) == 4)
        refused = await client.post("/classify", json={"input": [9]})
        assert (refused.status_code, int(refused.headers["Retry-After"]) >= 1) == (429, True)
        asked.pop().cancel()  # who leaves frees the place
        await wait_until(lambda: len(batcher.waiting) == 3)
        asked.append(asyncio.create_task(raw(client, "eval", input=[20])))
        await wait_until(lambda: len(batcher.waiting) == 4)
        standing.go.set()
        await asyncio.gather(*asked)
    assert [20] in standing.batches[1]
    assert sum(map(len, standing.batches)) == 5


async def test_a_row_the_device_cannot_compute_fails_alone(model: ScoringModel, path: Path) -> None:
    standing = StandingModel(model)
    standing.fails_on = 7
    async with batching(standing, max_queued_rows=64) as batcher, client_of(model, path, batcher) as client:

        def ask(length: int) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(client.post("/classify", json={"input": [5] * length}))

        first = ask(5)
        await wait_until(lambda: len(standing.batches) == 1)
        asked = [ask(length) for length in (6, 7, 8, 7, 6)]
        await wait_until(lambda: len(batcher.waiting) == 5)
        standing.go.set()
        answers = await asyncio.gather(*asked)
        await first
    assert [answer.status_code for answer in answers] == [200, 500, 200, 500, 200]
    assert "7 tokens: out of memory" in answers[1].text
    assert len(standing.batches[1]) == 5  # they were one batch


async def test_a_score_that_is_no_number_fails_in_words(model: ScoringModel, path: Path) -> None:
    class Overflowing(StandingModel):
        def score(self, rows: list[list[int]]) -> list[Tensor]:
            scores = [model.score([row])[0] for row in rows]
            return [
                score * float("nan") if len(row) == 7 else score
                for score, row in zip(scores, rows, strict=True)
            ]

    async with batching(Overflowing(model)) as batcher, client_of(model, path, batcher) as client:
        bad = await client.post("/classify", json={"input": [5] * 7})
        good = await client.post("/classify", json={"input": [5] * 6})
    assert (bad.status_code, good.status_code) == (500, 200) and "7 tokens" in bad.json()["error"]["message"]


async def test_a_lone_row_is_computed_at_once(model: ScoringModel) -> None:
    async with batching(model, flush_ms=3_600_000.0) as batcher, asyncio.timeout(120):
        await batcher.score([[5, 6]])


async def test_rows_that_wait_to_fill_a_batch_are_flushed_in_time(model: ScoringModel) -> None:
    standing = StandingModel(model)
    standing.go.set()
    async with batching(standing, flush_ms=300.0) as batcher, asyncio.timeout(120):
        burst = [asyncio.create_task(batcher.score([[5] * (6 + i)])) for i in range(4)]
        await asyncio.gather(*burst)  # a burst, then silence: nobody fills the batch
    assert len(standing.batches) == 1


async def test_the_process_serves_counts_finishes_what_it_took_and_exits_with_0(path, tmp_path):
    process = start_server(path, tmp_path / "log", "--served-model-name", "rm", "--max-batch-rows", "1")
    try:
        url = await wait_until(lambda: server_url(tmp_path / "log"))
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            assert (await client.get("/health")).status_code == 200
            assert len(await raw(client, input=ROWS)) == 3
            figures = text_string_to_metric_families((await client.get("/metrics")).text)
            counted = {s.name: s.value for family in figures for s in family.samples if not s.labels}
            assert counted["tidemill_reward_model_batch_rows_count"] == 3
            asked = [asyncio.create_task(raw(client, input=[[5] * 250] * 20)) for _ in range(8)]
            await wait_until(lambda: _is_computing(client))
            process.send_signal(signal.SIGTERM)
            assert [len(scores) for scores in await asyncio.gather(*asked)] == [20] * 8
        assert await asyncio.to_thread(process.wait, 120) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "/nowhere/at/all"], "the folder does not exist"),
        (
            ["--model", "m", "--max-padding", "2"],
            "argument --max-padding: Input should be less than or equal to 1, got 2",
        ),
        (["--model", "a/m", "--chat-template", "/nowhere"], "cannot read the chat template"),
    ],
)
def test_mistakes_are_answered_with_2_and_no_traceback(arguments: list[str], said: str) -> None:
    command = [sys.executable, "-m", "tidemill.services.reward.model_server", "--port", "0", *arguments]
    ended = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, said in ended.stderr, "Traceback" in ended.stderr) == (2, True, False), (
        ended.stderr
    )


async def _is_computing(client: httpx.AsyncClient) -> bool:
    text = (await client.get("/metrics")).text
    return any(
        line.startswith("tidemill_reward_model_queued_rows") and float(line.split()[-1]) > 100
        for line in text.splitlines()
    )


TOLERANCE = 1e-5
UNLIKE_ROWS = [[5, 6, 7], [9] * 40, [3], [4, 8, 15, 16, 23], [11, 12] * 30]
MAKERS = {
    "one label": (tiny_classifier, {}, AutoModelForSequenceClassification),
    "three labels": (tiny_classifier, {"num_labels": 3}, AutoModelForSequenceClassification),
    "tokens": (tiny_token_scorer, {}, AutoModelForTokenClassification),
    "tokens, two labels": (tiny_token_scorer, {"num_labels": 2}, AutoModelForTokenClassification),
    "encoder": (tiny_encoder, {"num_labels": 2}, AutoModelForSequenceClassification),
}


def plain(model: Any, row: list[int]) -> Tensor:
    """What transformers alone says, one row at a time."""
    with torch.inference_mode():
        scores: Tensor = model(input_ids=torch.tensor([row])).logits[0].float()
        return scores


@pytest.mark.parametrize("name", MAKERS)
def test_scores_equal_a_plain_forward_pass_and_rows_do_not_see_each_other(tmp_path: Path, name: str) -> None:
    make, changes, auto = MAKERS[name]
    path = make(tmp_path / "model", **changes)
    model = ScoringModel(ServerOptions(model=str(path)))
    reference = auto.from_pretrained(path)
    together = model.score(UNLIKE_ROWS)
    for row, scored, alone in zip(
        UNLIKE_ROWS, together, (model.score([row])[0] for row in UNLIKE_ROWS), strict=True
    ):
        assert scored.dtype == torch.float32
        assert (scored - plain(reference, row)).abs().max() < TOLERANCE
        assert (scored - alone).abs().max() < TOLERANCE  # the rows beside it change nothing
    # The test can see a difference: neighbours' scores are far apart.
    assert (together[0].mean() - together[1].mean()).abs() > 100 * TOLERANCE


def test_the_last_token_counts_also_where_it_is_the_padding_id(tmp_path: Path) -> None:
    path = tiny_classifier(tmp_path / "model", pad_token_id=1, eos_token_id=1)
    model = ScoringModel(ServerOptions(model=str(path)))
    (ended,) = model.score([[5, 6, 7, 1]])
    (cut,) = model.score([[5, 6, 7]])
    unpadded = AutoModelForSequenceClassification.from_pretrained(path)
    unpadded.config.pad_token_id = None
    assert (ended - plain(unpadded, [5, 6, 7, 1])).abs().max() < TOLERANCE
    assert (ended - cut).abs().max() > 100 * TOLERANCE


def test_the_head_computes_in_float32_over_a_trunk_in_bfloat16(tmp_path: Path) -> None:
    path = tiny_classifier(tmp_path / "model")
    model = ScoringModel(ServerOptions(model=str(path), dtype="bfloat16"))
    (scored,) = model.score([UNLIKE_ROWS[3]])
    reference = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.bfloat16)
    weights = AutoModelForSequenceClassification.from_pretrained(path).score.weight
    with torch.inference_mode():
        hidden_H = reference.model(torch.tensor([UNLIKE_ROWS[3]])).last_hidden_state[0, -1]
        expected = weights.bfloat16().float() @ hidden_H.float()
    assert hidden_H.dtype == torch.bfloat16
    assert (scored - expected).abs().max() < TOLERANCE
    # All in bfloat16, the score would be rounded to 8 bits.
    assert (scored.bfloat16().float() - scored).abs().max() > 0


def test_weights_go_and_come_back_unchanged(tmp_path: Path) -> None:
    model = ScoringModel(ServerOptions(model=str(tiny_classifier(tmp_path / "model")), share_device=True))
    model.restore()
    before = model.score(UNLIKE_ROWS)
    model.offload()
    model.restore()
    assert all(torch.equal(*pair) for pair in zip(before, model.score(UNLIKE_ROWS), strict=True))


def test_a_model_without_a_trained_head_is_refused(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM; expected \.\.\.ForSequenceClassification"):
        ScoringModel(ServerOptions(model=str(path)))
    with pytest.raises(ConfigError, match=r"no weights for score\.weight: it is not a trained sequence"):
        ScoringModel(ServerOptions(model=str(path), head="sequence"))
    with pytest.raises(ConfigError, match="does not exist"):
        ScoringModel(ServerOptions(model=str(tmp_path / "nowhere")))
