"""Pictures of URLs: bounded in size and time, from public addresses only, over real connections."""

import errno
import ipaddress
import os
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.servers import make_certificate
from tidemill.common.config.images import ImagesConfig
from tidemill.common.errors import BrokenImageError, StoreError
from tidemill.common.images import fetching
from tidemill.common.images.fetching import fetch, is_public

HERE = ImagesConfig(private_addresses=True, max_file_mb=0.01, fetch_timeout_s=5.0)
CONTENT = b"x" * 2000

Answer = Callable[[BaseHTTPRequestHandler], None]


def sends(status: int = 200, content: bytes = CONTENT, **headers: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(content)

    return answer


class Server:
    """Answers each path by its function; counts requests."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.answers: dict[str, Answer] = {}
        self.requests: list[str] = []
        self.hosts: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests.append(self.path)
                outer.hosts.append(self.headers["Host"])
                outer.answers[self.path](self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "FIRST_PAUSE_S", 0.01)


def reason_of(url: str, config: ImagesConfig = HERE) -> str:
    with pytest.raises(BrokenImageError) as caught:
        fetch(url, config)
    return str(caught.value)


def test_a_picture_is_fetched_with_what_its_server_calls_it(server):
    server.answers = {"/a?b=1": sends(Content_Type="image/png; x=y"), "/c": sends()}
    assert fetch(server.url("/a?b=1"), HERE) == fetching.Fetched(CONTENT, "PNG")
    assert fetch(server.url("/c"), HERE) == fetching.Fetched(CONTENT, "")


@pytest.mark.parametrize(
    "answer, words",
    [
        (sends(404), "status 404"),
        (sends(403), "status 403"),
        (sends(Content_Type="text/html"), "text/html"),
        (sends(Content_Encoding="gzip"), "compresses"),
        (sends(content=b"x" * 20_000), "0.01 MB"),
        (sends(301, Location="file:///etc/passwd"), "expected http"),
        (sends(301, Location="/same"), "redirected more than"),
    ],
)
def test_answers_that_are_no_picture_are_refused_at_once(server, answer, words):
    server.answers = {"/": answer, "/same": answer}
    assert words in reason_of(server.url("/"))
    assert len(server.requests) <= fetching.MAX_REDIRECTS + 1


def test_an_answer_without_end_is_cut_at_the_limit_of_bytes(server):
    def endless(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        for _ in range(10_000):
            request.wfile.write(b"x" * 1000)

    server.answers = {"/": endless}
    assert "0.01 MB" in reason_of(server.url("/"))


def test_a_server_that_sends_byte_after_byte_is_left_in_time(server):
    stopped = threading.Event()

    def drip(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        while not stopped.wait(0.02):
            request.wfile.write(b"x")
            request.wfile.flush()

    server.answers = {"/": drip}
    begun = time.monotonic()
    try:
        reason = reason_of(server.url("/"), HERE.model_copy(update={"fetch_timeout_s": 0.3}))
    finally:
        stopped.set()
    assert "longer than 0.3 s" in reason
    assert time.monotonic() - begun < 30


def test_a_server_that_is_busy_is_asked_again(server):
    answers = iter([sends(503), sends(429), sends()])
    server.answers = {"/": lambda request: next(answers)(request)}
    assert fetch(server.url("/"), HERE).content == CONTENT
    server.answers = {"/": sends(503)}
    assert "status 503" in reason_of(server.url("/"))
    assert len(server.requests) == 3 + fetching.NUM_TRIES


def test_an_answer_that_breaks_off_is_asked_for_again(server):
    answers = iter([sends(Content_Length="5000"), sends()])
    server.answers = {"/": lambda request: next(answers)(request)}
    assert fetch(server.url("/"), HERE).content == CONTENT


def test_private_addresses_are_refused_before_a_connection(server):
    public_only = HERE.model_copy(update={"private_addresses": False})
    for host in ("127.0.0.1", "localhost", "[::1]", "0.0.0.0", "[::ffff:127.0.0.1]", "2130706433", "127.1"):
        reason = reason_of(f"http://{host}:{server.port}/", public_only)
        assert "not a public address" in reason, host
    assert not server.requests


def test_all_addresses_of_a_name_are_checked_and_the_checked_one_is_connected(server, monkeypatch):
    """A name is resolved once: a second answer, with another address, is never asked for."""
    look_ups = []

    def resolve(answers):
        def getaddrinfo(host, port, *_, **__):
            look_ups.append(host)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in answers]

        return getaddrinfo

    public_only = HERE.model_copy(update={"private_addresses": False})
    monkeypatch.setattr(fetching.socket, "getaddrinfo", resolve(["93.184.216.34", "10.0.0.1"]))
    assert "10.0.0.1" in reason_of("http://pictures.example/", public_only)
    connected = []

    def connect(address, **_):
        connected.append(address)
        return socket.socket()

    monkeypatch.setattr(fetching.socket, "getaddrinfo", resolve(["93.184.216.34"]))
    monkeypatch.setattr(fetching.socket, "create_connection", connect)
    look_ups.clear()
    reason_of("http://pictures.example/", public_only)
    assert set(connected) == {("93.184.216.34", 80)}
    assert look_ups == ["pictures.example"] * len(connected)


def test_the_server_gets_the_name_that_the_url_has(server):
    server.answers = {"/": sends()}
    fetch(f"http://localhost:{server.port}/", HERE)
    assert server.hosts == [f"localhost:{server.port}"]


def test_a_redirect_to_a_private_address_is_refused(server, monkeypatch):
    """The first address counts as public here; that of the redirect is checked by the same rule."""
    monkeypatch.setattr(fetching, "is_public", lambda address: str(address) == "127.0.0.1")
    public_only = HERE.model_copy(update={"private_addresses": False})
    server.answers = {
        "/": sends(302, Location="http://169.254.169.254/latest/meta-data/"),
        "/next": sends(302, Location="/"),
    }
    assert "169.254.169.254" in reason_of(server.url("/next"), public_only)
    assert server.requests == ["/next", "/"]


@pytest.fixture
def secure_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """With a certificate for 127.0.0.1, which is trusted here."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl makes a certificate")
    certificate, key = make_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    running = Server(context)
    yield running
    running.close()


