"""Answers the requests of the live page from the files of a run folder, which are all that it reads.

GET /               the page; it fetches its data from the paths below
GET /data.json      the page's data without replies
GET /probes.json    the probe prompts and their answers
GET /replies.json   ?search= &sort= &descending=0|1 &step= &outcome= &offset= &limit=    any of the run's replies
GET /games.json     the groups of games of the run; ?step= or ?when=before|after: the games of one
GET /tokens.json    ?of=rollouts|probes|reference &step= &row=                 the tokens of one reply
"""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl

from operant.storage import atomic_io
from operant.tools.report import games, parquet, replies, run_report
from operant.types import OperantError

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
_FORMATS = {
    bool: ("[01]", "0 or 1"),
    int: ("[0-9]{1,9}", "a whole number of at least 0"),
}


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
