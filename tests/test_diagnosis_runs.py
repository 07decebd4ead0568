"""Every rule of the diagnosis on a run that has the fault, and on a healthy twin of the run.

The numbers in a message are computed again here, from the replies and scores of the run.
"""

import gzip
import json
import math
import random
import re
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from cases import cases
from toys import letters, lm

from operant import Judgement, Learner, train
from operant.engines.native.engine import NativeEngine
from operant.tools.diagnosis import RULES, Finding, History, diagnose, verdict
from operant.tools.diagnosis.progress import progress

TOY = {"optimizer.lr": 1e-2, "max_tokens": 8, "kl.coef": 0.0, "minibatch": 32, "update.epochs": 2, "watch_every": 0}
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

    def texts(self, steps: int) -> list[list[str]]:
        """Return the texts of the last steps, or of the first ones if `steps` is negative."""
        part = self.replies[-steps:] if steps > 0 else self.replies[:-steps]
        return [[r.reply for r in step] for step in part]

    def mean(self, name: str, steps: int) -> float:
        values = [m[name] for m in self.learner.history][-steps:]
        return sum(values) / len(values)


def toy(spread=0.05, reference="copy", **more) -> Learner:
    tokenizer = letters()
    model = lm("gpt2", len(tokenizer), spread=spread)
    return Learner(model, tokenizer=tokenizer, reference=reference, **TOY | more)


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


