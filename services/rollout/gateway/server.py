"""The gateway: a small HTTP server inside the rollout worker, on a loopback port of its own.

Every session has an address of its own, `/s/<token>/v1`, that speaks OpenAI's and Anthropic's APIs. An answer
is generated and read as a whole; a client that asks for a stream gets it as one, once it is there.
"""

import asyncio
import contextlib
import hmac
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tidemill.common.errors import ConfigError
from tidemill.common.process.http_server import ServerInService, server_config
from tidemill.common.process.listening import listen
from tidemill.common.telemetry import metrics
from tidemill.services.rollout.gateway import anthropic_messages, openai_chat, openai_responses
from tidemill.services.rollout.gateway.dialogue import Api, Body, RequestError, has_usage
from tidemill.services.rollout.gateway.session import GatewaySession
from tidemill.services.rollout.gateway.wishes import ignored_in, wishes_in
from tidemill.services.rollout.sessions.calls import MAX_DEPTH, is_deeper

log = structlog.get_logger(__name__)

APIS = {
    "chat/completions": openai_chat.CHAT,
    "completions": openai_chat.TEXT,
    "responses": openai_responses.RESPONSES,
    "messages": anthropic_messages.MESSAGES,
}
"""By path: how requests are read, and answers written."""
RETRY_COUNT = "x-stainless-retry-count"
"""The header in which the clients of OpenAI and Anthropic say whether they ask again."""

Endpoint = Callable[[GatewaySession, Body, str | None], Awaitable[Response]]
"""With the session, the request and what `RETRY_COUNT` says."""

KEEP_ALIVE_S = 600
"""Clients keep connections while their tools run; closing one earlier looks like a fault."""
COUNT = "messages/count_tokens"
"""The one request that the model does not answer."""
MAX_BODY_BYTES = 64 << 20
"""One program must not take the memory of all sessions of its worker."""
MAX_NOTED = 256
"""So many parameters are named in the log; what names they have is the clients' affair."""
NO_RETRY = {"x-should-retry": "false"}
"""For both clients: not retryable."""


