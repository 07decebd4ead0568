"""Every rule of the diagnosis on a run that has the fault, and on a healthy twin of the run."""

import gzip
import json
import math
import random
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean as average
from statistics import pstdev

import pyarrow.parquet as pq
import pytest
import torch
from cases import cases
from toys import letters, lm

from operant import Judgement, Learner, train
from operant.engines.native.engine import NativeEngine
from operant.tools.report.diagnosis import RULES, Finding, History, diagnose, verdict
from operant.tools.report.diagnosis.progress import progress

TOY = {"max_tokens": 8, "minibatch": 32, "epochs": 2, "watch_every": 0}
QUERY = [5, 6, 7]
D, GROUP = 7, (5, 6, 7, 8, 9)
"""The token `d`; the letters b to f."""
pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass
class TrainedLearner:
    """A learner with the replies and scores of each of its steps."""

    learner: Learner
    replies: list = field(default_factory=list)
    scores: list = field(default_factory=list)

    @property
    def findings(self) -> dict[str, Finding]:
        return {f.name: f for f in diagnose(self.learner)}

    def first(self, name: str, steps: int = 1) -> float:
        return average(m.get(name, 0.0) for m in self.learner.history[:steps])

    def last(self, name: str, steps: int = 5) -> float:
        return average(m.get(name, 0.0) for m in self.learner.history[-steps:])


def toy(spread=0.05, reference="copy", lr=1e-2, coef=0.0, **more) -> Learner:
    model, given = lm("gpt2", len(letters()), spread=spread), {"optimizer.lr": lr, "kl.coef": coef}
    return Learner(model, tokenizer=letters(), reference=reference, **TOY | given | more)


