"""`tidemill serve-rewards` as a process: its HTTP endpoint, and the real TRL and verl with it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import psutil
import pytest

from tests.support.recorded import tidemill
from tests.support.servers import free_port
from tests.support.venvs import python_with
from tests.support.waiting import PATIENCE_S
from tidemill.services.reward import adapters

REPO = Path(__file__).resolve().parents[3]
ADAPTERS = Path(adapters.__file__).resolve()
MODEL = REPO / "examples" / "arith" / "model"
FUNCTIONS = """
import os, pathlib, signal

def digits(data_source, solution_str, ground_truth, extra_info=None):
    '''A shaped reward: part of it for any digit, so that groups differ.'''
    if "fail" in (solution_str, ground_truth):
        raise ValueError("cannot score this")
    return float(solution_str.count(str(ground_truth))) + 0.25 * any(c.isdigit() for c in solution_str)


def relative(scores, samples):
    known = [score for score in scores if score is not None]
    return [None if score is None else score - sum(known) / len(known) for score in scores]
"""


class Service:
    def __init__(self, folder: Path, reward: str, *words: str, **env: str) -> None:
        (folder / "functions.py").write_text(FUNCTIONS)
        (folder / "rewards.yaml").write_text(f"reward: {{{reward}}}\nstreams: {{lease_s: 1.0}}\n")
        self.folder, self.port = folder, free_port()
        self.words = ["--run-id", "served", "--port", str(self.port), *words]
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")}
        self.env |= {"TIDEMILL_RUNS_DIR": str(folder / "runs"), "OMP_NUM_THREADS": "1", **env}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def running(self) -> Iterator["Service"]:
        command = [sys.executable, "-m", "tidemill", "serve-rewards", "rewards.yaml", *self.words]
        with (self.folder / "output.txt").open("ab") as output:
            process = subprocess.Popen(command, cwd=self.folder, env=self.env, stdout=output, stderr=output)
        self.pid = process.pid
        try:
            yield self
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0, (self.folder / "output.txt").read_text()

    def scores(self, *samples: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
        answer = self.post({"samples": samples}, **headers)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["scores"])

    def post(self, tree: Any, **headers: str) -> httpx.Response:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return httpx.post(f"{self.url}/v1/scores", json=tree, headers=headers, timeout=PATIENCE_S)
            except httpx.ConnectError:  # it starts
                assert time.monotonic() < deadline, (self.folder / "output.txt").read_text()
                time.sleep(0.1)

    def workers(self) -> list[int]:
        children = psutil.Process(self.pid).children()
        return [child.pid for child in children if "tidemill.services.reward" in child.cmdline()]


def sample(completion: Any, truth: Any = "4", **more: Any) -> dict[str, Any]:
    return {"completion": completion, "ground_truth": truth, **more}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("served")
    reward = "function: 'functions.py:digits', workers: 2, max_attempts: 1, on_failure: drop_group"
    with Service(folder, reward).running() as service:
        service.scores(sample("4"))
        yield service


def test_every_sample_gets_its_own_score_and_a_failure_has_none(service: Service) -> None:
    many = [sample("4" * number) for number in range(50)]
    assert [score["value"] for score in service.scores(*many)] == [0.0, *(n + 0.25 for n in range(1, 50))]
    chat = [{"role": "assistant", "content": "4 and 4"}]
    tools = [{"role": "assistant", "content": "4"}, {"role": "tool", "content": "4"}, *chat]
    found = service.scores(
        sample(chat, prompt=[{"role": "user", "content": "What?"}]),
        sample(tools),
        sample("fail"),
        sample("4", evaluation=True, step=3, data_source="d", extra_info={"a": [1, None]}),
    )
    assert [score["value"] for score in found] == [2.25, 2.25, None, 1.25]
    assert found[2]["status"] == "failed" and "cannot score this" in found[2]["error"]


def test_a_group_that_is_to_be_dropped_has_no_value_at_all_and_others_keep_theirs(service: Service) -> None:
    found = service.scores(
        sample("4", group="a"), sample("fail", group="a"), sample("4", group="b"), sample("4")
    )
    assert [score["value"] for score in found] == [None, None, 1.25, 1.25]


def test_the_endpoint_is_what_its_openapi_says(service: Service) -> None:
    described = httpx.get(f"{service.url}/openapi.json").json()
    schemas = described["components"]["schemas"]

    def check(name: str, tree: Any) -> None:
        jsonschema.validate(
            tree, {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}}
        )

    request = {"samples": [sample("4", prompt="2 + 2 =", group=1), sample("fail")]}
    check("ScoringRequest", request)
    check("ScoringAnswer", service.post(request).json())
    for wrong in ({"samples": []}, {"samples": [{}]}, {"samples": [sample("4", score=1)]}, {"a": 1}):
        with pytest.raises(jsonschema.ValidationError):
            check("ScoringRequest", wrong)
        assert service.post(wrong).status_code == 400
    assert service.post(request, origin="https://example.org").status_code == 403, "pages of a browser"


def test_records_are_those_of_a_run(service: Service) -> None:
    service.scores(sample("44", data_source="seen"))
    runs = service.folder / "runs"
    shown = tidemill(runs, "streams", "tail", "scores", "--run", "served", "-n", "1", "--json")
    assert '"value": 2.25' in shown.stdout, shown.stdout + shown.stderr
    assert tidemill(runs, "status", "served").returncode == 0


def test_a_token_group_functions_an_explicit_value_and_a_second_start(tmp_path: Path) -> None:
    token = "0123456789abcdef-token"
    reward = (
        "function: 'functions.py:digits', max_attempts: 1, on_failure: -1.0, group: 'functions.py:relative'"
    )
    started = Service(tmp_path, reward, TIDEMILL_REWARDS_TOKEN=token)
    shown = {"authorization": f"Bearer {token}"}
    with started.running():
        assert started.post({"samples": [sample("4")]}).status_code == 401
        found = started.scores(*(sample("4" * n, group=7) for n in (1, 3)), sample("fail"), **shown)
        assert [score["value"] for score in found] == [-1.0, 1.0, -1.0]
        assert found[2]["status"] == "failed", "a value that the config gives is said to be one"
    with started.running():
        found = started.scores(*(sample("4" * n, group=7) for n in (2, 4)), **shown)
        assert [score["value"] for score in found] == [-1.0, 1.0]
    done = tidemill(tmp_path / "runs", "streams", "tail", "trajectories", "--run", "served", "--json")
    messages = [json.loads(line)["message"] for line in done.stdout.splitlines()]
    keys = [(message["ticket"], message["index"]) for message in messages]
    assert len(set(keys)) == len(keys) == 5, "no number twice"


def test_trl_trains_the_demos_model_with_the_same_scores_while_a_worker_is_killed(
    service, tmp_path, monkeypatch
):
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    namespace: dict[str, Any] = {}
    exec(FUNCTIONS, namespace)
    monkeypatch.setenv("TIDEMILL_REWARDS_URL", service.url)
    kinds: dict[str, list[float | None]] = {"plain": [], "asynchronous": []}
    seen: list[float] = []

    def plain(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
        if not seen:
            # Stopped, it is still given samples, as a reader that waits; another takes them over from it.
            victim = service.workers()[0]
            os.kill(victim, signal.SIGSTOP)
            threading.Timer(0.5, os.kill, (victim, signal.SIGKILL)).start()
        found = adapters.reward(prompts, completions, **columns)
        kinds["plain"] += found
        truths = columns["answer"]
        seen.extend(
            namespace["digits"]("", text, truth) for text, truth in zip(completions, truths, strict=True)
        )
        return found

    async def asynchronous(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
        found = await adapters.reward_async(prompts, completions, **columns)
        kinds["asynchronous"] += found
        return found

    rows = [json.loads(line) for line in (MODEL.parent / "train.jsonl").read_text().splitlines()[:8]]
    rows = [{"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]} for row in rows]
    args = trl.GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        max_steps=3,
        use_cpu=True,
        bf16=False,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        reward_funcs=[plain, asynchronous],
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
    )
    before = len(service.workers())
    trainer.train()
    assert len(seen) == 24 and kinds["plain"] == seen and kinds["asynchronous"] == seen
    assert len(set(seen)) > 1 and before == 2
    logged = [row["rewards/plain/mean"] for row in trainer.state.log_history if "rewards/plain/mean" in row]
    assert logged == pytest.approx([sum(seen[n : n + 8]) / 8 for n in (0, 8, 16)])
    assert "ended by SIGKILL" in (service.folder / "output.txt").read_text()


def test_an_adapter_sends_again_what_a_service_that_was_killed_has_not_answered(tmp_path, monkeypatch):
    started = Service(tmp_path, "function: 'functions.py:digits', delay_s: [1.0, 1.0]")
    monkeypatch.setenv("TIDEMILL_REWARDS_URL", started.url)
    with futures.ThreadPoolExecutor() as pool:
        with contextlib.suppress(AssertionError), started.running():
            assert started.scores(sample("4"))[0]["value"] == 1.25
            asked = pool.submit(adapters.compute_score_plain, "d", "44", "4")
            assert not futures.wait([asked], 0.3).done
            left = psutil.Process(started.pid).children(recursive=True)
            os.kill(started.pid, signal.SIGKILL)
        psutil.wait_procs(left, PATIENCE_S)  # its guard ends them, and Redis last
        with started.running():
            assert asked.result(PATIENCE_S) == 2.25


def test_trl_leaves_out_what_has_failed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_REWARDS_URL", service.url)
    columns = {"ground_truth": ["4", "4", "5"], "trainer_state": None, "log_extra": print}
    assert adapters.reward(["a", "a", "b"], ["4", "fail", "5"], **columns) == [None, None, 1.25]


def test_verls_reward_loop_gets_the_same_scores_and_never_a_zero_for_a_failure(service: Service) -> None:
    packages = ["verl==0.9.1", "tensordict", "pyvers", "orjson", "ray", "omegaconf", "hydra-core"]
    packages += ["antlr4-python3-runtime==4.9.3", "codetiming", "pylatexenc"]
    python = python_with("verl", "pylatexenc, pyvers", ["--no-deps", *packages])
    texts = ["4", "the answer is 44", "none"]
    rows = [
        {"solution": text, "data_source": "d", "ground_truth": "4", "extra_info": {"index": n}}
        for n, text in enumerate(texts)
    ]
    site = Path(httpx.__file__).parents[1]
    env = {
        **os.environ,
        "TIDEMILL_REWARDS_URL": service.url,
        "PYTHONPATH": str(site),
        "TOKENIZERS_PARALLELISM": "0",
    }

    def loop(function: str, samples: list[dict[str, Any]]) -> "subprocess.CompletedProcess[str]":
        command = [
            str(python),
            str(REPO / "tests/support/verl_rewards.py"),
            str(MODEL),
            str(ADAPTERS),
            function,
        ]
        return subprocess.run(
            command, input=json.dumps(samples), env=env, capture_output=True, text=True, timeout=PATIENCE_S
        )

    for function in ("compute_score", "compute_score_plain"):
        done = loop(function, rows)
        assert done.returncode == 0, done.stderr[-2000:]
        assert json.loads(done.stdout.splitlines()[-1]) == [1.25, 2.25, 0.0]
    failed = loop("compute_score", [*rows, {**rows[0], "ground_truth": "fail"}])
    assert failed.returncode and "cannot score this" in failed.stderr
