"""Servers of models let in who shows the run's token, and tokens go to servers of the run only."""

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tidemill.common.config.servers import ServersConfig
from tidemill.common.process.json_api import TokenGate
from tidemill.services.reward.model_server.__main__ import main
from tidemill.services.reward.remote.servers import Replica, Servers
from tidemill.services.reward.remote.tokens import MODEL_TOKEN_VARIABLE, complaint, key_for

TOKEN = "0123456789abcdef-token"


async def _said(request: Request) -> Response:
    return PlainTextResponse("scores")


def client(token: str) -> httpx.AsyncClient:
    app = Starlette(routes=[Route("/{path:path}", _said, methods=["GET", "POST"])])
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(TokenGate(app, token, MODEL_TOKEN_VARIABLE)),
        base_url="http://localhost",
    )


@pytest.mark.parametrize(
    "authorization", [None, "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", TOKEN]
)
async def test_nobody_without_the_token_is_let_in(authorization: str | None) -> None:
    headers = {"Authorization": authorization} if authorization else {}
    async with client(TOKEN) as http:
        for path in ("/classify", "/pooling", "/v1/models"):
            answer = await http.post(path, headers=headers)
            assert answer.status_code == 401, path
            assert MODEL_TOKEN_VARIABLE in answer.text and TOKEN not in answer.text


async def test_whoever_shows_the_token_is_let_in_and_anybody_may_ask_for_health() -> None:
    async with client(TOKEN) as http:
        assert (await http.post("/classify", headers={"Authorization": f"bearer {TOKEN}"})).text == "scores"
        for path in ("/health", "/healthz", "/metrics"):
            assert (await http.get(path)).status_code == 200
    async with client("") as http:
        assert (await http.post("/classify")).status_code == 200


async def test_pages_that_a_browser_has_open_are_not_answered_without_a_token() -> None:
    """A page can make a browser send such a request to this machine without asking anybody."""
    async with client("") as http:
        for origin in ("https://example.org", "null", "http://127.0.0.1:8000"):
            answer = await http.post("/classify", headers={"Origin": origin, "Content-Type": "text/plain"})
            assert answer.status_code == 403 and MODEL_TOKEN_VARIABLE in answer.text
    async with client(TOKEN) as http:
        headers = {"Origin": "https://example.org", "Authorization": f"Bearer {TOKEN}"}
        assert (await http.post("/classify", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:8000", 200), ("127.0.0.1:80", 200), ("[::1]:8000", 200), ("[::1]", 200), ("127.0.0.1", 200)]
    + [
        (host, 403)
        for host in ("example.org", "example.org:8000", "10.0.0.5:80", "localhost.example.org", "")
    ],
)
async def test_without_a_token_only_who_asks_for_this_machine_is_answered(host: str, status: int) -> None:
    """A page's own name can be made to mean this machine; then its requests come without `Origin`."""
    async with client("") as http:
        assert (await http.post("/classify", headers={"Host": host})).status_code == status
    async with client(TOKEN) as http:
        headers = {"Host": host, "Authorization": f"Bearer {TOKEN}"}
        assert (await http.post("/classify", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("host", "token", "is_wrong"),
    [
        ("127.0.0.1", "", False),
        ("localhost", "", False),
        ("::1", "", False),
        ("0.0.0.0", "", True),
        ("::", "", True),
        ("10.0.0.5", "", True),
        ("10.0.0.5", TOKEN, False),
        ("127.0.0.1", "short", True),
    ],
)
def test_a_server_that_others_reach_needs_a_token(host: str, token: str, is_wrong: bool) -> None:
    assert bool(complaint(host, token)) is is_wrong


def test_the_model_server_does_not_start_for_everybody(monkeypatch, capsys):
    monkeypatch.delenv(MODEL_TOKEN_VARIABLE, raising=False)
    monkeypatch.setattr("sys.argv", ["server", "--model", "org/model", "--host", "0.0.0.0"])
    assert main() == 2
    assert "openssl rand" in capsys.readouterr().err


async def test_the_token_is_shown_to_servers_of_the_run_and_keys_to_those_of_the_config(monkeypatch):
    monkeypatch.setenv(MODEL_TOKEN_VARIABLE, TOKEN)
    monkeypatch.setenv("JUDGE_KEY", "sk-judge")
    far = "http://10.0.0.9:8000/v1"
    here = "http://127.0.0.1:8000/v1"
    assert key_for(far, True, "JUDGE_KEY") == key_for(here, True, "JUDGE_KEY") == TOKEN
    assert key_for(far, False, "JUDGE_KEY") == "sk-judge"
    assert key_for(far, False, "") == ""
    echo = httpx.MockTransport(lambda request: httpx.Response(200, text=request.headers["authorization"]))
    async with httpx.AsyncClient(transport=echo) as http:
        servers = Servers("judge", ServersConfig(api_key_env="JUDGE_KEY"), http, None)  # type: ignore[arg-type]
        for replica, key in (
            (Replica(far, is_registered=True), TOKEN),
            (Replica("https://api.example.org/v1"), "sk-judge"),
        ):
            assert (await servers.request(replica, "POST", replica.url, {})).text == f"Bearer {key}"
    monkeypatch.delenv(MODEL_TOKEN_VARIABLE)
    for url in (here, "http://localhost:1/v1", "http://[::1]:1/v1"):
        assert key_for(url, True, "JUDGE_KEY") == "sk-judge", "as before there was a token"


def test_no_key_goes_to_an_address_that_anybody_may_have_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has the Redis password of a reward worker, or of a reward server, may register one."""
    monkeypatch.delenv(MODEL_TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv("JUDGE_KEY", "sk-judge")
    for host in ("10.0.0.9", "127.0.0.1.example.org", "localhost.example.org", "127.0.0.1@10.0.0.9"):
        assert key_for(f"http://{host}:8000/v1", True, "JUDGE_KEY") == ""
