"""The replies in a browser: search, sorting, sliders, colours and keyboard, on a laptop and on a phone."""

import subprocess
import sys
from pathlib import Path

import pytest
from browsing import LAPTOP, PHONE, visit
from cases import slow
from processes import served
from run_folders import row

from operant.runs.folder import RunFolder
from operant.tools.report.run_report import write_report
from operant.tools.report.server import Server, Serving


def reply(i, text, reward, logprobs, end="length"):
    given = {"reply": text, "reward": reward, "logprobs": logprobs, "end": end}
    given["tokens"] = [" <b>"[: 1 + j] for j in range(len(logprobs))]
    given["ref_logprobs"] = [x - d for x, d in zip(logprobs, (0.5, -2.0, 0.0))]
    given["values"] = [0.1 * j for j in range(len(logprobs))]
    return row(i, len(logprobs), **given, advantages=[1.0, -1.0, 0.0][: len(logprobs)])


def step_rows(step, many=30):
    return [reply(i, f" step {step} reply {i}", i / 10 - step, [-1.0, -4.0, -9.0]) for i in range(many)]


def write(path):
    folder = RunFolder.create(path, {"steps": 9})
    for step in (1, 2, 3):
        folder.rollouts(step, step_rows(step))
        folder.log(step, {"reward/mean": 0.5})
    folder.rollouts(4, [reply(0, " <img src=x onerror=alert(1)> needle", None, [-1.0], "stop") | {"advantages": None}])
    folder.log(4, {"reward/mean": 0.5})
    for step, gain in ((0, 0.0), (4, 1.0)):
        rewards = [0.5 - gain, 0.1 + gain, 0.3 + gain / 2]
        folder.probes(step, [reply(i, f" now {step}.{i}", r, [-1.0, -2.0]) for i, r in enumerate(rewards)])
    folder.probes(None, [reply(i, f" before {i}", r, [-1.0, -2.0]) for i, r in enumerate((0.5, 0.1, 0.3))])
    folder.close()
    return folder


def live(folder):
    return served(Server(folder.path, Serving(serve=True, port=0)))


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("runs") / "run")
    with live(folder) as server:
        yield {"static": write_report(folder.path).as_uri(), "live": server.url}


@pytest.fixture(params=["static-laptop", slow("live-phone")])
def page(request, browser, urls):
    kind, size = request.param.split("-")
    with visit(browser, urls[kind], {"laptop": LAPTOP, "phone": PHONE}[size]) as page:
        if size == "phone":
            page.locator("#replies summary").click()  # folded at first
        page.wait_for_selector(".probes .line")
        yield page


@pytest.fixture
def run(tmp_path):
    return write(tmp_path / "run")


def texts(page, selector):
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


def replies(page):
    page.get_by_role("tab", name="All replies").click()
    page.wait_for_selector(".replies .line")
    return page


def settled(page, summary):
    page.locator(".replies .summary").filter(has_text=summary).wait_for()


def fits(page):
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


# --- the probe prompts ------------------------------------------------------------------------------------------------
def test_policy_and_reference_stand_side_by_side(page):
    assert texts(page, ".probes td.query") == ["Query 0", "Query 1", "Query 2"]
    assert texts(page, ".probes td.reply:not(.policy) .text") == ["before 0", "before 1", "before 2"]
    assert texts(page, ".probes td.policy .text") == ["now 4.0", "now 4.1", "now 4.2"]
    assert texts(page, ".probes td.gain") == ["−1.000", "+1.000", "+0.500"]
    assert texts(page, ".probes .summary") == ["Mean score 0.300 → 0.467; better on 2 of 3 prompts"]
    assert fits(page)
    head = page.locator(".probes th", has_text="Gain")
    for gains, order in (("+1.000 +0.500 −1.000", "descending"), ("−1.000 +0.500 +1.000", "ascending")):
        head.get_by_role("button").click()
        assert (texts(page, ".probes td.gain"), head.get_attribute("aria-sort")) == (gains.split(), order)
    page.locator(".probes th", has_text="Prompt").get_by_role("button").click()
    assert texts(page, ".probes td.query") == ["Query 0", "Query 1", "Query 2"]
    assert head.get_attribute("aria-sort") == "none"
    slider = page.locator(".probes input[type=range]")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    assert texts(page, ".probes .slider output") == ["step 0"] == [slider.get_attribute("aria-valuetext")]
    assert texts(page, ".probes td.policy .text") == ["now 0.0", "now 0.1", "now 0.2"]
    assert texts(page, ".probes td.gain") == ["0.000"] * 3