def test_a_picture_is_fetched_over_tls(secure_server):
    secure_server.answers = {"/": sends(Content_Type="image/png")}
    assert fetch(f"https://127.0.0.1:{secure_server.port}/", HERE).content == CONTENT


def test_a_certificate_of_another_host_or_of_nobody_is_refused_before_a_request(secure_server, monkeypatch):
    reason = reason_of(f"https://localhost:{secure_server.port}/")
    assert "certificate of localhost is refused" in reason
    monkeypatch.delenv("SSL_CERT_FILE")
    assert "certificate of 127.0.0.1 is refused" in reason_of(f"https://127.0.0.1:{secure_server.port}/")
    assert not secure_server.requests


def test_an_address_is_private_over_tls_too_also_behind_a_redirect(server, secure_server, monkeypatch):
    public_only = HERE.model_copy(update={"private_addresses": False})
    secure = f"https://127.0.0.1:{secure_server.port}/"
    assert "not a public address" in reason_of(secure, public_only)
    monkeypatch.setattr(fetching, "is_public", lambda address: address.version == 4)
    secure_server.answers = {"/": sends(302, Location=f"http://[::ffff:127.0.0.1]:{server.port}/")}
    assert "not a public address" in reason_of(secure, public_only)
    assert not server.requests


@pytest.mark.parametrize(
    "url, words",
    [
        ("http://user:secret@example.com/a.png", "password"),
        ("http://example.com:port/a.png", "cannot be read"),
        ("http://example.com/a b.png", "percent-encode"),
        ("http://exämple.com/a.png", "percent-encode"),
        ("http:///a.png", "expected http"),
        ("http://example.com/a\r\nHost: x", "percent-encode"),
        ("ftp://example.com/a.png", "expected http"),
    ],
)
def test_odd_urls_are_refused_without_a_look_up(url, words, monkeypatch):
    monkeypatch.setattr(fetching.socket, "getaddrinfo", None)
    reason = reason_of(url)
    assert words in reason and "secret" not in reason


@pytest.mark.parametrize("call", ["getaddrinfo", "create_connection"])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_a_shortage_of_this_machine_is_no_pictures_fault(server, monkeypatch, call, number):
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fetching.socket, call, fail)
    with pytest.raises(StoreError, match=os.strerror(number)):
        fetch(server.url("/"), HERE)


def test_nothing_that_listens_is_a_reason():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert "no connection" in reason_of(f"http://127.0.0.1:{port}/")


@pytest.mark.parametrize(
    "address, expected",
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("64:ff9b::808:808", True),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("127.8.8.8", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("255.255.255.255", False),
        ("224.0.0.1", False),
        ("240.0.0.1", False),
        ("::", False),
        ("::1", False),
        ("fe80::1", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("fec0::1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:169.254.169.254", False),
        ("::10.0.0.1", False),
        ("64:ff9b::a00:1", False),
        ("64:ff9b:1::a00:1", False),
        ("2002:a00:1::", False),
        ("2001:0:1:2:3:4:5:6", False),
    ],
)
def test_only_addresses_of_the_internet_are_public(address, expected):
    assert is_public(ipaddress.ip_address(address)) == expected
