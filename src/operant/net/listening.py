"""What the servers of this library share: addresses, ports, Host headers, and the one on starlette and uvicorn."""

import errno
import ipaddress
import socket
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from operant.types import OperantError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


class Listener:
    """Listens on an address; `run` answers requests until Ctrl-C, `start` in a thread of its own, by `respond`.

    Raises: OperantError where it cannot listen, or if starlette and uvicorn are not installed.
    """

    what = "this server"
    """The beginning of a sentence on packages that are missing."""

    def __init__(self, host: str, *ports: int) -> None:
        """ports: the first that is free is taken; 0 is any."""
        try:
            import uvicorn
            from starlette.applications import Starlette
            from starlette.routing import Route

            protocol = self.protocol()
        except ImportError as error:
            raise OperantError(f"{self.what} needs {error.name}: pip install 'operant[label]'") from error
        methods = ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"]
        config = uvicorn.Config(
            Starlette(routes=[Route("/{path:path}", self.respond, methods=methods)]), log_level="error",
            access_log=False, server_header=False, lifespan="off", timeout_graceful_shutdown=2, loop="asyncio",
            http=protocol, ws="none",
        )  # fmt: skip
        self.host, self.server = host, uvicorn.Server(config)
        self.socket = listening(host, ports)
        self.port = self.socket.getsockname()[1]
        self.thread: threading.Thread | None = None

    def protocol(self) -> "type | str":
        """How uvicorn reads HTTP."""
        return "h11"

    async def respond(self, request: "Request") -> "Response":
        raise NotImplementedError

    def run(self) -> None:
        self.server.run(sockets=[self.socket])

    def start(self) -> None:
        """Answer requests in a thread of its own; returns when it does."""
        self.thread = threading.Thread(target=self.run, name=self.what, daemon=True)
        self.thread.start()
        while self.thread.is_alive() and not self.server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        self.server.should_exit = True
        if self.thread is not None:
            self.thread.join()
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Responder(BaseHTTPRequestHandler):
    """One request to a server of the standard library, which logs nothing of it."""

    timeout = 60

    def respond(self, status: int, body: str, kind: str = "application/json", **headers: str) -> None:
        """Send an answer, of a HEAD request its headers alone. headers: further ones, with _ in the place of -."""
        data = body.encode("utf-8", errors="replace")
        self.send_response(status)
        known = {"Content-Type": kind, "Content-Length": str(len(data))}
        for name, value in {**known, **{name.replace("_", "-"): value for name, value in headers.items()}}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing about single requests."""


def listening(host: str, ports: Sequence[int]) -> socket.socket:
    """A socket that listens at the address, on the first port that is free. Raises: OperantError."""
    for port in ports:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            if port == ports[-1]:
                raise listening_error(error, host, port) from error
    raise AssertionError("no port is given")


def listening_error(error: OSError, host: str, port: int) -> OperantError:
    reason = {
        errno.EADDRINUSE: "the port is in use; choose another --port, or 0 for any",
        errno.EACCES: "permission denied; choose a --port above 1023",
    }.get(error.errno or 0)
    reason = reason or f"{(error.strerror or str(error)).lower()}; --host must be an address of this machine"
    return OperantError(f"cannot serve at {host}, port {port}: {reason}")


def url_of(host: str, port: int) -> str:
    host = "127.0.0.1" if host == "0.0.0.0" else "[::1]" if host == "::" else f"[{host}]" if ":" in host else host
    return f"http://{host}:{port}/"


def is_known_host(header: str | None, listening: str) -> bool:
    """Whether a request's Host header names the server that listens on the address `listening`."""
    try:
        name = urlsplit(f"//{header or ''}").hostname or ""
    except ValueError:
        return False
    if listening in ("0.0.0.0", "::") and (_address(name) or name == socket.gethostname().lower()):
        return True
    return name == listening.lower() or is_local(name)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def is_local(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)
