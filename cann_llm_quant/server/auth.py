"""The API key: `Authorization: Bearer KEY` on every path but `/health`, compared in constant time.

It is checked before a body is read.
"""

from hmac import compare_digest

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from cann_llm_quant.server.failures import error_response

OPEN_PATHS = frozenset({"/health"})


class ApiKey:
    """ASGI middleware that answers 401 to requests without the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app = app
        self._expected = key.encode("utf-8")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what carries the key."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._matches(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        response = error_response(
            401, "no valid API key; send the header Authorization: Bearer KEY", code="invalid_api_key"
        )
        response.headers["WWW-Authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _matches(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Header bytes arrive as Latin-1.
        return scheme.lower() == "bearer" and compare_digest(key.strip().encode("latin-1"), self._expected)
