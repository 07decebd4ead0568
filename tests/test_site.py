"""The site is built without a warning, loads nothing from elsewhere, draws formulas and can be read at night."""

import http.server
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from browsing import LAPTOP, PHONE, chromium, visit
from page_commands import ROOT
from processes import served

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
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, ROOT / "docs/reference.py"], check=True)
    built = subprocess.run(
        [SPHINX, "-q", "-E", "-W", "--keep-going", "-c", "docs", ".", folder], cwd=ROOT, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture
def address(site: Path):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_): ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    with served(server):
        yield f"http://127.0.0.1:{server.server_port}/"


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert len(pages) > 60 and {site / "index.html", site / "search.html", site / "docs/index.html"} <= pages.keys()
    assert [str(path) for path, text in pages.items() if LOADS.search(text)] == []
    assert [path.name for path in site.rglob("*.css") if IN_STYLES.search(path.read_text(encoding="utf-8"))] == []


def test_a_reader_finds_formulas_a_name_and_the_dark(address: str) -> None:
    """Every request of these visits goes to the site itself."""
    luminance = "element => getComputedStyle(element).{}.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0) / 3"
    with chromium() as browser:
        with visit(browser, address, scheme="dark") as page:
            page.wait_for_url("**/docs/index.html")
            assert page.locator("body").evaluate(luminance.format("backgroundColor")) < 60
            assert page.locator("article p").first.evaluate(luminance.format("color")) > 180
            page.get_by_role("link", name="where KL is charged").first.click()
            assert page.locator("article math").count() > 15 and "$" not in page.locator("article p").first.inner_text()
            page.locator("input[name=q]").first.fill("leave_one_out")
            page.keyboard.press("Enter")
            page.locator("#search-results li").first.wait_for()
        for size in (LAPTOP, PHONE):
            with visit(browser, address, size) as page:
                page.wait_for_url("**/docs/index.html")
                assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
