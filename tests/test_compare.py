"""Comparing runs: groups and their intervals, the front of reward against KL, and the page."""

import itertools
import json
import re
import statistics

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from cases import cases
from run_folders import probes, run
from texts import write_rows

from operant.tools.cli import main
from operant.tools.report.compare import comparison, front
from operant.tools.report.runs import expand, grouped, read_runs
from operant.tools.report.summary import interval, t_quantile, table


# --- numbers ----------------------------------------------------------------------------------------------------------
def test_the_interval_is_that_of_students_t():
    # By hand: 1, 2, 4 have mean 7/3 and standard deviation sqrt(7/3); t for 2 degrees of freedom is 4.30265 (tables).
    found = interval([1.0, 2.0, 4.0])
    assert found is not None and found.n == 3 and found.half is not None
    half = 4.30265 * (7 / 3) ** 0.5 / 3**0.5
    assert found.mean == pytest.approx(7 / 3) and found.half == pytest.approx(half, rel=1e-5)
    single = interval([5.0, None, float("nan")])
    assert single is not None and (single.mean, single.half, single.n) == (5.0, None, 1)
    assert interval([None]) is None


@cases(
    # Two standard errors of the difference of 4 scores of variance 1/3 are 2 * sqrt(2 / 12) = 0.816.
    ([0.2, -0.8, 0.2, -0.8], False),
    ([0.18, -0.82, 0.18, -0.82], True),
    ([9.0, 8.0, 9.0, 8.0], False),
)
def test_a_run_has_collapsed_if_its_held_out_score_fell_by_two_standard_errors(scores, fell, tmp_path):
    made = run(tmp_path / "a", after=(0.0, 1.0), replies=("x",) * 4, scores=([1.0, 0.0, 1.0, 0.0], scores))
    (record,) = read_runs([made])
    assert record.collapsed is fell and f"{int(fell)} of 1" in table(comparison([made]))


@cases((1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423), (1000, 1.9623))
def test_quantiles_are_those_of_the_tables(freedom, t):
    assert t_quantile(freedom) == pytest.approx(t, abs=6e-5)


def test_the_front_has_the_points_that_no_other_beats():
    # By hand: (1, 3) is beaten by (0, 3), (2, 4) and (2, 4) are one point, (3, 4) and (4, 1) are beaten.
    assert front([(2, 4), (1, 3), (0, 3), (2, 4), (4, 1), (3, 4), (5, 9)]) == [2, 0, 6]
    assert front([(1, 1)]) == [0] and front([]) == []


# --- groups -----------------------------------------------------------------------------------------------------------
def test_runs_that_differ_only_in_their_seed_are_one_line(tmp_path):
    for coef, seed in itertools.product((10.0, 0.02, 2.0), (1, 2)):
        run(tmp_path / f"{coef}-{seed}", coef=coef, seed=seed, keep=seed)  # `keep` does not change the training
    groups = grouped(read_runs(sorted(tmp_path.iterdir())))
    assert [g.name for g in groups] == ["0.02-*", "2.0-*", "10.0-*"], "by size, not by text"
    assert [len(g.runs) for g in groups] == [2, 2, 2]
    assert [g.values for g in groups] == [{"kl.coef": 0.02}, {"kl.coef": 2.0}, {"kl.coef": 10.0}]


def test_runs_with_the_same_seed_are_not_averaged(tmp_path):
    for name, seed in itertools.product(("new", "old"), (1, 2)):
        run(tmp_path / f"{name}-{seed}", seed=seed)
    assert [g.name for g in grouped(read_runs(sorted(tmp_path.iterdir())))] == ["new-*", "old-*"]


@cases(
    (["kl.coef=0,seed=1", "kl.coef=0,seed=12"], ["kl.coef=0"]),
    (["lr=1e-5,seed=1,steps=3", "lr=1e-5,seed=2,steps=3"], ["lr=1e-5,steps=3"]),
    (["seed=1", "seed=2"], ["seed=*"]),
    (["x/long", "y/long"], ["*/long"]),
    (["one", "two", "three"], ["one, two and 1 more"]),
    (["let1", "rev"], ["let1, rev"]),
)
def test_a_group_goes_by_what_the_names_of_its_runs_share(folders, names, tmp_path):
    for seed, folder in enumerate(folders):
        run(tmp_path / folder, seed=seed)
    assert [g.name for g in grouped(read_runs([tmp_path / folder for folder in folders]))] == names


