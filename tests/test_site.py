"""The site is built without a warning, loads nothing from elsewhere and draws formulas."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from page_commands import ROOT

SPHINX = ROOT / ".venv-site/bin/sphinx-build"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SPHINX.is_file(), reason="Sphinx has an environment of its own: make site"),
]
LOADS = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)\b[^>]*?\bsrc="(https?:)?//|<link\b[^>]*href="(https?:)?//"""
)
IN_STYLES = re.compile(r"""@import|url\(["']?(?:https?:)?//""")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """`make site`, into another folder."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, ROOT / "docs/reference.py"], check=True)
    built = subprocess.run(
        [SPHINX, "-q", "-E", "-W", "--keep-going", "-c", "docs", ".", folder], cwd=ROOT, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert len(pages) > 60 and {site / "index.html", site / "search.html", site / "docs/index.html"} <= pages.keys()
    assert [str(path) for path, text in pages.items() if LOADS.search(text)] == []
    styles = [path.name for path in site.rglob("*.css") if IN_STYLES.search(path.read_text(encoding="utf-8"))]
    assert styles == []
    assert pages[site / "docs/methods/ppo.html"].count("<math") > 15
