"""`tidemill serve-rewards` as a process: its HTTP endpoint, and the real TRL and verl with it."""

import asyncio
import contextlib
import http.client
import json
import os
import select
import signal
import socket
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
from tests.support.waiting import PATIENCE_S, wait_until
from tidemill.common.process.json_api import MAX_BODY_BYTES
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.streams import Entry, read_range
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Score
from tidemill.services.console.serve.gateway import MAX_WAITING
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


FINISHING = """
import os, pathlib, time

FOLDER = pathlib.Path(__file__).parent


def note(name, line):
    with (FOLDER / name).open("a") as file:
        file.write(f"{line}\\n")


def counted(data_source, solution_str, ground_truth, extra_info=None):
    note("counted.txt", solution_str)
    return float(solution_str)


def relative(scores):
    '''Says which worker finishes a group, and waits.'''
    note("finishing.txt", os.getppid())
    while not (FOLDER / "go").exists():
        time.sleep(0.02)
    return [score - min(scores) for score in scores]
"""


class Service:
    def __init__(self, folder: Path, reward: str, *words: str, run_id: str = "served", **env: str) -> None:
        (folder / "functions.py").write_text(FUNCTIONS)
        (folder / "rewards.yaml").write_text(f"reward: {{{reward}}}\nstreams: {{lease_s: 1.0}}\n")
        self.folder = folder
        self.port = free_port()
        self.words = ["--run-id", run_id, "--port", str(self.port), *words]
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
        return [child.pid for child in self.children_of("tidemill.services.reward")]

    def children_of(self, module: str) -> list[psutil.Process]:
        children = psutil.Process(self.pid).children()
        return [child for child in children if module in child.cmdline()]


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
    scored = service.scores(
        sample(chat, prompt=[{"role": "user", "content": "What?"}]),
        sample(tools),
        sample("fail"),
        sample("4", evaluation=True, step=3, data_source="d", extra_info={"a": [1, None]}),
    )
    assert [score["value"] for score in scored] == [2.25, 2.25, None, 1.25]
    assert scored[2]["status"] == "failed" and "cannot score this" in scored[2]["error"]


def test_a_group_that_is_to_be_dropped_has_no_value_at_all_and_others_keep_theirs(service: Service) -> None:
    scored = service.scores(
        sample("4", group="a"), sample("fail", group="a"), sample("4", group="b"), sample("4")
    )
    assert [score["value"] for score in scored] == [None, None, 1.25, 1.25]


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
    output = tidemill(runs, "streams", "tail", "scores", "--run", "served", "-n", "1", "--json")
    assert '"value": 2.25' in output.stdout, output.stdout + output.stderr
    assert tidemill(runs, "status", "served").returncode == 0


def test_a_token_group_functions_an_explicit_value_and_a_second_start(tmp_path: Path) -> None:
    token = "0123456789abcdef-token"
    reward = (
        "function: 'functions.py:digits', max_attempts: 1, on_failure: -1.0, group: 'functions.py:relative'"
    )
    started = Service(tmp_path, reward, TIDEMILL_REWARDS_TOKEN=token)
    headers = {"authorization": f"Bearer {token}"}
    with started.running():
        assert started.post({"samples": [sample("4")]}).status_code == 401
        scored = started.scores(*(sample("4" * n, group=7) for n in (1, 3)), sample("fail"), **headers)
        assert [score["value"] for score in scored] == [-1.0, 1.0, -1.0]
        assert scored[2]["status"] == "failed", "a value that the config gives is said to be one"
    with started.running():
        scored = started.scores(*(sample("4" * n, group=7) for n in (2, 4)), **headers)
        assert [score["value"] for score in scored] == [-1.0, 1.0]
    done = tidemill(tmp_path / "runs", "streams", "tail", "trajectories", "--run", "served", "--json")
    messages = [json.loads(line)["message"] for line in done.stdout.splitlines()]
    keys = [(message["ticket"], message["index"]) for message in messages]
    assert len(set(keys)) == len(keys) == 5, "no number twice"


def test_what_can_never_be_scored_at_once_is_refused_with_the_limit_and_the_remedy(service: Service) -> None:
    refused = service.post({"samples": [{"completion": ""}] * (MAX_WAITING + 1)})
    assert refused.status_code == 413, refused.text
    assert (
        "65,537 samples" in refused.text and "65,536" in refused.text and "several requests" in refused.text
    )
    assert service.scores(sample("4"))[0]["value"] == 1.25


