"""A reward that says more than a number: its answers, refusals, ways through a run, and the world that repeats them."""

import io
import json
import re
from contextlib import closing
from dataclasses import dataclass, replace

import pyarrow.parquet as pq
import pytest
from cases import cases
from page_commands import snippets
from scored import fixed, rollout_of
from toys import letters, lm

from operant import Completion, Judgement, Learner, OperantError, Rollout, Sampling, Task, Turn, isolated, train
from operant.envs import for_evaluation
from operant.metrics.collect import MOST, reward_metrics
from operant.rewards import judge
from operant.rewards.combine import minus_query, weighted
from operant.rewards.evaluate import LONGEST, Judged, Remark
from operant.rewards.failure_policy import IsolationOptions
from operant.rewards.feedback import Feedback
from operant.rollouts.play import play
from operant.runs.evaluate import Evaluation
from operant.runs.scored_rollouts import as_rows
from operant.runs.trackers import base
from operant.runs.trackers.console import Console
from operant.sampling import TokenCount
from operant.sandbox.pool import Response
from operant.tools.report.replies import Index

FAILED = Judgement(-0.6, {"passed": 3, "failed": 1}, "runtime error", "IndexError: list index out of range, line 4")


@dataclass(frozen=True)
class Verdict(Judgement):
    line: int = 0


ALLOWED = [
    (FAILED, -0.6, {"tests": -0.6, "passed": 3.0, "failed": 1.0}, ("runtime error",), FAILED.message),
    (Judgement([1, 2.0, 3], {"a": 0}), [1.0, 2.0, 3.0], {"tests": 6.0, "a": 0.0}, (), ""),
    (Judgement(None, {"a": 2, "b": None}, "late"), None, {"a": 2.0, "b": None}, ("late",), ""),
    (Judgement(1.0, message="x" * 2000), 1.0, {"tests": 1.0}, (), "x" * (LONGEST - 3) + "..."),
    (1.0, 1.0, {"tests": 1.0}, (), ""),
]
REFUSED = [
    (Judgement(float("nan")), "returned nan"),
    (Judgement("good"), "'good', of type str"),
    (Judgement({"a": 1.0}), "score is {'a': 1.0}"),
    (Judgement(Judgement(1.0)), "score is Judgement(score=1.0"),
    (Judgement([1.0]), "1 numbers where the rollout has 3 action tokens"),
    (Judgement(1.0, {"a": float("inf")}), "inf as its part 'a'"),
    (Judgement(1.0, [1.0]), "parts is [1.0]"),
    (Judgement(1.0, {"tests": 1.0}), "a part 'tests', which is the name of the reward"),
    (Judgement(1.0, outcome=3), "outcome is 3"),
    (Judgement(1.0, outcome="x" * 41), "at most 40 printable characters"),
    (Judgement(1.0, outcome="two\nlines"), "put details into message"),
    (Judgement(1.0, message=None), "message is None, of type NoneType"),
    (Verdict(1.0, line=4), "a Verdict with the fields line"),
]


def tests(rollouts):
    return [(ALLOWED + REFUSED)[r.task.target][0] for r in rollouts]


tests.__test__ = False


def asking(*numbers) -> list[Rollout]:
    return [replace(rollout_of(f"reply {n}"), task=Task(f"t/{n}", [1, 2], target=n)) for n in numbers]


# --- answers ----------------------------------------------------------------------------------------------------------
def test_a_judgement_is_read_and_its_parts_are_not_summed():
    judged = judge(tests, asking(*range(len(ALLOWED))))
    for i, (_, score, parts, classes, message) in enumerate(ALLOWED):
        assert (judged.scores[i], judged.remark(i)) == (score, (classes, message))
        told = {name: values[i] for name, values in judged.parts.items()}
        assert told == dict.fromkeys(told) | parts
    assert judge(fixed([0.5]), asking(0)).remarks == []


@pytest.mark.parametrize(("answer", "what"), REFUSED, ids=[what for _, what in REFUSED])
def test_a_judgement_that_is_not_allowed_is_a_sentence(answer, what):
    with pytest.raises(OperantError) as caught:
        judge(fixed([answer], "tests"), [rollout_of("x" * 200, task="imdb/17", query="A query")])
    for part in (what, "'tests'", "'imdb/17'", "'A query'", "xxx...'", ";"):
        assert part in str(caught.value)


