"""What a live page may ask of a run folder, and the answers: paths, their parameters, and sentences for wrong ones.

    GET /               the page; what it shows comes from the paths below
    GET /data.json      the page's data without replies
    GET /probes.json    the fixed queries and their answers
    GET /replies.json   ?search= &sort= &descending=0|1 &step= &offset= &limit=    any of the run's replies
    GET /tokens.json    ?of=rollouts|probes|reference &step= &row=                 one reply's tokens and their numbers

Nothing but the folder is read.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from operant.report import parquet, replies, run_report
from operant.report.search import Index
from operant.storage import atomic_io
from operant.types import OperantError

_OTHERS = ("report.html", "log.txt")
"""Files of a run that the page shows nothing of."""


class Wrong(Exception):
    """A request that gets no answer but a sentence: (status, sentence)."""


class Site:
    """What there is to ask of one run folder. Many threads may ask at once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.index = folder, Index(folder)
        self._kept: dict[Callable, tuple[Any, Any]] = {}
        self._lock = threading.Lock()

    def answer(self, path: str, query: str) -> Any:
        """HTML of the page, or an object for JSON. Raises: Wrong, and OperantError where the folder cannot be read."""
        if path not in _PATHS:
            raise Wrong(404, f"there is nothing at {path}; there are: {', '.join(_PATHS)}")
        answer, kinds = _PATHS[path]
        return answer(self, **_parameters(query, kinds))

    def fresh(self, make: Callable[[Path], Any]) -> Any:
        """`make(folder)`, made anew only where a file of the run has changed: a page that waits costs a run nothing."""
        with self._lock:
            paths = [path for part in (".", "rollouts", "probes") for path in sorted((self.folder / part).glob("*.*"))]
            stamps = [(path, parquet.stamp(path)) for path in paths if path.name not in _OTHERS]
            if make not in self._kept or self._kept[make][0] != stamps:
                self._kept[make] = stamps, make(self.folder)
            return self._kept[make][1]


def _page(site: Site) -> str:
    return run_report.page(_data(site), live=True)


def _data(site: Site) -> Any:
    return site.fresh(run_report.page_data)


def _probes(site: Site) -> Any:
    return site.fresh(_asked_again)


def _asked_again(folder: Path) -> Any:
    read = replies.Reader()
    return {"probes": replies.probes(folder, read), "notes": read.notes}


def _replies(site: Site, **asked: Any) -> Any:
    try:
        return site.index.find(**asked)
    except OperantError as error:
        raise Wrong(400, str(error)) from error


def _tokens(site: Site, of: str = "rollouts", step: int = 0, row: int = 0) -> Any:
    if of not in ("rollouts", "probes", "reference") or row < 0:
        raise Wrong(400, f"of={of!r}, row={row}: of must be rollouts, probes or reference, row at least 0")
    path = site.folder / ("rollouts" if of == "rollouts" else "probes") / f"{atomic_io.step_name(step)}.parquet"
    if of == "reference":
        path = site.folder / "probes" / "reference.parquet"
    try:
        return parquet.tokens(path, [row])[0]
    except (FileNotFoundError, IndexError):
        raise Wrong(404, f"there is no reply {row} at step {step} any more") from None


_PATHS: dict[str, tuple[Callable, dict[str, type]]] = {
    "/": (_page, {}),
    "/data.json": (_data, {}),
    "/probes.json": (_probes, {}),
    "/replies.json": (
        _replies,
        {"search": str, "sort": str, "descending": bool, "step": int, "offset": int, "limit": int},
    ),
    "/tokens.json": (_tokens, {"of": str, "step": int, "row": int}),
}


def _parameters(query: str, kinds: dict[str, type]) -> dict[str, Any]:
    """The parameters of a request as their kinds. One that is empty counts as not given."""
    try:
        given = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=20)
    except ValueError:
        raise Wrong(400, "the parameters are not well-formed") from None
    asked: dict[str, Any] = {}
    for name, text in given:
        if name not in kinds:
            raise Wrong(400, f"parameter {name!r} is unknown; there are: {', '.join(kinds) or 'none'}")
        if name in asked:
            raise Wrong(400, f"parameter {name!r} is given twice")
        if text:
            asked[name] = _value(name, text, kinds[name])
    return asked


def _value(name: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text not in ("0", "1"):
            raise Wrong(400, f"{name}={text!r}: it must be 0 or 1")
        return text == "1"
    if kind is int:
        if not text.isascii() or not text.isdigit() or len(text) > 9:
            raise Wrong(400, f"{name}={text!r}: it must be a whole number of at least 0")
        return int(text)
    return text
