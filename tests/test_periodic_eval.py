"""What is looked at on the way: held-out tasks with their own sampling, probes, the best model, distributions.

None of it may change a number of the training; what it writes is read back here.
"""

import json
import re
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch
from cases import cases
from small_runs import TASKS, Grumpy, count_a, cut, model, options, same, told
from toys import bare_logprobs, letters

from operant import Learner, Policy, Task, load_policy, train
from operant.engines.native.engine import NativeEngine
from operant.metrics.collect import query_share
from operant.models.safe_loading import load_tokenizer
from operant.runs.evaluate import EvaluationOptions, Evaluator
from operant.runs.scored_rollouts import Probes
from operant.sampling import token_pieces
from operant.storage.hub import BUILTIN
from operant.tally import Histogram

RUN = {"optimizer.lr": 1e-2, "probes": 32}


def run(path, reward=count_a, **more):
    return train(model(), TASKS, reward, out=path, **options(**(RUN | {"steps": 3} | more)))


def learner(**more):
    return Learner(model(), tokenizer=letters(), **{"max_tokens": 6} | more)


HELD_OUT = [Task(text, text) for text in TASKS]


def distributions(path):
    return [json.loads(x) for x in (path / "distributions.jsonl").read_text(encoding="utf-8").splitlines()]


WATCHING = {"evaluate": TASKS, "evaluate_every": 1, "evaluation.samples": 2, "evaluation.seeds": (5, 6)}
WATCHING |= {"evaluation.sampling": {"temperature": 0.5, "top_k": 3, "max_tokens": 3}, "probe_every": 1}
WATCHING |= {"best": "reward/mean", "watch_every": 1}
SELDOM = {"probe_every": 2, "watch_every": 2}


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """Three steps that are looked at, with probes after the second and third."""
    return run(tmp_path_factory.mktemp("runs") / "watched", reward=Grumpy(), **WATCHING | SELDOM)


def test_no_look_changes_a_number_of_the_training(watched, tmp_path):
    bare = run(tmp_path / "bare", reward=Grumpy(), probes=0, watch_every=0)
    assert told(bare, "evaluate/", "probe/") == told(watched, "evaluate/", "probe/") and same(bare, watched)
    kept = [{k: d.get(k) for k in ("step", "histograms")} for d in distributions(bare.path)]
    assert kept == [{k: d[k] for k in ("step", "histograms")} for d in distributions(watched.path)]


@pytest.mark.slow
def test_a_share_stays_held_out_when_the_run_is_resumed(tmp_path, capsys):
    """Training never draws it, in as many steps as pass over all tasks several times."""
    tasks = [Task(a + b, a + b) for a in "abcd" for b in "efgh"]
    given = RUN | {"evaluate": "25%", "steps": 6, "batch": 8, "probes": 0}
    whole = train(model(), tasks, count_a, out=tmp_path / "whole", **options(**given))
    assert "4 of 16 tasks are held out (evaluate=25%, seed 0)" in capsys.readouterr().out
    held_out = [rollout.task.id for rollout in whole.after.rollouts]
    drawn = [row["task"] for path in (whole.path / "rollouts").iterdir() for row in pq.read_table(path).to_pylist()]
    assert len(drawn) == 48 and {*drawn} | {*held_out} == {task.id for task in tasks} and not {*drawn} & {*held_out}
    cut(tmp_path / "cut", 3, tasks=tasks, **given)
    again = train(model(), tasks, count_a, out=tmp_path / "cut", resume=True, tokenizer=letters())
    assert [rollout.task.id for rollout in again.after.rollouts] == held_out and told(again) == told(whole)


