"""The page of a run: its data, its size, that it is self-contained, and its appearance in a browser."""

import hashlib
import json
import math
import random
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from browsing import LAPTOP, PHONE, visit
from cases import cases
from pages import low_contrast, overflows, overlaps
from processes import served
from run_folders import row

from operant.metrics.registry import METRICS
from operant.runs.folder import RunFolder
from operant.tally import Histogram
from operant.tools.labels.server import FOLDER as LABELS
from operant.tools.report import downsample, run_report
from operant.tools.report import html as html_pages
from operant.tools.report.server import Server, Serving, Site
from operant.types import OperantError

PAGE = Path(run_report.__file__).parent / "page"
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def metrics(step, chance):
    """Every metric of the registry that a run with a reward has, but for text games, and those of two parts of it."""
    named = [name for name in METRICS if "<" not in name and name not in ("step", "episodes")]
    others = ("supervised/", "preference/", "evaluate/loss", "evaluate/bits", "game/", "evaluate/game/", "actions/")
    named = [name for name in named if not name.startswith((*others, "memory/turns", "memory/forgotten"))]
    parts = [f"reward/{part}/{statistic}" for part in ("taste", "length") for statistic in ("mean", "std")]
    rising = {name: 0.2 + 0.05 * step + 0.1 * chance.random() for name in named + parts}
    return rising | {"kl/per_reply": 0.5 * step, "policy/ratio_min": 0.9, "policy/ratio_max": 1.2 + 0.1 * step}


def distributions(step, chance):
    drawn = [chance.gauss(step, 1) for _ in range(200)]
    names = ("reward", "kl_per_reply", "logprobs", "ref_logprobs")
    histograms = {name: Histogram.of(drawn).as_plain() for name in names}
    histograms["reply_tokens"] = Histogram.of([chance.randrange(3, 20) for _ in range(100)]).as_plain()
    norms = {block: math.exp(chance.gauss(0, 1)) for block in ("embedding", "block 0", "block 1", "final", "value")}
    return {"histograms": histograms, "blocks": {"gradient": norms, "update": norms, "weight": norms}}


def write_run(path, steps=12):
    folder, chance = RunFolder.create(path, {"train": {}, "steps": steps}), random.Random(0)
    for step in range(1, steps + 1):
        folder.log(step, metrics(step, chance))
        folder.distributions(step, distributions(step, chance))
        folder.rollouts(step, [row(i, reply=EVIL if i == 0 else f" step {step}.") for i in range(4)])
    folder.probes(0, [row(i, reply=" before", reward=0.1) for i in range(4)])
    folder.probes(steps, [row(i, reply=EVIL if i == 0 else " now", reward=0.7) for i in range(4)])
    folder.probes(None, [row(i, reply=" reference", reward=0.2) for i in range(4)])
    folder.close()
    return folder.path


def logged(path, *steps, config=None):
    folder = RunFolder.create(path, config or {})
    for step, numbers in enumerate(steps, 1):
        folder.log(step, numbers)
    folder.close()
    return folder.path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "a<b")


# --- downsampling -----------------------------------------------------------------------------------------------------
def test_a_short_curve_is_complete_and_a_metric_that_steps_lack_has_steps_of_its_own():
    metrics = [{"step": 3, "a": 1.0}, {"step": 4, "a": None, "b": 0.123456789}, {"step": 5, "a": 2.0}]
    values = {"a": [1.0, None, 2.0], "b": {"steps": [4], "values": [0.12346]}}
    assert downsample.curves(metrics) == {"steps": [3, 4, 5], "values": values}


def test_a_long_curve_is_short_and_keeps_its_peaks():
    metrics = [{"step": i + 1, "a": 0.0, "b": float(i)} for i in range(1003)]
    metrics[777]["a"], metrics[778]["a"], metrics[500]["a"] = 5.0, -7.0, None
    found = downsample.curves(metrics)
    assert downsample.steps_per_interval(1003) == 5
    assert len(found["steps"]) == len(found["values"]["a"]) == 402 <= downsample.POINTS
    assert found["steps"][:4] == [1, 5, 6, 10] and found["steps"][-2:] == [1001, 1003]
    at = found["steps"].index(776)
    assert found["values"]["a"][at : at + 2] == [5.0, -7.0]  # in their order in time
    assert found["values"]["b"][:4] == [0.0, 4.0, 5.0, 9.0] and found["values"]["b"][-1] == 1002.0
    assert None not in found["values"]["a"] and set(found["values"]["a"]) == {0.0, 5.0, -7.0}
    assert set(downsample.curves([{"step": i, "a": None} for i in range(999)])["values"]["a"]) == {None}


