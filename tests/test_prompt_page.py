"""The prompts of a run on its page: numbers by hand, the copied template, answers, steps, and how it looks."""

import json

import pytest
from browsing import LAPTOP, PHONE, visit
from cases import cases, slow
from pages import low_contrast, overflows
from processes import served

from operant.runs.folder import RunFolder
from operant.tools.report import prompts, run_report
from operant.tools.report.server import Server, Serving

EVIL = "</script><img src=x onerror=alert(1)>\u202e\x1b{mask}"
SCORES = {1: [3.0, 1.0], 2: [2.0, 0.0], 3: [float("nan"), 5.0], 4: [float("nan")] * 2, 5: [4.0, 2.0]}
WORDS = {1: " early", 2: "x", 3: " third", 4: "x", 5: " late"}


def row(text, score, **more):
    parts = {f"reward/{part}": score for part in prompts.PARTS}
    known = {"task": "t", "query": "q", "end": "length", "rollout": 0, "turn": 0, "ids": [1, 2], "reply_tokens": 2}
    return known | {"reply": text, "tokens": [text[:-1], text[-1:]], "reward": score} | parts | more


def prompt(text, test, source="best in training", step=0, confusion=((2, 1), (0, 3))):
    found = {"text": text, "ids": [1], "source": source, "step": step, "score": 12.345678, "train": 0.75, "test": test}
    return found | {"confusion": [list(counts) for counts in confusion]}


def baseline(name, text, **more):
    known = {"name": name, "prompt": text, "calls": 8, "train": 0.5, "test": 0.25, "score": 1.0, "detail": {}}
    return known | {"dev": None, "calibrate": "none", "seed": 0} | more


FOUND = {"task_model": "a/model", "template": "{sentence} {prompt} {mask} .", "words": [" bad", " good"], "set": "toy"}
FOUND |= {"texts": {"train": 4, "test": 6, "held_out": True}, "measure": "gap", "calibrate": "none", "length": 2}
FOUND |= {"calls": 1234, "prompts": [prompt(" it was", 5 / 6), prompt(EVIL, 0.5, "greedy", 5, ((0, 3), (1, 2)))]}
IN_CONTEXT = baseline("in-context", "", detail={"examples": "fine good .\n"})
FOUND["baselines"] = [baseline("none", ""), baseline("manual", "It was", calibrate="mean")]
FOUND["baselines"] += [IN_CONTEXT, baseline("head", "")]
TRANSFER = (("b/model", " it was", 0.6), ("c/model", " it was", 0.4), ("c/model", EVIL, 0.2))
FOUND["transfer"] = [{"task_model": model, "prompt": text, "test": share} for model, text, share in TRANSFER]


def write(path, scores=SCORES, found=FOUND):
    folder = RunFolder.create(path, {"steps": len(scores)})
    for step, pair in scores.items():
        means = {"reward/mean": 1.0 * step, "rollout/logprob_mean": -0.5 * step}  # of no reference
        folder.log(step, means | {f"soft_q/{of}{name}": 1.0 * step for name in "qva" for of in ("", "target_")})
        folder.rollouts(step, [row(f"{WORDS[step]} {i}", score) for i, score in enumerate(pair)])
    folder.close()
    if found:
        (folder.path / "prompts.json").write_text(json.dumps(found), encoding="utf-8")
    return folder.path


# --- data -------------------------------------------------------------------------------------------------------------
def test_the_steps_by_hand(tmp_path):
    data = prompts.embedded(write(tmp_path / "run", found=None))
    assert data["found"] is None
    scores = {"best": [3.0, 2.0, 5.0, None, 4.0], "mean": [2.0, 1.0, 5.0, None, 3.0]}
    text = [" early 0", "x 0", " third 1", "", " late 0"]
    assert data["steps"] == {"step": [1, 2, 3, 4, 5], "of": 5, "text": text} | scores
    assert data["tokens"] == {  # a fifth of five steps; two prompts of two tokens in each, whose first is the same
        "first": {"from": 1, "to": 1, "different": 3},
        "last": {"from": 5, "to": 5, "different": 3},
        "rows": [[" early ", 0.5, 0.0], [" late ", 0.0, 0.5], ["0", 0.25, 0.25], ["1", 0.25, 0.25]],
    }


def test_what_is_pasted_is_what_the_task_model_reads(tmp_path):
    assert [(one["from"], one["paste"]) for one in prompts.embedded(write(tmp_path / "run"))["found"]["rows"]] == [
        ("best in training, step 1", "{sentence}  it was {mask} ."),  # the template's space and the prompt's own
        ("greedy, after step 5", "{sentence} " + EVIL + " {mask} ."),
        ("none", "{sentence} {mask} ."),
        ("manual, mean calibration", "{sentence} It was {mask} ."),
        ("in-context", "fine good .\n{sentence} {mask} ."),
        ("head", None),
    ]