def test_equal_names_have_as_many_parents_as_tell_them_apart(tmp_path):
    folders = ["a/x/run", "b/x/run", "other"]
    for i, folder in enumerate(folders):
        run(tmp_path / folder, coef=i)
    assert [r.name for r in read_runs([tmp_path / folder for folder in [*folders, "other/../other"]])] == folders


def test_means_and_intervals_over_seeds(tmp_path):
    run(tmp_path / "a", seed=1, rewards=(1.0, 2.0), after=(4.0, 1.0), replies=["ab", "  "])
    longer = {"seed": 2, "rewards": (3.0, 2.0, 5.0), "kls": (0.0, 1.0, 2.0), "steps": 2}
    run(tmp_path / "b", after=(6.0, 3.0), replies=["ab", "c"], **longer)
    data = comparison([tmp_path / "a", tmp_path / "b"])
    (group,) = data["groups"]
    assert data["rewards"][0]["held_out"] and group["n"] == 2
    half = {"half": pytest.approx(12.7062, abs=1e-3), "n": 2}
    before = {"mean": 1.0, "half": 0.0, "n": 2}
    after, change = {"mean": 5.0} | half, {"mean": 4.0} | half
    assert group["held_out"]["reward"] == {"before": before, "after": after, "change": change}
    assert group["training"]["reward"]["before"]["mean"] == 2.0, "that of the first step"
    assert group["held_out"]["empty"]["after"]["mean"] == 0.25
    curves = {c["name"]: c["lines"][0] for c in data["curves"]}
    reward = curves["reward/mean"]
    assert reward["steps"] == [1, 2, 3] and reward["mean"] == [2.0, 2.0, 5.0] and reward["n"] == [1, 2]
    assert (reward["low"], reward["high"]) == ([1.0, 2.0, 5.0], [3.0, 2.0, 5.0])
    assert reward["runs"] == [[1.0, 2.0, None], [3.0, 2.0, 5.0]]
    assert curves["evaluate/reward"]["steps"] == [0, 2, 3], "before training, and after it for runs of 2 and 3 steps"
    assert "5 ± 13" in table(data)


def test_without_held_out_tasks_the_last_steps_are_compared(tmp_path):
    run(tmp_path / "a", after=(4.0, 1.0), replies=["a"])
    run(tmp_path / "b", coef=0.0, rewards=[0.0] * 5 + [1.0, 2.0, 3.0, 4.0, 5.0], kls=range(10))
    data = comparison([tmp_path / "a", tmp_path / "b"])
    assert not data["rewards"][0]["held_out"] and data["options"] == ["kl.coef", "steps"]
    assert [g["name"] for g in data["groups"]] == ["a", "b"], "in the order that was given"
    assert data["groups"][1]["training"]["reward"]["after"]["mean"] == statistics.fmean([1, 2, 3, 4, 5])
    assert "over the last 5 steps is 3, with b" in " ".join(data["rewards"][0]["verdict"])


def test_an_unfinished_run_does_not_hide_the_held_out_results_of_the_others(tmp_path):
    run(tmp_path / "done", after=(4.0, 1.0), replies=["a"])
    run(tmp_path / "begun", coef=0.3, rewards=(9.0, 9.0), steps=50)
    data = comparison([tmp_path / "done", tmp_path / "begun"])
    assert data["rewards"][0]["held_out"] and "is 4, with done" in " ".join(data["rewards"][0]["verdict"])
    assert data["notes"] == ["1 of 2 runs is unfinished."] and data["groups"][1]["held_out"] == {}


def held_out_runs(folder, ends, before=7.88, steps=12):
    """Write runs by (coefficient, reward after training); the seeds of a coefficient are counted."""
    for seed, (coef, after) in enumerate(ends, 1):
        known = {"coef": coef, "seed": seed, "rewards": [7.0] * steps, "kls": [1.0] * steps}
        run(folder / f"kl={coef},seed={seed}", before=(before, 0.0), after=(after, 2.0), **known)
    return sorted(folder.iterdir())


WIDE = [(0.1, 18.0), (0.1, 18.1), (0.1, 18.2), (2.0, 17.9), (2.0, 18.1), (5.0, 1.0), (5.0, 1.1)]