def average(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def spread(values) -> float:
    return average((x - average(values)) ** 2 for x in values) ** 0.5


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


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
@cache
def critic(fault: bool) -> TrainedLearner:
    """Returns of 100 for a critic that begins at 0 and learns slowly; in the twin, scores are normalised."""
    slow = toy(**{"optimizer.lr": 1e-4, "epochs": 1, "score.normalise": not fault})
    return run(slow, lambda r: 100 + share(r), 32, count=16)


leap = cache(lambda fault: run(toy(**{"optimizer.lr": 0.3 if fault else 1e-3, "kl.coef": 0.1}), share, 6))


def rise(trained: TrainedLearner) -> float:
    """Return KL per reply after the first step. Before it, policy and reference are equal."""
    return trained.learner.history[1]["kl/per_reply"] - trained.learner.history[0]["kl/per_reply"]


@cache
def query_decides(fault: bool) -> TrainedLearner:
    queries = [[4 + i, 5] for i in range(8)]
    return run(toy(), lambda r: share(r) + fault * r.turns[0].prompt[0], 5, queries)


@cache
def abstains(fault: bool) -> TrainedLearner:
    return run(toy(**{"optimizer.lr": 1e-3}), lambda r: None if fault and r.ids[0] % 3 == 0 else share(r), 6)


class Stale(NativeEngine):
    """An engine that never updates its weights."""

    def sync(self, policy, version):
        self.version = version


@cache
def scoring(fault: bool) -> TrainedLearner:
    learner = toy(**{"optimizer.lr": 3e-3})
    if fault:
        learner.engine = Stale(deepcopy(learner.policy))
    return run(learner, share, 7)


@cache
def not_finite(value: float) -> TrainedLearner:
    """The gradient of the third optimizer step, in step 2, is `value`; 0 leaves it unchanged (the twin)."""
    learner, calls = toy(**{"optimizer.lr": 3e-3}), []

    def spoil(gradient):
        calls.append(1)
        return torch.full_like(gradient, value) if value and len(calls) == 3 else gradient

    next(learner.policy.model.parameters()).register_hook(spoil)
    return run(learner, share, 4)


@cache
def refused(fault: bool) -> TrainedLearner:
    small = {} if fault else {"optimizer.lr": 1e-3}
    return run(toy(**{"ratio_threshold": 1.01, "kl.coef": 0.1} | small), share, 5)


high_kl = cache(lambda fault: run(toy(**{"kl.coef": 0.02 if fault else 0.1}), grouped, 18))
unpaid_kl = cache(lambda fault: run(toy(**{"kl.coef": 0.0 if fault else 0.1}), grouped, 14))


@cache
def flat(fault: bool) -> TrainedLearner:
    chance = random.Random(0)
    learner = toy(**{"optimizer.lr": 5e-3, "kl.coef": 0.04})
    return run(learner, lambda r: chance.random() if fault else grouped(r), 31)


signs = cache(lambda fault: run(toy(), lambda r: float(r.reply.count("!" if fault else "d")), 11 if fault else 8))


REFRAIN, SENTENCE = "a b.c d.e ", "a b.c d.e f.g h."


@cache
def repetition(fault: bool) -> TrainedLearner:
    made = toy(**{"max_tokens": 30, "kl.coef": 0.0 if fault else 1.0}, **only(REFRAIN))
    return run(made, recites(REFRAIN), 14)


@cache
def diversity(fault: bool) -> TrainedLearner:
    made = toy(**{"max_tokens": 16, "kl.coef": 0.0 if fault else 1.0}, **only(SENTENCE))
    return run(made, recites(SENTENCE), 14)


@cache
def longer(fault: bool) -> TrainedLearner:
    learner = toy(stop_tokens=(2, 4, 5, 6, 7, 8), max_tokens=24)
    return run(learner, lambda r: float(len(r.ids)) if fault else float(r.ids[0] == 9), 10)


shorter = cache(lambda fault: run(toy(max_tokens=16), lambda r: -abs(len(r.ids) - 4.0) if fault else share(r), 14))


LADDER = {"compile error": -1.0, "failed test": -0.3, "passed": 1.0}


@cache
def short_programs(fault: bool) -> TrainedLearner:
    """A program compiles if it ends within 5 tokens, and passes if it begins with `ddd`; in the twin, with `d`."""
    least = 3 if fault else 1

    def judge(r) -> Judgement:
        outcome = "compile error" if r.turns[0].end != "stop" or len(r.ids) > 5 else "failed test"
        outcome = "passed" if r.ids[:least] == [D] * least else outcome
        return Judgement(LADDER[outcome], outcome=outcome)

    return run(toy(max_tokens=16), judge, 14)


def ladder(trained: TrainedLearner) -> tuple[str, ...]:
    """Return the shares of outcomes and the lengths in the first and the last five steps."""
    kinds = [Counter(judged.outcome for judged in step) for step in trained.scores]
    shares = {name: [average(k[name] / 32 for k in part) for part in (kinds[:5], kinds[-5:])] for name in LADDER}
    first, last = (average(part) for part in (lengths(trained)[:5], lengths(trained)[-5:]))
    errors, wrong, passed = ((percent(a), percent(b)) for a, b in shares.values())
    return (
        f"compile error went from {errors[0]} to {errors[1]}, but wrong ones from {wrong[0]} to {wrong[1]}",
        f"{passed[1]} pass ({passed[0]} before)",
        f"from {first:.1f} to {last:.1f} tokens",
    )


@cache
def unlikely_text(fault: bool) -> TrainedLearner:
    """A nearly deterministic model at the start, and a token that it hardly ever generates."""
    return run(toy(0.3, **{"kl.coef": 0.0 if fault else 0.05}), share, 10)


@cache
def saturated(fault: bool) -> TrainedLearner:
    """Every further letter earns less; in the twin, all earn the same."""
    learner = toy(**{"kl.coef": 0.002, "fixed_length": True})
    many = range(4, 16)
    return run(learner, lambda r: 1 - math.exp(-6 * share(r, many)) if fault else share(r, many), 14)


@cache
def soon_saturated(fault: bool) -> TrainedLearner:
    """Nearly the highest score from the start."""
    enough = 1.0 if fault else 8.0
    return run(toy(), lambda r: min(enough, float(sum(i in range(5, 12) for i in r.ids))), 12)


@cache
def empty_by_kl(fault: bool) -> TrainedLearner:
    """KL in both directions is penalised, as in TRL, so short replies cost least."""
    as_in_trl = {"kl.kind": "absolute", "kl.reward_gradient": "score", "kl.coef": 3.0 if fault else 0.05}
    learner = toy(**as_in_trl, **{"optimizer.lr": 5e-3})
    return run(learner, grouped, 20 if fault else 12)


empty_by_reward = cache(lambda fault: run(toy(), lambda r: -float(len(r.reply)) if fault else share(r), 10))
one_word = cache(lambda fault: run(toy(**{"kl.coef": 0.0 if fault else 0.1}), share, 16))
constant = cache(lambda fault: run(toy(**{"optimizer.lr": 1e-3}), lambda r: 0.25 if fault else share(r), 4))


@cache
def no_advantage(fault: bool) -> TrainedLearner:
    """Scores that depend on the query only: within a group they are equal."""
    queries = [[4 + i, 5] for i in range(4)]
    return run(toy(algorithm="rloo"), lambda r: float(r.turns[0].prompt[0]) if fault else share(r), 4, queries)


ratio = cache(lambda fault: run(toy(**{"optimizer.lr": 0.02 if fault else 1e-3, "epochs": 4}), share, 3))


@cache
def clipping(fault: bool) -> TrainedLearner:
    return run(toy(**{"optimizer.lr": 0.02 if fault else 1e-4, "epochs": 6, "minibatch": 8}), share, 3)


@cache
def unmeasured(fault: bool) -> TrainedLearner:
    small = {} if fault else {"optimizer.lr": 1e-3}
    return run(toy(reference=None, **{"max_tokens": 16} | only(SENTENCE) | small), recites(SENTENCE), 13)


drowned = cache(lambda fault: run(toy(**{"kl.coef": 5.0 if fault else 0.01, "optimizer.lr": 3e-3}), share, 8))


# --- the numbers that the messages must have --------------------------------------------------------------------------
def by_steps(trained: TrainedLearner, steps: int, count) -> float:
    """Return the mean over the last steps of a statistic of a step's texts."""
    return average(count(texts) for texts in trained.texts(steps))


def distinct(texts) -> float:
    pairs = [p for t in texts for p in zip(words(t), words(t)[1:])]
    return len(set(pairs)) / len(pairs)


def repeated(texts) -> float:
    threes = [list(zip(w, w[1:], w[2:])) for t in texts if len(w := words(t)) > 2]
    return average(1 - len(set(x)) / len(x) for x in threes) if threes else 0.0


def top(texts) -> float:
    flat_words = [w for t in texts for w in words(t)]
    return Counter(flat_words).most_common(1)[0][1] / len(flat_words)


def exclaimed(texts) -> float:
    return "".join(texts).count("!") / len("".join(texts))


def lengths(trained: TrainedLearner) -> list[float]:
    return [average(len(r.ids) for r in step) for step in trained.replies]


def means(trained: TrainedLearner) -> list[float]:
    return [average(sum(x) if isinstance(x, list) else x for x in step if x is not None) for step in trained.scores]


def before_and_after(trained: TrainedLearner) -> tuple[str, str]:
    """Return the mean scores of the first 64 replies, and of the last five steps."""
    first = math.ceil(64 / len(trained.replies[0]))
    return f"{average(means(trained)[:first]):.3g}", f"{average(means(trained)[-5:]):.3g}"


def explained(trained: TrainedLearner) -> str:
    mean = trained.mean("value/explained_variance", 10)
    assert mean < -10  # the critic is off by 100, and the returns vary by a few hundredths
    return f"{mean:.2f}"


def decided(trained: TrainedLearner) -> str:
    """Return the intraclass correlation of scores by query, from pooled variances of 8 queries with 4 replies each."""
    each = []
    for scores in trained.scores[-5:]:
        by = [scores[i::8] for i in range(8)]
        within = average(sum((x - average(g)) ** 2 for x in g) / 3 for g in by)
        between = 4 * sum((average(g) - average(scores)) ** 2 for g in by) / 7
        each.append((between - within) / (between + 3 * within))
    return percent(average(each))


def gap(trained: TrainedLearner) -> str:
    return f"{max(m['rollout/logprob_gap'] for m in trained.learner.history[-3:]):.3g}"


def refusals(trained: TrainedLearner) -> str:
    return percent(trained.mean("policy/skipped_steps", 5))


def kl(trained: TrainedLearner) -> str:
    return f"{trained.mean('kl/per_reply', 5):.3g} nats"


def fallen(trained: TrainedLearner) -> tuple[str, ...]:
    series = [m["rollout/ref_logprob_mean"] for m in trained.learner.history]
    return (*before_and_after(trained), f"{series[0]:.1f}", f"{average(series[-5:]):.1f}")


def entropies(trained: TrainedLearner) -> tuple[str, str]:
    series = [m["policy/entropy"] for m in trained.learner.history]
    return f"{series[0]:.3g}", f"{average(series[-3:]):.3g}"


def lost(trained: TrainedLearner) -> str:
    series = [m["policy/entropy"] for m in trained.learner.history]
    return percent(1 - average(series[-5:]) / series[0])


def ratios(trained: TrainedLearner) -> tuple[str, ...]:
    last = trained.learner.history[-3:]
    return (f"a spread of {average(m['policy/ratio_std'] for m in last):.3g} (healthy: at most 0.5)",)


def penalties(trained: TrainedLearner) -> tuple[str, str]:
    scores = [spread(s) for s in trained.scores[-5:]]
    return f"{trained.mean('reward/kl_penalty_std', 5):.3g} between", f"{average(scores):.3g}."


def empties(trained: TrainedLearner) -> str:
    return percent(by_steps(trained, 3, lambda texts: average(not t.strip(" .") for t in texts)))


CASES = {
    # finding: run, numbers in the message, part of the cause, part of the remedy, whether the twin has no findings
    "critic": (critic, explained, "cannot follow", "--score.normalise true", True),
    "query_decides": (query_decides, decided, "more on the prompt", "minus_query", True),
    "abstains": (abstains, lambda t: percent(average(average(s is None for s in x) for x in t.scores[-5:])),
                 "returned None", "low score", True),
    "scoring": (scoring, gap, "other weights", "`sync`", True),
    "refused": (refused, refusals, "moved the policy too far", "--optimizer.lr", True),
    "high_kl": (high_kl, kl, "0.02", "--kl.coef 0.04", True),
    "leap": (leap, lambda t: f"rose by {rise(t):.3g} nats a reply in one step, the 1st",
             "learning rate of 0.3", "--optimizer.lr 0.0003", True),
    "unpaid_kl": (unpaid_kl, kl, "kl.coef is 0", "--kl.coef 0.1", True),
    "flat": (flat, lambda t: (*before_and_after(t), kl(t), "31 steps"), "does not depend", "--optimizer.lr", True),
    "signs": (signs, lambda t: (f"{percent(by_steps(t, 3, exclaimed))} of the characters are exclamation marks",
                                f"({percent(exclaimed(t.texts(-1)[0]))} before)"),
              "the reward likes them", "--kl.coef 0.1", False),
    "repetition": (repetition, lambda t: (percent(by_steps(t, 3, repeated)), percent(repeated(t.texts(-1)[0]))),
                   "does not punish it", "--kl.coef 0.1", True),
    "diversity": (diversity, lambda t: (percent(by_steps(t, 3, distinct)), percent(distinct(t.texts(-1)[0]))),
                  "does not punish it", "--kl.coef 0.1", True),
    "unlikely_text": (unlikely_text, fallen, "very unlikely", "--kl.coef 0.1", True),
    "entropy": (diversity, entropies, "too large or KL too cheap", "--loss.entropy_coef", True),
    "one_word": (one_word, lambda t: f"{percent(by_steps(t, 3, top))} of the words are 'dddddddd'",
                 "kl.coef is 0", "--kl.coef 0.1", True),
    "constant": (constant, lambda t: "0.25", "does not depend on the reply", "read replies", True),
    "no_advantage": (no_advantage, lambda t: "In 4 of the last 4 steps", "the same score", "--samples", True),
    "ratio": (ratio, ratios, "too far", "--optimizer.lr", True),
    "clipping": (clipping, lambda t: percent(t.mean("policy/clip_fraction", 3)), "too large", "--update.epochs", True),
    "unmeasured": (unmeasured, lost, "no reference", "--reference copy` and `--kl.coef 0.1", True),
    "short_programs": (short_programs, ladder, "the ladder of outcomes", "--reward.kind passed", False),
    "drowned": (drowned, penalties, "coefficient of 5 is too high", "--kl.coef 0.0", True),
}  # fmt: skip


@pytest.mark.slow  # test_diagnosis.py has the same rules on made-up metrics
@pytest.mark.parametrize("name", CASES)
def test_the_fault_is_reported_with_its_numbers_and_its_remedy(name):
    make, numbers, cause, remedy, _ = CASES[name]
    trained = make(True)
    found = trained.findings[name]
    expected = numbers(trained)
    for number in (expected,) if isinstance(expected, str) else expected:
        assert number in found.message
    assert cause in found.cause and remedy in found.remedy
    assert 1 <= found.step <= len(trained.replies)


@pytest.mark.slow  # test_diagnosis.py has the same rules on made-up metrics
@pytest.mark.parametrize("name", CASES)
def test_the_healthy_twin_has_no_such_finding(name):
    make, _, _, _, wholly = CASES[name]
    found = make(False).findings
    assert name not in found
    if wholly:
        assert found == {}


def test_every_rule_has_a_run():
    tested = set(CASES) | {"not_finite", "empty", "saturated", "length", "declared_otherwise", "other_sampler"}
    tested |= {"overfits", "guesses"}  # tests/test_supervised.py, tests/test_reward_model.py
    tested |= {"evaluated_otherwise", "no_step"}  # tests/test_beam_search.py, tests/test_diagnosis.py
    tested |= {"invalid", "copied", "never_won"}  # tests/test_games.py
    tested |= {"outgrown", "slow_price", "verifier"}  # tests/test_diagnosis.py
    assert {rule.__name__ for rule in RULES} == tested  # external replies: tests/test_negative_kl.py


# --- findings with several causes -------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_reported_with_its_step(value):
    trained = not_finite(value)
    found = trained.findings["not_finite"]
    assert found.message == "1 step was refused because of NaN or infinity."
    assert found.step == 2 and found.level == "problem"
    assert set(trained.findings) == {"not_finite"}  # the same step is not reported again as refused for its ratio
    assert "--optimizer.lr" in found.remedy and "operant replay" in found.remedy
    assert all(bool(p.isfinite().all()) for p in trained.learner.policy.parameters())
    assert not_finite(0.0).findings == {}


def test_empty_replies_caused_by_kl():
    trained, found = empty_by_kl(True), empty_by_kl(True).findings["empty"]
    assert f"{empties(trained)} of the replies are empty" in found.message
    most = max(m["reward/kl_penalty"] for m in trained.learner.history)
    assert f"paid up to {most:.3g} where scores differ by {spread(trained.scores[0]):.3g}" in found.cause
    assert found.cause.startswith("the KL coefficient is too high") and "--kl.coef 0.75" in found.remedy
    assert set(trained.findings) == {"empty"}  # no second remedy, and no finding about the few remaining words
    assert empty_by_kl(False).findings == {}


def test_empty_replies_caused_by_the_reward():
    trained, found = empty_by_reward(True), empty_by_reward(True).findings["empty"]
    assert f"{empties(trained)} of the replies are empty" in found.message
    others = [x for r, x in zip(trained.replies[-1], trained.scores[-1]) if r.reply.strip(" .")]
    empty = [x for r, x in zip(trained.replies[-1], trained.scores[-1]) if not r.reply.strip(" .")]
    assert f"empty replies score {average(empty):.3g}, the others {average(others):.3g}" in found.cause
    assert "prefers empty replies" in found.cause and "lowest score" in found.remedy and "kl" not in found.remedy
    assert "signs" not in trained.findings  # from the two or three remaining characters
    assert "empty" not in empty_by_reward(False).findings


def test_a_saturated_reward():
    trained, found = saturated(True), saturated(True).findings["saturated"]
    now, first = average(spread(s) for s in trained.scores[-5:]), spread(trained.scores[0])
    assert found.level == "note" and "--steps" in found.remedy
    most = max(x for s in trained.scores[-5:] for x in s)
    assert f"{now:.3g} only ({first:.3g} at first), all near {most:.3g}:" in found.message
    assert "saturated" not in saturated(False).findings


@pytest.mark.slow
def test_a_reward_that_was_nearly_saturated_at_the_start_is_not_called_constant():
    found = soon_saturated(True).findings
    assert "constant" not in found and "Every reply now scores 1:" in found["saturated"].message
    assert not {"constant", "saturated"} & set(soon_saturated(False).findings)


@cases((longer, "longer", "`--sampling.max_tokens {}`"), (shorter, "shorter", "`--sampling.min_tokens {}`"))
@pytest.mark.slow
def test_lengths_that_the_reward_pays_for(make, cause, remedy):
    trained, found = make(True), make(True).findings["length"]
    first, last = lengths(trained)[0], average(lengths(trained)[-5:])
    assert f"from {first:.1f} to {last:.1f} tokens" in found.message
    assert f"pays for {cause}" in found.cause and remedy.format(round(first)) in found.remedy
    assert (f"`length:<={round(first)}`" if last > first else f"`length:{round(first)}`") in found.remedy
    assert "length" not in make(False).findings


def test_a_spammed_sign_is_named():
    """It is not a word, so it is found as a token and shown as text."""
    trained, found = signs(True), signs(True).findings["one_word"]
    ids = [i for r in trained.replies[-1] for i in r.ids]
    assert f"{percent(Counter(ids).most_common(1)[0][1] / len(ids))} of the tokens are '!'." in found.message
    assert "one_word" not in signs(False).findings or "'d" in signs(False).findings["one_word"].message


@cache
def drift() -> TrainedLearner:
    chance = random.Random(0)
    return run(toy(), lambda r: chance.random(), 31)


@pytest.mark.slow
def test_spam_is_not_blamed_on_a_reward_that_did_not_rise():
    found = drift().findings["one_word"]
    assert "did not rise" in found.cause and "likes" not in found.cause
    assert "likes it" in one_word(True).findings["one_word"].cause


def test_a_high_coefficient_that_is_not_enough_is_named():
    """KL exceeds the target of the controller, which the message names."""
    learner = toy(**{"kl.coef": 0.02, "kl.control": "adaptive", "kl.target": 0.5})
    found = run(learner, grouped, 14).findings["high_kl"]
    assert "far above its target of 0.5" in found.message and "--kl.coef" in found.remedy


@pytest.mark.parametrize("declared", [{"temperature": 0.5}, {"min_new_tokens": 3}])
def test_a_declared_setting_that_differs_is_a_note(declared):
    learner = toy(**{"optimizer.lr": 1e-3})
    (name, value), own = next(iter(declared.items())), {"temperature": 1.0, "min_new_tokens": 0}
    for _ in range(3):
        made = learner.generate([QUERY] * 32, **declared)
        learner.step([QUERY] * 32, [r.ids for r in made], [share(r) for r in made], generation=declared)
    (found,) = diagnose(learner)
    assert found.name == "declared_otherwise" and found.level == "note"
    assert f"{name}={value} (here {own[name]})" in found.message
    assert f"--sampling.{'min_tokens' if value == 3 else name} {value}" in found.remedy
    same = {name: own[name]}
    made = learner.generate([QUERY] * 32)
    learner.step([QUERY] * 32, [r.ids for r in made], [share(r) for r in made], generation=same)
    assert diagnose(learner) == []


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
SIDES = ("before", "after")
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
    before, after = (whole.evaluation[side]["mean"] for side in ("before", "after"))
    changes = [new["score"] - old["score"] for old, new in zip(*(whole.evaluation[s]["replies"] for s in SIDES))]
    middle, half = average(changes), 1.9692 * spread(changes) / 255**0.5  # t for 255 degrees of freedom, from a table
    interval = f"({middle - half:+.2f} to {middle + half:+.2f}, 95 %)"
    assert sentence.startswith(f"It learned: held-out reward {before:.3g} -> {after:.3g} {interval} in 72 steps")
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
    trained = run(toy(0.3, **{"kl.coef": 0.0, "optimizer.lr": 5e-3}), share, 12)
    assert not {"other_sampler", "negative_kl"} & set(trained.findings)
