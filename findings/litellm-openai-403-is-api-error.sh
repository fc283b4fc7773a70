#!/usr/bin/env bash
# litellm: an answer 403 raises PermissionDeniedError with `anthropic/...`, and APIError with `openai/...`, which is no PermissionDeniedError.
# Expected: one class. 400, 401, 404 and 429 have the same class with both. Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check litellm==1.110.2
cd "$folder"
LITELLM_LOCAL_MODEL_COST_MAP=True venv/bin/python - 2>/dev/null <<'PYTHON'
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import litellm

litellm.suppress_debug_info = True


class Refuses(BaseHTTPRequestHandler):
    """Answers with the status that is the first part of the path."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps({"error": {"message": "refused", "type": "refused", "code": "refused"}}).encode()
        self.send_response(int(self.path.split("/")[1]))
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def error_of(provider, status):
    address = f"http://127.0.0.1:{server.server_port}/{status}/v1"
    messages = [{"role": "user", "content": "hello"}]
    try:
        litellm.completion(
            model=f"{provider}/any", api_base=address, api_key="any", messages=messages, max_retries=0, num_retries=0
        )
    except Exception as error:
        return type(error)


server = ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
threading.Thread(target=server.serve_forever, daemon=True).start()
print("litellm", version("litellm"))
classes = {}
for status in (400, 401, 403, 404, 429):
    classes[status] = [error_of(provider, status) for provider in ("openai", "anthropic")]
    print(status, *(error.__name__ for error in classes[status]))
of_openai, of_anthropic = classes[403]
is_same_otherwise = all(first is second for status, (first, second) in classes.items() if status != 403)
is_denied = of_anthropic is litellm.PermissionDeniedError
sys.exit(0 if is_denied and not issubclass(of_openai, litellm.PermissionDeniedError) and is_same_otherwise else 1)
PYTHON
echo "as described"