def test_a_step_that_has_changed_is_read_again(tmp_path):
    path = write(tmp_path / "run", {1: [3.0, 1.0], 2: [2.0, 0.0]}, None)
    assert prompts.embedded(path)["steps"]["best"] == [3.0, 2.0]
    write(tmp_path / "other", {1: [3.0, 1.0], 2: [7.0, 0.0]}, None)
    (tmp_path / "other/rollouts/step-00002.parquet").replace(path / "rollouts/step-00002.parquet")
    assert prompts.embedded(path)["steps"]["best"] == [3.0, 7.0]
    (path / "rollouts/step-00001.parquet").write_bytes(b"damaged")
    assert prompts.embedded(path)["steps"]["best"] == [7.0]


def test_other_replies_are_no_prompts(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {"steps": 1})
    folder.rollouts(1, [{"reply": "r", "reward": 1.0, "reward/accuracy": 1.0}])
    folder.close()
    assert prompts.embedded(folder.path) is None


# --- in a browser -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def url(tmp_path_factory):
    return run_report.write_report(write(tmp_path_factory.mktemp("pages") / "run")).as_uri()


def test_the_tables_show_prompts_answers_and_other_models(browser, url):
    with visit(browser, url) as page:
        rows = page.locator("#prompts .found tbody tr")
        assert rows.count() == 6 and page.locator("#prompts .found input").count() == 2
        numbers = ["best in training, step 1", "1,234", "12.3", "75.0 %", "83.3 %"]
        assert rows.nth(0).locator("td").all_inner_texts()[:5] == numbers
        assert rows.nth(0).locator("th .text").evaluate("it => it.textContent") == " it was"
        assert rows.nth(1).locator("th .text").evaluate("it => it.textContent") == EVIL
        marks = "it => [...it.querySelectorAll('.mark')].map(one => one.dataset.mark)"
        assert rows.nth(1).locator("th .text").evaluate(marks) == ["·", "·", "U+202E", "U+001B"]
        matrix = page.locator("#prompts .matrix").nth(0).locator("td")
        assert matrix.all_inner_texts() == ["2 67 %", "1 33 %", "0 0 %", "3 100 %"]
        rows.nth(1).locator("label").click()
        assert matrix.all_inner_texts() == ["0 0 %", "3 100 %", "1 33 %", "2 67 %"]
        transfer = page.locator("#prompts .transfer")
        assert transfer.locator("thead th").all_inner_texts()[1:] == ["a/model (trained on)", "b/model", "c/model"]
        assert transfer.locator("td").all_inner_texts() == ["83.3 %", "60.0 %", "40.0 %", "50.0 %", "–", "20.0 %"]


@cases("secure", slow("selection"))
def test_a_click_copies_the_whole_template(clipboard, browser, url):
    with visit(browser, url) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.evaluate("navigator.clipboard.writeText('old')")
        if clipboard == "selection":  # as on a page from another machine without a certificate
            page.evaluate("void (navigator.clipboard.writeText = () => Promise.reject())")
        page.get_by_role("button", name="Copy the template with the prompt 1,").click()
        page.get_by_text("Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == "{sentence}  it was {mask} ."


def test_the_best_prompt_of_the_step_under_the_pointer_is_shown(browser, url):
    with visit(browser, url) as page:
        chart = page.locator("#chart-prompt-scores")
        lines = lambda: chart.locator(".below p").evaluate_all("all => all.map(one => one.textContent)")  # noqa: E731
        assert lines() == ["Best so far, of step 3:  third 1 5"]
        plot = chart.locator(".u-over")
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        for share, expected in (
            (0.26, ["Best so far, of step 1:  early 0 3", "Best of step 2: x 0 2"]),
            (0.5, ["Best so far, of step 3:  third 1 5"]),
            (0.99, ["Best so far, of step 3:  third 1 5", "Best of step 5:  late 0 4"]),
        ):
            page.mouse.move(box["x"] + share * box["width"], box["y"] + 20)
            page.wait_for_timeout(50)
            assert lines() == expected
        assert chart.locator(".key b").all_inner_texts() == ["5", "4", "3"]


@cases((PHONE, "light"), slow(LAPTOP, "light"), slow(LAPTOP, "dark"), slow(PHONE, "dark"))
def test_prompts_fit_and_can_be_read(size, scheme, browser, url):
    with visit(browser, url, size, scheme) as page:
        page.evaluate("document.querySelectorAll('section > details').forEach((it) => (it.open = true))")
        assert page.locator("#soft-q figure").count() == 3
        page.evaluate("document.querySelector('#replies').remove()")  # has tests of its own
        assert overflows(page) == [] and low_contrast(page) == []


@pytest.mark.slow
def test_the_live_page_fills_in_what_is_found(browser, tmp_path, soon):
    path = write(tmp_path / "run", found=None)
    with served(Server(path, Serving(port=0))) as server, visit(browser, server.url) as page:
        page.locator("#prompts .tokens").wait_for()
        assert page.locator("#prompts .found").count() == 0
        (path / "prompts.json").write_text(json.dumps(FOUND), encoding="utf-8")
        page.locator("#prompts .found").wait_for()
