"""A local address at which reward functions ask servers, without knowing the replicas."""

import asyncio

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tidemill.common.errors import MachineFaultError
from tidemill.common.process.http_server import ServerInService, is_this_machine, listen, server_config
from tidemill.common.process.replicas import LANE_HEADER
from tidemill.common.wire.messages import Lane
from tidemill.services.reward.remote.faults import CHARS_PER_TOKEN, FaultKind, RemoteFault, status_fault
from tidemill.services.reward.remote.limiter import Permit
from tidemill.services.reward.remote.servers import Replica, Servers, usage_of

PASSED_ON = ("content-type", "accept", "authorization")
MACHINE_FAULT = "machine_fault"
"""Code of the answer where the worker's machine is short of something: no server was asked."""
STATUSES: dict[str, int] = {FaultKind.TIMEOUT: 504, FaultKind.RATE_LIMITED: 429, FaultKind.NO_REPLICA: 503}


class RouterProxy:
    """Serves the address that reward functions get as `reward_router_address`, verl's name.

    A small HTTP server inside the worker, on a loopback port of its own. A request to it, to any path of the
    replicas' API, goes to the least loaded replica within the run's limits, and to another one if that fails.
    Answers are passed on whole, also those that were asked for as a stream. The replica's key is sent along
    where a request brings none of its own.
    """

    def __init__(self, servers: Servers, timeout_s: float) -> None:
        self._servers = servers
        self._timeout_s = timeout_s
        app = Starlette(routes=[Route("/{path:path}", self._forward, methods=["GET", "POST"])])
        self._server = ServerInService(server_config(app))
        self._serving: asyncio.Task[None] | None = None
        self.address = ""

    async def start(self) -> str:
        listener = listen("127.0.0.1")
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        name = f"router of {self._servers.name}"
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name=name)
        return self.address

    async def close(self) -> None:
        """Stop listening; requests under way are broken off."""
        self._server.should_exit = True
        self._server.force_exit = True
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)

    async def _forward(self, request: Request) -> Response:
        if "origin" in request.headers or not is_this_machine(request.headers.get("host", "")):
            return Response("a browser's pages are not answered here", 403)
        body = await request.body()
        lane = Lane.EVAL if request.headers.get(LANE_HEADER) == Lane.EVAL.value else Lane.TRAIN
        headers = {name: request.headers[name] for name in PASSED_ON if request.headers.get(name)}
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")

        async def send(replica: Replica, permit: Permit) -> httpx.Response:
            url = replica.root + target
            answer = await self._servers.request(replica, request.method, url, headers, content=body or None)
            # Other errors are about the request, and are passed on to the function.
            if answer.status_code >= 500 or answer.status_code in (408, 429):
                raise status_fault(replica.origin, answer.status_code, answer.headers, answer.text)
            used = _usage(answer)
            if used:
                self._servers.count_tokens(permit, *used)
            return answer

        try:
            answer = await self._servers.ask(send, lane, len(body) // CHARS_PER_TOKEN, self._timeout_s)
        except RemoteFault as fault:  # in the form of OpenAI's errors
            error = {"message": str(fault), "type": fault.kind, "code": fault.kind}
            pause = {"Retry-After": f"{fault.retry_after_s:.0f}"} if fault.asks_for_pause else None
            return JSONResponse({"error": error}, STATUSES.get(fault.kind, 502), pause)
        except MachineFaultError as shortage:
            error = {"message": str(shortage), "type": MACHINE_FAULT, "code": MACHINE_FAULT}
            return JSONResponse({"error": error}, 503, {"Retry-After": "1"})
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type", ""))


def _usage(answer: httpx.Response) -> tuple[int, int] | None:
    """Prompt and completion tokens, where the answer says them."""
    if "json" not in answer.headers.get("content-type", ""):
        return None
    try:
        return usage_of(answer.json()) if answer.json().get("usage") else None
    except (ValueError, TypeError, LookupError, AttributeError):
        return None