def run(learner, score, steps, queries=(QUERY,), count=32) -> TrainedLearner:
    trained = TrainedLearner(learner)
    for _ in range(steps):
        replies = learner.generate(list(queries) * (count // len(queries)))
        trained.replies.append(replies)
        trained.scores.append([score(r) for r in replies])
        learner.step(replies, trained.scores[-1])
    return trained


def share(reply, ids=(D,)) -> float:
    return sum(i in ids for i in reply.ids) / len(reply.ids)


def grouped(reply) -> float:
    return share(reply, GROUP)


def percent(x: float) -> str:
    return f"{100 * x:.0f} %" if x >= 0.095 else f"{100 * x:.1f} %"


def recites(text: str):
    """Return a reward of 1 for every token that equals that of the endlessly repeated `text` at its position."""
    ids = letters().convert_tokens_to_ids(list(text))
    return lambda r: [float(i == ids[k % len(ids)]) for k, i in enumerate(r.ids)]


def only(text: str) -> dict:
    """Return options for a learner that generates only the characters of `text`, and gets a reward per token."""
    tokenizer = letters()
    allowed = set(tokenizer.convert_tokens_to_ids(list(text)))
    return {"banned": tuple(i for i in range(len(tokenizer)) if i not in allowed), "gamma": 0.0, "value_coef": 0.1}


# --- runs with a fault, and their twins -------------------------------------------------------------------------------
class Stale(NativeEngine):
    """An engine that never updates its weights."""

    def sync(self, policy, version):
        self.version = version


def scoring(fault: bool) -> TrainedLearner:
    learner = toy(lr=3e-3)
    if fault:
        learner.engine = Stale(deepcopy(learner.policy))
    return run(learner, share, 7)


def short_programs(fault: bool) -> TrainedLearner:
    """A program compiles if it ends within 5 tokens, and passes if it begins with `ddd`; in the twin, with `d`."""
    least = 3 if fault else 1

    def judge(r) -> Judgement:
        outcome = "compile error" if r.turns[0].end != "stop" or len(r.ids) > 5 else "failed test"
        outcome = "passed" if r.ids[:least] == [D] * least else outcome
        return Judgement({"compile error": -1.0, "failed test": -0.3, "passed": 1.0}[outcome], outcome=outcome)

    return run(toy(max_tokens=16), judge, 14)


def at_random(fault: bool, *, lr: float, coef: float) -> TrainedLearner:
    """Scores that depend on nothing; in the twin, on the reply."""
    chance = random.Random(0)
    return run(toy(lr=lr, coef=coef), lambda r: chance.random() if fault else grouped(r), 31)


@cache
def signs(fault: bool) -> TrainedLearner:
    return run(toy(), lambda r: float(r.reply.count("!" if fault else "d")), 11 if fault else 8)


@cache
def recital(fault: bool) -> TrainedLearner:
    return run(toy(coef=0.0 if fault else 1.0, max_tokens=16, **only(SENTENCE)), recites(SENTENCE), 14)


def before_and_after(t: TrainedLearner) -> tuple[str, str]:
    """The mean scores of the first 64 replies, and of the last five steps."""
    return f"{t.first('reward/mean', 2):.3g}", f"{t.last('reward/mean'):.3g}"


def ladder(t: TrainedLearner) -> tuple[str, ...]:
    """Return the shares of outcomes and the lengths in the first and the last five steps."""
    (error, wrong, passed), (errors, wrongs, passes) = (
        [percent(mean(f"outcome/{name}", 5)) for name in ("compile error", "failed test", "passed")]
        for mean in (t.first, t.last)
    )
    return (
        f"compile error went from {error} to {errors}, but wrong ones from {wrong} to {wrongs}",
        f"{passes} pass ({passed} before)",
        f"from {t.first('rollout/reply_tokens', 5):.1f} to {t.last('rollout/reply_tokens'):.1f} tokens",
    )


def kl(t: TrainedLearner) -> str:
    return f"{t.last('kl/per_reply'):.3g} nats"


def grown(t: TrainedLearner) -> str:
    return f"from {t.first('rollout/reply_tokens'):.1f} to {t.last('rollout/reply_tokens'):.1f} tokens"


REFRAIN, SENTENCE, TARGET = "a b.c d.e ", "a b.c d.e f.g h.", {"kl.control": "adaptive", "kl.target": 0.5}
MANY = range(4, 16)
CASES = {
    # finding: a run with the fault or without it, the numbers in its message, part of its cause, part of its remedy,
    # and whether the twin has no findings at all
    "critic": (  # returns of 100 for a critic that begins at 0 and learns slowly; in the twin, scores are normalised
        lambda fault: run(toy(lr=1e-4, epochs=1, normalise=not fault), lambda r: 100 + share(r), 32, count=16),
        lambda t: f"{t.last('value/explained_variance', 10):.2f}", "cannot follow", "--score.normalise true", True),
    "query_decides": (
        lambda fault: run(toy(), lambda r: share(r) + fault * r.turns[0].prompt[0], 5, [[4 + i, 5] for i in range(8)]),
        lambda t: percent(t.last("reward/query_share")), "more on the prompt", "minus_query", True),
    "abstains": (
        lambda fault: run(toy(lr=1e-3), lambda r: None if fault and r.ids[0] % 3 == 0 else share(r), 6),
        lambda t: percent(t.last("reward/abstained")), "returned None", "low score", True),
    "scoring": (scoring, lambda t: f"{max(m['rollout/logprob_gap'] for m in t.learner.history[-3:]):.3g}",
                "other weights", "`sync`", True),
    "refused": (
        lambda fault: run(toy(lr=1e-2 if fault else 1e-3, coef=0.1, ratio_threshold=1.01), share, 5),
        lambda t: percent(t.last("policy/skipped_steps")), "moved the policy too far", "--optimizer.lr", True),
    "high_kl": (
        lambda fault: run(toy(coef=0.02 if fault else 0.1), grouped, 18), kl, "0.02", "--kl.coef 0.04", True),
    "high_kl: a target": (
        lambda fault: run(toy(coef=0.02 if fault else 0.1, **TARGET), grouped if fault else lambda r: 0.0, 14),
        lambda t: "far above its target of 0.5", "", "--kl.coef", False),
    "leap": (
        lambda fault: run(toy(lr=0.3 if fault else 1e-3, coef=0.1), share, 6),
        lambda t: f"rose by {2 * (t.first('kl/per_reply', 2) - t.first('kl/per_reply')):.3g} nats a reply in one",
        "learning rate of 0.3", "--optimizer.lr 0.0003", True),
    "unpaid_kl": (
        lambda fault: run(toy(coef=0.0 if fault else 0.1), grouped, 14), kl, "kl.coef is 0", "--kl.coef 0.1", True),
    "flat": (lambda fault: at_random(fault, lr=5e-3, coef=0.04),
             lambda t: (*before_and_after(t), kl(t), "31 steps"), "does not depend", "--optimizer.lr", True),
    "signs": (signs, lambda t: (f"{percent(t.last('text/exclamations', 3))} of the characters are exclamation marks",
                                f"({percent(t.first('text/exclamations'))} before)"),
              "the reward likes them", "--kl.coef 0.1", False),
    "one_word: a sign": (signs, lambda t: "of the tokens are '!'.", "", "", False),  # it is no word, but a token
    "one_word: at random": (
        lambda fault: at_random(fault, lr=1e-2, coef=0.0 if fault else 0.1), lambda t: "", "did not rise", "", False),
    "one_word": (
        lambda fault: run(toy(coef=0.0 if fault else 0.1), share, 16),
        lambda t: f"{percent(t.last('text/top_word', 3))} of the words are 'dddddddd'",
        "likes it", "--kl.coef 0.1", True),
    "repetition": (
        lambda fault: run(toy(coef=0.0 if fault else 1.0, max_tokens=30, **only(REFRAIN)), recites(REFRAIN), 14),
        lambda t: (percent(t.last("text/repeated", 3)), percent(t.first("text/repeated"))),
        "does not punish it", "--kl.coef 0.1", True),
    "diversity": (recital, lambda t: (percent(t.last("text/distinct_2", 3)), percent(t.first("text/distinct_2"))),
                  "does not punish it", "--kl.coef 0.1", True),
    "entropy": (recital, lambda t: (f"{t.first('policy/entropy'):.3g}", f"{t.last('policy/entropy', 3):.3g}"),
                "too large or KL too cheap", "--loss.entropy_coef", True),
    "unmeasured": (
        lambda fault: run(toy(reference=None, lr=1e-2 if fault else 1e-3, max_tokens=16, **only(SENTENCE)),
                          recites(SENTENCE), 13),
        lambda t: percent(1 - t.last("policy/entropy") / t.first("policy/entropy")),
        "no reference", "--reference copy` and `--kl.coef 0.1", True),
    "length: longer": (
        lambda fault: run(toy(stop_tokens=(2, 4, 5, 6, 7, 8), max_tokens=24),
                          lambda r: float(len(r.ids)) if fault else float(r.ids[0] == 9), 10),
        grown, "pays for longer", lambda t: f"`length:<={t.first('rollout/reply_tokens'):.0f}`", False),
    "length: shorter": (
        lambda fault: run(toy(max_tokens=16), lambda r: -abs(len(r.ids) - 4.0) if fault else share(r), 14),
        grown, "pays for shorter", lambda t: f"`--sampling.min_tokens {t.first('rollout/reply_tokens'):.0f}`", False),
    "unlikely_text": (  # a nearly deterministic model at the start, and a token that it hardly ever generates
        lambda fault: run(toy(0.3, coef=0.0 if fault else 0.05), share, 10),
        lambda t: (*before_and_after(t), f"{t.first('rollout/ref_logprob_mean'):.1f}",
                   f"{t.last('rollout/ref_logprob_mean'):.1f}"),
        "very unlikely", "--kl.coef 0.1", True),
    "constant": (
        lambda fault: run(toy(lr=1e-3), lambda r: 0.25 if fault else share(r), 4),
        lambda t: "0.25", "does not depend on the reply", "read replies", True),
    "saturated": (  # every further letter earns less; in the twin, all earn the same
        lambda fault: run(toy(coef=0.002, fixed_length=True),
                          lambda r: 1 - math.exp(-6 * share(r, MANY)) if fault else share(r, MANY), 14),
        lambda t: f"{t.last('reward/std'):.3g} only ({t.first('reward/std'):.3g} at first), all near ",
        "", "--steps", False),
    "saturated: soon": (  # nearly the highest score from the start
        lambda fault: run(toy(), lambda r: min(1.0 if fault else 8.0, 8 * share(r, range(5, 12))), 12),
        lambda t: "Every reply now scores 1:", "", "", False),
    "no_advantage": (  # scores that depend on the query only: within a group they are equal
        lambda fault: run(toy(algorithm="rloo"), lambda r: float(r.turns[0].prompt[0]) if fault else share(r), 4,
                          [[4 + i, 5] for i in range(4)]),
        lambda t: "In 4 of the last 4 steps", "the same score", "--samples", True),
    "ratio": (
        lambda fault: run(toy(lr=0.02 if fault else 1e-3, epochs=4), share, 3),
        lambda t: f"a spread of {t.last('policy/ratio_std', 3):.3g} (healthy: at most 0.5)",
        "too far", "--optimizer.lr", True),
    "clipping": (
        lambda fault: run(toy(lr=0.02 if fault else 1e-4, epochs=6, minibatch=8), share, 3),
        lambda t: percent(t.last("policy/clip_fraction", 3)), "too large", "--update.epochs", True),
    "short_programs": (short_programs, ladder, "the ladder of outcomes", "--reward.kind passed", False),
    "drowned": (
        lambda fault: run(toy(lr=3e-3, coef=5.0 if fault else 0.01), share, 8),
        lambda t: (f"{t.last('reward/kl_penalty_std'):.3g} between", f"{t.last('reward/scaled_std'):.3g}."),
        "coefficient of 5 is too high", "--kl.coef 0.0", True),
}  # fmt: skip


@pytest.mark.slow  # test_diagnosis.py has the same rules on made-up metrics
@pytest.mark.parametrize("name", CASES)
def test_the_fault_is_reported_and_its_healthy_twin_has_none(name):
    make, numbers, cause, remedy, wholly = CASES[name]
    faulty, healthy, rule = make(True), make(False), name.partition(":")[0]
    found, expected = faulty.findings[rule], numbers(faulty)
    for number in (expected,) if isinstance(expected, str) else expected:
        assert number in found.message
    assert cause in found.cause and (remedy if isinstance(remedy, str) else remedy(faulty)) in found.remedy
    assert 1 <= found.step <= len(faulty.replies)
    assert "constant" not in faulty.findings or name == "constant"
    twins = healthy.findings
    assert rule not in twins or "'d" in twins[rule].message  # the word of the twin of `signs`
    assert not wholly or twins == {}


def test_every_rule_has_a_run():
    tested = {name.partition(":")[0] for name in CASES} | {"not_finite", "empty", "declared_otherwise", "other_sampler"}
    tested |= {"overfits", "guesses"}  # tests/test_supervised.py, tests/test_reward_model.py
    tested |= {"evaluated_otherwise", "no_step"}  # tests/test_beam_search.py, tests/test_diagnosis.py
    tested |= {"invalid", "copied", "never_won"}  # tests/test_games.py
    tested |= {"outgrown", "slow_price", "verifier"}  # tests/test_diagnosis.py
    assert {rule.__name__ for rule in RULES} == tested  # external replies: tests/test_negative_kl.py


# --- findings with several causes -------------------------------------------------------------------------------------
@cases(math.nan, math.inf, 0.0)
def test_a_gradient_that_is_not_finite_is_reported_with_its_step(value):
    """That of the third optimizer step, in step 2, is `value`; 0 leaves it unchanged."""
    learner, calls = toy(lr=3e-3), []

    def spoil(gradient):
        calls.append(1)
        return torch.full_like(gradient, value) if value and len(calls) == 3 else gradient

    next(learner.policy.model.parameters()).register_hook(spoil)
    findings = run(learner, share, 3).findings
    # The same step is not reported again as refused for its ratio.
    assert set(findings) == ({"not_finite"} if value else set())
    if value:
        found = findings["not_finite"]
        assert found.message == "1 step was refused because of NaN or infinity."
        assert found.step == 2 and found.level == "problem"
        assert "--optimizer.lr" in found.remedy and "operant replay" in found.remedy
        assert all(bool(p.isfinite().all()) for p in learner.policy.parameters())


def test_empty_replies_caused_by_kl():
    # KL in both directions is penalised, so short replies cost least.
    faulty = run(toy(lr=5e-3, coef=3.0, **{"kl.kind": "absolute", "kl.reward_gradient": "score"}), grouped, 20)
    found = faulty.findings["empty"]
    assert f"{percent(faulty.last('text/empty', 3))} of the replies are empty" in found.message
    most = max(m["reward/kl_penalty"] for m in faulty.learner.history)
    assert f"paid up to {most:.3g} where scores differ by {pstdev(faulty.scores[0]):.3g}" in found.cause
    assert found.cause.startswith("the KL coefficient is too high") and "--kl.coef 0.75" in found.remedy
    assert set(faulty.findings) == {"empty"}  # no second remedy, and no finding about the few remaining words


def test_empty_replies_caused_by_the_reward():
    faulty = run(toy(), lambda r: -float(len(r.reply)), 10)
    found = faulty.findings["empty"]
    scores = ([], [])
    for reply, score in zip(faulty.replies[-1], faulty.scores[-1], strict=True):
        scores[bool(reply.reply.strip(" ."))].append(score)
    assert f"empty replies score {average(scores[0]):.3g}, the others {average(scores[1]):.3g}" in found.cause
    assert "prefers empty replies" in found.cause and "lowest score" in found.remedy and "kl" not in found.remedy
    assert "signs" not in faulty.findings  # from the two or three remaining characters


@cases(("temperature", 0.5, 1.0, "temperature"), ("min_new_tokens", 3, 0, "min_tokens"))
def test_a_declared_setting_that_differs_is_a_note(name, value, own, option):
    learner = toy(lr=1e-3)

    def step(declared):
        made = learner.generate([QUERY] * 32, **declared)
        learner.step([QUERY] * 32, [r.ids for r in made], [share(r) for r in made], generation=declared)
        return diagnose(learner)

    (found,) = step({name: value})
    assert found.name == "declared_otherwise" and found.level == "note"
    assert f"{name}={value} (here {own})" in found.message and f"--sampling.{option} {value}" in found.remedy
    assert step({name: own}) == []


def test_probes_see_that_the_query_decides(tmp_path):
    """One reply per query does not show it, but the probes have two replies per query before training."""
    tasks = [a + b for a in "abcdef" for b in "ghijkl"]  # more than `PROBES`

    def trained(out, weight):
        def reward(rollouts):
            return [grouped(r) + weight * tasks.index(r.query) for r in rollouts]

        model = lm("gpt2", len(letters()), spread=0.05)
        options = {"steps": 3, "batch": 36, "max_tokens": 6, "optimizer.lr": 5e-3, "epochs": 1, "probe_every": 1}
        return train(model, tasks, reward, out=tmp_path / out, tokenizer=letters(), **options)

    made = trained("fault", 1.0)
    assert "reward/query_share" not in made.metrics[-1]
    found = next(f for f in diagnose(made) if f.name == "query_decides")
    assert percent(made.metrics[-1]["probe/query_share"]) in found.message and "minus_query" in found.remedy
    assert made.metrics[-1]["probe/query_share"] > 0.95
    first = pq.read_table(made.path / "probes" / "step-00000.parquet").to_pylist()
    score = progress(History(made.metrics))  # against the answers before training, not the first ones after
    assert (score.label, score.after) == ("probe reward", made.metrics[-1]["probe/reward"])
    assert score.before == pytest.approx(average(r["reward"] for r in first))
    assert score.before != made.metrics[0]["probe/reward"]
    twin = trained("twin", 0.0)
    assert twin.metrics[-1]["probe/query_share"] < 0.8 and diagnose(twin) == []


# --- the demo ---------------------------------------------------------------------------------------------------------
SEEDS, CONTROLS = [f"seed-{i}" for i in range(1, 6)], [f"control-{i}" for i in range(1, 4)]


@cache
def demo() -> dict[str, History]:
    """Five runs of the sentiment demo and three whose rewards were shuffled, without their replies."""
    path = Path(__file__).parent / "slices" / "healthy-demo.jsonl.gz"
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    config, histories = lines[0]["config"], {}
    for name in SEEDS + CONTROLS:
        own = [line for line in lines[1:] if line["run"] == name]
        metrics = [line["metrics"] for line in own if "metrics" in line]
        histories[name] = History(metrics, config=config, evaluation=own[-1]["evaluation"])
    return histories


@pytest.mark.parametrize("name", SEEDS)
def test_the_demo_has_no_findings_at_any_step_and_learns(name):
    whole = demo()[name]
    assert len(whole.metrics) == 72
    for count in range(1, 73):
        found = diagnose(History(whole.metrics[:count], config=whole.config))
        assert [f for f in found if f.level != "note"] == [], count
    sentence = verdict(whole, diagnose(whole))
    sides = [whole.evaluation[side] for side in ("before", "after")]
    changes = [new["score"] - old["score"] for old, new in zip(*(side["replies"] for side in sides))]
    middle, half = average(changes), 1.9692 * pstdev(changes) / 255**0.5  # t for 255 degrees of freedom, from a table
    interval = f"({middle - half:+.2f} to {middle + half:+.2f}, 95 %)"
    ends = " -> ".join(f"{side['mean']:.3g}" for side in sides)
    assert sentence.startswith(f"It learned: held-out reward {ends} {interval} in 72 steps")
    assert sentence.endswith("and nothing looks wrong.")


@pytest.mark.parametrize("name", CONTROLS)
def test_shuffled_rewards_did_not_learn(name):
    whole = demo()[name]
    found = diagnose(whole)
    assert [f.name for f in found] == ["flat"]
    assert verdict(whole, found).startswith("It did not learn: held-out reward")
    bare = History(whole.metrics, config=whole.config)  # nor from the rewards of training alone
    assert verdict(bare, diagnose(bare)).startswith("It did not learn")
    for count in range(1, 73):
        begun = History(whole.metrics[:count], config=whole.config)
        found = diagnose(begun)
        assert {f.name for f in found if f.level != "note"} <= {"flat"}, count
        assert not verdict(begun, found).startswith("It learned:"), count  # it may drift upwards for a while


def test_one_rare_draw_of_a_nearly_deterministic_policy_is_no_finding():
    trained = run(toy(0.3, lr=5e-3), share, 12)
    assert not {"other_sampler", "negative_kl"} & set(trained.findings)