def test_a_body_above_the_limit_is_refused_before_it_is_read(service: Service) -> None:
    """Nothing of it is ever sent: clients such as curl ask first."""
    head = (
        "POST /v1/scores HTTP/1.1\r\nHost: 127.0.0.1\r\nExpect: 100-continue\r\n"
        f"Content-Length: {MAX_BODY_BYTES + 1}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", service.port), PATIENCE_S) as client:
        client.sendall(head.encode())
        answer = client.makefile("rb").read()
    assert b" 413 " in answer.splitlines()[0], answer
    assert b"268,435,456 bytes" in answer and b"several requests" in answer


def test_while_a_large_request_is_parsed_others_are_answered(service: Service) -> None:
    large = json.dumps({"samples": [sample("4" * 999, group=number // 4) for number in range(400)]})
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=PATIENCE_S)

    def values() -> list[float]:
        return [score["value"] for score in json.loads(connection.getresponse().read())["scores"]]

    with contextlib.closing(connection):
        connection.request("POST", "/v1/scores", large)
        assert values() == [999.25] * 400
        (reader,) = service.children_of("tidemill.services.console.serve.request_reader")
        reader.suspend()  # parsing takes as long as it is so
        try:
            connection.request("POST", "/v1/scores", large)
            for _ in range(3):
                assert service.scores(sample("44"))[0]["value"] == 2.25
            assert select.select([connection.sock], [], [], 0)[0] == []
        finally:
            reader.resume()
        assert values() == [999.25] * 400


def test_a_process_that_dies_while_it_reads_costs_one_attempt(service: Service) -> None:
    samples = [sample("4" * 999) for _ in range(100)]
    assert len(service.scores(*samples)) == 100
    (reader,) = service.children_of("tidemill.services.console.serve.request_reader")
    reader.suspend()
    with futures.ThreadPoolExecutor() as pool:
        asked = pool.submit(service.post, {"samples": samples})
        assert service.scores(sample("4"))[0]["value"] == 1.25
        reader.kill()
        answer = asked.result()
    assert answer.status_code == 503 and "SIGKILL" in answer.text
    assert answer.headers["retry-after"] == "1"
    assert len(service.scores(*samples)) == 100
    refused = service.post({"samples": [*samples, {"completion": 1}]})
    assert refused.status_code == 400 and "samples.100.completion" in refused.text


async def test_a_worker_that_is_killed_as_it_finishes_a_group_costs_nothing_and_nothing_stays_in_redis(
    broker: Broker, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    (tmp_path / "finishing.py").write_text(FINISHING)
    reward = "function: 'finishing.py:counted', group: 'finishing.py:relative', workers: 2, processes: 1"
    keys = Keys("served-finishing")
    started = Service(tmp_path, reward, run_id=keys.run_id, TIDEMILL_REDIS_URL=redis_server.url)
    finishing = tmp_path / "finishing.txt"
    asked = [sample(str(number), group="g") for number in (3, 1, 4, 2)]
    with started.running():
        posting = asyncio.create_task(asyncio.to_thread(started.scores, *asked))
        await wait_until(lambda: finishing.exists() and finishing.read_text().endswith("\n"))
        (killed,) = map(int, finishing.read_text().split())
        assert killed in started.workers()
        results = keys.results(0)
        assert await broker.execute("HLEN", results) == 5  # four results, and which trajectory was last
        os.kill(killed, signal.SIGKILL)
        (tmp_path / "go").touch()
        assert [score["value"] for score in await posting] == [2.0, 0.0, 3.0, 1.0]
        assert len(set(finishing.read_text().split())) == 2, "another worker has finished the group"
        assert sorted((tmp_path / "counted.txt").read_text().split()) == ["1", "2", "3", "4"], "scored once"
        entries = await read_range(broker, keys.scores(), Score)
        scored_keys = [entry.message.key for entry in entries if isinstance(entry, Entry)]
        assert scored_keys == [(0, index) for index in range(4)], "0 lost, 0 twice"

        async def is_clean() -> bool:
            return not await broker.execute("EXISTS", results, keys.result_tickets())

        await wait_until(is_clean)


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
        scored = adapters.reward(prompts, completions, **columns)
        kinds["plain"] += scored
        truths = columns["answer"]
        seen.extend(
            namespace["digits"]("", text, truth) for text, truth in zip(completions, truths, strict=True)
        )
        return scored

    async def asynchronous(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
        scored = await adapters.reward_async(prompts, completions, **columns)
        kinds["asynchronous"] += scored
        return scored

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
            children = psutil.Process(started.pid).children(recursive=True)
            os.kill(started.pid, signal.SIGKILL)
        psutil.wait_procs(children, PATIENCE_S)  # its guard ends them, and Redis last
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
