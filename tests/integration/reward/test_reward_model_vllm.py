"""vLLM's pooling server and this project's give the same scores, those of a plain forward pass."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.reward.test_model_rewards import SAMPLE, reward_of
from tests.support.reward_models import tiny_classifier
from tests.support.vllm_machine import need_vllm
from tests.support.waiting import wait_until
from tidemill.common.config.reward_kinds import RewardModelConfig
from tidemill.common.process.vllm_machine import machine_environment
from tidemill.services.reward.model_server.options import ServerOptions
from tidemill.services.reward.model_server.requests import ClassifyRequest, Inputs
from tidemill.services.reward.model_server.scoring_model import ScoringModel
from tidemill.services.reward.remote.reward_model import make_body

need_vllm()

TOLERANCE = 1e-3
"""vLLM's kernels are others; scores of the tiny model are around 1."""
ROWS = [[5, 6, 7], [9] * 40, [3], [4, 8, 15, 16, 23]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_classifier(tmp_path_factory.mktemp("classifier"), num_labels=2)


@pytest.fixture(scope="module")
def url(path: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free_socket:
        port = free_socket.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path)]
    command += ["--runner", "pooling", "--enforce-eager", "--dtype", "float32", "--port", str(port)]
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }
    log = path / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--max-model-len", "128"],
            env=machine_environment(os.environ | variables),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    yield f"http://127.0.0.1:{port}"
    os.killpg(process.pid, 9)
    process.wait()


async def test_vllm_and_this_project_agree(url: str, path: Path) -> None:
    model = ScoringModel(ServerOptions(model=str(path)))
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await wait_until(lambda: _is_healthy(client), 500)
        answer = await client.post("/classify", json={"input": ROWS, "use_activation": False})
        items = answer.json()["data"]
        for item, scores in zip(items, model.score(ROWS), strict=True):
            assert item["probs"] == pytest.approx(scores.tolist(), abs=TOLERANCE)
        assert max(abs(value) for item in items for value in item["probs"]) > 100 * TOLERANCE
    async with httpx.AsyncClient(timeout=60) as http:  # the same as a run's reward
        rewards = [reward_of(url, http, input=sent, label=1) for sent in ("ids", "chat")]
        outcomes = [await reward.score(SAMPLE) for reward in rewards]
        for reward in rewards:
            await reward._servers.close()
    inputs = Inputs(str(path), model.vocab_size, 128)
    (chat,) = inputs.rows(ClassifyRequest(**make_body(SAMPLE, RewardModelConfig(servers="rm"))))
    for outcome, scores in zip(outcomes, model.score([[5, 6, 7], chat]), strict=True):
        assert outcome.value == pytest.approx(float(scores[1]), abs=TOLERANCE)


async def _is_healthy(client: httpx.AsyncClient) -> Any:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.HTTPError:
        return False
