"""Serves the page of a run over HTTP, live while the run is in progress: `operant report runs/x --serve`.

`api.py` answers the requests. By default the server listens on this machine alone; it refuses requests whose Host
header is not a name of this server, because a page of another site could have sent them (DNS rebinding).
"""

import errno
import ipaddress
import socket
import socketserver
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from operant.tools.report.api import RequestError, Site
from operant.tools.report.html import as_json
from operant.types import OperantError

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Serving:
    """Options of the live page: `Serving(serve=True, port=8265)`."""

    serve: bool = False
    """Serve the live page with every reply instead of writing report.html."""
    host: str = "127.0.0.1"
    """The address to listen on. 0.0.0.0 shows the run to everyone who can reach this machine."""
    port: int = 8265
    """The port to listen on. 0: any free port."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise OperantError(f"port={self.port}: it must be 0 (any free port) to 65535")


def serve(folder: str | Path, options: Serving) -> int:
    """Serve the page of a run folder until Ctrl-C; returns the exit code. Raises as `Server`."""
    with Server(Path(folder), options) as server:
        try:
            print(f"{server.url} serves {folder} with every reply, live; press Ctrl-C to end", flush=True)
            if not is_local(options.host):
                print("everyone who can reach this machine can read it; --host 127.0.0.1 restricts it to this machine")
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


class Server(ThreadingHTTPServer):
    """Listens on the address of the options; `serve_forever` then answers requests about a run folder.

    Raises: OperantError where it cannot listen.
    """

    daemon_threads = True

    def __init__(self, folder: Path, options: Serving) -> None:
        self.site, self.host = Site(folder), options.host
        self.address_family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        try:
            super().__init__((options.host, options.port), _Handler)
        except OSError as error:
            raise listening_error(error, options.host, options.port) from error

    def server_bind(self) -> None:
        """Bind without looking up this machine's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)

    @property
    def url(self) -> str:
        return url_of(self.host, self.server_address[1])

    def knows(self, host: str | None) -> bool:
        return is_known_host(host, self.host)


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


class _Handler(BaseHTTPRequestHandler):
    """Answers one request with the page, a JSON object, or a JSON object with an `error`."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "operant", ""
    timeout = 60

    def do_GET(self) -> None:
        status = 200
        try:
            if not self.server.knows(self.headers.get("Host")):
                raise RequestError(403, f"this page is available at {self.server.url} only")
            url = urlsplit(self.path)
            answer = self.server.site.answer(url.path, url.query)
        except RequestError as error:
            status, answer = error.args[0], {"error": error.args[1]}
        except OperantError as error:
            status, answer = 500, {"error": str(error)}
        if isinstance(answer, str):
            self._send(status, answer, "text/html")
        else:
            self._send(status, as_json(answer), "application/json")

    def do_POST(self) -> None:
        """Refuse any method but GET."""
        self.close_connection = True  # the body is not read
        self._send(405, as_json({"error": f"{self.command} is not supported; use GET"}), "application/json")

    do_HEAD = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_POST

    def _send(self, status: int, body: str, kind: str) -> None:
        data = body.encode("utf-8", errors="replace")
        self.send_response(status)
        for name, value in (_HEADERS | {"Content-Type": f"{kind}; charset=utf-8"}).items():
            self.send_header(name, value)
        if status == 405:
            self.send_header("Allow", "GET")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def handle(self) -> None:
        """Handle the requests of one connection; a browser that closes it early is not an error."""
        try:
            super().handle()
        except ConnectionError:
            self.close_connection = True

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing about single requests."""
