"""Runs the application until it is told to stop, and then lets it finish what it has begun.

The first SIGINT or SIGTERM closes the door: new requests get 503, `/health` as well, so that a balancer looks
elsewhere. Once all answers are sent, or `drain_seconds` have passed and the rest was cancelled, the server ends. A
second signal cancels at once.
"""

import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from cann_llm_quant.errors import UsageError
from cann_llm_quant.server.service import Service

FLUSH_SECONDS = 5  # for connections to close once all answers are made


def open_socket(host: str, port: int) -> socket.socket:
    """A bound socket, before the model is loaded; port 0 takes any that is free. UsageError where it cannot be."""
    if not 0 <= port <= 65535:
        raise UsageError(f"port {port} must lie between 0 and 65535; choose another with --port")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--host {host}: {error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise UsageError(f"port {port} of {host} cannot be used ({error}); choose another with --port") from error
    return bound


def is_loopback(bound: socket.socket) -> bool:
    """Whether only this machine reaches the socket."""
    address = str(bound.getsockname()[0])
    return address.startswith("127.") or address == "::1"


def url_of(bound: socket.socket) -> str:
    """The address for a client."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: FastAPI, bound: socket.socket, *, drain_seconds: float, ready: Callable[[], None]) -> None:
    """Serve on the socket until a signal ends it; `ready` is called once connections are taken."""
    DrainingServer(app, drain_seconds, ready).run(sockets=[bound])


class DrainingServer(uvicorn.Server):
    """uvicorn's server with a door that closes before it ends."""

    def __init__(self, app: FastAPI, drain_seconds: float, ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=FLUSH_SECONDS,
        )
        super().__init__(config)
        self._service: Service = app.state.service
        self._drain_seconds = drain_seconds
        self._ready = ready
        self._deadline: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take connections, then say so."""
        await super().startup(sockets)
        self._ready()

    def begin_drain(self) -> None:
        """Close the door; a second time, wait no longer."""
        wait = 0.0 if self._service.draining else self._drain_seconds
        self._service.draining = True
        self._deadline = time.monotonic() + wait

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal."""
        self.begin_drain()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end."""
        if self._deadline is not None:
            if time.monotonic() >= self._deadline:
                self._service.give_up()
                self.should_exit = True
            elif self._service.is_idle:
                self.should_exit = True
        return await super().on_tick(counter)