class Gateway:
    """Serves the sessions that are open; `model` is what it calls the model.

    With `refuses_wishes`, a request that asks for a form of the answer or for a call is refused.
    """

    def __init__(self, model: str, host: str = "127.0.0.1", refuses_wishes: bool = False) -> None:
        self.model, self.host, self.root = model, host, ""
        self._refuses_wishes = refuses_wishes
        self._sessions: dict[str, GatewaySession] = {}
        self._noted: set[str] = set()
        self._serving: asyncio.Task[None] | None = None
        posts = {path: self._asking(api) for path, api in APIS.items()} | {COUNT: self._count}
        gets: dict[str, Endpoint] = {"models": self._models, "models/{name:path}": self._one_model}
        routes = [
            Route(f"/s/{{token}}/v1/{path}", self._endpoint(endpoint), methods=[method])
            for method, endpoints in (("POST", posts), ("GET", gets))
            for path, endpoint in endpoints.items()
        ]
        app = Starlette(routes=routes)
        self._server = ServerInService(server_config(app, timeout_keep_alive=KEEP_ALIVE_S))

    async def start(self) -> None:
        """Listen. Raises ConfigError: not at this address."""
        try:
            listener = listen(self.host)
        except OSError as error:
            where = f"{self.host} (rollout.environment.gateway_host)"
            raise ConfigError(f"cannot listen for agents at {where}: {error.strerror}") from None
        self.root = f"http://{self.host}:{listener.getsockname()[1]}"
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="gateway")

    async def close(self) -> None:
        """Stop listening; requests under way are broken off."""
        self._server.should_exit = self._server.force_exit = True
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)

    @contextlib.contextmanager
    def serving(self, session: GatewaySession) -> Iterator[str]:
        """Answer the session's programs at the address that this gives, without `/v1`."""
        self._sessions[session.token] = session
        try:
            yield f"{self.root}/s/{session.token}"
        finally:
            del self._sessions[session.token]

    def _endpoint(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                session = self._session(request)
                body = await _body(request, session) if request.method == "POST" else {}
                return await endpoint(session, body, request.headers.get(RETRY_COUNT))
            except RequestError as error:
                return _refusal(error)
            except asyncio.CancelledError:
                return _refusal(RequestError("the session is over", "session_over", 404))
            except Exception as error:  # the session fails with it; its program must not try again
                log.warning("a request of an agent failed", error=str(error))
                return _refusal(RequestError("the engine failed", "engine_failed", 500))

        return answer

    def _session(self, request: Request) -> GatewaySession:
        session = self._sessions.get(request.path_params["token"])
        if session is None:
            raise RequestError("there is no session at this address, or it is over", "session_over", 404)
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(
            (request.headers.get("x-api-key") or given).encode(), session.key.encode()
        ):
            raise RequestError(
                "the key is not the session's; use the one that came with its address", "key", 401
            )
        return session

    def _asking(self, api: Api) -> Endpoint:
        """The endpoint that has the model answer."""

        async def ask(session: GatewaySession, body: Body, retry_count: str | None) -> Response:
            # What is malformed is refused before anything is generated, so all of the request is read first.
            question = api.question_of(body)
            is_stream, _ = body.get("stream"), has_usage(body)
            self._check_wishes(body)
            answer = await session.answer(question, None if retry_count is None else retry_count != "0")
            if not is_stream:
                return JSONResponse(api.answer_of(answer, self.model, body))
            return _stream(api.events_of(answer, self.model, body))

        return ask

    def _check_wishes(self, body: Body) -> None:
        """Count what the request asks of sampling, or refuse it."""
        wishes = wishes_in(body)
        if wishes and self._refuses_wishes:
            raise RequestError(
                f"{' and '.join(wishes)} cannot be promised: answers are sampled freely, as they are trained "
                "(rollout.environment.structured_output)"
            )
        for wish in wishes:
            metrics.AGENT_WISHES.labels(wish).inc()
        self._note("an agent asks for a form of the answer; it is sampled freely", wishes)
        self._note("an agent's parameters are ignored: rollout.sampling holds", ignored_in(body))

    def _note(self, what: str, names: Sequence[str]) -> None:
        """Say once for every parameter that the run's own holds."""
        new = [name for name in names if name not in self._noted]
        if new and len(self._noted) < MAX_NOTED:
            self._noted.update(new)
            log.info(what, parameters=new)

    async def _models(self, session: GatewaySession, body: Body, _: str | None) -> Response:
        pages = {"has_more": False, "first_id": self.model, "last_id": self.model}
        return JSONResponse({"object": "list", "data": [self._shown], **pages})

    async def _one_model(self, session: GatewaySession, body: Body, _: str | None) -> Response:
        return JSONResponse(self._shown)  # it answers to any name

    @property
    def _shown(self) -> dict[str, Any]:
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "tidemill"}
        return model | {"type": "model", "display_name": self.model, "created_at": "1970-01-01T00:00:00Z"}

    async def _count(self, session: GatewaySession, body: Body, _: str | None) -> Response:
        num_tokens = await session.count_tokens(anthropic_messages.question_of(body))
        return JSONResponse({"input_tokens": num_tokens})


async def _body(request: Request, session: GatewaySession) -> Body:
    """What a request brings. What is too long is read and not kept: then the client reads why."""
    content, num_bytes = bytearray(), 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes <= session.max_body_bytes:
            content += part
        elif num_bytes > MAX_BODY_BYTES:
            raise RequestError(f"the request has more than {MAX_BODY_BYTES:,} bytes", "too_large", 413)
    if num_bytes > session.max_body_bytes:
        raise session.too_long(is_asked=not request.url.path.endswith(COUNT))
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the request must be a JSON object")
    if is_deeper(body, MAX_DEPTH):
        raise RequestError(f"the request has lists or objects more than {MAX_DEPTH} deep")
    return body


def _stream(events: Iterable[Mapping[str, Any] | str]) -> Response:
    """Server-sent events, each after the name of its type where it has one."""
    lines = []
    for event in events:
        named = f"event: {event['type']}\n" if isinstance(event, Mapping) and "type" in event else ""
        data = event if isinstance(event, str) else json.dumps(event)
        lines.append(f"{named}data: {data}\n\n")
    return Response("".join(lines), media_type="text/event-stream", headers={"cache-control": "no-cache"})


def _refusal(error: RequestError) -> Response:
    """In a form that both clients read."""
    kinds = {401: "authentication_error", 404: "not_found_error", 500: "api_error"}
    described = {
        "message": f"{error.message} ({error.code})",
        "type": kinds.get(error.status, "invalid_request_error"),
        "code": error.code,
        "param": None,
        "details": {"error_code": error.code},  # Anthropic's client then sends its history without a thread
    }
    return JSONResponse({"type": "error", "error": described}, error.status, NO_RETRY)
