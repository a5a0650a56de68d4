"""Listening on a port: one uvicorn server in this process, and an end that loses no answer."""

import asyncio
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from jaxfound.config.schema import ConfigError
from jaxfound.config.serve import ServeConfig
from jaxfound.resources.signals import GracefulStop
from jaxfound.serving.reply import Front

# After the engine has ended every request, so long for the last answers to leave.
LAST_ANSWERS_S = 5.0
KEEP_ALIVE_S = 75


class HttpServer(uvicorn.Server):
    """Serves an application until it is told to stop; then takes no more and drains the engine.

    Args:
        app: the routes.
        front: drained at the end.
        cfg: `drain_timeout_s` is what running requests have to end.
        on_ready: called when requests are answered.
    """

    def __init__(
        self, app: ASGIApp, front: Front, *, cfg: ServeConfig, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                lifespan="off",
                # Records go where the program's own go.
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                # uvicorn asks for whole seconds and hands them to asyncio, which does not.
                timeout_graceful_shutdown=int(cfg.drain_timeout_s + LAST_ANSWERS_S + 1),
            )
        )
        self._front = front
        self._drain_s = cfg.drain_timeout_s
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening; running requests end, or are told that they were cancelled."""
        draining = asyncio.ensure_future(self._front.drain(self._drain_s))
        await super().shutdown(sockets)
        await draining


def bind(host: str, port: int) -> socket.socket:
    """Return a socket of that address, on which nobody listens yet.

    So a port that is taken is known before weights are loaded, and connections are refused until
    requests can be answered.

    Args:
        host: a name or an address of this machine.
        port: 0 = any that is free.

    Raises:
        ConfigError: the address is taken, or not this machine's.
    """
    there = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        there = socket.socket(family, kind, protocol)
        there.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        there.bind(address)
    except OSError as error:
        if there is not None:
            there.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}. Choose another "
            "--port, or end what uses it"
        ) from error
    return there


def listen(there: socket.socket, server: HttpServer) -> None:
    """Answer on a bound socket until SIGTERM or Ctrl-C; a second Ctrl-C ends at once.

    Raises:
        KeyboardInterrupt: at the second Ctrl-C.
    """
    # uvicorn hands the signal on when it has ended; this is who takes it.
    with GracefulStop():
        server.run(sockets=[there])
