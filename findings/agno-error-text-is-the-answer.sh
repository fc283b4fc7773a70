#!/usr/bin/env bash
# agno: where the model's server answers 500, `agent.run` raises nothing: the text of the error is the `content` of its result, as an answer
# would be. Expected: an exception, or no content. Only `status` says that it failed. Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check agno==3.1.10 openai==3.57.0
cd "$folder"
HOME=$folder venv/bin/python - 2>/dev/null <<'PYTHON'
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

from agno.agent import Agent
from agno.models.openai import OpenAIChat

TEXT = "the disk is full"


class Fails(BaseHTTPRequestHandler):
    """Answers 500."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps({"error": {"message": TEXT, "type": "server_error", "code": "any"}}).encode()
        self.send_response(500)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Fails)
threading.Thread(target=server.serve_forever, daemon=True).start()
address = f"http://127.0.0.1:{server.server_port}/v1"
model = OpenAIChat(id="any", base_url=address, api_key="any", max_retries=0)
result = Agent(model=model, telemetry=False).run("hello")
print("agno", version("agno"))
print("content:", result.content)
print("status: ", result.status)
sys.exit(0 if TEXT in str(result.content) else 1)
PYTHON
echo "as described"
