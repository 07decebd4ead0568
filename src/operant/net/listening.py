"""What the servers of this library share: addresses, ports, Host headers, and the one on starlette and uvicorn."""

import asyncio
import errno
import io
import ipaddress
import socket
import threading
import time
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from operant.types import OperantError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


class Listener(AbstractContextManager):
    """Listens on an address; `run` answers requests until Ctrl-C, `start` in a thread of its own, by `respond`.

    Raises: OperantError where it cannot listen, or if starlette and uvicorn are not installed.
    """

    what = "this server"
    """The beginning of a sentence on packages that are missing."""
    patience = 60.0
    """Seconds in which a request has to be there as a whole, and after which a connection without one is closed."""

    def __init__(self, host: str, *ports: int) -> None:
        """ports: the first that is free is taken; 0 is any."""
        try:
            import uvicorn
            from starlette.routing import request_response
        except ImportError as error:
            raise OperantError(f"{self.what} needs {error.name}: pip install 'operant[label]'") from error
        config = uvicorn.Config(
            request_response(self.respond), log_level="error", access_log=False, server_header=False, lifespan="off",
            timeout_graceful_shutdown=2, loop="asyncio", http=self.protocol(), ws="none", limit_concurrency=1000,
        )  # fmt: skip
        self.host, self.server = host, uvicorn.Server(config)
        self.socket = listening(host, *ports)
        self.port = self.socket.getsockname()[1]
        self.thread = threading.Thread(target=self.run, name=self.what, daemon=True)

    def protocol(self) -> type:
        """How uvicorn reads HTTP: a connection is closed if no request, or no further one, has begun for too long."""
        from uvicorn.protocols.http.h11_impl import H11Protocol

        listener = self

        class Hurried(H11Protocol):
            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                super().connection_made(transport)
                self.hurry()

            def on_response_complete(self) -> None:
                self.hurry()
                super().on_response_complete()

            def hurry(self) -> None:
                last, close = self.cycle, self.transport.close
                self.loop.call_later(listener.patience, lambda: close() if self.cycle is last else None)

        return Hurried

    async def respond(self, request: "Request") -> "Response":
        raise NotImplementedError

    def run(self) -> None:
        self.server.run(sockets=[self.socket])

    def start(self) -> None:
        """Answer requests in a thread of its own; returns when it does."""
        self.thread.start()
        while self.thread.is_alive() and not self.server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        self.server.should_exit = True
        if self.thread.is_alive():
            self.thread.join()
        self.socket.close()

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Arriving(socket.SocketIO):  # what a connection sends, until `due`
    due = 0.0

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        self._sock.settimeout(max(self.due - time.monotonic(), 0.001))  # pyright: ignore
        return super().readinto(buffer)


class Responder(BaseHTTPRequestHandler):
    """One request to a server of the standard library, which logs nothing of it."""

    timeout = 60  # seconds in which a request has to be there as a whole

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Arriving(self.connection, "rb"))

    def handle_one_request(self) -> None:
        self.rfile.raw.due = time.monotonic() + self.timeout  # type: ignore[attr-defined]
        super().handle_one_request()

    def respond(self, status: int, body: str, kind: str = "application/json", **headers: str) -> None:
        """Send an answer, of a HEAD request its headers alone. headers: further ones, with _ in the place of -."""
        data = body.encode("utf-8", errors="replace")
        self.connection.settimeout(self.timeout)
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing about single requests."""


def listening(host: str, port: int, *others: int) -> socket.socket:
    """A socket that listens at the address, on the first port that is free. Raises: OperantError."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        if others:
            return listening(host, *others)
        known = {errno.EADDRINUSE: "the port is in use; choose another --port, or 0 for any"}
        known[errno.EACCES] = "permission denied; choose a --port above 1023"
        other = f"{(error.strerror or str(error)).lower()}; --host must be an address of this machine"
        raise OperantError(f"cannot serve at {host}, port {port}: {known.get(error.errno or 0, other)}") from error


def url_of(host: str, port: int) -> str:
    host = "127.0.0.1" if host == "0.0.0.0" else "[::1]" if host == "::" else f"[{host}]" if ":" in host else host
    return f"http://{host}:{port}/"


def is_known_host(header: str | None, listening: str) -> bool:
    """Whether a request's Host header names the server that listens on the address `listening`."""
    try:
        name = urlsplit(f"//{header or ''}").hostname or ""
    except ValueError:
        return False
    every = listening in ("0.0.0.0", "::") and (_address(name) or name == socket.gethostname().lower())
    return bool(every) or name == listening.lower() or is_local(name)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def is_local(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)
