"""Small APIs of JSON over HTTP: who may ask, how much, and how a refusal looks.

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
    429: "RateLimitError",
}


class InputError(RewardError):
    """The request can never be served as it is."""

    status = 400


class BusyError(RewardError):
    """No room now; `retry_after_s` is when to retry."""

    status = 429

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


async def answered(
    work: Callable[[Request], Awaitable[dict[str, Any] | BaseModel]], http: Request
) -> Response:
    """What `work` makes of a request, or its refusal: a TidemillError's own `status`, else 500."""
    try:
        made = await work(http)
        if isinstance(made, BaseModel):  # in which numbers that are not finite become null
            return Response(made.model_dump_json(), media_type="application/json")
        return JSONResponse(made)
    except ValidationError as error:
        return refusal(400, explained(error))
    except TidemillError as error:
        return refusal(getattr(error, "status", 500), str(error), getattr(error, "retry_after_s", None))


async def read_body(http: Request) -> bytes:
    """The whole body. Raises InputError: it is too large."""
    content = bytearray()
    async for part in http.stream():
        content += part
        # Counted as it comes: a request need not say its length.
        if len(content) > MAX_BODY_BYTES:
            raise InputError(f"the request has more than {MAX_BODY_BYTES:,} bytes: send it in parts")
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
        field = ".".join(str(part) for part in item["loc"]) or "body"
        problems.append(f"{field}: {item['msg'].removeprefix('Value error, ')}")
    return "; ".join(problems[:MAX_PROBLEMS])


class TokenGate:
    """Around an application; without a token it lets through what asks for this machine, but for pages.

    A browser on this machine would send what any page asks it to, and says so with `Origin`; or with the name
    of the page's own site as `Host`, where that name was made to mean this machine.
    """

    def __init__(self, app: ASGIApp, token: str, variable: str) -> None:
        """`variable` of the environment has the token."""
        self._app, self._token, self._variable = app, token, variable

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
    """Whether a request's header shows the token."""
    scheme, _, shown = authorization.partition(" ")
    # Not `==`, whose time tells how many characters are right.
    return scheme.lower() == "bearer" and hmac.compare_digest(shown.strip().encode(), token.encode())


def token_problem(host: str, token: str, variable: str, whose: str) -> str:
    """What is wrong with listening on `host` with the token of `variable`; empty where nothing is. `whose`
    are the clients."""
    if token and len(token) < MIN_TOKEN_CHARS:
        problem = f"{variable} has {len(token)} characters; expected at least {MIN_TOKEN_CHARS}"
    elif not token and not is_loopback(host.strip("[]")):
        problem = f"--host {host} lets everybody in who reaches it: {variable} is not set"
    else:
        return ""
    return f"{problem}. Make one with `openssl rand -base64 24`, and give it to {whose} too."
