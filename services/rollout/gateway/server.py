"""The gateway: a small HTTP server inside the rollout worker, on a loopback port of its own.

Every session has an address of its own, `/s/<token>/v1`, with OpenAI's and Anthropic's APIs. An answer is
generated as a whole; a client that asks for a stream gets it in one go, as the events of a stream. On a
connection that a session has claimed, `/v1` is its address too, with a key that all sessions know. A process
can claim a connection of its own only: a program cannot bring the requests of another session into its own.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import os
import secrets
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidemill.common.process.http_server import ServerInService, listen, server_config
from tidemill.common.process.shortage import run_on_thread
from tidemill.common.telemetry import metrics
from tidemill.services.rollout.gateway.apis import APIS, Api, anthropic_question
from tidemill.services.rollout.gateway.dialogue import Body, RequestError, ignored_in, wants_usage, wishes_in
from tidemill.services.rollout.gateway.session import GatewaySession
from tidemill.services.rollout.sessions.calls import MAX_DEPTH, is_deeper

log = structlog.get_logger(__name__)

RETRY_COUNT = "x-stainless-retry-count"
"""Header in which the clients of OpenAI and Anthropic say how often they have retried."""
KEEP_ALIVE_S = 600
"""Clients keep connections while their tools run; closing one earlier looks like a fault."""
COUNT = "messages/count_tokens"
"""Path of the request that the model does not answer."""
MAX_BODY_BYTES = 64 << 20
"""Largest request that is read: one program must not take the memory of all sessions of its worker."""
PIECE_BYTES = 64 << 10
"""Length of the pieces in which an answer is sent; uvicorn pauses where that much waits for its client."""
MAX_NOTED = 256
"""Most fields that are named in the log: clients may send any names."""
NO_RETRY = {"x-should-retry": "false"}
"""Tells both clients not to retry."""
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 500: "api_error"}

Endpoint = Callable[[GatewaySession, Request], Awaitable[Response]]


class WatchedResponse(Response):
    """A response that is sent in pieces, and calls `on_lost` if its client has gone before the last one.

    Its length is announced, so a client never takes a beginning of it for the whole.
    """

    def __init__(self, on_lost: Callable[[], None], content: str, **more: Any) -> None:
        super().__init__(content, **more)
        self._on_lost = on_lost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = bytes(self.body)
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        is_lost = await request.is_disconnected()
        await send(start)
        for first in range(0, len(body), PIECE_BYTES):
            # Waits until the client has taken most of the pieces before it: without them it cannot have left.
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            is_lost = is_lost or await request.is_disconnected()
            piece = body[first : first + PIECE_BYTES]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        # Not looked at after the last piece: a client may leave as soon as it has it.
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        if is_lost:
            self._on_lost()


class Gateway:
    """Serves the sessions that are open; `model` is the model's name in answers.

    With `refuses_wishes`, a request that asks for a form of the answer or for a call is refused.
    """

    def __init__(self, model: str, host: str = "127.0.0.1", refuses_wishes: bool = False) -> None:
        self.model = model
        self.host = host
        self.root = ""
        self._port = 0
        self.placeholder_key = secrets.token_urlsafe(24)
        """The key on connections that are claimed."""
        self._refuses_wishes = refuses_wishes
        self.sessions: dict[str, GatewaySession] = {}
        """Token -> open session."""
        self._claimed: dict[tuple[str, int], GatewaySession] = {}
        """Client's host and port of a connection -> the session that has claimed it."""
        self._noted: set[str] = set()
        self._serving: asyncio.Task[None] | None = None
        posts: dict[str, Endpoint] = {path: partial(self._ask, api) for path, api in APIS.items()}
        posts[COUNT] = self._count
        gets: dict[str, Endpoint] = {"models": self._models, "models/{name:path}": self._models}
        routes = []
        for prefix in ("/s/{token}", ""):
            for path, endpoint in posts.items():
                routes.append(Route(f"{prefix}/v1/{path}", partial(self._answer, endpoint), methods=["POST"]))
            for path, endpoint in gets.items():
                routes.append(Route(f"{prefix}/v1/{path}", partial(self._answer, endpoint), methods=["GET"]))
        claim = partial(self._answer, self._claim)
        path = "/s/{token}/processes/{pid:int}/connections/{port:int}"
        routes.append(Route(path, claim, methods=["POST"]))
        # A client's address is what the kernel says, whatever headers say.
        config = server_config(Starlette(routes=routes), timeout_keep_alive=KEEP_ALIVE_S, proxy_headers=False)
        self._server = ServerInService(config)

    async def start(self) -> None:
        """Listen. Raises ConfigError: this address cannot be used."""
        listener = listen(self.host, remedy="Agents ask there: change rollout.environment.gateway_host.")
        self._port = listener.getsockname()[1]
        self.root = f"http://{self.host}:{self._port}"
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="gateway")

    async def close(self) -> None:
        # Without `force_exit` uvicorn would wait for requests under way, whose sessions are over.
        self._server.should_exit = True
        self._server.force_exit = True
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)

    @contextlib.contextmanager
    def serving(self, session: GatewaySession) -> Iterator[str]:
        """Serve the session during the block. Yields its address, without `/v1`."""
        self.sessions[session.token] = session
        try:
            yield f"{self.root}/s/{session.token}"
        finally:
            del self.sessions[session.token]
            # The kernel gives a client's port to other connections later: no claim may outlive its session.
            self._claimed = {
                end: claimant for end, claimant in self._claimed.items() if claimant is not session
            }

    async def _answer(self, endpoint: Endpoint, request: Request) -> Response:
        try:
            return await endpoint(self._session(request), request)
        except RequestError as error:
            refused = error
        except asyncio.CancelledError:  # its turn was cancelled when the session was closed
            refused = RequestError("the session is over", "session_over", 404)
        except Exception as error:  # the session fails with it; its program must not try again
            log.warning("a request of an agent failed", error=str(error))
            refused = RequestError("the engine failed", "engine_failed", 500)
        described = {  # in a form that both clients read
            "message": f"{refused.message} ({refused.code})",
            "type": ERROR_TYPES.get(refused.status, "invalid_request_error"),
            "code": refused.code,
            "param": None,
            "details": {"error_code": refused.code},  # Anthropic's client then sends its history whole
        }
        return JSONResponse({"type": "error", "error": described}, refused.status, NO_RETRY)

    def _session(self, request: Request) -> GatewaySession:
        token = request.path_params.get("token")
        # A client of `/v1` knows no session: it was made before there was one.
        session = self._claimed.get(_end_of(request)) if token is None else self.sessions.get(token)
        if session is None:
            raise RequestError("there is no session at this address, or it is over", "session_over", 404)
        credential = request.headers.get("authorization", "").removeprefix("Bearer ")
        credential = request.headers.get("x-api-key") or credential
        key = self.placeholder_key if token is None else session.key
        # In constant time; and as bytes, because `compare_digest` refuses text that is not ASCII.
        if not hmac.compare_digest(credential.encode(), key.encode()):
            raise RequestError(
                "the key is not the session's; use the one that came with its address", "key", 401
            )
        return session

    async def _claim(self, session: GatewaySession, request: Request) -> Response:
        """Record that a connection to the placeholder's address belongs to the session.

        Raises:
            RequestError: it is not a connection of the process that asks.
        """
        pid = request.path_params["pid"]
        port = request.path_params["port"]
        # The host is that of this request, as the kernel says: a program cannot claim for another machine.
        asking_end = _end_of(request)
        claimed_end = (asking_end[0], port)
        # All sessions run as one user and know each other's ports. That the process holds the connection of
        # this request too shows that it is the one that asks: it has not just given the pid of another one.
        held = await run_on_thread(_ends_held_by, pid, self._port)
        if not {asking_end, claimed_end} <= held:
            log.warning("an agent claimed a connection that its process does not hold", pid=pid, port=port)
            raise RequestError(
                f"process {pid} asks for the connection from port {port} and does not hold it; a process can "
                "claim its own connections only",
                "not_its_connection",
                403,
            )
        self._claimed[claimed_end] = session
        return Response()

    async def _ask(self, api: Api, session: GatewaySession, request: Request) -> Response:
        # What is malformed is refused before anything is generated, so all of the request is read first.
        body = await _body(request, session)
        is_streamed = bool(body.get("stream"))
        question = replace(api.question_of(body), is_streamed=is_streamed)
        wants_usage(body)  # only for its error
        self._check_wishes(body)
        retry_count = request.headers.get(RETRY_COUNT)
        answer = await session.answer(question, None if retry_count is None else retry_count != "0")
        lose = partial(session.note_lost, answer)
        if not is_streamed:
            # Not a JSONResponse: what is sent back of a request may have lone surrogates, NaN and infinities.
            payload = json.dumps(api.answer_of(answer, self.model, body))
            return WatchedResponse(lose, payload, media_type="application/json")
        lines = []
        for event in api.events_of(answer, self.model, body):
            named = f"event: {event['type']}\n" if isinstance(event, Mapping) and "type" in event else ""
            lines.append(f"{named}data: {event if isinstance(event, str) else json.dumps(event)}\n\n")
        headers = {"cache-control": "no-cache"}
        return WatchedResponse(lose, "".join(lines), media_type="text/event-stream", headers=headers)

    def _check_wishes(self, body: Body) -> None:
        """Count the request's wishes for a form of the answer, or refuse them."""
        wishes = wishes_in(body)
        if wishes and self._refuses_wishes:
            raise RequestError(
                f"{' and '.join(wishes)} cannot be promised: answers are sampled freely, as they are trained "
                "(rollout.environment.structured_output)"
            )
        for wish in wishes:
            metrics.AGENT_WISHES.labels(wish).inc()
        self._note("an agent asks for a form of the answer; it is sampled freely", wishes)
        self._note("fields of an agent's requests do nothing here: rollout.sampling holds", ignored_in(body))

    def _note(self, event: str, names: Sequence[str]) -> None:
        """Log each name once."""
        new = [name for name in names if name not in self._noted]
        if new and len(self._noted) < MAX_NOTED:
            self._noted.update(new)
            log.info(event, parameters=new)

    async def _models(self, session: GatewaySession, request: Request) -> Response:
        """The only model, whatever name is asked for."""
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "tidemill"}
        model |= {"type": "model", "display_name": self.model, "created_at": "1970-01-01T00:00:00Z"}
        if "name" in request.path_params:
            return JSONResponse(model)
        pages = {"has_more": False, "first_id": self.model, "last_id": self.model}
        return JSONResponse({"object": "list", "data": [model], **pages})

    async def _count(self, session: GatewaySession, request: Request) -> Response:
        question = anthropic_question(await _body(request, session))
        return JSONResponse({"input_tokens": await session.count_tokens(question)})