# --- all replies ------------------------------------------------------------------------------------------------------
def test_replies_are_paged_searched_sorted_and_picked_by_step(page):
    first = texts(replies(page), ".replies td.reply")
    assert len(first) == 25 and first[1] == "Query 0 step 3 reply 0", "the newest come first"
    assert first[0] == "Query 0 <img src=x onerror=alert(1)> needle", "text is escaped"
    assert not page.locator(".outcome").filter(visible=True).count() and not page.locator("#chart-outcomes").count()
    page.get_by_text("1–25 of 91").wait_for()
    assert page.get_by_role("button", name="Previous").is_disabled()
    for button, place in (("Next", "26–50"), ("Previous", "1–25"), ("Next", "26–50")):
        page.get_by_role("button", name=button).click()
        page.get_by_text(f"{place} of 91").wait_for()
    assert texts(page, ".replies td.reply")[0] == "Query 24 step 3 reply 24" and fits(page)

    for typed, marks in (("STEP 2 REPLY 1", ["step 2 reply 1"] * 11), ("qUERY 29", ["Query 29"] * 3), ("nowhere", [])):
        page.get_by_role("searchbox").fill(typed)
        settled(page, f"{len(marks)} found.")
        assert texts(page, ".replies td.reply mark") == marks
    assert texts(page, ".replies td.reply") == [] and "nothing found" in page.locator(".pager").inner_text()
    page.get_by_role("searchbox").fill("")
    page.get_by_text("1–25 of 91").wait_for()

    button = page.locator(".replies th", has_text="Reward").get_by_role("button")
    for order, top, rewards in (
        ("descending", "step 1 reply 29", ["1.900", "1.800", "1.700"]),
        ("ascending", "step 3 reply 0", ["−3.000", "−2.900", "−2.800"]),
    ):
        button.press("Enter")
        page.locator(f".replies th[aria-sort={order}]", has_text="Reward").wait_for()
        page.locator(".replies .line", has_text=top).first.wait_for()
        assert texts(page, ".replies td.reward")[:3] == rewards
    for place in ("26–50", "51–75", "76–91"):
        page.get_by_role("button", name="Next").click()
        page.get_by_text(f"{place} of 91").wait_for()
    page.locator(".replies .line", has_text="needle").wait_for()
    assert texts(page, ".replies td.reward")[-2:] == ["1.900", "–"], "a reply without a score comes last"

    page.locator(".replies input[type=range]").focus()
    page.keyboard.press("ArrowLeft")
    settled(page, "30 found.")
    assert texts(page, ".replies .slider output") == ["step 3"]
    assert not page.get_by_label("All steps").is_checked()
    assert "step 3 reply 0" in texts(page, ".replies td.reply")[0]
    page.get_by_label("All steps").check()
    page.get_by_text("1–25 of 91").wait_for()


# --- tokens -----------------------------------------------------------------------------------------------------------
def opened(page, text="step 3 reply 1"):
    replies(page).locator(".replies .line", has_text=text).first.click()
    page.wait_for_selector(".replies .token")
    return page.locator(".replies .token")


def colour(token):
    return token.evaluate("e => [e.style.getPropertyValue('--hue'), Number(e.style.getPropertyValue('--share'))]")


EXPECTED = {
    "Policy log-prob": [("--blue", 1 / 8), ("--blue", 0.5), ("--blue", 1.0)],
    "Reference log-prob": [("--orange", 1.5 / 8), ("--orange", 0.25), ("--orange", 1.0)],
    "KL": [("--blue", 0.25), ("--orange", 1.0), ("--blue", 0.0)],
    "Value": [("--green", 0.0), ("--green", 0.5), ("--green", 1.0)],
    "Advantage": [("--green", 1.0), ("--pink", 1.0), ("--green", 0.0)],
}


