"""Builds a self-contained page: template, style, scripts and data in a single file that needs no network.

    html = page("runs/x", data, scripts=("charts.js", "app.js"), styles=("style.css",))

The files are in `page/`. In the JSON of the data every `<` is escaped, so that no text can close its script element.
"""

import json
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_FILES = Path(__file__).parent / "page"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(title: str, data: object, *, scripts: Sequence[str], styles: Sequence[str], live: bool = False) -> str:
    """Fill in the template.

    data: the object that the scripts find as JSON in `#data`. scripts, styles: names of files in `page/`, added after
    those of uPlot. live: the page may fetch from its own server, and has `<meta name="live">`.
    """
    parts = {
        "policy": _POLICY + ("; connect-src 'self'" if live else ""),
        "live": '<meta name="live" content="yes">' if live else "",
        "title": escape(title),
        "styles": "\n".join(_read(name) for name in ("vendor/uPlot.min.css", *styles)),
        "scripts": "\n".join(_read(name) for name in ("vendor/uPlot.iife.min.js", *scripts)),
        "data": as_json(data).replace("<", "\\u003c"),
    }
    return re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], _read("page.html"))


def as_json(data: object) -> str:
    """Encode as compact JSON. Raises: ValueError for NaN and infinity."""
    return json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def _read(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")


def cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[:longest] + " …"


def spread(items: Sequence[T], most: int) -> list[T]:
    """Select at most `most` evenly spaced items, with both ends: `spread("abcde", 3) == ["a", "c", "e"]`."""
    if most >= len(items):
        return list(items)
    if most < 2:
        return list(items[len(items) - most :])
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def fitting(make: Callable[[int], T], most: int, budget: float) -> T:
    """Return `make(n)` for a large n of at most `most` whose JSON fits into the budget of bytes."""
    while (bytes_made := size(made := make(most))) > budget and most:
        most = min(most - 1, int(most * budget / bytes_made))
    return made


def size(data: object) -> int:
    text = as_json(data)
    return len(text.encode("utf-8", errors="replace")) + 5 * text.count("<")