@pytest.mark.slow
def test_it_crosses_the_border_of_a_process_unchanged():
    with closing(isolated(tests, each=True)) as reward:
        judged = judge(reward, asking(*range(len(ALLOWED + REFUSED))))
    with closing(isolated(info_of)) as reward:  # what a rollout carries there, as one that a world has judged
        assert judge(reward, [replace(rollout_of(""), info={"judgement": FAILED})]).scores == [1.0]
    here = judge(tests, asking(*range(len(ALLOWED))))
    good = slice(0, len(ALLOWED))
    assert judged.scores[good] == here.scores and judged.remarks[good] == here.remarks
    assert {name: values[good] for name, values in judged.parts.items()} == here.parts
    assert judged.outcomes == ["abstain" if a[1] is None else "ok" for a in ALLOWED] + ["error"] * len(REFUSED)


def info_of(rollouts):
    return [float(r.info == {"judgement": vars(FAILED)}) for r in rollouts]


def test_a_worker_that_sends_another_judgement_is_not_believed():
    reward = isolated(tests)
    for sent in ({"judgement": {"score": 1.0}}, {"judgement": vars(Verdict(1.0))}, {"judgement": 3}, 3, None):
        [result] = reward._read(Response("ok", {"answers": [sent]}), asking(0))
        assert (result.outcome, result.reason) == ("error", "returned nonsense")


def test_a_weighted_sum_puts_the_name_of_the_reward_in_front():
    kind = fixed([Judgement(1.0, {"words": 7}, "polite", "says please")], "kind")
    reward = weighted({"tests": (fixed([FAILED]), 2.0), "kind": (kind, 0.5), "plain": (fixed([1.0]), 1.0)})
    judged = judge(reward, asking(0))
    assert judged.scores == [pytest.approx(2 * -0.6 + 0.5 + 1.0)]
    expected = {"tests": -0.6, "tests/passed": 3, "tests/failed": 1, "kind": 1, "kind/words": 7, "plain": 1}
    assert judged.parts == {name: [value] for name, value in expected.items()}
    assert judged.remark(0) == (("tests/runtime error", "kind/polite"), f"tests: {FAILED.message}\nkind: says please")


def test_minus_query_subtracts_parts_and_keeps_what_was_said():
    def longer(rollouts):
        texts = [r.query + r.reply for r in rollouts]
        return [Judgement(len(text), {"e": text.count("e")}, f"of {text}") for text in texts]

    judged = judge(minus_query(longer), [rollout_of("eel", query="The")])
    assert judged.scores == [3.0] and judged.parts == {"longer": [3.0], "e": [2.0]}
    assert judged.remarks == [(("of Theeel",), "")]


# --- metrics ----------------------------------------------------------------------------------------------------------
def classes(*named) -> Judged:
    return Judged([0.0] * len(named), {"a": []}, remarks=[Remark((n,) if n else ()) for n in named])


def test_shares_by_hand():
    assert reward_metrics(classes("good", "bad", "good", "")) == {"outcome/good": 0.5, "outcome/bad": 0.25}
    before = {"outcome/bad": 0.25, "reward/mean": 1.0}
    assert reward_metrics(classes("good", ""), before) == {"outcome/bad": 0.0, "outcome/good": 0.5}
    assert reward_metrics(classes(), before) == {"outcome/bad": 0.0}


def test_too_many_classes_are_counted_together():
    first = reward_metrics(classes("late", "late", *[f"error {i}" for i in range(23)]))
    assert len(first) == MOST + 1 and first["outcome/late"] == pytest.approx(2 / 25)
    assert first["outcome/other"] == pytest.approx(4 / 25) and "outcome/error 9" not in first
    second = reward_metrics(classes("error 9", "error 9", "error 0", "x"), first)
    assert second.keys() == first.keys() and second["outcome/other"] == 0.75 and second["outcome/error 0"] == 0.25


# --- runs -------------------------------------------------------------------------------------------------------------
TASKS = ["ab", "cde", "the end", "h"]
SMALL = {"steps": 2, "batch": 4, "sampling.max_tokens": 4, "watch_every": 0, "probes": 2, "probe_every": 1}


def vowels(rollouts):
    found = [sum(c in "aeiou" for c in r.reply) for r in rollouts]
    return [Judgement(n / 2, {"count": n}, "some" if n else "none", f"<b>{n}</b> vowels") for n in found]