@cases(  # the first of them once praised 6.08 where 7.88 stood before
    ([(0.1, 6.08), (2.0, 5.0)], "No setting ended better .* highest .* 6.08, with kl=0.1,seed=1, .* 7.88 .* one run"),
    ([(0.1, 9.08), (2.0, 5.0)], r"The highest .* 9.08, with kl=0.1,seed=1, .* of 2 nats; .* 7.88 \(\+1.2\).*one run"),
    # by hand: 7.9, 8.0, 8.2 have mean 8.0333 and t * s / sqrt(3) = 4.3027 * 0.15275 / 1.7321 = 0.3795
    ([(0.1, x) for x in (7.9, 8.0, 8.2)], r"The reward .* 8.03 ± 0.38, with kl=0.1, .*\(\+0.153 ± 0.38, .*noise\)\."),
    # Of two settings, by hand: t of 97.5 % is 6.2053, and 0.3795 * 6.2053 / 4.3027 = 0.547 is more than 0.453.
    ([(0.1, 8.2), (0.1, 8.3), (0.1, 8.5), (2.0, 1.0), (2.0, 1.1)], r".*453 ± 0.38, .*noise for the highest of 2\)\."),
    (WIDE, r"The highest .* 18.1 ± 0.25, .* 7.88 ± 0 \(\+10.2 ± 0.25\). Its interval overlaps that of kl=2.0\."),
)
def test_the_headline_knows_the_value_before_training(ends, headline, tmp_path):
    data = comparison(held_out_runs(tmp_path, ends))
    said = " ".join(data["rewards"][0]["verdict"])
    assert re.match(headline, said) and said in table(data) and ("one run" in said) == ("one run" in headline)


def test_few_steps_are_too_early(tmp_path):
    data = comparison(held_out_runs(tmp_path, [(0.1, 9.0)], steps=4))
    assert data["rewards"][0]["verdict"][0] == "Too early to say (4 steps)."


def test_the_front_of_the_page_joins_the_means_of_the_groups(tmp_path):
    """That of 5.0 is below the reward before training, at more KL than none: no training beats it in both."""
    for coef, reward, kl in ((0.0, 9.0, 30.0), (0.1, 8.0, 5.0), (0.5, 3.0, 6.0), (2.0, 2.0, 1.0), (5.0, -4.0, 0.5)):
        for seed in (1, 2):
            run(tmp_path / f"{coef}-{seed}", coef=coef, seed=seed, after=(reward + seed, kl), replies=["a b c"])
    data = comparison(sorted(tmp_path.iterdir()))
    [plane] = data["rewards"][0]["planes"]
    assert [data["groups"][i]["name"] for i in plane["front"]] == ["2.0-*", "0.1-*", "0.0-*"]
    assert plane["of"] == "kl" and len(plane["points"]) == 10 and plane["start"] == [0.0, 1.0]
    assert data["groups"][0]["values"] == {"kl.coef": "0"} and data["options"] == ["kl.coef"]


def test_runs_whose_names_share_nothing_go_by_what_differs(tmp_path):
    rewards = {"let1": "letters:e", "let2x": "letters:e", "b": "letters:a", "c": "letters:a"}
    for seed, (folder, reward) in enumerate(rewards.items()):
        run(tmp_path / folder, seed=seed, reward=reward)
    assert [g.name for g in grouped(read_runs(sorted(tmp_path.iterdir())))] == ["reward=letters:a", "reward=letters:e"]


@pytest.mark.parametrize(("option", "parts"), [("memory", 1), ("template", 1), ("win", 2), ("test_games", 2)])
def test_options_of_a_world_split_rewards_only_if_they_change_the_pay_or_the_held_out_games(tmp_path, option, parts):
    for i, value in enumerate((1, 2)):
        run(tmp_path / str(i), after=(3.0, 1.0), replies=["a"], reward=None, env={option: value})
    assert len(comparison(sorted(tmp_path.iterdir()))["rewards"]) == parts