@pytest.mark.parametrize("count", [1, 500, 501, 751, 12_345])
def test_a_curve_of_any_length_fits_and_ends_with_its_last_step(count):
    found = downsample.curves([{"step": i, "a": float(i)} for i in range(count)])
    assert len(found["steps"]) == len(found["values"]["a"]) <= downsample.POINTS
    assert found["steps"][-1] == found["values"]["a"][-1] == count - 1 and found["steps"] == sorted(set(found["steps"]))


def heatmaps(path, *lines):
    """Of a file whose last line is still being written."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9', encoding="utf-8")
    return downsample.Heatmaps(path)


def histogram(width, start, *counts):
    return {"width": width, "start": start, "counts": list(counts)}


def test_histograms_of_different_widths_share_a_grid(tmp_path):
    histograms = [histogram(0.25, -1, 1, 2, 3, 4, 0, 6), histogram(0.5, 0, 5, 5), histogram(1.0, 1, 3)]
    lines = [{"step": 2 * i, "histograms": {"x": each}} for i, each in enumerate(histograms)]
    grid = heatmaps(tmp_path / "d", *lines).histogram("x")
    assert grid["steps"] == [0, 2, 4]
    assert (grid["width"], grid["start"], grid["rows"]) == (0.5, -1, 5)  # -0.5 to 2.0
    merged, same, spread = grid["columns"]
    assert merged == [0, *(round(n / 16, 4) for n in (1, 5, 4, 6))]  # bins -1 | 0 1 | 2 3 | 4
    assert same == [1, 0.5, 0.5]
    assert spread == [3, 0.5, 0.5]  # one bin over 1.0 to 2.0 is two rows of half its share


def test_a_heatmap_loses_nothing_and_its_tail_stays_in_the_outermost_row(tmp_path):
    outlier = histogram(1.0, 0, *([500] * 4), *([0] * 95), 1)
    grid = heatmaps(tmp_path / "d", {"step": 1, "histograms": {"x": outlier}}).histogram("x")
    assert (grid["start"], grid["rows"]) == (0, 4) and grid["columns"] == [[0, 0.2499, 0.2499, 0.2499, 0.2504]]


def test_whole_numbers_make_rows_without_stripes_between(tmp_path):
    lengths = Histogram.of([float(n) for n in (3, 4, 5, 7, 20, 20, 31)], bins=128)
    assert lengths is not None and lengths.width == 0.25
    grid = heatmaps(tmp_path / "d", {"step": 1, "histograms": {"x": lengths.as_plain()}}).histogram("x")
    assert (grid["width"], grid["start"], grid["rows"]) == (1.0, 3, 29)
    assert [i + 3 for i, share in enumerate(grid["columns"][0][1:]) if share] == [3, 4, 5, 7, 20, 31]


def test_a_long_run_has_every_nth_histogram_and_the_newest(tmp_path):
    lines = [{"step": i, "histograms": {"x": histogram(1.0, i, 1)}, "gradients": {"gradient": 1}} for i in range(1000)]
    for line in lines[::10]:
        line["blocks"] = {"gradient": {"a": float(line["step"]), "b": None}}
    found = heatmaps(tmp_path / "d", *lines)
    grid, norms = found.histogram("x"), found.blocks("gradient")
    assert len(grid["steps"]) == 250 and grid["steps"][-3:] == [991, 995, 999] and len(grid["columns"]) == 250
    assert norms["names"] == ["a", "b"]
    assert norms["columns"][:2] == [[0.0, None], [10.0, None]] or norms["steps"][-1] == 990
    assert found.histogram("y") is None and found.blocks("weight") is None
    assert downsample.Heatmaps(tmp_path / "nothing").histogram("x") is None


def test_a_damaged_file_is_an_answer_of_the_server(run, monkeypatch):
    monkeypatch.setattr(run_report, "read_history", lambda folder: [][0])
    with pytest.raises(OperantError, match="has contents that operant did not write"):
        Site(run).answer("/data.json", "")


# --- the data of the page ---------------------------------------------------------------------------------------------
def test_the_data_has_numbers_probes_and_distributions(run):
    data = run_report.page_data(run)
    assert data["name"] == run.name and data["steps"] == [12, 12] and data["steps_per_interval"] == 1
    assert data["curves"]["steps"] == list(range(1, 13))
    assert data["curves"]["values"]["kl/per_reply"] == [0.5 * i for i in range(1, 13)]
    assert set(data["histograms"]) == {"reward", "kl_per_reply", "logprobs", "ref_logprobs", "reply_tokens"}
    assert data["histograms"]["reply_tokens"]["width"] == 1.0
    assert data["blocks"]["update"]["names"] == ["embedding", "block 0", "block 1", "final", "value"]
    numbers = {number["label"]: number for number in data["numbers"]}
    where = {"label": "KL per reply", "note": "mean of the last 5 steps", "unit": "nats"}
    assert numbers["KL per reply"] == where | {"after": 5.0}  # mean of 4 to 6
    assert numbers["Training time"]["unit"] == "s"
    rows = [
        {"query": f"Query {i}", "before": {"reply": " reference", "reward": 0.2}, "gain": 0.5, "pick": pick}
        | {"after": {"reply": EVIL if i == 0 else " now", "reward": 0.7}}
        for i, pick in ((1, "median"), (3, "best"), (0, "worst"))  # all gains are equal, so their order decides
    ]
    about = {"before": "reference", "after": "policy, step 12", "queries": "probe prompts", "of": 4, "better": 4}
    assert data["samples"] == about | {"rows": rows}
    kl = next(m for m in data["metrics"] if m["name"] == "kl/per_reply")
    assert (kl["first"], kl["last"], kl["odd"]) == (0.5, 6.0, False) and kl["band"] == (0, 10)
    assert html_pages.as_json(data)


def test_without_a_reference_replies_are_compared_with_those_before_training(tmp_path):
    folder = RunFolder.create(tmp_path / "x", {})
    folder.log(1, {"reward/mean": 1.0})
    folder.probes(0, [row(0, reward=0.0002), row(1, reward=0.0004), row(2, reward=None)])
    folder.probes(1, [row(0, reward=0.0003), row(1, reward=0.0005), row(2)])
    samples = run_report.page_data(folder.path)["samples"]
    assert (samples["before"], samples["of"], samples["better"]) == ("policy, step 0", 2, 2)
    folder.close()


@cases(("fixed", None), ("adaptive", 6.0), ("per_token", 6.0))
def test_a_target_is_drawn_if_a_controller_steers_towards_it(control, target, tmp_path):
    path = logged(tmp_path / "x", config={"kl": {"control": control, "target": 6.0}})
    assert run_report.page_data(path)["target"] == target


def test_without_probes_the_held_out_tasks_are_the_samples(tmp_path):
    path = logged(tmp_path / "x", {"reward/mean": 0.5})
    replies = [{"task": f"t{i}", "query": "q", "reply": f"r{i}", "score": i / 4} for i in range(5)]
    evaluation = {"before": None, "after": {"mean": 0.5, "kl": 1.0, "replies": replies}}
    (path / "evaluation.json").write_text(json.dumps(evaluation), encoding="utf-8")
    samples = run_report.page_data(path)["samples"]
    assert samples["of"] == 5 and [r["after"]["reply"] for r in samples["rows"]] == ["r0", "r1", "r2"]
    assert [r["before"] for r in samples["rows"]] == [None] * 3


@cases(
    ([0.3, -0.2, 0.1, 0.4, 0.2], 4, [("median", 0.2), ("best", 0.4), ("worst", -0.2)]),
    ([0.5, None, 0.25, 0.0], 2, [("median", 0.25), ("best", 0.5), ("worst", 0.0)]),  # one has no score
    ([0.5, 0.25], 2, [("best", 0.5), ("worst", 0.25)]),
    ([-0.5], 0, [("best", -0.5)]),
)
def test_the_samples_are_the_median_the_best_and_the_worst_gain(gains, better, chosen, tmp_path):
    folder = RunFolder.create(tmp_path / "x", {})
    folder.probes(None, [row(i, reward=1.0) for i, _ in enumerate(gains)])
    folder.probes(1, [row(i, reward=None if gain is None else 1.0 + gain) for i, gain in enumerate(gains)])
    folder.close()
    samples = run_report.page_data(folder.path)["samples"]
    assert (samples["of"], samples["better"]) == (sum(gain is not None for gain in gains), better)
    assert [(r["pick"], pytest.approx(r["gain"])) for r in samples["rows"]] == chosen


SCALED = {  # raw scores 0.4 and 0.8 after a running mean of 0.5 and spread of 0.25, with 0.6 and 1.8 of KL penalty
    "reward/mean": 0.6, "reward/std": 0.2, "reward/scaled_mean": 0.4, "reward/scaled_std": 0.8,
    "reward/kl_penalty": 1.2, "reward/kl_penalty_std": 0.6, "reward/return": -0.8, "reward/return_std": 0.2,
}  # fmt: skip


def test_penalty_and_return_are_drawn_in_units_of_the_reward(tmp_path):
    equal = SCALED | {"reward/std": 0.0, "reward/scaled_std": 0.0}  # equal scores do not tell their unit
    path = logged(tmp_path / "x", SCALED, equal, config={"score": {"normalise": True}})
    values = run_report.page_data(path)["curves"]["values"]
    found = {name[7:]: values[f"{name}_in_reward_units"] for name in SCALED if name[7:11] in ("kl_p", "retu")}
    # 0.25 * 1.2 and 0.25 * 0.6 of penalty leave 0.6 - 0.3 on average; 0.4 - 0.15 and 0.8 - 0.45 spread by 0.05
    wanted = {"kl_penalty": 0.3, "kl_penalty_std": 0.15, "return": 0.3, "return_std": 0.05}
    assert found == {name: [number, None] for name, number in wanted.items()}
    assert values["reward/return"] == [-0.8, -0.8]


@cases({"normalise": False}, *({"scale": True, name: 0} for name in ("clip", "missing_stop", "truncate_token")))
def test_scores_that_are_not_scaled_or_also_altered_stay_in_their_own_units(score, tmp_path):
    data = run_report.page_data(logged(tmp_path / "x", SCALED, config={"score": score}))
    assert not [name for name in data["curves"]["values"] if name.endswith(run_report.IN_REWARD_UNITS)]
    assert data["scaled"] == (True in score.values())


EXPLAINED = json.loads(Path(__file__).with_name("explained.json").read_text(encoding="utf-8"))
"""Of each run: its configuration, its metrics, and what the page says of it."""


@pytest.mark.parametrize("name", EXPLAINED)
def test_the_page_explains_the_task_with_the_names_and_numbers_of_the_run(name, tmp_path):
    config, metrics, phrases = EXPLAINED[name]
    steps = [metrics | {"time/update": seconds} for seconds in (9.0, 1.0, 3.0, 50.0)]
    cycle = run_report.page_data(logged(tmp_path / "x", *steps, config=config))["cycle"]
    text = "\n".join([cycle["sentence"], *(part["text"] for part in cycle["parts"])])
    assert [words for words in phrases if words not in text] == [], text
    assert cycle["parts"][-1]["seconds"] == 3.0, "the first step warms up, and the median ignores a pause"


def test_metrics_without_a_description_or_without_a_finite_value(tmp_path):
    numbers = {"own/thing": 1.0, "kl/coef": float("nan"), "kl/per_reply": -3.0, "reward/a/mean": 1.0}
    found = run_report.page_data(logged(tmp_path / "x", numbers))["metrics"]
    assert [m["name"] for m in found] == ["reward/a/mean", "kl/per_reply", "own/thing"], "the order of the registry"
    assert found[2] == {"name": "own/thing", "first": 1.0, "last": 1.0} and found[1]["odd"]


# --- the file ---------------------------------------------------------------------------------------------------------
def test_the_page_holds_the_data(run):
    html = run_report.write_report(run).read_text(encoding="utf-8")
    assert "<title>a&lt;b</title>" in html
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])
    assert data["samples"]["rows"][2]["after"]["reply"] == EVIL
    assert data | {"replies": None} == json.loads(html_pages.as_json(run_report.page_data(run) | {"replies": None}))


def test_the_page_refers_to_nothing_outside_itself(run):
    html = run_report.write_report(run).read_text(encoding="utf-8")
    around = re.sub(r"<script.*?</script>", "", html, flags=re.S)
    assert re.findall(r"""(?:src|href|srcset|action)\s*=\s*["']?([^"'>\s]*)""", around) == ["data:,"]
    assert "@import" not in html and "url(" not in around
    assert "default-src 'none'" in html and "connect-src" not in html
    live = run_report.page(run_report.page_data(run), live=True)
    assert "connect-src 'self'" in live and '<meta name="live"' in live and '<meta name="live"' not in html


@pytest.mark.parametrize("path", sorted(PAGE.glob("*.js")), ids=lambda path: path.name)
def test_own_scripts_neither_end_the_page_nor_build_html(path):
    text = path.read_text(encoding="utf-8")
    assert "</script" not in text and "{{" not in text
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)


