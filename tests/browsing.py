"""Chromium for tests of pages: a console error, a warning or a request to another host fails the test."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ARGUMENTS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
ARGUMENTS += "--disable-component-update --disable-sync"
LAPTOP, PHONE = (1440, 900), (390, 844)


@contextmanager
def chromium() -> Iterator:
    """The browser of this machine or playwright's own; the test is skipped if there is neither."""
    playwright = pytest.importorskip("playwright.sync_api")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with playwright.sync_playwright() as running:
        try:
            browser = running.chromium.launch(executable_path=found, args=ARGUMENTS.split())
        except playwright.Error as error:
            pytest.skip(f"no Chromium here: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@contextmanager
def visit(browser, url: str, size: tuple[int, int] = LAPTOP, scheme: str = "light") -> Iterator:
    """Open a page of `size` pixels. Afterwards it must have no console error and no request to another host."""
    complaints: list[str] = []
    with browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme) as context:
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on(
            "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: complaints.append(request.url) if not request.url.startswith(url) else None)
        page.goto(url)
        yield page
    assert not complaints, complaints
