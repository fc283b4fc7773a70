from http.server import BaseHTTPRequestHandler, HTTPServer

NAMES = ("ebb", "flow", "slack")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path.strip("/")
        text = "\n".join(NAMES) if not name else f"{name} has {sum(map(ord, name))} points"
        self.send_response(200 if not name or name in NAMES else 404)
        self.end_headers()
        self.wfile.write(text.encode())


HTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
