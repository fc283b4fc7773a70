"""Who may read the pages of `tidemill web`, and what goes with every answer."""

import base64
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tidemill.common.errors import ConfigError
from tidemill.services.console.web.runs import Catalog
from tidemill.services.console.web.server import Access, create_app

FIXED = "a-token-of-16-characters-or-more"


def client_of(access: Access, runs: Path, base: str = "http://127.0.0.1:8420") -> TestClient:
    return TestClient(create_app(Catalog(runs), access), base_url=base, follow_redirects=False)


@pytest.fixture
def own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.delenv("TIDEMILL_REDIS_URL", raising=False)
    return client_of(Access.of("127.0.0.1"), tmp_path)


def test_on_this_machine_no_token_is_asked_for_and_nothing_but_reading_is_answered(
    own_machine: TestClient,
) -> None:
    assert own_machine.get("/").status_code == 200 and "There is no run" in own_machine.get("/").text
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        answer = own_machine.request(method, "/")
        assert answer.status_code == 405 and answer.headers["allow"] == "GET, HEAD", method


def test_a_name_that_was_pointed_here_is_refused_and_others_ask_under_addresses_and_given_names(own_machine):
    for host in ("localhost", "localhost:9000", "127.0.0.1:1", "[::1]:8420", "LOCALHOST"):
        assert own_machine.get("/", headers={"host": host}).status_code == 200, host
    for host in ("evil.example", "127.0.0.1.evil.example", "10.0.0.7:8420", "", "localhost.evil"):
        answer = own_machine.get("/", headers={"host": host})
        assert answer.status_code == 421 and "<" not in answer.text, host

    access = Access.of("0.0.0.0", ("runs.example",))
    for host in ("10.1.2.3:8420", "runs.example", "[fe80::1]:1"):
        assert access.knows_host(host), host
    assert not access.knows_host("evil.example:8420")
    assert Access.of("10.1.2.3").token != Access.of("10.1.2.3").token


def test_every_answer_forbids_what_a_page_does_not_need(own_machine: TestClient) -> None:
    for path in ("/", "/static/page.js", "/run/none", "/nothing"):
        headers = own_machine.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


def basic(name: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


@pytest.mark.parametrize("path", ["/", "/static/page.css", "/run/x/groups/1/0/tokens"])
def test_others_need_the_token_for_everything(tmp_path, monkeypatch, path):
    monkeypatch.delenv("TIDEMILL_REDIS_URL", raising=False)
    access = Access.of("0.0.0.0")
    token = access.token
    client = client_of(access, tmp_path, "http://10.1.2.3:8420")
    for header in (f"Bearer {token}", f"bearer {token}", basic("", token), basic("me", token)):
        assert client.get(path, headers={"authorization": header}).status_code in (200, 404), header
    no_text = "Basic " + base64.b64encode(b"\xff").decode()
    wrong = ("", token, "Bearer wrong", "Bearer ", basic(token, ""), basic("", "wrong"))
    for header in (*wrong, "Basic", "Basic ###", no_text, f"Digest {token}"):
        answer = client.get(path, headers={"authorization": header})
        assert answer.status_code == 401, header
        assert answer.headers["www-authenticate"].startswith("Basic "), "browsers ask"
    assert client.get(path, params={"token": token}).status_code == 401, "addresses are kept and sent"


def test_a_token_is_asked_for_on_this_machine_too_where_somebody_wants_it(tmp_path: Path) -> None:
    assert Access.of("127.0.0.1").token == ""
    access = Access.of("127.0.0.1", asks_always=True)
    client = client_of(access, tmp_path)
    assert client.get("/").status_code == 401
    assert client.get("/", headers={"authorization": f"Bearer {access.token}"}).status_code == 200
    assert Access.of("127.0.0.1", fixed_token=FIXED).token == FIXED, "the same after a restart"
    for weak in ("short", "é" * 40):
        with pytest.raises(ConfigError, match="TIDEMILL_WEB_TOKEN"):
            Access.of("127.0.0.1", fixed_token=weak)