@pytest.mark.parametrize("folder", [PAGE / "vendor", LABELS / "vendor"], ids=["report", "labels"])
def test_vendored_files_match_their_readme(folder):
    note = (folder / "README.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"`([\w.]+)` \| `([0-9a-f]{64})`", note))
    assert {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in listed} == listed
    assert {path.name for path in folder.iterdir()} == {*listed, "LICENSE", "README.md"}
    assert "MIT" in note and "MIT" in (folder / "LICENSE").read_text(encoding="utf-8")


# --- in a browser -----------------------------------------------------------------------------------------------------
COLOURS = """() => [...document.querySelectorAll("figure.chart:has(canvas)")].map((figure) => {
    const canvas = figure.querySelector("canvas"), colours = new Set();
    const copy = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height });
    const context = copy.getContext("2d", { willReadFrequently: true });
    context.drawImage(canvas, 0, 0);
    const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
    for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 200) colours.add(data.slice(i, i + 3).join());
    return [figure.id, [...colours]];
})"""
"""The solid colours on every chart."""
EXPECTED = """
reward-mean reward-kl_penalty reward-return heat-reward held-out evaluate-bleu evaluate-chrf evaluate-distinct
evaluate-exact_match against-kl soft-q soft-v soft-a kl-per_reply heat-kl_per_reply kl-coef logprobs
heat-logprobs heat-ref_logprobs policy-entropy policy-clip_fraction ratio policy-approx_kl staleness rollout-carried
value-explained_variance
value-loss rollout-reply_tokens heat-reply_tokens ends text-empty text-top_word text-distinct_1 text-distinct_2
text-repeated text-exclamations text-emojis text-non_letters grad-norm blocks-gradient blocks-update blocks-weight
reward-taste-mean reward-length-mean phases tokens-per_second memory
""".split()
FITS = "document.documentElement.scrollWidth <= innerWidth"
BLUE = {"light": (31, 111, 181), "dark": (107, 177, 238)}


def has(colours, wanted):
    """Whether one of the "r,g,b" is the wanted colour, up to the rounding of a canvas."""
    return any(all(abs(int(a) - b) < 3 for a, b in zip(colour.split(","), wanted)) for colour in colours)


def wait_until(page, script):
    """Wait until a script is true on the page, whose content policy forbids playwright's wait_for_function."""
    for _ in range(200):
        if page.evaluate(script):
            return
        page.wait_for_timeout(50)
    raise AssertionError(script)


@pytest.fixture(scope="module")
def url(run):
    return run_report.write_report(run).as_uri()


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.slow
def test_every_chart_is_drawn_and_the_page_fits_and_can_be_read(browser, run, url, size, scheme):
    with visit(browser, url, size, scheme) as page:
        drawn = dict(page.evaluate(COLOURS))
        assert list(drawn) == [f"chart-{name}" for name in EXPECTED]
        for name, colours in drawn.items():
            assert len(colours) > 8 if "heat" in name or "blocks" in name else len(colours) > 3, name
        assert has(drawn["chart-reward-mean"], BLUE[scheme])
        assert page.locator("section:not([hidden]) > details[open]").count() == (1 if size == PHONE else 9)
        for _ in range(2):
            assert page.evaluate(FITS) and overflows(page) == [] and low_contrast(page) == []
            for texts in ("#cycle text", "#overview > *, .number > *, #diagnosis, #samples", "summary > *"):
                assert overlaps(page, texts) == []
            assert overlaps(page, "figure h3, .readout, .key, .keys > span, figcaption, .words") == []
            page.evaluate(UNFOLD)
            page.wait_for_timeout(300)
        assert page.locator("#metrics tbody tr").count() == len(run_report.page_data(run)["metrics"])


UNFOLD = "document.querySelectorAll('details').forEach((it) => (it.open = true))"


def test_a_phone_shows_the_verdict_first_and_a_link_unfolds_what_it_leads_to(browser, url):
    with visit(browser, url, PHONE) as page:
        assert page.evaluate("document.documentElement.scrollHeight") < 8000  # with the charts of one section
        parts = (".verdict", ".task", "#cycle", ".numbers", "#samples")
        places = [page.locator(name).bounding_box()["y"] for name in parts]
        assert places == sorted(places)
        page.locator("nav a", has_text="Distance").click()
        page.locator("#chart-kl-per_reply").wait_for()
        box = page.locator("#chart-kl-per_reply .plot").bounding_box()
        assert box["width"] > 300, "a chart that was folded fills the window"


SAVED = """() => {
    const saved = [];
    URL.createObjectURL = (blob) => (saved.push(blob), "");
    HTMLAnchorElement.prototype.click = function () { saved.push(this.download) };
    document.querySelectorAll(".export button").forEach((it) => it.click());
    return Promise.all(saved.map((it) => (it.text ? it.text() : it))).then((all) =>
        Object.fromEntries(all.flatMap((text, i) => (i % 2 ? [] : [[all[i + 1], text]]))));
}"""
"""Presses all buttons that save a figure; returns the files by name. Chromium itself refuses so many at once."""


@pytest.mark.slow
@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_every_figure_is_saved_as_a_picture_that_stands_alone_and_as_a_table(browser, run, url, size):
    with visit(browser, url, size) as page:
        page.locator("#chart-reward-mean").hover()
        with page.expect_download() as download:
            page.get_by_role("button", name="Reward of the replies: save the numbers as CSV").click()
        assert download.value.suggested_filename == "a-b-reward-mean.csv"
        assert Path(download.value.path()).read_text().startswith("step,reward/mean,reward/mean spread\n1,")
        page.evaluate(UNFOLD)
        page.wait_for_timeout(300)
        files, marks = page.evaluate(SAVED), page.locator("figure.chart").count()
    assert len(files) == 2 * (len(EXPECTED) + 1) == 2 * (marks + 1)
    rows = [line.split(",") for line in files["a-b-kl-per_reply.csv"].splitlines()]
    assert rows[0] == ["step", "kl/per_reply", "kl/per_reply spread"]
    assert [(int(step), float(kl)) for step, kl, _ in rows[1:]] == [(step, 0.5 * step) for step in range(1, 13)]
    shares = [line.split(",") for line in files["a-b-heat-reply_tokens.csv"].splitlines()]
    assert shares[0][:2] == ["step", "3 to 4"] and len(shares) == 13
    assert sum(map(float, shares[1][1:])) == pytest.approx(1.0, abs=2e-3)
    alone = browser.new_page(viewport={"width": 1500, "height": 900})
    for name, text in files.items():
        if not name.endswith(".svg"):
            continue
        picture = ElementTree.fromstring(text)
        assert "var(" not in text and "http" not in text.replace("http://www.w3.org/2000/svg", ""), name
        assert len(picture.findall(".//{*}path")) + len(picture.findall(".//{*}circle")) > 0, name
        alone.set_content(text)
        assert overlaps(alone, "text") == [], name
        drawn = alone.locator("svg").bounding_box()
        for box in alone.locator("text").all():
            place = box.bounding_box()
            assert drawn["x"] - 1 <= place["x"] and place["x"] + place["width"] <= drawn["x"] + drawn["width"] + 1, name
    alone.close()


def test_what_never_changes_is_said_in_words_and_a_single_zero_starts_at_zero(browser, tmp_path):
    folder, four = RunFolder.create(tmp_path / "x", {}), Histogram.of([4.0, 4.0]).as_plain()
    for step in (1, 2):
        current = {"rollout/staleness": 0.0, "rollout/staleness_max": 0.0, "reward/mean": 1.0 * step}
        folder.log(step, current | {"kl/coef": 0.25, "text/empty": 0.0, "value/loss": 1.0 / step})
        both = {"reply_tokens": four, "reward": Histogram.of([0.0, 0.0]).as_plain()}
        folder.distributions(step, {"histograms": both, "blocks": {"update": {"a": 0.0, "b": 0.0}}})
    folder.close()
    with visit(browser, run_report.write_report(folder.path).as_uri()) as page:
        for chart, text in (
            ("kl-coef", "0.25 at every step."),
            ("text-empty", "0 % at every step."),
            ("heat-reply_tokens", "4: all replies of every step."),
            ("heat-reward", "0: all replies of every step."),
            ("blocks-update", "0 in every part at every step."),
        ):
            assert page.locator(f"#chart-{chart} .words").inner_text() == text
        assert [name for name, _ in page.evaluate(COLOURS)] == ["chart-reward-mean", "chart-value-loss"]
        assert page.locator("#chart-staleness, #chart-rollout-carried").count() == 0
    path = logged(tmp_path / "y", {"policy/clip_fraction": 0.0, "policy/approx_kl": 0.0, "reward/mean": 0.5})
    with visit(browser, run_report.write_report(path).as_uri()) as page:
        assert has(dict(page.evaluate(COLOURS))["chart-reward-mean"], BLUE["light"]), "one point is a dot"
        texts = re.findall(">([^<>]+)<", page.evaluate(SAVED)["y-policy-approx_kl.svg"])
        assert texts == ["Size of the update (nats)", "0", "0.2", "0.4", "0.6", "0.8", "1", "step 0", "1", "2"]


@pytest.mark.slow
def test_a_change_of_theme_redraws(browser, url):
    with visit(browser, url) as page:
        before = dict(page.evaluate(COLOURS))
        assert has(before["chart-reward-mean"], BLUE["light"])
        page.emulate_media(color_scheme="dark")
        wait_until(page, "matchMedia('(prefers-color-scheme: dark)').matches")
        page.wait_for_timeout(200)
        after = dict(page.evaluate(COLOURS))
        for name in ("chart-reward-mean", "chart-phases", "chart-kl-coef"):
            assert has(after[name], BLUE["dark"]) and not has(after[name], BLUE["light"]), name
        for name in ("chart-heat-reward", "chart-blocks-weight"):  # heatmaps are painted apart
            assert not set(before[name]) & set(after[name])


def hover(page, chart, share):
    box = page.locator(f"#{chart} .u-over").bounding_box()
    page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)


