"""JSON APIs over HTTP: authorization, limits, and the form of errors.

A request is answered in full or refused with a reason, in the form that OpenAI's clients read.
"""

import hmac
import math
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tidemill.common.errors import RewardError, TidemillError
from tidemill.common.process.http_server import is_loopback, is_this_machine

MAX_PROBLEMS = 5
MAX_BODY_BYTES = 256 << 20
OPEN_PATHS = ("/health", "/healthz", "/metrics")
MIN_TOKEN_CHARS = 16
ERRORS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
}


class InputError(RewardError):
    """The request cannot be served as it is; not retryable."""

    status = 400


class BusyError(RewardError):
    """The server is full; retry after `retry_after_s`."""

    status = 429

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooLargeError(InputError):
    """The request is too large as a whole; it has to be sent in parts."""

    status = 413


class UnavailableError(BusyError):
    """Something that the server needs is away; retry after `retry_after_s`."""

    status = 503


async def answered(
    work: Callable[[Request], Awaitable[dict[str, Any] | BaseModel | Response]], http: Request
) -> Response:
    """The response of `work` to a request, or its refusal: with a TidemillError's own `status`, else 500."""
    try:
        answer = await work(http)
        if isinstance(answer, BaseModel):  # pydantic writes numbers that are not finite as null
            return Response(answer.model_dump_json(), media_type="application/json")
        return answer if isinstance(answer, Response) else JSONResponse(answer)
    except ValidationError as error:
        return refusal(400, explained(error))
    except TidemillError as error:
        return refusal(getattr(error, "status", 500), str(error), getattr(error, "retry_after_s", None))


async def read_body(http: Request) -> bytes:
    """The whole body. Raises TooLargeError: it is too large."""
    content = bytearray()
    async for chunk in http.stream():
        content += chunk
        # Counted while it is read: a request need not declare its length.
        if len(content) > MAX_BODY_BYTES:
            raise TooLargeError(f"the request has more than {MAX_BODY_BYTES:,} bytes: send it in parts")
    return bytes(content)


def refusal(status: int, message: str, retry_after_s: float | None = None) -> Response:
    kind = ERRORS.get(status, "InternalServerError")
    error = {"message": message, "type": kind, "param": None, "code": status}
    headers = {} if retry_after_s is None else {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
    return JSONResponse({"error": error}, status, headers=headers)


def explained(error: ValidationError) -> str:
    """All problems of a body in one line."""
    problems = []
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        field = ".".join(str(key) for key in item["loc"]) or "body"
        problems.append(f"{field}: {item['msg'].removeprefix('Value error, ')}")
    return "; ".join(problems[:MAX_PROBLEMS])


class TokenGate:
    """Checks the token before an application; without a token, only local requests pass, none of web pages.

    A browser on this machine sends whatever a page asks for. Such a request has `Origin`; or the name of the
    page's own site as `Host`, where that name was made to resolve to this machine (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, token: str, variable: str) -> None:
        """`variable`, for messages, is the environment variable with the token."""
        self._app = app
        self._token = token
        self._variable = variable

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 or 403, or pass the request on."""
        headers = Headers(scope=scope)
        is_open = scope["type"] != "http" or scope["path"] in OPEN_PATHS
        is_local = not self._token and "origin" not in headers and is_this_machine(headers.get("host", ""))
        app = self._app
        if not (is_open or is_local):
            if not self._token:
                app = refusal(403, f"no page of a browser is answered without a token: see {self._variable}")
            elif not is_shown(headers.get("authorization", ""), self._token):
                app = refusal(401, f"the token is wrong: see {self._variable}")
        await app(scope, receive, send)


def is_shown(authorization: str, token: str) -> bool:
    """Whether the header `Authorization` holds the token."""
    scheme, _, credentials = authorization.partition(" ")
    # Not `==`, whose time depends on how many characters are right.
    return scheme.lower() == "bearer" and hmac.compare_digest(credentials.strip().encode(), token.encode())


def token_problem(host: str, token: str, variable: str, whose: str) -> str:
    """Why a server must not listen on `host` with the token of `variable`; empty where it may. `whose` names
    the clients, for the message."""
    if token and len(token) < MIN_TOKEN_CHARS:
        problem = f"{variable} has {len(token)} characters; expected at least {MIN_TOKEN_CHARS}"
    elif not token and not is_loopback(host.strip("[]")):
        problem = f"--host {host} lets everybody in who reaches it: {variable} is not set"
    else:
        return ""
    return f"{problem}. Make one with `openssl rand -base64 24`, and give it to {whose} too."