# --- held-out tasks ---------------------------------------------------------------------------------------------------
def test_held_out_tasks_have_samples_and_seeds_of_their_own():
    asked = learner()
    own = EvaluationOptions(samples=3, seeds=(1, 2), sampling={"max_new_tokens": 2})
    made = Evaluator(asked, HELD_OUT, count_a, own)()
    assert [r.task.id for r in made.rollouts] == [t for _ in range(2) for t in TASKS for _ in range(3)]
    assert max(len(r.ids) for r in made.rollouts) == 2
    said = [tuple(r.ids) for r in made.rollouts]
    assert len(set(said[:3])) > 1 and said[:15] != said[15:]
    metrics = made.metrics()
    assert metrics["evaluate/reward"] == pytest.approx(sum(made.scores) / 30)
    best = [max(made.scores[i : i + 3]) for i in range(0, 30, 3)]
    assert metrics["evaluate/best_of_k"] == pytest.approx(sum(best) / 10)
    one = Evaluator(asked, HELD_OUT, count_a, EvaluationOptions(seeds=(2,)))()
    assert [tuple(r.ids)[:2] for r in one.rollouts] == said[15::3]  # the same seed, the first sample of each
    greedy = EvaluationOptions(seeds=(1, 2), sampling={"top_k": 1})
    likeliest = [r.ids for r in Evaluator(asked, HELD_OUT, count_a, greedy)().rollouts]
    assert likeliest[:5] == likeliest[5:]
    with torch.no_grad():
        first = asked.policy.model(torch.tensor([letters().encode("ab", add_special_tokens=False)])).logits[0, -1]
    assert likeliest[0][0] == int(first.argmax())


@cases(("reward/mean", max), ("kl/per_reply", min))
def test_the_best_model_is_kept_by_any_metric(name, choose, watched, tmp_path):
    made = watched if choose is max else run(tmp_path / "r", best=f"-{name}", probes=0)
    told_best = json.loads((made.path / "best/best.json").read_text(encoding="utf-8"))
    assert told_best["value"] == choose(m[name] for m in made.metrics)
    assert made.metrics[told_best["step"] - 1][name] == told_best["value"]
    kept, last = load_policy(str(made.path / "best")), made.policy
    same = all(torch.equal(a, b) for a, b in zip(kept.model.parameters(), last.model.parameters(), strict=True))
    assert same == (told_best["step"] == 3)


# --- probes -----------------------------------------------------------------------------------------------------------
def test_probes_begin_as_the_reference_and_are_told_by_token(watched):
    folder = watched.path / "probes"
    written = [f"step-{n:05d}.parquet" for n in (0, 2, 3)]
    assert sorted(p.name for p in folder.iterdir()) == ["reference.parquet", *written]
    first, theirs = (pq.read_table(folder / n).to_pylist() for n in ("step-00000.parquet", "reference.parquet"))
    last = pq.read_table(folder / "step-00003.parquet").to_pylist()
    assert [r["reply"] for r in first] == [r["reply"] for r in theirs]  # a copy, the same random numbers
    assert [r["reply"] for r in last] != [r["reply"] for r in theirs]
    assert [r["task"] for r in first] == [r["task"] for r in last] and len(first) == len(TASKS)
    for row in last:
        assert len(row["tokens"]) == len(row["ids"]) == len(row["values"]) == len(row["kl"]) == len(row["advantages"])
        assert re.sub("<.*?>", "", "".join(row["tokens"])) == row["reply"]  # a reply's text has no special tokens
    assert all(k == pytest.approx(0, abs=1e-5) for row in first for k in row["kl"])
    metrics = {m["step"]: m for m in watched.metrics}
    assert metrics[3]["probe/reward"] == pytest.approx(sum(r["reward"] for r in last) / 5)
    kl = [sum(r["logprobs"]) - sum(r["ref_logprobs"]) for r in last]
    assert metrics[3]["probe/kl_per_reply"] == pytest.approx(sum(kl) / 5)
    assert metrics[3]["probe/reference_reward"] == pytest.approx(sum(r["reward"] for r in theirs) / 5)
    assert "probe/reward" not in metrics[1]


class Silent(NativeEngine):
    """As a server, it gives log-probs of what could be drawn, and does not say what that was."""

    def generate(self, prompts, sampling, keys):
        return [replace(made, allowed=None) for made in super().generate(prompts, sampling, keys)]


def test_a_reference_that_is_another_model_answers_for_itself():
    other = model()
    for p in other.parameters():
        p.data *= 2
    asked = learner(reference=Policy(other), engine=Silent)
    made = Evaluator(asked, HELD_OUT, count_a, EvaluationOptions(sampling={"top_k": 1}))()
    said = [(turn.prompt, turn.action) for rollout in made.rollouts for turn in rollout.turns]
    kl = [float((bare_logprobs(asked.policy.model, *one) - bare_logprobs(other, *one)).sum()) for one in said]
    assert made.kl == pytest.approx(sum(kl) / 5, abs=1e-4) and abs(made.kl) > 1e-3
    probes = Probes(asked, HELD_OUT, count_a)
    mine, theirs = [[row["ids"] for row in rows] for rows, _ in (probes.ask(), probes.ask_reference())]
    alone = Probes(Learner(other, tokenizer=letters(), max_tokens=6), HELD_OUT, count_a)
    assert theirs == [row["ids"] for row in alone.ask()[0]] != mine


