"""Findings of the diagnosis on made-up metrics; those of real runs are in test_diagnosis_runs.py."""

import json
from dataclasses import replace

import pytest
from cases import cases

from operant.rollouts.generation_kwargs import UNSCORED
from operant.runs.folder import as_parquet
from operant.tools.report.diagnosis import EXPLAINS, RULES, History, diagnose, read_history, verdict
from operant.tools.report.diagnosis.history import FINDINGS
from operant.tools.report.diagnosis.progress import progress
from operant.tools.report.diagnosis.sampling import SETTINGS
from operant.tools.report.run_report import in_reward_units, key_numbers
from operant.types import OUTCOMES


# --- external replies; their real runs are in test_negative_kl.py -----------------------------------------------------
def test_what_is_explained_exists():
    assert set().union(*EXPLAINS.values()) <= set(FINDINGS) and set(SETTINGS) == set(UNSCORED)


def test_a_line_search_that_accepts_nothing_is_reported_at_its_first_step():
    steps = [{"step": 1, "trust/accepted": 0.0, "rollout/count": 64}]
    (finding,) = diagnose(History(steps))
    assert finding.name == "no_step" and "in 1 of 1 training steps" in finding.message
    assert diagnose(History([*steps, steps[0] | {"step": 2, "trust/accepted": 1.0}])) == []


@cases(
    ((0.0, 0.8, 0.1, 0.1, 40), (0.0, 0.3, 0.6, 0.1, 20), "with a runtime error went from 80 % to 30 %, but wrong"),
    ((0.4, 0.4, 0.1, 0.1, 40), (0.3, 0.2, 0.4, 0.1, 20), "a compile error or a runtime error went from 80 % to 50"),
    ((0.0, 0.8, 0.1, 0.1, 40), (0.0, 0.3, 0.6, 0.1, 39), None),  # not shorter
    ((0.0, 0.8, 0.1, 0.1, 40), (0.0, 0.3, 0.1, 0.6, 20), None),  # right
    ((0.0, 0.2, 0.7, 0.1, 40), (0.0, 0.7, 0.2, 0.1, 20), None),  # more errors
)
def test_short_wrong_programs_are_seen_where_any_error_becomes_rarer(begin, end, expected):
    names = [f"outcome/{name}" for name in OUTCOMES] + ["rollout/reply_tokens"]
    steps = [dict(zip(names, begin))] * 9 + [dict(zip(names, end))] * 9
    found = [finding.message for finding in diagnose(History(steps)) if finding.name == "short_programs"]
    assert len(found) == (expected is not None) and all(expected in message for message in found)


def negative(**more) -> History:
    steps = [{"step": i, "kl/per_reply": -1.0, "kl/per_reply_std": 2.0, "rollout/count": 64} for i in range(1, 6)]
    return History(steps, **more)


def test_a_kl_below_zero_is_reported_with_its_error_and_noise_is_not():
    finding = diagnose(negative(config={"sampling.top_k": 5, "sampling.truncation": "stored"}))[0]
    assert finding.name == "negative_kl" and "-1.00" in finding.message and "0.11" in finding.message  # 2/sqrt(64 * 5)
    assert finding.cause.startswith("sampling.top_k=5")
    assert diagnose(History([m | {"kl/per_reply_std": 20.0} for m in negative().metrics])) == []
    few = [{"kl/per_reply": kl, "kl/per_reply_std": abs(kl) / 2, "rollout/count": 4} for kl in (1e-6, -0.17)]
    assert diagnose(History(few)) == []


