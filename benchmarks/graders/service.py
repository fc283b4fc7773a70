"""Scores answers by a real `tidemill serve-rewards`, with real reward workers and sandbox workers."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.graders.table import FAILED, Answer, Expected

ADDRESS = re.compile(r"scores at (http://\S+/v1/scores)")
TIMEOUT_S = 600.0
STOP_S = 60.0
ATTEMPTS = {"max_attempts": 1, "timeout_s": 300.0}
"""One attempt: what is not a fault of the machine fails every time."""


class _Echo(BaseHTTPRequestHandler):
    """A judge that answers with the last message it gets."""

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        request = json.loads(self.rfile.read(length))
        text = request["messages"][-1]["content"] if "messages" in request else request["prompt"]
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "finish_reason": "stop", "text": text, "message": message}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "choices": [choice]}
        self._send(answer)

    def do_GET(self) -> None:
        self._send({"data": [{"id": "echo"}]})

    def _send(self, tree: Any) -> None:
        body = json.dumps(tree).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def _echo_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def _config(rewards: Sequence[dict[str, Any]], echo_url: str) -> dict[str, Any]:
    """One named reward for each config; each scores the samples of its own data source."""
    named: dict[str, Any] = {}
    for number, reward in enumerate(rewards):
        name = f"r{number}"
        named[name] = ATTEMPTS | reward | {"applies_to": [name]}
        sandbox = named[name].get("sandbox")
        if sandbox is not None:
            # They share a queue: the workers of the first one run the programs of all.
            named[name]["sandbox"] = {"workers": 0} | sandbox
    sandboxes = [reward["sandbox"] for reward in named.values() if "sandbox" in reward]
    if sandboxes:
        sandboxes[0]["workers"] = 2
    servers = {"echo": {"base_urls": [echo_url], "model": "echo", "patience_s": 30.0}}
    is_judged = any("judge" in reward for reward in rewards)
    return {"reward": {"rewards": named, "workers": 1}} | ({"servers": servers} if is_judged else {})


@contextlib.contextmanager
def serving(config: dict[str, Any], folder: Path) -> Iterator[str]:
    """The address of a `tidemill serve-rewards` with this config, which ends with the block."""
    path = folder / "rewards.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "tidemill", "serve-rewards", str(path), "--run-id", "graders"]
    command += ["--port", "0", "--runs-dir", str(folder / "runs")]
    env = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")}
    process = subprocess.Popen(
        command,
        env=env | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    output: list[str] = []
    try:
        address = None
        while address is None:
            line = process.stdout.readline()
            output.append(line)
            if not line:
                raise RuntimeError("tidemill serve-rewards ended: " + "".join(output)[-2000:])
            address = ADDRESS.search(line)
        drain = threading.Thread(target=output.extend, args=(process.stdout,), daemon=True)
        drain.start()
        yield address[1]
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def score_answers(answers: Sequence[Answer]) -> list[tuple[Expected, str]]:
    """Score and error of each answer, in their order."""
    rewards: list[dict[str, Any]] = []
    for answer in answers:
        if answer.reward not in rewards:
            rewards.append(answer.reward)
    samples = [
        {
            "prompt": answer.prompt,
            "completion": answer.completion,
            "ground_truth": answer.ground_truth,
            "extra_info": answer.extra,
            "data_source": f"r{rewards.index(answer.reward)}",
        }
        for answer in answers
    ]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graders-")))
        config = _config(rewards, stack.enter_context(_echo_url()))
        url = stack.enter_context(serving(config, folder))
        response = httpx.post(url, json={"samples": samples}, timeout=TIMEOUT_S)
        if response.status_code != 200:
            raise RuntimeError(f"serve-rewards answered {response.status_code}: {response.text[:2000]}")
        scores = response.json()["scores"]
    return [(FAILED if score["value"] is None else score["value"], score["error"]) for score in scores]