def test_one_cursor_and_one_zoom_for_all(browser, url):
    with visit(browser, url) as page:
        page.locator("#chart-reward-mean").scroll_into_view_if_needed()
        hover(page, "chart-reward-mean", 0.5)
        for chart in ("chart-reward-mean", "chart-reward-return", "chart-kl-per_reply", "chart-heat-reward"):
            assert re.search(r"step [67]\b", page.locator(f"#{chart} .readout").inner_text()), chart
        value = page.locator("#chart-kl-per_reply .readout").inner_text()
        step = int(re.search(r"step (\d+)", value)[1])
        assert value.endswith(f"{0.5 * step:g}")
        hover(page, "chart-reward-mean", 0.02)
        page.mouse.down()
        hover(page, "chart-reward-mean", 0.3)
        page.mouse.up()
        assert page.locator(".zoomed").inner_text() == "steps 1 to 4 · show all"
        hover(page, "chart-reward-return", 0.99)
        assert "step 4" in page.locator("#chart-reward-return .readout").inner_text()
        page.locator("#chart-reward-return .u-over").dblclick()
        assert page.locator(".zoomed").is_hidden()
        hover(page, "chart-heat-reward", 0.99)
        assert "step 12" in page.locator("#chart-reward-mean .readout").inner_text()
        assert "%" in page.locator("#chart-heat-reward .readout").inner_text()


