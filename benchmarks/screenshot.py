"""Photograph the page of a run for the README: its top, and a reply that is open token by token.

    python -m benchmarks.screenshot runs/sentiment

writes docs/figures/report.png and docs/figures/tokens.png. It needs a Chromium on the PATH, and playwright of the extra
`dev`.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

from operant.tools.report.run_report import write_report

TOP = {"x": 0, "y": 0, "width": 1200, "height": 860}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="the folder of the pictures")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        photograph(chromium(playwright), write_report(options.run), options.out)


def chromium(playwright: Any) -> Any:
    """The browser of this machine."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    return playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])


def photograph(browser: Any, report: Path, out: Path) -> None:
    """Save report.png and tokens.png in the folder `out`."""
    page = browser.new_page(viewport={"width": 1200, "height": 1600}, color_scheme="light")
    page.goto(report.resolve().as_uri())
    page.wait_for_selector(".verdict")
    page.screenshot(path=out / "report.png", clip=TOP)
    page.get_by_role("tab", name="All replies").click()
    page.wait_for_selector(".replies .line")
    page.locator(".replies th", has_text="Reward").get_by_role("button").click()
    page.locator(".replies th[aria-sort=descending]").wait_for()
    page.locator(".replies .line").nth(1).click()
    page.locator(".side").wait_for()
    first = page.locator(".replies thead").bounding_box()
    last = page.locator(".replies .line").nth(3).bounding_box()
    height = last["y"] + last["height"] - first["y"]
    page.screenshot(path=out / "tokens.png", clip={"x": 0, "y": first["y"], "width": 1200, "height": height})
    page.close()


if __name__ == "__main__":
    main()
