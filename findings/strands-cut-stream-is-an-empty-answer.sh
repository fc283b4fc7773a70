#!/usr/bin/env bash
# strands-agents: a stream of an OpenAI server that ends before its last chunk raises nothing: the agent's result is a message without any
# content, though text had come, and its stop_reason is the one of a whole answer. Expected: an error, or the text that came.
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'strands-agents[openai]==1.62.0' openai==2.54.0
cd "$folder"
HOME=$folder venv/bin/python - <<'PYTHON'
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

from strands import Agent
from strands.models.openai import OpenAIModel

HEAD = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "any"}
CHOICE = {"index": 0, "delta": {"role": "assistant", "content": "The answer is"}, "finish_reason": None}


class Cuts(BaseHTTPRequestHandler):
    """Sends the beginning of a stream, and ends it as a whole one, as proxies do whose server has gone."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        body = f"data: {json.dumps({**HEAD, 'choices': [CHOICE]})}\n\n".encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Cuts)
threading.Thread(target=server.serve_forever, daemon=True).start()
arguments = {"base_url": f"http://127.0.0.1:{server.server_port}/v1", "api_key": "any"}
model = OpenAIModel(model_id="any", client_args=arguments)
print("strands-agents", version("strands-agents"))
try:
    result = Agent(model=model, callback_handler=None)("hello")
except Exception as error:
    print("raised", type(error).__name__, error)
    sys.exit(1)
print("content:", result.message["content"], "| stop_reason:", result.stop_reason)
sys.exit(0 if not result.message["content"] and result.stop_reason == "end_turn" else 1)
PYTHON
echo "as described"