def test_a_finding_links_to_its_chart(browser, tmp_path):
    chance = random.Random(0)
    steps = [metrics(step, chance) | {"kl/per_reply": 20.0 * step, "kl/coef": 0.1} for step in range(1, 13)]
    path = logged(tmp_path / "x", *steps, config={"kl": {"coef": 0.1}})
    with visit(browser, run_report.write_report(path).as_uri()) as page:
        page.evaluate("document.querySelectorAll('#diagnosis details').forEach((it) => (it.open = true))")
        chip = page.locator("#diagnosis button", has_text="kl/per_reply").first
        assert not page.locator("#chart-kl-per_reply").evaluate("(it) => it.getBoundingClientRect().top < innerHeight")
        chip.click()
        place = "document.querySelector('#chart-kl-per_reply').getBoundingClientRect()"
        wait_until(page, f"(({{ top, bottom }}) => top >= 0 && bottom <= innerHeight)({place})")  # it scrolls slowly
        assert page.evaluate(FITS)


@pytest.mark.slow
def test_many_findings_are_folded(browser, tmp_path):
    data = run_report.page_data(write_run(tmp_path / "x"))
    finding = {"level": "warning", "message": "`a` -> <b>", "cause": "c", "remedy": "`--d`", "metrics": [], "step": 1}
    for count, shown, label in ((4, 4, None), (6, 3, "3 more")):
        html = run_report.page(data | {"replies": None, "findings": [finding | {"name": str(i)} for i in range(count)]})
        (tmp_path / "page.html").write_text(html, encoding="utf-8")
        with visit(browser, (tmp_path / "page.html").as_uri()) as page:
            assert page.locator("#diagnosis li:visible").count() == shown
            assert page.locator("#diagnosis .message").first.inner_text() == "a → <b>"
            assert f"{count} warnings" in page.locator(".status").inner_text()
            if label:
                page.get_by_text(label).click()
                assert page.locator("#diagnosis li:visible").count() == count