def test_a_part_of_a_mixed_comparison_is_named_by_what_it_has(tmp_path):
    for name, given in enumerate([{"reward": "letters:e"}, {"env": {"win": 2}}, {"env": "rooms", "env.win": 3}, {}]):
        run(tmp_path / str(name), after=(3.0, 1.0), replies=["a"], **{"reward": None} | given)
    titles = {reward["name"] for reward in comparison(sorted(tmp_path.iterdir()))["rewards"]}
    assert titles == {"letters:e", "env.win 2", "rooms", "no reward and no env"}


@pytest.mark.parametrize(("tasks", "parts"), [("a.jsonl", 1), ("b.jsonl", 2)])
def test_a_share_of_other_tasks_is_another_held_out_set(tmp_path, tasks, parts):
    for name, source in (("1", "a.jsonl"), ("2", tasks)):
        made = run(tmp_path / name, evaluate="10%", tasks=source)
        write_rows(made / "metrics.jsonl", [{"step": i, "evaluate/reward": 0.5 + i} for i in (1, 2)])
    curves = comparison(sorted(tmp_path.iterdir()))["curves"]
    assert len([curve for curve in curves if "evaluate/reward" in json.dumps(curve)]) == parts


def test_reward_stands_against_perplexity_where_it_was_measured(tmp_path):
    """A setting of two seeds is its mean; the front joins those that no other beats in both."""
    for coef, reward, perplexity in ((0.0, 9.0, 400.0), (0.1, 8.0, 50.0), (0.5, 3.0, 90.0)):
        for seed in (1, 2):
            told = ({"perplexity": 30.0}, {"perplexity": perplexity + seed})
            run(tmp_path / f"{coef}-{seed}", coef=coef, seed=seed, after=(reward, 1.0), metrics=told, replies=["a b"])
    data = comparison(sorted(tmp_path.iterdir()))
    _, plane = data["rewards"][0]["planes"]
    assert plane["of"] == "perplexity" and plane["start"] == [30.0, 1.0]
    assert [point["x"] for point in plane["points"]] == [401, 402, 51, 52, 91, 92]
    assert [data["groups"][i]["name"] for i in plane["front"]] == ["0.1-*", "0.0-*"]
    path = tmp_path / "0.5-2" / "config.yaml"  # another model has rated the replies of one run
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    config["evaluation"] = {"metrics": {"perplexity": {"model": "./other"}}}
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    assert [plane["of"] for plane in comparison(sorted(tmp_path.iterdir()))["rewards"][0]["planes"]] == ["kl"]


def test_scores_of_different_rewards_share_no_axis(tmp_path):
    for i, (name, reward) in enumerate({"a": "letters:e", "b": "letters:a", "c": "letters:e"}.items()):
        known = {"reward": reward, "evaluation": {"metrics": {"distinct": {"n": 1 if name == "c" else 2}}}}
        run(tmp_path / name, coef=i / 10, after=(4.0 + i, 1.0), metrics=(None, {"distinct": 0.5 + i / 10}), **known)
    data = comparison([tmp_path / name for name in "abc"])
    assert {(c["name"], c["of"]): [line["group"] for line in c["lines"]] for c in data["curves"]} == {
        ("reward/mean", "letters:e"): [0, 2],
        ("reward/mean", "letters:a"): [1],
        ("kl/per_reply", ""): [0, 1, 2],
        ("evaluate/reward", "letters:e"): [0, 2],
        ("evaluate/reward", "letters:a"): [1],
        ("evaluate/distinct", "n: 2"): [0, 1],
        ("evaluate/distinct", "n: 1"): [2],
    }
    runs = {r["name"]: [p["run"] for p in r["planes"][0]["points"]] for r in data["rewards"]}
    assert runs == {"letters:e": ["a", "c"], "letters:a": ["b"]}
    assert data["metrics"] == ["distinct"] and data["groups"][2]["held_out"]["distinct"]["after"]["mean"] == 0.7
    head, *rows = (re.split(" {2,}", line) for line in table(data).splitlines()[:4])
    assert [row[head.index("distinct")] for row in rows] == ["0.5", "0.6", "0.7"]