def test_a_run_shows_it_everywhere(tmp_path):
    started = {"tokenizer": letters(), "evaluate": TASKS[:2], "evaluate_every": 1} | SMALL
    run = train(lm(vocab=40, spread=0.1), TASKS, vowels, out=tmp_path / "run", **started)
    for step, metrics in enumerate(run.metrics, start=1):
        table = pq.read_table(run.path / "rollouts" / f"step-{step:05}.parquet").to_pylist()
        assert {row["outcome"] for row in table} <= {"some", "none"}
        for name in ("some", "none"):
            assert metrics.get(f"outcome/{name}", 0.0) == sum(row["outcome"] == name for row in table) / 4
        count = sum(row["reward/count"] for row in table) / 4
        assert metrics["reward/count/mean"] == pytest.approx(count) == 2 * metrics["reward/mean"]
        assert all(row["message"] == f"<b>{row['reward/count']:.0f}</b> vowels" for row in table)
    held = json.loads((run.path / "evaluation.json").read_text(encoding="utf-8"))["after"]
    shares = [sum(reply["outcomes"] == [name] for reply in held["replies"]) / 2 for name in ("some", "none")]
    assert [run.metrics[-1].get(f"evaluate/outcome/{name}", 0.0) for name in ("some", "none")] == shares
    assert Evaluation.from_plain(held).as_plain() == held
    found = Index(run.path).find(search="<B>0</B>", outcome="none")
    assert found["outcomes"] == sorted({row["outcome"] for row in Index(run.path).find(limit=500)["rows"]})
    assert {row["message"] for row in found["rows"]} <= {"<b>0</b> vowels"}


def test_console_and_trackers_show_it():
    remarks = [Remark(("bad\x1b", "b"), "why\n" * 50), Remark()]
    table = as_rows([rollout_of("eel"), rollout_of("x")], [1.0, None], remarks=remarks)
    named = as_rows([rollout_of("y")], [0.0], remarks=[Remark(("failed test",), "failed test: 1 of 2").under("tests")])
    console = Console(1, samples_every=1, samples=3, output=(output := io.StringIO()))
    console.rollouts(1, table)
    console.rollouts(2, named)
    first, second, third = output.getvalue().splitlines()
    assert third.endswith(" (tests/failed test: 1 of 2)"), "the message has the outcome, too, and it is said once"
    assert "[1.00] (bad , b: why why" in first and first.endswith("...)") and second.endswith("| x")
    shown = [dict(zip(base.COLUMNS, row, strict=True)) for row in base.replies(1, table)]
    assert [(row["outcome"], row["message"]) for row in shown] == [("bad\x1b, b", "why\n" * 50), (None, None)]


def test_a_step_takes_judgements_in_place_of_scores():
    made = []
    for scores in ([FAILED, Judgement(1.0, {"passed": 5}, "passed")], [-0.6, 1.0]):
        learner = Learner(lm(vocab=40, spread=0.1), tokenizer=letters(), **{"sampling.max_tokens": 4})
        made.append(learner.step(learner.generate(["ab", "cde"]), scores))
    judged, plain = made
    assert {k: v for k, v in plain.items() if not k.startswith(("time", "tok"))}.items() <= judged.items()
    assert judged["outcome/passed"] == judged["outcome/runtime error"] == 0.5 and judged["reward/passed/mean"] == 4.0
    with pytest.raises(OperantError, match="outcome is 3 for task"):
        learner.step(["ab", "cde"], ["the", "end"], [FAILED, Judgement(1.0, outcome=3)])


# --- worlds -----------------------------------------------------------------------------------------------------------
def ends_in_e(rollouts):
    good = [r.reply.endswith("e") for r in rollouts]
    return [Judgement(1.0, {"turns": len(r.texts)}, "good") if g else FAILED for r, g in zip(rollouts, good)]


class Obedient:
    """An engine that replies `ab`, and `abe` once it has read of an IndexError."""

    def generate(self, prompts, sampling, keys):
        texts = ["abe" if "line" in letters().decode(prompt) else "ab" for prompt in prompts]
        replies = [letters()(text, add_special_tokens=False)["input_ids"] for text in texts]
        return [Completion(ids, [0.0] * len(ids), None, "stop", 0) for ids in replies]


def played(env):
    known = {"engine": Obedient(), "tokenizer": letters(), "sampling": Sampling(max_tokens=4)}
    return play([Task("a", "the"), Task("b", "en")], env=env, **known)


