#!/bin/bash
set -e
cat > server.py <<'P'
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        is_known = self.path == "/hello"
        self.send_response(200 if is_known else 404)
        self.end_headers()
        self.wfile.write(b"hello" if is_known else b"")

HTTPServer(("127.0.0.1", 8080), Handler).serve_forever()
P
setsid nohup python3 server.py > server.log 2>&1 < /dev/null &
for _ in $(seq 50); do curl -s localhost:8080/ && break || sleep 0.1; done
