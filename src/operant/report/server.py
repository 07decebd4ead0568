"""A run's page over HTTP, live while the run goes on: `operant report runs/x --serve`.

`answers.py` says what there is to ask for. The server listens to this machine alone unless told otherwise, and answers
no page that another site's name leads to.
"""

import errno
import ipaddress
import socket
import socketserver
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from operant.report.api import Site, Wrong
from operant.report.html import as_json
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
    """Where the live page is served: `Serving(serve=True, port=8265)`."""

    serve: bool = False
    """Serve the page with every reply, instead of writing report.html."""
    host: str = "127.0.0.1"
    """The address to listen at. 0.0.0.0 shows the run to everyone who can reach this machine."""
    port: int = 8265
    """0: any free one."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise OperantError(f"port={self.port}: it must be 0 (any free one) to 65535")


def serve(folder: str | Path, options: Serving) -> int:
    """Serve the page of a run folder until Ctrl-C; returns the exit code. Raises as `server`."""
    with server(folder, options) as running:
        try:
            print(f"{running.url} shows {folder} with every reply, live while it goes on; Ctrl-C ends", flush=True)
            if not _is_local(options.host):
                print("everyone who can reach this machine can read it there; --host 127.0.0.1 keeps it to yourself")
            running.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def server(folder: str | Path, options: Serving) -> "Server":
    """A server that listens and waits for `serve_forever`. Raises: OperantError where it cannot listen."""
    try:
        return Server(Path(folder), options)
    except OSError as error:
        place = f"{options.host}, port {options.port}"
        if error.errno == errno.EADDRINUSE:
            raise OperantError(f"cannot serve at {place}: it is in use; choose another --port, or 0 for any") from error
        if error.errno == errno.EACCES:
            raise OperantError(f"cannot serve at {place}: not allowed; choose a --port above 1023") from error
        reason = (error.strerror or str(error)).lower()
        raise OperantError(f"cannot serve at {place}: {reason}; --host must be an address of this machine") from error


class Server(ThreadingHTTPServer):
    """Hands requests to the site of a run."""

    daemon_threads = True

    def __init__(self, folder: Path, options: Serving) -> None:
        self.site, self.host = Site(folder), options.host
        self.address_family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        super().__init__((options.host, options.port), _Handler)

    def server_bind(self) -> None:
        """Without asking a name server what this machine is called, which may take seconds."""
        socketserver.TCPServer.server_bind(self)

    @property
    def url(self) -> str:
        """Where a browser finds the page."""
        host = "127.0.0.1" if self.host == "0.0.0.0" else f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"

    def knows(self, host: str | None) -> bool:
        """Whether a request's Host header names this server. Another name that leads here is another site's trick."""
        try:
            name = urlsplit(f"//{host or ''}").hostname or ""
        except ValueError:
            return False
        if self.host in ("0.0.0.0", "::") and (_address(name) or name == socket.gethostname().lower()):
            return True
        return name == self.host.lower() or _is_local(name)


def _address(name: str) -> Any:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _is_local(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


class _Handler(BaseHTTPRequestHandler):
    """One request: checked, answered, or told in a sentence what is wrong with it."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "operant", ""
    timeout = 60

    def do_GET(self) -> None:
        """Answer."""
        status, said = 200, ""
        try:
            said = self._answer()
        except Wrong as wrong:
            status, said = wrong.args
        except OperantError as error:
            status, said = 500, str(error)
        page = status == 200 and urlsplit(self.path).path == "/"
        body = said if page else as_json(said if status == 200 else {"error": said})
        self._send(status, body, "text/html" if page else "application/json")

    def _answer(self) -> Any:
        if not self.server.knows(self.headers.get("Host")):
            raise Wrong(403, f"this page is served to {self.server.url} alone")
        url = urlsplit(self.path)
        return self.server.site.answer(url.path, url.query)

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

    def _refuse(self) -> None:
        self.close_connection = True  # what stands in the body is not read
        self._send(405, as_json({"error": f"{self.command} is not answered here, GET is"}), "application/json")

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse

    def handle(self) -> None:
        """A browser that has gone away is no fault of anybody's."""
        try:
            super().handle()
        except ConnectionError:
            self.close_connection = True

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing of each request."""