def test_a_policy_that_reads_the_message_repairs_its_reply():
    for rollout in played(Feedback(ends_in_e, turns=3)):
        assert rollout.texts == ["ab", "abe"] and [turn.reward for turn in rollout.turns] == [0.0, 1.0]
        assert "line" in letters().decode(rollout.turns[1].prompt)
        assert rollout.info["judgement"] == Judgement(1.0, {"turns": 2.0}, "good")
    for rollout in played(Feedback(ends_in_e, turns=1)):
        assert rollout.texts == ["ab"] and rollout.paid == -0.6
    seen: list[Rollout] = []
    world = Feedback(lambda rollouts: seen.extend(rollouts) or [0.5])
    world.measure(TokenCount(letters()), None)
    world.reset({0: Task("a", [{"role": "user", "content": "the"}])})
    world.on_turns({0: Turn(letters()("go a").input_ids, [4, 5], end="length")})
    assert world.step({0: "ab"})[0].reward == 0.5  # of the prompt as the policy has read it, and a reply that was cut
    assert [(r.query, r.ids, r.end) for r in seen] == [("go a", [4, 5], "length")]
    for rollout in played(Feedback(ends_in_e, text=" no.{message}")):
        assert letters().decode(rollout.turns[1].prompt).startswith(f"{rollout.query}ab no.")


def test_a_reward_that_fails_fails_the_episode():
    def breaks(rollouts):
        return [1.0 / (r.task.id == "a") for r in rollouts]

    good, bad = played(Feedback(breaks).under(IsolationOptions(on_error="drop")))
    assert (good.paid, bad.end) == (1.0, "raised") and "ZeroDivisionError" in bad.info["failure"]
    breaks.judged = lambda rollouts: Judged([None] * len(rollouts), outcomes=["timeout"] * len(rollouts))
    assert [rollout.end for rollout in played(Feedback(breaks))] == ["timeout"] * 2


def test_the_reward_of_a_world_has_the_options_of_the_run():
    named, own = "isolated:test_judgement:vowels", isolated("test_judgement:vowels", timeout=9.0)
    mine = type("Mine", (Feedback,), {})
    worlds = [mine(reward).under(IsolationOptions(timeout=7.0)) for reward in (named, own)]
    assert [(type(world), world.judges[0].options.timeout) for world in worlds] == [(mine, 7.0), (mine, 9.0)]
    (people := fixed([1.0])).for_held_out = lambda: vowels
    world = mine(people)
    assert [for_evaluation(world).judges, world.judges] == [[vowels], [people]]


def test_what_a_world_judged_reaches_metrics_and_rows(tmp_path):
    started = {"tokenizer": letters(), "env": "feedback", "env.reward": "test_judgement:vowels"} | SMALL
    run = train(lm(vocab=40, spread=0.1), TASKS, out=tmp_path / "run", **started)
    table = pq.read_table(run.path / "rollouts" / "step-00002.parquet").to_pylist()
    last = [row for row in table if row["reward"] is not None]
    assert len(last) == 4 and [row["message"] for row in table if row["reward"] is None] == [None] * 4
    assert run.metrics[1].get("outcome/some", 0.0) == sum(row["outcome"] == "some" for row in last) / 4
    assert all(row["reward"] == row["paid"] == row["reward/world/count"] / 2 for row in last)
    won = replace(rollout_of(""), info={"judgement": Judgement(0.0, outcome="won")})
    beside = judge(fixed([FAILED]), [won], pays=True)
    assert beside.remarks == [(("runtime error", "world/won"), FAILED.message)] and beside.scores == [-0.6]


@cases(
    (lambda: Feedback(ends_in_e, turns=0), "env.turns=0"),
    (lambda: Feedback(ends_in_e, text="no"), "must contain {message}"),
    (lambda: Feedback("leters:e"), "did you mean 'letters'"),
    (lambda: Feedback({"minus_greedy:letters:e": 1.0}), "which --reward alone gets"),
    (lambda: judge(None, [replace(rollout_of(""), info={"judgement": Verdict(1.0)})], pays=True), "fields line"),
)
def test_a_world_that_cannot_judge_is_refused(make, message):
    with pytest.raises(OperantError, match=message):
        make()


def test_the_snippets_of_the_page_print_what_they_claim(capsys):
    known: dict = {}
    for snippet in snippets("docs/rewards.md#rewards-by-name-or-your-own"):
        exec(snippet, known)
        promised = re.findall(r"print\(.*\)  # (.*)", snippet)
        assert promised and capsys.readouterr().out.splitlines() == promised
