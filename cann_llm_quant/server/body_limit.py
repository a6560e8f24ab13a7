"""A bound on the size of request bodies, whether or not they announce it."""

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cann_llm_quant.server.failures import error_response


class BodyLimit:
    """ASGI middleware that answers 413 to bodies of more than `limit` bytes."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit
        self._message = f"the body is larger than the {limit} bytes that this server takes"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse by the announced length at once, otherwise while the body is read."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if not announced.isdecimal() or int(announced) > self.limit:
            await error_response(413, self._message)(scope, receive, send)
            return
        await self.app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.limit:
                raise HTTPException(413, self._message)
            return message

        return counted
