"""The page of several runs in a browser: 2, 6 and 24 runs, on a laptop and a phone, in light and dark.

First, the checks of `pages.py` find what is wrong with a page, and nothing in a page that is well.
"""

import itertools
import json
import re
from functools import cache
from xml.etree import ElementTree

import pytest
from browsing import LAPTOP, PHONE, visit
from cases import slow
from pages import low_contrast, overflows, overlaps
from run_folders import probes, run

from operant.tools.report.compare import write_comparison

WIDTHS = {"laptop": LAPTOP, "phone": PHONE}


FAULTS = [
    ("<p style='width:900px'>wide</p>", overflows, 1),
    ("<div style='overflow:auto'><p style='width:900px'>scrolls</p></div>", overflows, 0),
    ("<p class=a style='position:absolute;top:0'>one</p><p class=a style='position:absolute;top:4px'>two</p>", None, 1),
    ("<p class=a>one <b class=a>in it</b></p><p class=a>two</p>", None, 0),
    ("<svg width=300><text class=a y=20>one</text><text class=a x=10 y=24>two</text></svg>", None, 1),
    ("<p style='color:#777'>4.48 to 1</p>", low_contrast, 1),
    ("<p style='color:#767676'>4.54 to 1</p>", low_contrast, 0),
    ("<p style='color:#949494;font-size:24px'>3.03 to 1, large</p>", low_contrast, 0),
    ("<p style='opacity:.5'>black at half is 3.95 to 1</p>", low_contrast, 1),
    ("<div style='background:#222'><p style='color:#767676'>3.5 to 1</p></div>", low_contrast, 1),
    ("<div style='background:#000'><p style='background:rgba(255,255,255,.9)'>18 to 1</p></div>", low_contrast, 0),
    ("<svg><text y=20 fill='#777'>4.48 to 1</text></svg>", low_contrast, 1),
    ("<p style='color:#fff;display:none'>unseen</p>", low_contrast, 0),
]


def test_each_fault_is_found_and_only_it(browser):
    page = browser.new_page(viewport={"width": 400, "height": 300})
    for body, check, faults in FAULTS:
        page.set_content(f"<body style='margin:0'>{body}")
        assert len(check(page) if check else overlaps(page, ".a")) == faults, body
    page.close()


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """The page of three settings with two seeds each, whose replies name their run."""
    folder = tmp_path_factory.mktemp("sweep")
    for coef, seed in itertools.product((0.0, 0.1, 2.0), (1, 2)):
        given = {"rewards": (1.0, 2.0, 5.0 - coef + seed), "kls": (0, 1, 3 - coef)}
        made = run(folder / f"c{coef}-{seed}", coef=coef, seed=seed, **given)
        replies = {f"q{i}": "" if coef == 2.0 else f"<b>reply {i} by {coef}-{seed}</b>" for i in range(5)}
        probes(made, "step-00003.parquet", replies)
        probes(made, "reference.parquet", {f"q{i}": f"reference {i}" for i in range(5)})
    return write_comparison(sorted(folder.iterdir()), folder / "comparison.html").as_uri()


def unfold(page):
    page.eval_on_selector_all("details", "all => all.forEach((one) => (one.open = true))")


@pytest.mark.parametrize("size", ["laptop", slow("phone")])
def test_the_page_in_a_browser(browser, size, sweep):
    with visit(browser, sweep, WIDTHS[size]) as page:
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


def test_the_legend_makes_one_run_stand_out(browser, sweep):
    """A colour is one variable for all charts, so that of the others is faint everywhere."""
    alpha = "n => getComputedStyle(document.documentElement).getPropertyValue('--g' + n).match(/[\\d.]+(?=\\))/)[0] * 1"
    with visit(browser, sweep) as page:
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
    figure.hover()
    with page.expect_download() as download:
        figure.locator(f".export button:has-text('{kind}')").click()
    return download.value.path().read_text(encoding="utf-8")


def test_figures_are_saved_with_names_and_numbers(browser, sweep):
    with visit(browser, sweep) as page:
        chart, plane = page.locator("#reward-mean"), page.locator("#frontier figure")
        table = saved(page, chart, "CSV").splitlines()
        names = [f"c{c}-*{edge}" for c in ("0.0", "0.1", "2.0") for edge in ("", " low", " high")]
        assert table[0].split(",") == ["step", *names] and table[3] == "3,6.5,6,7,6.4,5.9,6.9,4.5,4,5"
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
        steps = range(12 + 4 * (i % 3))
        given = {"rewards": [5.0 + i / 10 * step for step in steps], "kls": [i * step / 20 for step in steps]}
        given |= {"replies": ["The reply is quite long, " * 4, ""], "evaluation": {"metrics": "distinct"}}
        given |= {"reward": "letters:a" if i % 5 == 1 else "letters:e", "optimizer": options}
        given |= {"steps": 400} if i % 7 == 3 else {}
        name = f"{i:02d}-a-run-of-letters-with-a-name-of-sixty-characters-in-all-".ljust(60, "x")
        made = run(folder / name, coef=i / 20, seed=i % 2, after=after, **given)
        if after:
            judged = json.loads((made / "evaluation.json").read_text(encoding="utf-8"))
            judged["before"]["metrics"], judged["after"]["metrics"] = {"distinct": 0.9}, {"distinct": 0.7 - i / 100}
            (made / "evaluation.json").write_text(json.dumps(judged), encoding="utf-8")
    return write_comparison(sorted(folder.iterdir()), folder / "comparison.html").as_uri()


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return cache(lambda count: runs_of(tmp_path_factory.mktemp(f"runs-{count}"), count))


@pytest.mark.parametrize(("count", "size", "scheme"), list(itertools.product((2, 6, 24), WIDTHS, ("light", "dark"))))
@pytest.mark.slow
def test_nothing_is_cut_off_covered_or_pale(browser, urls, count, size, scheme):
    with visit(browser, urls(count), {"laptop": (1400, 900), "phone": PHONE}[size], scheme) as page:
        assert page.locator(".legend .entry").count() == count and page.locator(".key").count() == 0
        assert overflows(page) == []
        unfold(page)
        page.wait_for_timeout(300)  # the figures of the sections that were folded take their size
        assert overflows(page) == [] and overlaps(page, ".legend .entry, .legend .single") == []
        assert overlaps(page, "#runs th, #runs td") == []
        for figure in range(page.locator("svg.frontier").count()):
            page.locator("svg.frontier").nth(figure).evaluate("(svg, id) => (svg.id = id)", f"plane-{figure}")
            assert overlaps(page, f"#plane-{figure} text") == []
        assert overlaps(page, ".compared h3, .compared .readout, .compared figcaption, .compared canvas") == []
        assert overlaps(page, ".answer > *, .query-block > p") == [] and low_contrast(page) == []


@pytest.mark.parametrize("scheme", ["light", slow("dark")])
def test_runs_are_told_apart(browser, urls, scheme):
    """WCAG asks for a contrast of 3 for what is drawn; 24 runs have 8 colours with 3 dashes and markers."""
    with visit(browser, urls(24), scheme=scheme) as page:
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
