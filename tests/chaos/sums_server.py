"""The server that `sums.py` plays against: it alone knows the sums and how often each was tried.

    python -m tests.chaos.sums_server PORT

What it knows dies with it: a session that it held can only be played again, in another one.
"""

import json
import re
import sys
import uuid
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

RIGHT = 1.0
WRONG = 0.125
"""No reward is 0, so a score of 0 can only come from somebody who made it up."""


@dataclass
class Sum:
    prompt: str
    answer: str
    num_tries: int = 0

    def judge(self, text: str) -> tuple[str, float, bool]:
        self.num_tries += 1
        if re.findall(r"-?\d+", text)[-1:] == [self.answer]:
            return "", RIGHT / self.num_tries, True
        return self.prompt, WRONG, self.num_tries > 1


SESSIONS: dict[str, Sum] = {}


class Handler(BaseHTTPRequestHandler):
    """POST /sessions begins one, POST /sessions/ID answers in it."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = self.path.removeprefix("/sessions").strip("/")
        if not name:
            name = uuid.uuid4().hex
            SESSIONS[name] = Sum(asked["prompt"], asked["answer"], asked["tries"])
            self._answer(200, name)
        elif session := SESSIONS.get(name):
            answer = session.judge(asked["text"])
            if answer[-1]:
                del SESSIONS[name]
            self._answer(200, answer)
        else:
            self._answer(404, "this server does not know the session: it may have been restarted")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: there are thousands."""

    def _answer(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    request_queue_size = 512


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
