"""Comparing runs: groups and their intervals, the front of reward against KL, and the page."""

import itertools
import json
import random
import statistics

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from browsing import LAPTOP, PHONE, chromium, visit

from operant.cli import main
from operant.report.compare import comparison, front, write_comparison
from operant.report.runs import expand, grouped, read_runs
from operant.report.summary import interval, t_quantile, table


def run(folder, *, coef=0.1, seed=1, rewards=(1.0, 2.0), kls=(0.0, 3.0), after=None, replies=(), **options):
    """Write a run folder with one line per step. after: (reward, KL) on held-out tasks, answered by `replies`."""
    folder.mkdir(parents=True)
    config = {"steps": len(rewards), "reward": "letters:e", "keep": 2, "kl": {"coef": coef}, "learner": {"seed": seed}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config | options), encoding="utf-8")
    lines = [{"step": i + 1, "reward/mean": r, "kl/per_reply": k} for i, (r, k) in enumerate(zip(rewards, kls))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if after:
        rows = [{"task": f"t{i}", "query": "ab", "reply": text, "score": 1.0} for i, text in enumerate(replies)]
        evaluation = {"before": {"mean": 1.0, "kl": 0.0, "replies": rows}}
        evaluation["after"] = {"mean": after[0], "kl": after[1], "replies": rows}
        (folder / "evaluation.json").write_text(json.dumps(evaluation), encoding="utf-8")
    return folder


def probes(folder, name, replies):
    (folder / "probes").mkdir(exist_ok=True)
    rows = [
        {"task": t, "query": f"query {t}", "reply": text, "reward": 0.5, "rollout": 0} for t, text in replies.items()
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "probes" / name)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_the_interval_is_that_of_students_t():
    # By hand: 1, 2, 4 have mean 7/3 and standard deviation sqrt(7/3); t for 2 degrees of freedom is 4.30265 (tables).
    found = interval([1.0, 2.0, 4.0])
    assert found is not None and found.n == 3 and found.half is not None
    assert found.mean == pytest.approx(7 / 3) and found.half == pytest.approx(
        4.30265 * (7 / 3) ** 0.5 / 3**0.5, rel=1e-5
    )
    single = interval([5.0, None, float("nan")])
    assert single is not None and (single.mean, single.half, single.n) == (5.0, None, 1)
    assert interval([None]) is None


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423), (1000, 1.9623)]
)
def test_quantiles_are_those_of_the_tables(freedom, t):
    assert t_quantile(freedom) == pytest.approx(t, abs=6e-5)


def test_the_interval_covers_the_true_mean_in_95_percent_of_the_draws():
    draw, covered = random.Random(0), 0
    for _ in range(2000):
        found = interval([draw.gauss(0.0, 1.0) for _ in range(4)])
        covered += abs(found.mean) <= found.half
    assert 0.935 < covered / 2000 < 0.965


def test_the_front_has_the_points_that_no_other_beats():
    draw = random.Random(1)
    for _ in range(200):
        points = [(draw.randrange(6), draw.randrange(6)) for _ in range(draw.randrange(1, 8))]
        beaten = {
            i
            for (i, a), (j, b) in itertools.permutations(enumerate(points), 2)
            if b[0] <= a[0] and b[1] >= a[1] and (b != a or j < i)
        }
        found = front(points)
        assert set(found) == set(range(len(points))) - beaten, points
        assert [points[i][0] for i in found] == sorted(points[i][0] for i in found)


# --- groups -----------------------------------------------------------------------------------------------------------


def test_runs_that_differ_only_in_their_seed_are_one_line(tmp_path):
    for coef, seed in itertools.product((10.0, 0.02, 2.0), (1, 2)):
        run(tmp_path / f"{coef}-{seed}", coef=coef, seed=seed, keep=seed)  # `keep` does not change the training
    groups = grouped(read_runs(sorted(tmp_path.iterdir())))
    assert [g.label for g in groups] == ["kl.coef 0.02", "kl.coef 2", "kl.coef 10"], "by size, not by text"
    assert [len(g.runs) for g in groups] == [2, 2, 2]


