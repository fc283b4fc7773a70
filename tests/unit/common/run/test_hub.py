"""A model of the hub that cannot be had is refused within seconds; what waits for the hub says so."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from tidemill.common.errors import ConfigError
from tidemill.common.run.hub import check_model_on_hub, told_while_waiting

ANSWERS = {"known": (200, ""), "gated": (403, "GatedRepo")}
"""Model -> status and error code, as the hub answers; it has no others."""


class Hub(BaseHTTPRequestHandler):
    release = threading.Event()

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if name == "silent":
            self.release.wait(30)
            return
        code, error = ANSWERS.get(name, (404, "RepoNotFound"))
        body = b'{"id": "a/known", "siblings": []}'
        self.send_response(code)
        if error:
            self.send_header("X-Error-Code", error)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Hub.release.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    try:
        yield
    finally:
        Hub.release.set()
        server.shutdown()
        server.server_close()


def test_a_model_that_the_hub_has_is_fine(hub: None) -> None:
    check_model_on_hub("a/known")


@pytest.mark.parametrize(
    ("name", "words"), [("a/gated", "HF_TOKEN"), ("a/nothing", "no such model"), ("a/silent", "HF_ENDPOINT")]
)
def test_one_that_cannot_be_had_is_refused_with_the_remedy(hub: None, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        check_model_on_hub(name, timeout_s=0.2)
    assert f"model.path {name}" in str(caught.value)


def test_a_hub_that_is_not_there_is_named(hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9 does not answer"):
        check_model_on_hub("a/known")


def test_offline_only_the_cache_is_asked(hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        check_model_on_hub("a/known")


def test_waiting_for_the_hub_is_said_at_doublings(capsys: pytest.CaptureFixture[str]) -> None:
    with told_while_waiting("hub:a/b", first_s=0.05):
        threading.Event().wait(0.35)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(". ")[0] for line in lines][:3] == [
        f"hub:a/b: waiting for the hub for {seconds} s" for seconds in (0.05, 0.1, 0.2)
    ]
    with told_while_waiting("hub:a/b"):
        pass
    assert not capsys.readouterr().err