def test_equal_scores_are_reported_after_some_steps_and_named_in_the_verdict():
    zero = {"reward__std": lambda i: 0.0, "reward__mean": lambda i: 0.0, "policy__advantage_zero": lambda i: 1.0}
    found = [[f.name for f in diagnose(History(steps(i, **zero), config={"steps": 80}))] for i in (1, 7, 8)]
    assert found == [[], [], ["constant"]]
    assert [f.name for f in diagnose(History(steps(2, **zero), config={"steps": 2}))] == ["constant"]
    rare = steps(20, **zero | {"reward__std": lambda i: 0.1 * (i % 3 == 0)})
    replies = [{"task": str(i), "score": 0.0} for i in range(4)]
    history = History(rare, evaluation={when: {"mean": 0.0, "replies": replies} for when in ("before", "after")})
    assert "Every reply scores 0, so there is nothing to learn from. Is what" in verdict(history, [])
    same = {"mean": 0.5, "replies": [reply | {"score": i / 3} for i, reply in enumerate(replies)]}
    alike = replace(history, evaluation=dict.fromkeys(("before", "after"), same))
    assert "Every reply" not in verdict(alike, [])  # the replies are as they were
    after = {"mean": 0.0, "replies": [reply | {"score": 1.0 * (i > 0)} for i, reply in enumerate(replies)]}
    better = replace(history, evaluation=history.evaluation | {"after": after})
    assert "4 held-out tasks are few to tell: give more." in verdict(better, [])


def test_short_replies_have_rules_and_remedies_of_their_own():
    spam = {"text__top_word": lambda i: 0.05 + 0.01 * i, "rollout__turns": lambda i: 3.0}
    assert "one_word" not in {f.name for f in diagnose(History(steps(**spam)))}
    history = History(steps(text__empty=lambda i: 0.01 * i), config={"sampling.max_tokens": 1})
    assert "`--sampling.min_tokens 1`" in next(f for f in diagnose(history) if f.name == "empty").remedy


def test_a_kl_above_its_target_is_not_called_unusual():
    told = {"kl/per_reply": 7.0, "reward/mean": 0.5, "reward/std": 0.2, "reward/kl_penalty": 0.7, "kl/coef": 0.1}
    config = {"kl.control": "adaptive", "kl.target": 3.0, "kl.coef": 0.1}
    history = History([{"step": i, **told} for i in range(1, 41)], config=config)
    [message] = [f.message for f in diagnose(history) if f.name == "high_kl"]
    assert "7 nats a reply, far above its target of 3." in message and "usual" not in message


# --- made-up metrics of longer runs -----------------------------------------------------------------------------------
def steps(count=40, **series):
    base = {"reward/mean": 0.5, "reward/std": 0.2, "rollout/count": 64}
    return [{"step": i + 1} | base | {k.replace("__", "/"): v(i) for k, v in series.items()} for i in range(count)]


@cases(
        ("critic", {"value__explained_variance": lambda i: -0.5}),
        ("query_decides", {"reward__query_share": lambda i: 0.9}),
        ("abstains", {"reward__abstained": lambda i: 0.3}),
        ("scoring", {"rollout__logprob_gap": lambda i: 0.4}),
        ("not_finite", {"update__refused": lambda i: 0.5}),
        ("not_finite", {"policy__loss": lambda i: None}),
        ("refused", {"policy__skipped_steps": lambda i: 0.5}),
        ("high_kl", {"kl__per_reply": lambda i: 1.0 * i, "reward__kl_penalty": lambda i: 0.1 * i}),
        ("unpaid_kl", {"kl__per_reply": lambda i: 1.0 * i, "reward__kl_penalty": lambda i: 0.0}),
        ("flat", {"kl__per_reply": lambda i: 3.0, "reward__mean": lambda i: 0.01 * (i % 2)}),
        ("outgrown", {"rollout__outgrown": lambda i: float(i), "reward__std": lambda i: 0.0}),
        ("verifier", {"outcome__crash": lambda i: 0.75, "outcome__hang": lambda i: 0.25, "reward__std": lambda i: 0.0}),
        ("verifier", {"outcome__maths__crash": lambda i: 1.0}),
        ("signs", {"text__exclamations": lambda i: 0.001 * i}),
        ("repetition", {"text__repeated": lambda i: 0.02 * i}),
        ("diversity", {"text__distinct_2": lambda i: 0.9 - 0.02 * i}),
        ("length", {"rollout__reply_tokens": lambda i: 20.0 - 0.4 * i}),
        ("entropy", {"policy__entropy": lambda i: 4.0 - 0.1 * i, "kl__per_reply": lambda i: 0.5}),
        ("leap", {"kl__per_token": lambda i: 2.0 * (i > 0), "kl__per_reply": lambda i: 20.0 * (i > 0)}),
        ("clipping", {"policy__clip_fraction": lambda i: 0.5}),
        ("constant", {"reward__std": lambda i: 0.2 * (i < 1), "reward__max": lambda i: 0.9}),
        ("no_advantage", {"policy__advantage_zero": lambda i: 1.0}),
        ("drowned", {"reward__kl_penalty_std": lambda i: 1.0, "reward__scaled_std": lambda i: 0.2 * (i > 0)}),
        ("one_word", {"text__top_word": lambda i: 0.05 + 0.01 * i}),
        ("saturated", {"reward__std": lambda i: 0.2 if i < 9 else 0.01, "reward__max": lambda i: 0.1 + (i > 8),
                       "reward__mean": lambda i: 0.1 + (i > 8)}),
        ("empty", {"text__empty": lambda i: 0.01 * i}),
        ("unlikely_text", {"reward__mean": lambda i: 0.1 * i, "rollout__ref_logprob_mean": lambda i: -4 - 0.1 * i}),
)  # fmt: skip
def test_a_rule_reports_its_fault_and_nothing_without_it(name, series):
    assert name in {f.name for f in diagnose(History(steps(**series)))}
    healthy = {k: (lambda i, v=v: v(0) if v(0) != v(39) else 0.0) for k, v in series.items()}  # no trend, or 0
    assert name not in {f.name for f in diagnose(History(steps(**healthy)))}