def test_every_number_of_a_metric_has_its_column_and_its_chart(tmp_path):
    measured = {"rouge/rouge1": 0.25, "rouge/rougeL": 0.2, "bertscore/f1": 0.9}
    run(tmp_path / "a", after=(4.0, 1.0), metrics=(None, measured), evaluation={"metrics": "rouge,bertscore"})
    data = comparison([tmp_path / "a"])
    head, row = (re.split(" {2,}", line) for line in table(data).splitlines()[:2])
    assert [row[head.index(name)] for name in ("rouge/rouge1", "bertscore/f1")] == ["0.25", "0.9"]
    assert {f"evaluate/{name}" for name in measured} <= {chart["name"] for chart in data["curves"]}


def test_the_newest_probes_are_shown_side_by_side(tmp_path):
    for coef, (name, word) in enumerate((("a", "one"), ("b", "two"))):
        run(tmp_path / name, coef=coef)
        probes(tmp_path / name, "step-00000.parquet", {"x": "old", "y": "old"})
        turns = [("y", "y", f"{word} y", 0.5), ("x", "x", "a first turn", None), ("x", "x", f"{word} x", 0.5)]
        turns += [("z", f"z of {name}", "z", 0.5)]  # a name that two files have given
        rows = [{"task": t, "query": f"query {q}", "reply": r, "reward": s, "rollout": 0} for t, q, r, s in turns]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name / "probes/step-00010.parquet")
    probes(tmp_path / "b", "reference.parquet", {"x": "ref x", "y": "ref y"})
    replies = comparison([tmp_path / "a", tmp_path / "b"])["replies"]
    assert replies["queries"] == ["query y", "query x"]
    assert [column["answers"][1] for column in replies["columns"]] == [["one x", 0.5], ["two x", 0.5]]
    assert replies["reference"][1] == ["ref x", 0.5] and replies["reference_label"] == "the reference"
    (tmp_path / "a/probes/step-00011.parquet").write_bytes(b"PAR1 and then the disk was full")
    assert comparison([tmp_path / "a"])["replies"]["queries"] == []


def test_a_run_before_its_first_step_can_be_compared(tmp_path):
    run(tmp_path / "a", rewards=(), kls=(), steps=5)
    assert comparison([tmp_path / "a"])["rewards"][0]["verdict"] == ["No run has finished a step yet."]
    run(tmp_path / "b", coef=0.3, rewards=(1.0, None), kls=(None, None))
    data = comparison([tmp_path / "a", tmp_path / "b"])
    assert len(data["runs"]) == 2 and data["rewards"][0]["planes"] == []
    json.dumps(data, allow_nan=False)


@cases(({"query_tokens": 2}, {"query_tokens": 8}, False), ({"loss_on": "all"}, {"loss_on": "replies"}, True))
def test_held_out_results_on_other_prompts_are_not_compared(one, other, same, tmp_path):
    known = {"after": (4.0, 1.0), "replies": ["a"], "evaluate": "x.txt"}
    places = [run(tmp_path / str(i), data=data, **known) for i, data in enumerate((one, other))]
    assert comparison(places)["rewards"][0]["held_out"] is same


def test_an_order_of_pairs_is_no_reward(tmp_path):
    run(tmp_path / "dpo", coef=0.3)
    write_rows(tmp_path / "dpo/metrics.jsonl", [{"step": i, "preference/accuracy": 0.7} for i in (1, 2)])
    (tmp_path / "dpo/evaluation.json").write_text('{"before": {"loss": 3.0}, "after": {"loss": 2.0}}')
    found = comparison([run(tmp_path / "ppo"), tmp_path / "dpo"])
    assert [reward["name"] for reward in found["rewards"]] == ["reward", "share of pairs in the right order"]
    ((loss,),) = (chart["lines"] for chart in found["curves"] if chart["name"] == "evaluate/loss")
    assert (loss["steps"], loss["mean"]) == ([0, 2], [3.0, 2.0])


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
    printed = capsys.readouterr().out
    assert "kl.coef=1  1     1       1.5" in printed and "They differ in: kl.coef." in printed
    assert printed.endswith(f"comparison: {tmp_path / 'sweep' / 'report.html'}\n")
    run(tmp_path / "alone")
    both = ["report", str(tmp_path / "sweep"), str(tmp_path / "alone"), "--out"]
    assert main([*both, str(tmp_path / "c")]) == 2 and not (tmp_path / "c").exists()
    assert "let its name end in .html" in capsys.readouterr().err
    assert main([*both, str(tmp_path / "c.html")]) == 0
    assert (tmp_path / "c.html").stat().st_size > 50_000