def _end_of(request: Request) -> tuple[str, int]:
    client = request.client
    return (_plain_address(client.host), client.port) if client else ("", 0)


def _ends_held_by(pid: int, remote_port: int) -> set[tuple[str, int]]:
    """The local ends, host and port, of the TCP connections of a process to `remote_port`; empty where it
    cannot be seen."""
    try:
        # Other network namespaces have loopback addresses and ports of their own, which prove nothing here.
        if sys.platform == "linux" and not os.path.samefile(f"/proc/{pid}/ns/net", "/proc/self/ns/net"):
            return set()
        connections = psutil.Process(pid).net_connections("tcp")
    except (psutil.Error, OSError, ValueError, OverflowError):
        return set()
    return {
        (_plain_address(each.laddr.ip), each.laddr.port)
        for each in connections
        if each.laddr and each.raddr and each.raddr.port == remote_port
    }


def _plain_address(host: str) -> str:
    """The address in one spelling, and that of IPv4 where it is one in the form of IPv6."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    return str(getattr(address, "ipv4_mapped", None) or address)


async def _body(request: Request, session: GatewaySession) -> Body:
    content = bytearray()
    num_bytes = 0
    most_bytes = min(session.max_body_bytes, MAX_BODY_BYTES)
    async for chunk in request.stream():
        num_bytes += len(chunk)
        # A body that is too long is read but not kept: a client that cannot send it all never reads why.
        if num_bytes <= most_bytes:
            content += chunk
        elif num_bytes > MAX_BODY_BYTES:
            raise RequestError(f"the request has more than {MAX_BODY_BYTES:,} bytes", "too_large", 413)
    if num_bytes > most_bytes:
        is_asked = not request.url.path.endswith(COUNT)
        raise session.too_long(f"more than {most_bytes:,} bytes", is_asked)
    try:
        # On the loop, 60 MB of pictures for 0.1 s: on a thread it would hold the interpreter as long.
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the request must be a JSON object")
    # Chat templates and encoders recurse: what is deeper could end any of them with a RecursionError.
    if is_deeper(body, MAX_DEPTH):
        raise RequestError(f"the request has lists or objects more than {MAX_DEPTH} deep")
    return body
