"""One self-contained page: template, style, scripts and data in a single file that asks nothing of a network.

    html = page("runs/x", data, scripts=("charts.js", "app.js"))

The files stand in `page/`. Data is JSON that no text in it can end: every `<` is written as an escape.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

_FILES = Path(__file__).parent / "page"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(
    title: str,
    data: Mapping[str, Any],
    *,
    scripts: Sequence[str],
    styles: Sequence[str] = ("style.css",),
    live: bool = False,
) -> str:
    """The page. live: it may ask the server that it came from, and nobody else; `<meta name="live">` tells it so.

    scripts, styles: names of files in `page/`, after uPlot's own; data: what JSON can hold, found in `#data`.
    """
    policy = _POLICY + ("; connect-src 'self'" if live else "")
    parts = {
        "policy": policy,
        "live": '<meta name="live" content="yes">' if live else "",
        "title": escape(title),
        "styles": "\n".join(_read(name) for name in ("vendor/uPlot.min.css", *styles)),
        "scripts": "\n".join(_read(name) for name in ("vendor/uPlot.iife.min.js", *scripts)),
        "data": as_json(data).replace("<", "\\u003c"),
    }
    pieces = _read("page.html").split("{{")
    filled = [parts[name] + rest for name, rest in (piece.split("}}", 1) for piece in pieces[1:])]
    return pieces[0] + "".join(filled)


def as_json(data: Mapping[str, Any]) -> str:
    """Compact and strict: NaN is refused."""
    return json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def _read(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")
