"""Lets in whoever shows the token; everybody may ask whether the server is well, and for its metrics."""

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from common.model_token import MODEL_TOKEN_VARIABLE, is_shown
from services.reward.model_server.protocol import failure

OPEN_PATHS = ("/health", "/healthz", "/metrics")


class TokenGate:
    """Around an application; without a token it lets everything through."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or pass the request on."""
        is_open = not self._token or scope["type"] != "http" or scope["path"] in OPEN_PATHS
        if is_open or is_shown(Headers(scope=scope).get("authorization", ""), self._token):
            await self._app(scope, receive, send)
            return
        message = f"the token is wrong: see {MODEL_TOKEN_VARIABLE}"
        await JSONResponse(failure(message, "AuthenticationError", 401), 401)(scope, receive, send)