def test_the_warning_of_the_ratio_quotes_only_what_is_beyond_its_healthy_range():
    ratio = {"policy__ratio_max": lambda i: 82.0, "policy__ratio_min": lambda i: 0.0259}
    (finding,) = diagnose(History(steps(3, **ratio, policy__ratio_std=lambda i: 3.0 + i)))
    assert finding.message.endswith(" probabilities had a spread of 4 (healthy: at most 0.5).")
    assert diagnose(History(steps(3, **ratio))) == []


@cases((64, "reward 0.0625 in step 1 -> 0.762 in steps 8 to 12 ("), (8, "reward 0.3 in steps 1 to 5 -> 0.762 in"))
def test_the_verdict_names_the_steps_that_its_numbers_are_means_of(count, expected):
    means = [0.0625, 0.25, 0.3125, 0.375, 0.5, 0.7, 0.7, 0.73, 0.74, 0.76, 0.78, 0.8]
    assert expected in verdict(History(steps(12, reward__mean=lambda i: means[i], rollout__count=lambda i: count)), [])


@pytest.mark.parametrize(("env", "remedy"), [(None, "--reference copy"), ("rooms", "--loss.entropy-coef 0.01")])
def test_a_lost_entropy_without_a_reference_has_a_remedy_that_fits_the_task(env, remedy):
    series = steps(policy__entropy=lambda i: 2.0 if i == 0 else 0.1, reward__mean=lambda i: 0.01 * i)
    (finding,) = [f for f in diagnose(History(series, config={"env": env})) if f.name == "unmeasured"]
    assert remedy in finding.remedy


@cases(
    (9.0, 1e-5, "adaptive", True),
    (1.0, -1e-5, "adaptive", True),
    (9.0, 0.02, "adaptive", False),  # the price is on its way
    (6.5, 1e-5, "adaptive", False),  # near the target
    (9.0, 0.0, "fixed", False),  # no target
)
def test_a_price_that_hardly_moves_while_kl_is_off_its_target_is_reported(kl, rate, control, expected):
    series = {"kl__per_reply": lambda i: kl, "kl__coef": lambda i: 0.1 * (1 + rate) ** i}
    series |= {"reward__kl_penalty": lambda i: 0.1 * kl, "reward__mean": lambda i: 0.01 * i}
    found = diagnose(History(steps(**series), config={"kl.control": control, "kl.target": 6.0}))
    assert ("slow_price" in {f.name for f in found}) is expected


def test_the_error_of_a_change_is_that_of_both_means():
    # By hand: losses that go up and down by 1 have a noise of 1 / 2, and two means of five steps sqrt(1/2 (1/5 + 1/5)).
    change = progress(History([{"step": i + 1, "supervised/loss": float(i % 2)} for i in range(12)]))
    assert change is not None and change.error == pytest.approx(0.2**0.5) and change.freedom == 22 // 3