def test_nan_leaves_a_gap_in_a_curve_and_a_step_without_the_metric_does_not(browser, tmp_path):
    steps = []
    for step in range(1, 12):
        old = {"rollout/staleness": 1.0, "rollout/staleness_max": 1.0, "rollout/carried": step - 1.0}
        values = {"policy/entropy": None if step == 6 else 1.0 + step, "update/grad_norm": 2.0, "evaluate/own": None}
        values |= {} if step == 6 else {"update/grad_norm_clipped": 1.0}
        steps.append(old | values | {"policy/approx_kl": None if step in (5, 7) else 0.01 * step})
    columns = """(id) => {
        const canvas = document.querySelector(`#${id} canvas`), { width, height } = canvas;
        const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
        const blue = (x, y) => [31, 111, 181].every((c, k) => Math.abs(data[4 * (y * width + x) + k] - c) < 30);
        return [...Array(width).keys()].map((x) => [...Array(height).keys()].some((y) => blue(x, y)));
    }"""
    with visit(browser, run_report.write_report(logged(tmp_path / "x", *steps)).as_uri()) as page:
        for chart, gaps in (("policy-entropy", 1), ("policy-approx_kl", 2), ("grad-norm", 0)):
            blue = "".join("x" if known else "." for known in page.evaluate(columns, f"chart-{chart}")).strip(".")
            assert len(blue) > 200 and len(re.findall(r"\.{15,}", blue)) == gaps, (chart, blue)
        assert page.locator("#chart-staleness, #chart-rollout-carried").count() == 2, "ages of replies, if some are old"


