"""Who may read the pages of `tidemill web`, and what goes with every answer."""

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tidemill.common.errors import ConfigError
from tidemill.services.console.web.runs import Catalog
from tidemill.services.console.web.server import Access, create_app


def client_of(access: Access, runs: Path, base: str = "http://127.0.0.1:8420") -> TestClient:
    return TestClient(create_app(Catalog(runs), access), base_url=base, follow_redirects=False)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.delenv("TIDEMILL_REDIS_URL", raising=False)
    with client_of(Access.of("127.0.0.1"), tmp_path) as client:
        yield client


@pytest.fixture
def open_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TestClient, Access]]:
    monkeypatch.delenv("TIDEMILL_REDIS_URL", raising=False)
    access = Access.of("0.0.0.0")
    with client_of(access, tmp_path, "http://10.1.2.3:8420") as client:
        yield client, access


def test_on_this_machine_no_token_is_asked_for(own: TestClient) -> None:
    assert own.get("/").status_code == 200
    assert "There is no run" in own.get("/").text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_but_reading_is_answered(own: TestClient, method: str) -> None:
    answer = own.request(method, "/")
    assert answer.status_code == 405 and answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.7:8420", "", "localhost.evil"]
)
def test_a_name_that_was_pointed_here_is_refused(own: TestClient, host: str) -> None:
    answer = own.get("/", headers={"host": host})
    assert answer.status_code == 421 and "<" not in answer.text


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1:1", "[::1]:8420", "LOCALHOST"])
def test_names_of_this_machine_are_known(own: TestClient, host: str) -> None:
    assert own.get("/", headers={"host": host}).status_code == 200


def test_every_answer_forbids_what_a_page_does_not_need(own: TestClient) -> None:
    for path in ("/", "/static/page.js", "/run/none", "/nothing"):
        headers = own.get(path).headers
        policy = headers["content-security-policy"]
        assert (
            "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        )
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"


def basic(name: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


@pytest.mark.parametrize("path", ["/", "/static/page.css", "/run/x/groups/1/0/tokens.json"])
def test_others_need_the_token_for_everything(open_to_others: tuple[TestClient, Access], path: str) -> None:
    client, access = open_to_others
    right = (
        f"Bearer {access.token}",
        f"bearer {access.token}",
        basic("", access.token),
        basic("me", access.token),
    )
    wrong = ("", access.token, "Bearer wrong", "Bearer ", basic(access.token, ""), basic("", "wrong"))
    malformed = (
        "Basic",
        "Basic ###",
        "Basic " + base64.b64encode(b"\xff").decode(),
        f"Digest {access.token}",
    )
    for given in right:
        assert client.get(path, headers={"authorization": given}).status_code in (200, 404), given
    for given in (*wrong, *malformed):
        answer = client.get(path, headers={"authorization": given})
        assert answer.status_code == 401, given
        assert answer.headers["www-authenticate"].startswith("Basic "), "browsers ask"
    assert client.get(path, params={"token": access.token}).status_code == 401, "addresses are kept and sent"


def test_a_page_for_others_answers_under_addresses_and_given_names_only(tmp_path: Path) -> None:
    access = Access.of("0.0.0.0", ("runs.example",))
    assert (
        access.knows_host("10.1.2.3:8420")
        and access.knows_host("runs.example")
        and access.knows_host("[fe80::1]:1")
    )
    assert not access.knows_host("evil.example:8420")
    assert Access.of("10.1.2.3").token != Access.of("10.1.2.3").token


FIXED = "a-token-of-16-characters-or-more"


def test_a_token_is_asked_for_on_this_machine_too_where_somebody_wants_it(tmp_path: Path) -> None:
    assert Access.of("127.0.0.1").token == ""
    access = Access.of("127.0.0.1", asks_always=True)
    with client_of(access, tmp_path) as client:
        assert client.get("/").status_code == 401
        assert client.get("/", headers={"authorization": f"Bearer {access.token}"}).status_code == 200


def test_a_fixed_token_is_the_same_after_a_restart_and_hard_to_guess() -> None:
    assert Access.of("127.0.0.1", fixed_token=FIXED).token == FIXED
    for weak in ("short", "é" * 40):
        with pytest.raises(ConfigError, match="TIDEMILL_WEB_TOKEN"):
            Access.of("127.0.0.1", fixed_token=weak)