def test_labelled_runs_are_judged_by_held_out_pairs_and_have_no_kl_and_no_rewards():
    each = {"preference/loss": 0.5, "kl/per_reply": -0.722, "reward/return": 0.5, "preference/accuracy": 0.9}

    def labelled(count):
        ends = [{"metrics": {"preference/accuracy": right}, "labelled": 99, "pairs": count} for right in (14 / 24, 1.0)]
        return History([{"step": i + 1} | each for i in range(6)], evaluation=dict(zip(("before", "after"), ends)))

    # By hand: the standard error of 14 of 24 is sqrt(14 / 24 * 10 / 24 / 24) = 0.101, so the rise is 42 +- 20 points.
    sentence, many = verdict(labelled(24), []), labelled(24)
    assert sentence.startswith("It learned: held-out pairs in the right order 58 % -> 100 % (+21 to +42 points, 95 %)")
    assert "KL" not in sentence and "has not learned yet" in (few := verdict(labelled(4), [])) and "4 held-out" in few
    shown = key_numbers(many)
    assert [n["after"] for n in shown if n["label"] == "Log-ratio to the reference"] == [-0.722]
    assert not any("KL" in n["label"] for n in shown)
    assert not any(name.startswith("reward/") for m in in_reward_units(many) for name in m)


def test_a_mean_that_cannot_change_is_no_verdict_on_learning():
    """Where people pick the best of four replies, every step's mean is 0.25, whatever is learnt."""
    each = {"reward/mean": 0.25, "reward/std": 0.43, "kl/per_reply": 9.0, "rollout/count": 64}
    rows = [{"task": "a", "reward": x} for x in (None, 0.0, 1.0)]
    picked = History([{"step": i + 1} | each for i in range(60)], rows=rows)
    assert verdict(picked, found := diagnose(picked)).startswith("The mean reward is 0.25 in every step, so it")
    assert not {"flat", "constant"} & {finding.name for finding in found}
    decided = replace(picked, rows=[{"task": x, "reward": x} for x in (0.0, 1.0) * 2])
    assert not verdict(decided, []).startswith("The mean reward is"), "one prompt always passes, one never does"
    moved = [line | {"reward/mean": 0.25 + 0.01 * (i % 2)} for i, line in enumerate(picked.metrics)]
    moving = replace(picked, metrics=moved)
    assert verdict(moving, []).startswith("It did not learn") and "flat" in {f.name for f in diagnose(moving)}


def test_what_kl_costs_is_in_units_of_the_reward_with_the_options_of_a_run():
    config = {"score.normalise": True, "score.clip": None, "score.overlong_tokens": 0}
    step = {"step": 1, "reward/std": 0.5, "reward/scaled_std": 2.0, "reward/kl_penalty": 0.4, "reward/return": 1.0}
    step |= {"reward/mean": 0.6, "reward/scaled_mean": 0.2}
    (row,) = in_reward_units(History([step], config=config))
    assert row["reward/kl_penalty_in_reward_units"] == pytest.approx(0.1)
    assert in_reward_units(History([step], config=config | {"score.overlong_tokens": 8})) == [step]


def test_an_empty_folder(tmp_path):
    history = read_history(tmp_path)
    assert diagnose(history) == [] and verdict(history, []) == "No step is finished yet."
    assert all(rule(history) is None for rule in RULES)
    bare = [{"step": i, "kl/per_token": 2.0 * (i > 1), "reward/mean": 0.1 * i} for i in range(1, 6)]
    assert "leap" not in [finding.name for finding in diagnose(History(bare))], "of how many nats a reply?"


def test_options_and_metrics_of_a_folder(tmp_path):
    (tmp_path / "config.yaml").write_text("kl: {coef: 0.3}\nreward: letters:e\n", encoding="utf-8")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 1.0}) + "\n", encoding="utf-8")
    (tmp_path / "rollouts").mkdir()
    for step in ("99999", "100000"):
        (tmp_path / f"rollouts/step-{step}.parquet").write_bytes(as_parquet([{"reply": step}]))
    history = read_history(tmp_path)
    assert history.option("kl.coef") == 0.3 and history.option("reward") == "letters:e" and history.texts == ["100000"]
    assert verdict(history, []) == "Too early to say (1 step)."