def test_means_and_intervals_over_seeds(tmp_path):
    run(tmp_path / "a", seed=1, rewards=(1.0, 2.0), after=(4.0, 1.0), replies=["ab", "  "])
    run(
        tmp_path / "b",
        seed=2,
        rewards=(3.0, 2.0, 5.0),
        kls=(0.0, 1.0, 2.0),
        after=(6.0, 3.0),
        replies=["ab", "c"],
        steps=2,
    )
    data = comparison([tmp_path / "a", tmp_path / "b"])
    (group,) = data["groups"]
    assert data["held_out"] and group["n"] == 2
    assert group["final"]["reward"] == {"mean": 5.0, "half": pytest.approx(12.7062, abs=1e-3), "n": 2}
    assert group["final"]["empty"]["mean"] == 0.25
    reward = next(c for c in data["curves"] if c["name"] == "reward/mean")["lines"][0]
    assert reward["steps"] == [1, 2, 3] and reward["mean"] == [2.0, 2.0, 5.0] and reward["n"] == [1, 2]
    assert reward["half"][1:] == [0.0, None], "equal values have no spread; one value has no interval"
    assert "5 ± 12.7" in table(data)
    assert data["verdict"].startswith("The reward on held-out tasks is 5 ± 12.7 at a KL of ")


def test_without_held_out_tasks_the_last_steps_are_compared(tmp_path):
    run(tmp_path / "a", after=(4.0, 1.0), replies=["a"])
    run(tmp_path / "b", coef=0.0, rewards=[0.0] * 5 + [1.0, 2.0, 3.0, 4.0, 5.0], kls=range(10))
    data = comparison([tmp_path / "a", tmp_path / "b"])
    assert not data["held_out"] and data["groups"][0]["label"] == "kl.coef 0, steps 10"
    assert data["groups"][0]["final"]["reward"]["mean"] == statistics.fmean([1, 2, 3, 4, 5])


def test_the_front_of_the_page_joins_the_means_of_the_groups(tmp_path):
    for coef, reward, kl in ((0.0, 9.0, 30.0), (0.1, 8.0, 5.0), (0.5, 3.0, 6.0), (2.0, 2.0, 1.0)):
        for seed in (1, 2):
            run(tmp_path / f"{coef}-{seed}", coef=coef, seed=seed, after=(reward + seed, kl), replies=["a b c"])
    data = comparison(sorted(tmp_path.iterdir()))
    assert [data["groups"][i]["label"] for i in data["frontier"]["front"]] == ["kl.coef 2", "kl.coef 0.1", "kl.coef 0"]
    assert len(data["frontier"]["points"]) == 8 and data["frontier"]["start"] == 1.0
    assert data["differs"]["kl.coef"][0] == "0" and set(data["differs"]) == {"kl.coef", "learner.seed"}


def test_different_rewards_are_not_ranked(tmp_path):
    run(tmp_path / "a", after=(4.0, 1.0), replies=["a"])
    run(tmp_path / "b", reward="letters:a", after=(5.0, 2.0), replies=["a"])
    data = comparison([tmp_path / "a", tmp_path / "b"])
    assert (
        "rewards of the runs differ" in data["verdict"]
        and data["frontier"]["front"] == []
        and data["frontier"]["start"] is None
    )


def test_a_damaged_file_of_replies_is_left_out(tmp_path):
    run(tmp_path / "a")
    probes(tmp_path / "a", "step-00001.parquet", {"x": "reply"})
    (tmp_path / "a/probes/step-00002.parquet").write_bytes(b"PAR1 and then the disk was full")
    assert comparison([tmp_path / "a"])["replies"]["queries"] == []


