"""The page of several runs in a browser: 2, 6 and 24 runs, on a laptop and a phone, in light and dark."""

import itertools
import json
import re
from xml.etree import ElementTree

import pytest
from browsing import LAPTOP, PHONE, visit
from cases import slow
from pages import low_contrast, overflows, overlaps
from run_folders import probes, run

from operant.tools.report.compare import write_comparison

WIDTHS = {"laptop": LAPTOP, "phone": PHONE}


def sweep_page(folder):
    """Write the page of three settings with two seeds each, whose replies name their run."""
    for coef, seed in itertools.product((0.0, 0.1, 2.0), (1, 2)):
        made = run(
            folder / f"c{coef}-{seed}",
            coef=coef,
            seed=seed,
            rewards=(1.0, 2.0, 5.0 - coef + seed),
            kls=(0, 1, 3 - coef),
        )
        probes(
            made,
            "step-00003.parquet",
            {f"q{i}": "" if coef == 2.0 else f"<b>reply {i} by {coef}-{seed}</b>" for i in range(5)},
        )
        probes(made, "reference.parquet", {f"q{i}": f"reference {i}" for i in range(5)})
    return write_comparison(sorted(folder.iterdir()), folder / "comparison.html").as_uri()


def unfold(page):
    page.eval_on_selector_all("details", "all => all.forEach((one) => (one.open = true))")


@pytest.mark.parametrize("size", ["laptop", slow("phone")])
def test_the_page_in_a_browser(browser, size, tmp_path):
    url = sweep_page(tmp_path)
    with visit(browser, url, WIDTHS[size]) as page:
        assert page.inner_text(".status") == "6 runs in 3 settings, 2 seeds each"
        assert page.locator(".frontier").is_visible(), "the first chart is not folded on a phone either"
        unfold(page)
        assert page.locator(".frontier .mean").count() == 3 and page.locator(".frontier .run").count() == 6
        drawn = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v)"
        assert page.eval_on_selector_all(".charts canvas", f"all => all.length >= 2 && all.every({drawn})")

        block = page.locator(".query-block").first
        assert block.locator(".answer").count() == 4, "the reference and three settings"
        assert "<b>reply 0 by 0.0-1</b>" in block.inner_text() and "(empty)" in block.inner_text()
        page.click("#later")
        assert "reply 3 by 0.1-1" in page.inner_text("#replies") and page.locator(".query-block").count() == 2
        page.click("button.seed:has-text('2')")
        assert "reply 3 by 0.1-2" in page.inner_text("#replies")
        assert page.locator("#all tbody tr th" if size == "phone" else "#all thead th").count() == 6


def test_reward_stands_against_perplexity_too(browser, tmp_path):
    for coef in (0.1, 0.2):
        made = run(tmp_path / f"c{coef}", coef=coef, after=(3.0 + coef, 1.0), replies=["a b c"])
        judged = json.loads((made / "evaluation.json").read_text(encoding="utf-8"))
        for when, perplexity in (("before", 30.0), ("after", 100 * coef)):
            judged[when]["metrics"] = {"perplexity": perplexity}
        (made / "evaluation.json").write_text(json.dumps(judged), encoding="utf-8")
    with visit(browser, write_comparison(sorted(tmp_path.iterdir()), tmp_path / "comparison.html").as_uri()) as page:
        unfold(page)
        figures = page.locator("#frontier figure")
        assert figures.count() == 2 and page.locator(".frontier .mean").count() == 4
        assert "perplexity of the replies" in figures.nth(1).locator("svg").text_content()
        assert saved(page, figures.nth(1), "CSV").splitlines()[:2] == ["run,perplexity,reward", "c0.1,10,3.1"]


def test_the_legend_makes_one_run_stand_out(browser, tmp_path):
    """A colour is one variable for all charts, so that of the others is faint everywhere."""
    alpha = (
        "n => Number(getComputedStyle(document.documentElement).getPropertyValue('--g' + n).match(/[\\d.]+(?=\\))/)[0])"
    )
    with visit(browser, sweep_page(tmp_path)) as page:
        entry = page.locator(".legend .entry").nth(1)
        assert [page.evaluate(alpha, n) for n in range(3)] == [1, 1, 1]
        entry.hover()
        assert [page.evaluate(alpha, n) < 0.2 for n in range(3)] == [True, False, True]
        page.mouse.move(1, 1)
        assert [page.evaluate(alpha, n) for n in range(3)] == [1, 1, 1]
        entry.click()
        page.mouse.move(1, 1)
        page.locator("h2").first.click()
        assert page.evaluate(alpha, 0) < 0.2 and entry.get_attribute("aria-pressed") == "true"
        chart = page.locator("#reward-mean")
        assert "band: lowest to highest" in chart.inner_text()
        page.check("#single")
        assert "Every run." in chart.inner_text() and "band" not in chart.inner_text()
        chart.evaluate("figure => figure.scrollIntoView({ block: 'center', behavior: 'instant' })")
        box = chart.locator("canvas").bounding_box()
        page.mouse.move(box["x"] + box["width"] - 20, box["y"] + 12)
        assert chart.locator(".readout").inner_text() == "step 3 c0.0-2: 7", "the line under the pointer, by its name"