def test_a_token_shows_its_numbers_and_a_click_colours_all(page):
    tokens, tip = opened(page), page.locator(".replies .tip")
    tokens.nth(1).hover()
    numbers = dict(zip(texts(page, ".replies .tip dt"), texts(page, ".replies .tip dd")))
    assert list(numbers) == list(EXPECTED)
    assert list(numbers.values()) == ["−4.000", "−2.000", "−2.000", "0.100", "−1.000"]
    box, port = tip.bounding_box(), page.viewport_size
    assert box["x"] >= 0 and box["x"] + box["width"] <= port["width"]
    page.mouse.move(0, 0)
    tip.wait_for(state="hidden")
    tokens.first.focus()
    page.keyboard.press("End")
    assert tokens.nth(2).evaluate("e => e === document.activeElement") and "−9.000" in tip.inner_text()
    page.keyboard.press("ArrowLeft")
    assert "−4.000" in tip.inner_text() and tokens.nth(1).get_attribute("aria-label").endswith("KL −2.000")
    page.keyboard.press("Escape")
    assert page.locator(".replies .token").count() == 0
    assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "false"

    opened(page)
    assert page.get_by_label("KL", exact=True).is_checked()
    for label, wanted in EXPECTED.items():
        page.locator(".modes label", has_text=label).first.click()
        for token, (name, share) in zip(tokens.all(), wanted, strict=True):
            assert colour(token) == [f"var({name})", pytest.approx(share, abs=1e-3)], label
    assert "−1.00 0 +1.00" in " ".join(page.locator(".legend").inner_text().split()) and fits(page)


def test_both_answers_open_and_the_keyboard_alone_opens_a_reply(page):
    page.locator(".probes .line").nth(1).click()
    page.wait_for_selector(".probes .token")
    assert texts(page, ".probes .facts-line b") == ["Reference", "Policy, step 4"]
    assert page.locator(".probes .side").nth(1).locator(".token").count() == 2
    page.get_by_role("tab", name="Probe prompts").focus()
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("tab", name="All replies").get_attribute("aria-selected") == "true"
    page.wait_for_selector(".replies .line")
    page.get_by_role("button", name="Tokens of the reply to Query 1", exact=True).first.press("Enter")
    page.wait_for_selector(".replies .token")
    modes = page.locator(".replies")
    modes.get_by_label("KL", exact=True).press("ArrowRight")
    assert modes.get_by_label("Value", exact=True).is_checked()
    assert colour(page.locator(".replies .token").nth(2)) == ["var(--green)", 1.0]
    page.locator(".replies .line", has_text="needle").click()
    page.locator(".replies .modes").filter(has_not_text="Advantage").first.wait_for()  # it is unknown


@pytest.mark.slow
def test_colours_follow_light_and_dark(browser, urls):
    grounds = []
    for scheme in ("light", "dark"):
        with visit(browser, urls["static"], scheme=scheme) as page:
            grounds.append(opened(page).nth(1).evaluate("e => getComputedStyle(e).backgroundColor"))
    assert len(set(grounds)) == 2 and "rgba(0, 0, 0, 0)" not in grounds


# --- static and live --------------------------------------------------------------------------------------------------
def test_the_static_page_names_the_replies_that_it_lacks(browser, urls, run):
    with visit(browser, urls["static"]) as page:
        assert texts(replies(page), ".replies .summary") == ["All 91 replies are embedded."]
    run.rollouts(3, [known | {"tokens": None} for known in step_rows(3, 128)])
    with visit(browser, write_report(run.path).as_uri()) as page:
        replies(page)
        assert "111 of 189 replies are embedded, from 4 of 4 steps" in page.locator(".replies .summary").inner_text()
        assert f"operant report {run.path} --serve" in page.locator(".replies .summary").inner_text()
        page.locator(".replies .line", has_text="step 3 reply 2").first.click()
        assert "not on this page" in page.locator(".replies .missing").first.inner_text()