@cases("probe", "evaluate")
def test_curves_of_held_out_scores_start_before_training(kind, browser, tmp_path):
    steps = ({f"{kind}/reward": 0.7, f"{kind}/reward_before": 0.25}, {f"{kind}/reward": 0.8})
    with visit(browser, run_report.write_report(logged(tmp_path / "x", *steps)).as_uri()) as page:
        hover(page, "chart-held-out", 0.01)
        assert re.search(r"step 0\b.*0.25$", page.locator("#chart-held-out .readout").inner_text(), re.DOTALL)


@pytest.mark.slow
@cases(((-90.0, 0.1, 0.5), True), ((-90.0, 0.1, -3.0), False))
def test_an_untrained_critic_does_not_flatten_its_curve(values, floor, browser, tmp_path):
    path = logged(tmp_path / "x", *({"value/explained_variance": value} for value in values))
    with visit(browser, run_report.write_report(path).as_uri()) as page:
        chart = page.locator("#chart-value-explained_variance")
        assert ("Values below −1 are drawn at −1." in chart.inner_text()) == floor
        hover(page, "chart-value-explained_variance", 0.01)
        assert chart.locator(".readout").inner_text().endswith("−90")  # the readout shows the true value


def test_the_page_of_a_run_before_its_first_step(browser, tmp_path):
    with visit(browser, run_report.write_report(logged(tmp_path / "x", config={"steps": 7})).as_uri()) as page:
        assert page.locator(".verdict").inner_text() == "No step is finished yet."
        assert "step 0 of 7" in page.locator(".status").inner_text()
        assert page.locator("canvas").count() == 0 and page.locator("section:visible").count() == 0


