"""A router's address for reward functions: what verl calls `reward_router_address`.

A small HTTP server inside the worker, on a loopback port of its own. A request to it, to any path of the
replicas' API, goes to the least loaded replica within the run's limits, and to another one if that fails.
Answers are passed on whole, also those that were asked for as a stream.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tidemill.common.errors import ConfigError
from tidemill.common.process.http_server import ServerInService, is_this_machine, server_config
from tidemill.common.process.listening import listen
from tidemill.common.run.replicas import key_for
from tidemill.common.wire.messages import Lane
from tidemill.services.reward.remote.calls import RemoteCalls
from tidemill.services.reward.remote.faults import (
    CHARS_PER_TOKEN,
    FaultKind,
    RemoteFault,
    connection_fault,
    status_fault,
)
from tidemill.services.reward.remote.limiter import Permit
from tidemill.services.reward.remote.router import Replica

LANE_HEADER = "x-tidemill-lane"
"""`eval` gives a request the priority of evaluation."""
PASSED_ON = ("content-type", "accept", "authorization")
METHODS = ["GET", "POST"]
STATUSES = {FaultKind.TIMEOUT: 504, FaultKind.RATE_LIMITED: 429, FaultKind.NO_REPLICA: 503}
BAD_GATEWAY = 502


@dataclass(frozen=True, slots=True)
class Answer:
    """What a replica answered."""

    status: int
    content: bytes
    content_type: str


class RouterProxy:
    """The server of one router. The replica's key is sent along where a request brings none of its own."""

    def __init__(self, calls: RemoteCalls, http: httpx.AsyncClient) -> None:
        self._calls, self._http = calls, http
        app = Starlette(routes=[Route("/{path:path}", self._forward, methods=METHODS)])
        self._server = ServerInService(server_config(app))
        self._serving: asyncio.Task[None] | None = None
        self.address = ""

    async def start(self) -> str:
        """Listen; returns `host:port`."""
        listener = listen("127.0.0.1")
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        name = f"router of {self._calls.name}"
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name=name)
        return self.address

    async def close(self) -> None:
        """Stop listening; requests under way are broken off."""
        self._server.should_exit = self._server.force_exit = True
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)

    async def _forward(self, request: Request) -> Response:
        if "origin" in request.headers or not is_this_machine(request.headers.get("host", "")):
            return Response("a browser's pages are not answered here", 403)
        body = await request.body()
        lane = Lane.EVAL if request.headers.get(LANE_HEADER) == Lane.EVAL.value else Lane.TRAIN
        headers = {name: value for name in PASSED_ON if (value := request.headers.get(name))}
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")

        async def send(replica: Replica, permit: Permit) -> Answer:
            key = key_for(replica.url, replica.is_registered, self._calls.api_key_env)
            own = {"authorization": f"Bearer {key}"} if key else {}
            answer = await self._send(replica, request.method, target, body, own | headers)
            used = _usage(answer)
            if used is not None:
                permit.used_tokens = sum(used)
                self._calls.count_tokens(*used)
            return answer

        try:
            answer = await self._calls.ask(send, lane, _estimate(body))
        except RemoteFault as fault:
            return _refusal(fault)
        return Response(answer.content, answer.status, media_type=answer.content_type)

    async def _send(
        self, replica: Replica, method: str, target: str, body: bytes, headers: Mapping[str, str]
    ) -> Answer:
        try:
            answer = await self._http.request(
                method, f"{replica.root}{target}", content=body or None, headers=dict(headers)
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise connection_fault(replica.origin, error) from error
        # What is wrong with the request is between the function and the replica; the rest is ours.
        if answer.status_code >= 500 or answer.status_code in (408, 429):
            raise status_fault(replica.origin, answer.status_code, answer.headers, answer.text)
        return Answer(answer.status_code, answer.content, answer.headers.get("content-type", ""))


class RouterProxies:
    """The routers' addresses of one worker, by reward; each starts when it is first asked for."""

    def __init__(self, calls: Mapping[str, RemoteCalls], http: httpx.AsyncClient) -> None:
        self._calls, self._http = calls, http
        self._proxies: dict[str, RouterProxy] = {}

    async def address(self, name: str) -> str:
        """`host:port` of the router of the reward `name`. Raises ConfigError: there is no such router."""
        if name not in self._calls:
            known = ", ".join(sorted(self._calls)) or "there is none"
            raise ConfigError(
                f"no reward with servers is called {name!r}, so there is no router of it; known: {known}"
            )
        if name not in self._proxies:
            calls = self._calls[name]
            self._proxies[name] = RouterProxy(calls, self._http)
            await self._proxies[name].start()
        return self._proxies[name].address

    async def close(self) -> None:
        """Stop all servers."""
        await asyncio.gather(*(proxy.close() for proxy in self._proxies.values()))


def _estimate(body: bytes) -> int:
    try:
        request = json.loads(body) if body else {}
        wanted = request.get("max_tokens") or request.get("max_completion_tokens") or 0
        return len(body) // CHARS_PER_TOKEN + max(0, int(wanted))
    except (ValueError, TypeError, AttributeError):
        return len(body) // CHARS_PER_TOKEN


def _usage(answer: Answer) -> tuple[int, int] | None:
    """Prompt and completion tokens, where the answer says them."""
    if "json" not in answer.content_type:
        return None
    try:
        usage = json.loads(answer.content)["usage"]
        return int(usage["prompt_tokens"]), int(usage.get("completion_tokens") or 0)
    except (ValueError, TypeError, LookupError):
        return None


def _refusal(fault: RemoteFault) -> Response:
    """A fault in the form of OpenAI's errors."""
    error = {"message": str(fault), "type": fault.kind, "code": fault.kind}
    headers = {"Retry-After": f"{fault.retry_after_s:.0f}"} if fault.retry_after_s else None
    return JSONResponse({"error": error}, STATUSES.get(fault.fault, BAD_GATEWAY), headers)