def test_the_live_page_follows_the_run_but_for_an_open_reply(browser, run, soon):
    with live(run) as server, visit(browser, server.url) as page:
        replies(page)
        assert texts(page, ".replies .summary") == ["All 91 replies of 4 steps are available."]
        run.rollouts(5, [reply(0, " brand new", 0.5, [-1.0])])
        run.probes(5, [reply(0, " newest", 0.9, [-1.0])])
        page.locator(".replies .line", has_text="brand new").wait_for()
        assert texts(page, ".replies .slider output") == ["step 5"]
        page.get_by_role("tab", name="Probe prompts").click()
        page.locator(".probes td.policy", has_text="newest").wait_for()
        opened(page)
        run.rollouts(6, [reply(0, " even newer", 0.5, [-1.0])])
        settled(page, "All 93 replies of 6 steps")
        assert page.locator(".replies .token").count() == 3
        assert page.locator(".replies .line", has_text="even newer").count() == 0


def test_long_messages_and_numbers_fit_a_phone(browser, tmp_path):
    folder = RunFolder.create(tmp_path / "run", {"steps": 2})
    more = {"outcome": "failed test", "message": "assert f(1) == " * 20}
    folder.rollouts(1, [known | more for known in step_rows(1, 4)])
    for step, entropy in ((1, 0.1963), (2, 0.1704)):
        folder.log(step, {"reward/mean": -0.0895 * step, "policy/entropy": entropy, "kl/per_reply": 0.179})
    folder.close()
    with visit(browser, write_report(folder.path).as_uri(), PHONE) as page:
        page.evaluate("document.querySelectorAll('details').forEach((it) => (it.open = true))")
        page.wait_for_selector(".replies .line")
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]


@pytest.mark.parametrize("kind", [slow("static"), "live"])
def test_outcomes_are_a_column_a_filter_and_a_chart_and_messages_are_searched_as_text(browser, tmp_path, kind):
    folder = RunFolder.create(tmp_path / "run", {"steps": 2})
    folder.rollouts(1, step_rows(1, 4))  # of a version without these columns
    outcomes = ("passed", "runtime error", None, None)
    rows = zip(step_rows(2, 4), outcomes, (None, "runtime error: <b>IndexError</b>: x\n line 4", "no class", None))
    folder.rollouts(2, [known | {"outcome": outcome, "message": message} for known, outcome, message in rows])
    for step, share in ((1, 0.0), (2, 0.25)):
        folder.log(step, {"reward/mean": 0.5, "outcome/passed": share, "outcome/runtime error": share})
    folder.close()
    with live(folder) as server:
        url = {"static": write_report(folder.path).as_uri(), "live": server.url}[kind]
        with visit(browser, url) as page:
            page.wait_for_selector(".replies .line")
            outcomes = [text.split("\n") for text in texts(page, ".replies td.outcome")]
            assert outcomes[:4] == [["passed"], ["runtime error", "<b>IndexError</b>: x line 4"], ["no class"], ["–"]]
            assert outcomes[4:] == [["–"]] * 4
            choice = page.get_by_label("Outcome", exact=True)
            assert choice.locator("option").all_inner_texts() == ["All outcomes", "passed", "runtime error"]
            choice.select_option("runtime error")
            settled(page, "1 found")
            page.locator(".replies .line").click()
            assert page.locator(".side .message").inner_text() == "<b>IndexError</b>: x\n line 4"
            assert page.locator(".message b").count() == 0
            choice.select_option("")
            settled(page, "All 8 replies")  # or the next wait would be content with what stands there already
            page.get_by_placeholder("Search prompts and replies").fill("indexerror")
            settled(page, "1 found")
            page.wait_for_selector(".replies mark")
            assert texts(page, ".replies mark") == ["IndexError"]
            assert "runtime error" in page.locator("#chart-outcomes").inner_text()


@pytest.mark.slow
def test_the_page_is_photographed_for_the_readme(browser, run, tmp_path):
    command = [sys.executable, "-m", "benchmarks.screenshot", str(run.path), "--out", str(tmp_path)]
    subprocess.run(command, cwd=Path(__file__).parents[1], check=True)
    for name in ("report.png", "tokens.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