def test_the_newest_probes_are_shown_side_by_side(tmp_path):
    for name, word in (("a", "one"), ("b", "two")):
        run(tmp_path / name, coef=0.1 if name == "a" else 0.2)
        probes(tmp_path / name, "step-00000.parquet", {"x": "old", "y": "old"})
        probes(tmp_path / name, "step-00010.parquet", {"y": f"{word} y", "x": f"{word} x"})
    probes(tmp_path / "b", "reference.parquet", {"x": "ref x", "y": "ref y"})
    replies = comparison([tmp_path / "a", tmp_path / "b"])["replies"]
    place = replies["queries"].index("query x")
    assert [column["answers"][place] for column in replies["columns"]] == [["one x", 0.5], ["two x", 0.5]]
    assert replies["reference"][place] == ["ref x", 0.5] and replies["reference_label"] == "the reference"


def test_a_run_before_its_first_step_can_be_compared(tmp_path):
    run(tmp_path / "a", rewards=(), kls=(), steps=5)
    assert "No run has finished a step" in comparison([tmp_path / "a"])["verdict"]
    run(tmp_path / "b", coef=0.3, rewards=(1.0, None), kls=(None, None))
    data = comparison([tmp_path / "a", tmp_path / "b"])
    assert len(data["runs"]) == 2 and data["frontier"]["points"] == []
    json.dumps(data, allow_nan=False)


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_a_run_is_named(tmp_path, capsys):
    run(tmp_path / "a")
    (tmp_path / "other").mkdir()
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "other")]) == 2
    assert f"{tmp_path / 'other'} is not a run folder" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "a"), "--serve"]) == 2
    assert "--serve is for one run" in capsys.readouterr().err


def test_a_sweep_stands_for_its_runs(tmp_path, capsys):
    run(tmp_path / "sweep" / "kl.coef=0", coef=0.0)
    run(tmp_path / "sweep" / "kl.coef=1", coef=1.0)
    (tmp_path / "sweep" / "sweep.yaml").write_text("axes: {kl.coef: ['0', '1']}\n", encoding="utf-8")
    assert [p.name for p in expand([tmp_path / "sweep"])] == ["kl.coef=0", "kl.coef=1"]
    assert main(["report", str(tmp_path / "sweep")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "sweep" / "report.html")
    run(tmp_path / "alone")
    assert main(["report", str(tmp_path / "sweep"), str(tmp_path / "alone"), "--out", str(tmp_path / "c.html")]) == 0
    assert (tmp_path / "c.html").stat().st_size > 50_000


def test_texts_of_a_run_cannot_close_the_script_with_the_data(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    run(tmp_path / "a", after=(1.0, 1.0), replies=[evil], reward=evil)
    html = write_comparison([tmp_path / "a"], tmp_path / "c.html").read_text(encoding="utf-8")
    assert evil not in html and "<script>alert" not in html


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


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


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_the_page_in_a_browser(browser, size, tmp_path):
    url = sweep_page(tmp_path)
    with visit(browser, url, size) as page:
        assert "6 runs: 3 settings, 2 runs of each" in page.inner_text(".status")
        assert page.locator(".frontier .mean").count() == 3 and page.locator(".frontier .run").count() == 6
        inside = "c => Math.abs(c.cx.baseVal.value) < innerWidth && c.cy.baseVal.value > 0"
        assert page.eval_on_selector_all(".frontier circle", f"all => all.every({inside})")
        drawn = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v)"
        assert page.eval_on_selector_all(".charts canvas", f"all => all.length >= 2 && all.every({drawn})")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off at the side"

        block = page.locator(".query-block").first
        assert block.locator(".answer").count() == 4, "the reference and three settings"
        assert "<b>reply 0 by 0.0-1</b>" in block.inner_text() and "(empty)" in block.inner_text()
        page.click("#later")
        assert "reply 3 by 0.1-1" in page.inner_text("#replies") and page.locator(".query-block").count() == 2
        page.click("button.seed:has-text('2')")
        assert "reply 3 by 0.1-2" in page.inner_text("#replies")
        assert page.locator(".runs tbody tr").count() == 6
