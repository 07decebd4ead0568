"""Serves the page of a run over HTTP, live while the run is in progress: `operant report runs/x --serve`.

GET /               the page; it fetches its data from the paths below
GET /data.json      the page's data without replies
GET /probes.json    the probe prompts and their answers
GET /replies.json   ?search= &sort= &descending=0|1 &step= &outcome= &offset= &limit=    any of the run's replies
GET /games.json     the groups of games of the run; ?step= or ?when=before|after: the games of one
GET /tokens.json    ?of=rollouts|probes|reference &step= &row=                 the tokens of one reply

Only the files of the run folder are read. By default the server listens on this machine alone; it refuses requests
whose Host header is not a name of this server, because a page of another site could have sent them (DNS rebinding).
"""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from operant.bounds import bounded, check_bounds
from operant.net.listening import Responder, is_known_host, is_local, listening, url_of
from operant.storage import atomic_io
from operant.tools.report import games, parquet, replies, run_report
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

_NOT_SHOWN = ("report.html", "log.txt")
"""Files of a run that the page does not depend on."""


class RequestError(Exception):
    """A request that is refused: (HTTP status, message)."""


class Site:
    """Answers requests about one run folder. It may be used from several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.index = folder, replies.Index(folder)
        self._results: dict[str, tuple[object, object]] = {}
        self._lock = threading.Lock()

    def answer(self, path: str, query: str) -> object:
        """Return the HTML of the page, or an object to send as JSON.

        Raises: RequestError for an unknown path or parameter; OperantError where the folder cannot be read.
        """
        if path not in _PATHS:
            raise RequestError(404, f"there is nothing at {path}; there are: {', '.join(_PATHS)}")
        method, types = _PATHS[path]
        with parquet.reading_run(self.folder):
            return method(self, **_parameters(query, types))

    def page(self) -> str:
        return run_report.page(self.data(), live=True)

    def data(self) -> object:
        return self._cached("data", run_report.page_data)

    def probes(self) -> object:
        read = replies.Reader()
        return self._cached("probes", lambda folder: {"probes": replies.probes(folder, read), "notes": read.notes})

    def replies(self, **parameters: str | int | None) -> object:
        try:
            return self.index.find(**parameters)
        except OperantError as error:
            raise RequestError(400, str(error)) from error

    def games(self, step: int | None = None, when: str | None = None) -> object:
        if when not in (None, *games.HELD_OUT):
            raise RequestError(400, f"when={when!r}: it must be before or after")
        if step is None and when is None:
            return {"groups": self._cached("games", games.groups)}
        try:
            return {"games": games.games(self.folder, step, when)}
        except FileNotFoundError:
            raise RequestError(404, f"there are no games of step {step} any more") from None

    def tokens(self, of: str = "rollouts", step: int = 0, row: int = 0) -> object:
        if of not in ("rollouts", "probes", "reference") or row < 0:
            raise RequestError(400, f"of={of!r}, row={row}: of must be rollouts, probes or reference, row at least 0")
        folder = self.folder / ("rollouts" if of == "rollouts" else "probes")
        name = "reference" if of == "reference" else atomic_io.step_name(step)
        try:
            return parquet.tokens(folder / f"{name}.parquet", [row])[0]
        except (FileNotFoundError, IndexError):
            raise RequestError(404, f"there is no reply {row} at step {step} any more") from None

    def _cached(self, name: str, make: Callable[[Path], object]) -> object:
        """Return `make(folder)`, computed again only after a file of the run has changed, so that polling is cheap."""
        with self._lock:
            paths = [path for part in (".", "rollouts", "probes") for path in sorted((self.folder / part).glob("*.*"))]
            stamps = [(path, parquet.stamp(path)) for path in paths if path.name not in _NOT_SHOWN]
            if name not in self._results or self._results[name][0] != stamps:
                self._results[name] = stamps, make(self.folder)
            return self._results[name][1]


_PATHS: dict[str, tuple[Callable, dict[str, type]]] = {
    "/": (Site.page, {}),
    "/data.json": (Site.data, {}),
    "/probes.json": (Site.probes, {}),
    "/replies.json": (
        Site.replies,
        {"search": str, "sort": str, "descending": bool, "step": int, "outcome": str, "offset": int, "limit": int},
    ),
    "/games.json": (Site.games, {"step": int, "when": str}),
    "/tokens.json": (Site.tokens, {"of": str, "step": int, "row": int}),
}
"""By path: the method that answers, and the types of its parameters."""
_FORMATS = {bool: ("[01]", "0 or 1"), int: ("[0-9]{1,9}", "a whole number of at least 0")}


def _parameters(query: str, types: dict[str, type]) -> dict[str, str | int]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=20)
    except ValueError:
        raise RequestError(400, "the parameters are not well-formed") from None
    parameters: dict[str, str | int] = {}
    for name, text in pairs:
        if name not in types:
            raise RequestError(400, f"parameter {name!r} is unknown; there are: {', '.join(types) or 'none'}")
        if name in parameters:
            raise RequestError(400, f"parameter {name!r} appears twice")
        if not text:
            continue
        if types[name] is str:
            parameters[name] = text
            continue
        pattern, description = _FORMATS[types[name]]
        if not re.fullmatch(pattern, text):
            raise RequestError(400, f"{name}={text!r}: it must be {description}")
        parameters[name] = types[name](int(text))
    return parameters


@dataclass(frozen=True)
class Serving:
    """Options of the live page: `Serving(serve=True, port=8265)`."""

    serve: bool = False
    """Serve the live page with every reply instead of writing report.html."""
    host: str = "127.0.0.1"
    """The address to listen on. 0.0.0.0 shows the run to everyone who can reach this machine."""
    port: int = bounded(8265, at_least=0, below=65536, rule="0 (any free port) to 65535")
    """The port to listen on. 0: any free port."""

    def __post_init__(self) -> None:
        check_bounds(self)


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
        super().__init__((options.host, options.port), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening(options.host, options.port)
        self.server_address = self.socket.getsockname()

    @property
    def url(self) -> str:
        return url_of(self.host, self.server_address[1])


class _Handler(Responder):
    """Answers one request with the page, a JSON object, or a JSON object with an `error`."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "operant", ""

    def do_GET(self) -> None:
        status = 200
        try:
            if not is_known_host(self.headers.get("Host"), self.server.host):
                raise RequestError(403, f"this page is available at {self.server.url} only")
            url = urlsplit(self.path)
            answer = self.server.site.answer(url.path, url.query)
        except RequestError as error:
            status, answer = error.args[0], {"error": error.args[1]}
        except OperantError as error:
            status, answer = 500, {"error": str(error)}
        text, kind = (answer, "text/html") if isinstance(answer, str) else (as_json(answer), "application/json")
        self.respond(status, text, f"{kind}; charset=utf-8", **_HEADERS)

    def do_POST(self) -> None:
        self.close_connection = True  # the body is not read
        body = as_json({"error": f"{self.command} is not supported; use GET"})
        self.respond(405, body, "application/json; charset=utf-8", **_HEADERS, Allow="GET")

    do_HEAD = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_POST

    def handle(self) -> None:
        """Handle the requests of one connection; a browser that closes it early is not an error."""
        try:
            super().handle()
        except ConnectionError:
            self.close_connection = True
