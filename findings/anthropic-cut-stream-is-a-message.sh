#!/usr/bin/env bash
# anthropic: a stream that ends before `message_stop`, and before a block's end, raises nothing: `get_final_message` returns the half text
# as a message, with the `stop_reason` None. Expected: an error, as where the connection breaks. Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check anthropic==2.14.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anthropic

USAGE = {"input_tokens": 1, "output_tokens": 1}
MESSAGE = {"id": "m", "type": "message", "role": "assistant", "model": "any", "content": [], "usage": USAGE}
EVENTS = [
    {"type": "message_start", "message": {**MESSAGE, "stop_reason": None, "stop_sequence": None}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "The answer is"}},
]


class Cuts(BaseHTTPRequestHandler):
    """Sends the beginning of a stream, and ends it as a whole one, as proxies do whose server has gone."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        body = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in EVENTS).encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Cuts)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.server_port}", api_key="any", max_retries=0)
asked = {"model": "any", "max_tokens": 99, "messages": [{"role": "user", "content": "hello"}]}
print("anthropic", anthropic.__version__)
try:
    with client.messages.stream(**asked) as stream:
        message = stream.get_final_message()
except Exception as error:
    print("raised", type(error).__name__, error)
    sys.exit(1)
print("text:", message.content[0].text, "| stop_reason:", message.stop_reason)
sys.exit(0 if message.content[0].text == "The answer is" and message.stop_reason is None else 1)
PYTHON
echo "as described"