def saved(page, figure, kind):
    """The text of a figure that is saved as `SVG` or `CSV`."""
    figure.hover()
    with page.expect_download() as download:
        figure.locator(f".export button:has-text('{kind}')").click()
    return download.value.path().read_text(encoding="utf-8")


def test_figures_are_saved_with_names_and_numbers(browser, tmp_path):
    with visit(browser, sweep_page(tmp_path)) as page:
        chart, plane = page.locator("#reward-mean"), page.locator("#frontier figure")
        table = saved(page, chart, "CSV").splitlines()
        assert table[0] == ",".join(
            ["step", *(f"c{c}-*{edge}" for c in ("0.0", "0.1", "2.0") for edge in ("", " low", " high"))]
        )
        assert table[3] == "3,6.5,6,7,6.4,5.9,6.9,4.5,4,5"
        for figure in (chart, plane):
            drawing = ElementTree.fromstring(saved(page, figure, "SVG"))
            texts = [node.text for node in drawing.iter("{http://www.w3.org/2000/svg}text")]
            assert {"c0.0-*", "c0.1-*", "c2.0-*"} <= set(texts) and drawing.tag.endswith("}svg")
        assert saved(page, plane, "CSV").splitlines()[:2] == ["run,kl,reward", "c0.0-1,1.3333,3"]


def runs_of(folder, count):
    """Write runs of three lengths, some unfinished, unjudged or with another reward, with names of 60 characters."""
    for i in range(count):
        after = None if i % 7 == 3 else (5.0 + i / 10, 0.5 + 11.3 * i / count)
        options = {"lr": i} if count < 24 else {f"option_with_a_long_name_{n}": i * n for n in range(20)}
        made = run(
            folder / f"{i:02d}-a-run-of-letters-with-a-name-of-sixty-characters-in-all-".ljust(60, "x"),
            coef=i / 20,
            seed=i % 2,
            rewards=[5.0 + i / 10 * step for step in range(12 + 4 * (i % 3))],
            kls=[i * step / 20 for step in range(12 + 4 * (i % 3))],
            after=after,
            replies=["The reply is quite long, " * 4, ""],
            reward="letters:a" if i % 5 == 1 else "letters:e",
            optimizer=options,
            **({"steps": 400} if i % 7 == 3 else {}),
            evaluation={"metrics": "distinct"},
        )
        if after:
            judged = json.loads((made / "evaluation.json").read_text(encoding="utf-8"))
            judged["before"]["metrics"], judged["after"]["metrics"] = {"distinct": 0.9}, {"distinct": 0.7 - i / 100}
            (made / "evaluation.json").write_text(json.dumps(judged), encoding="utf-8")
    return write_comparison(sorted(folder.iterdir()), folder / "comparison.html").as_uri()


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return {count: runs_of(tmp_path_factory.mktemp(f"runs-{count}"), count) for count in (2, 6, 24)}


@pytest.mark.parametrize(("count", "size", "scheme"), list(itertools.product((2, 6, 24), WIDTHS, ("light", "dark"))))
@pytest.mark.slow
def test_nothing_is_cut_off_covered_or_pale(browser, urls, count, size, scheme):
    width = {"laptop": (1400, 900), "phone": PHONE}[size]
    with visit(browser, urls[count], width, scheme) as page:
        assert page.locator(".legend .entry").count() == count and page.locator(".key").count() == 0
        assert overflows(page) == []
        unfold(page)
        page.wait_for_timeout(300)  # the figures of the sections that were folded take their size
        assert overflows(page) == []
        assert overlaps(page, ".legend .entry, .legend .single") == []
        assert overlaps(page, "#runs th, #runs td") == []
        for figure in range(page.locator("svg.frontier").count()):
            page.locator("svg.frontier").nth(figure).evaluate("(svg, id) => (svg.id = id)", f"plane-{figure}")
            assert overlaps(page, f"#plane-{figure} text") == []
        assert overlaps(page, ".compared h3, .compared .readout, .compared figcaption, .compared canvas") == []
        assert overlaps(page, ".answer > *, .query-block > p") == []
        assert low_contrast(page) == []


@pytest.mark.parametrize("scheme", ["light", slow("dark")])
def test_runs_are_told_apart(browser, urls, scheme):
    """WCAG asks for a contrast of 3 for what is drawn; 24 runs have 8 colours with 3 dashes and markers."""
    with visit(browser, urls[24], scheme=scheme) as page:
        looks = page.eval_on_selector_all(
            ".legend .swatch",
            """all => all.map((svg) => [getComputedStyle(svg.firstChild).stroke,
                svg.firstChild.getAttribute('stroke-dasharray'), svg.lastChild.getAttribute('d')])""",
        )
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert len({tuple(look) for look in looks}) == 24 and len({tuple(look[1:]) for look in looks}) == 3
    assert len({look[0] for look in looks}) == 8
    for colour, *_ in looks:
        light, dark = sorted((luminance(colour), luminance(paper)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3, colour


def luminance(colour):
    """The relative luminance of `rgb(1, 2, 3)` (WCAG 2.2)."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
