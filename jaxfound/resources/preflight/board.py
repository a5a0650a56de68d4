"""Where hosts meet before there is a job: keys over one TCP port, kept by process 0.

Inside a job JAX's coordination service keeps the keys (resources/control.py). It lets nobody in
until everyone is there, and its two ends must be of one version, so it cannot be asked who is
absent or which versions differ. A line of JSON is a request, a line of JSON is its answer.
"""

import json
import socket
import socketserver
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import cast

from jaxfound.resources.control import LocalStore, PeerError

GREETING = "jaxfound doctor 1"
# How long one request may take: the board answers from memory.
ANSWER_S = 10.0
RETRY_S = 0.2


class PortError(PeerError):
    """The port of the meeting is held by another program, or no such address is on this host."""


class Board:
    """The keys, served to every host until it is closed.

    Raises:
        PortError: if the port cannot be listened on.
    """

    def __init__(self, port: int) -> None:
        self.store = LocalStore()
        self._lock = threading.Lock()
        board = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                for line in self.rfile:
                    self.wfile.write(board.answer(line))

        class Server(socketserver.ThreadingTCPServer):
            address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
            allow_reuse_address = True
            daemon_threads = True
            request_queue_size = 1024

            def server_bind(self) -> None:
                if self.address_family == socket.AF_INET6:
                    self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                super().server_bind()

        try:
            self._server = Server(("", port), Handler)
        except OSError as error:
            raise PortError(f"port {port} of this host: {error.strerror}") from error
        self.port = cast(int, self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.daemon = True
        self._thread.start()

    def answer(self, line: bytes) -> bytes:
        """Return the answer to one request; what is no request gets the greeting."""
        try:
            asked = json.loads(line)
        except ValueError:
            asked = {}
        with self._lock:
            found = self._do(asked if isinstance(asked, dict) else {})
        return json.dumps({"is": GREETING, "found": found}).encode() + b"\n"

    def _do(self, asked: Mapping[str, str]) -> dict[str, str]:
        match asked.get("do"):
            case "put":
                self.store.put(asked["key"], asked["value"])
            case "read":
                return self.store.read(asked["key"])
            case "delete":
                self.store.delete(asked["key"])
            case _:
                pass
        return {}

    def close(self) -> None:
        """Stop answering and free the port."""
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> "Board":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class BoardStore:
    """The keys of a board on this or another host; one connection, one request at a time.

    Args:
        host: name or address of process 0's host.
        port: of the board.
        limit_s: how long to try while nobody answers.

    Raises:
        PortError: if what answers is not a board.
        PeerError: if nobody answers within the limit; from every call, if the board is gone.
    """

    def __init__(self, host: str, port: int, *, limit_s: float | int) -> None:
        self._where = f"{host}:{port}"
        self._lock = threading.Lock()
        self._socket = self._connect(host, port, limit_s=limit_s)
        self._file = self._socket.makefile("rb")
        self._ask({"do": "greet"})

    def _connect(self, host: str, port: int, *, limit_s: float | int) -> socket.socket:
        ends_s = time.monotonic() + limit_s
        while True:
            try:
                return socket.create_connection((host, port), timeout=ANSWER_S)
            except OSError as error:
                if time.monotonic() > ends_s:
                    raise PeerError(
                        f"nobody answers at {self._where} within {limit_s:.0f} s ({error})",
                        missing=(0,),
                    ) from error
            time.sleep(RETRY_S)

    def _ask(self, request: Mapping[str, str]) -> dict[str, str]:
        with self._lock:
            try:
                self._socket.sendall(json.dumps(request).encode() + b"\n")
                line = self._file.readline()
            except OSError as error:
                raise PeerError(f"{self._where} does not answer ({error})", missing=(0,)) from error
        try:
            answer = json.loads(line)
            if answer["is"] == GREETING:
                return answer["found"]
        except (ValueError, KeyError, TypeError):
            pass
        if not line and request["do"] != "greet":
            raise PeerError(f"{self._where} has ended", missing=(0,))
        raise PortError(f"what answers at {self._where} is not `jaxfound doctor` of this version")

    def put(self, key: str, value: str) -> None:
        """Set `key`, over any earlier value."""
        self._ask({"do": "put", "key": key, "value": value})

    def read(self, folder: str) -> dict[str, str]:
        """Return what is under `folder/`, by the rest of the key."""
        return self._ask({"do": "read", "key": folder})

    def delete(self, folder: str) -> None:
        """Remove `folder` and all under it."""
        self._ask({"do": "delete", "key": folder})

    def local_address(self) -> str:
        """Return this host's address on the way to the board."""
        return self._socket.getsockname()[0].removeprefix("::ffff:")

    def close(self) -> None:
        """End the connection."""
        self._file.close()
        self._socket.close()