def test_a_reward_that_fails_on_probes_stops_nothing(tmp_path):
    def picky(rollouts):
        if rollouts[0].task.id.startswith("probe/"):
            raise RuntimeError("not in the mood")
        return count_a(rollouts)

    assert len(run(tmp_path / "r", picky, steps=1, best="select/share").metrics) == 1
    log = (tmp_path / "r/log.txt").read_text(encoding="utf-8")
    assert "the probe prompts of step 1 were left out" in log and "best=select/share: no step has measured that" in log


def test_pieces_of_tokens_join_to_the_text():
    tokenizer, text = load_tokenizer(BUILTIN / "reviews-lm"), "The film wasn't bad at all: 3 stars, but fun."
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = token_pieces(tokenizer, ids)
    assert len(pieces) == len(ids) > 10 and "".join(pieces).strip() == text


# --- what the query decides -------------------------------------------------------------------------------------------
def test_the_share_of_the_query_is_the_intraclass_correlation(monkeypatch):
    # Shrout and Fleiss (1979), table 2: six targets, four judges; ICC(1,1) = 0.17.
    table = [(9, 2, 5, 8), (6, 1, 3, 2), (8, 4, 6, 8), (7, 1, 2, 6), (10, 5, 6, 9), (6, 2, 4, 7)]
    scores = [float(x) for row in table for x in row]
    groups = [i for i, row in enumerate(table) for _ in row]
    assert query_share(scores, groups) is None  # six queries are too few
    sixteen = [g for g in range(8) for _ in range(2)]
    assert query_share([float(g) for g in sixteen], sixteen) == 1.0
    assert query_share([float(i % 2) for i in range(16)], sixteen) == 0.0 and query_share([1.0] * 16, sixteen) is None
    monkeypatch.setattr("operant.metrics.collect.GROUPS", 6)
    assert query_share(scores, groups) == pytest.approx(0.166, abs=5e-4)


# --- distributions ----------------------------------------------------------------------------------------------------
def test_distributions_count_every_reply_and_token(watched):
    for step, held in enumerate(distributions(watched.path), 1):
        rows = pq.read_table(watched.path / f"rollouts/step-{step:05d}.parquet").to_pylist()
        said = {
            "reward": [r["reward"] for r in rows],
            "kl_per_reply": [sum(r["logprobs"]) - sum(r["ref_logprobs"]) for r in rows],
            "logprobs": [x for r in rows for x in r["logprobs"]],
            "values": [x for r in rows for x in r["values"]],
            "reply_tokens": [float(len(r["ids"])) for r in rows],
        }
        for name, values in said.items():
            counted = Histogram.from_plain(held["histograms"][name])
            assert sum(counted.counts) == len(values), name
            if name in ("reward", "reply_tokens", "logprobs"):
                assert counted == Histogram.of(values), name
        assert ("gradients" in held) == (step % 2 == 1)
        assert set(held["blocks"]["gradient"]) == {"embedding", "block 0", "block 1", "final", "value"}


def test_norms_of_blocks_add_up_to_the_whole():
    one = learner(epochs=1, **{"optimizer.lr": 1e-2})
    before = {n: p.clone() for n, p in one.policy.named_parameters()}
    metrics = one.step(one.generate(["ab"] * 4), [1.0, 0.0, 0.5, 2.0])
    blocks = one.distributions["blocks"]
    assert sum(x**2 for x in blocks["gradient"].values()) ** 0.5 == pytest.approx(metrics["update/grad_norm"], rel=1e-5)
    assert metrics["update/grad_norm_clipped"] == pytest.approx(min(metrics["update/grad_norm"], 1.0), rel=1e-5)
    moved = {n: p.detach() - before[n] for n, p in one.policy.named_parameters()}
    norm = sum(float(d.pow(2).sum()) for n, d in moved.items() if ".h.1." in n) ** 0.5
    assert blocks["update"]["block 1"] == pytest.approx(norm, rel=1e-5)
    whole = sum(float(p.detach().pow(2).sum()) for p in one.policy.parameters())
    assert sum(x**2 for x in blocks["weight"].values()) == pytest.approx(whole, rel=1e-5)