def test_the_page_of_held_out_labels_without_a_disagreement(browser, tmp_path):
    numbers = {"preference/loss": 0.5, "kl/per_reply": -0.722, "reward/return": 0.5, "reward/kl_penalty": 0.0}
    path = logged(tmp_path / "x", numbers, config={"steps": 1})
    labels = {"of": 4, "right": 4.0, "labellers": [{"name": "ann", "of": 4, "right": 4.0}], "worst": []}
    labels["calibration"] = [{"from": 0.9, "to": 1.0, "of": 4, "right": 1.0, "confidence": 0.99}]
    (path / "evaluation.json").write_text(json.dumps({"labels": labels}), encoding="utf-8")
    with visit(browser, run_report.write_report(path).as_uri()) as page:
        text = page.inner_text("body")
        assert "4 judgements" in text and "null" not in text and "KL per reply" not in text
        assert page.locator("#chart-reward-return, #chart-reward-kl_penalty").count() == 0


@pytest.mark.slow
def test_the_live_page_is_updated_in_place(browser, tmp_path, soon):
    folder = RunFolder.open(write_run(tmp_path / "y"))
    with served(Server(folder.path, Serving(serve=True, port=0))) as running, visit(browser, running.url) as page:
        page.wait_for_selector("#chart-reward-mean canvas")
        page.evaluate("Charts.zoom([3, 20]); document.querySelector('#chart-reward-mean canvas').mine = true")
        folder.log(13, metrics(13, random.Random(0)))
        page.get_by_text("step 13", exact=False).first.wait_for()
        page.locator("#chart-reward-mean").scroll_into_view_if_needed()
        hover(page, "chart-reward-mean", (13 - 3) / 17)
        assert "step 13" in page.locator("#chart-reward-mean .readout").inner_text()
        assert page.evaluate("document.querySelector('#chart-reward-mean canvas').mine")  # not replaced
        assert page.locator(".zoomed").is_visible()
        highest = page.evaluate("""async () => {
            const spec = (most) => ({ stacked: true, most, series: [{ label: "a", x: [1, 2], values: [1, 9] }] });
            const chart = Charts.line(document.body.appendChild(document.createElement("figure")), spec(2));
            await new Promise((done) => requestAnimationFrame(done, chart.update(spec())));
            return chart.uplot.scales.y.max;
        }""")
        assert highest == 9  # and not where the first data were cut off
        page.evaluate("[window.served, window.fetch] = [fetch, () => Promise.reject()]")
        page.locator(".status", has_text="· the server does not answer").wait_for()
        page.evaluate("void (window.fetch = served)")
        page.locator(".status", has_text="· live").wait_for()
    folder.close()
