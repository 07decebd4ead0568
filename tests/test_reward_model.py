"""Reward models: what is read, gain and bias, the export, ensembles, training; a language model as a judge."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers as t
from cases import cases
from completion_server import Server
from scored import rollout_of
from small_runs import model
from texts import write_rows
from toys import bare_logprobs, letters, lm, on_disk

import operant
from operant import Learner, OperantError, Rollout, Task, Turn
from operant.apps.rlhf import judged_labels
from operant.apps.rlhf.reward_model import RewardModel
from operant.apps.rlhf.reward_model_score import RewardModelScore
from operant.data.demonstrations import WholeTexts
from operant.models.reference import digest
from operant.models.safe_loading import load_tensors
from operant.rewards import check, judge, resolve
from operant.tools.cli import main
from operant.tools.report.diagnosis import History, diagnose
from operant.tools.report.run_report import page_data
from operant.tools.report.summary import brief

pytestmark = pytest.mark.filterwarnings("ignore")
TINY = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def save(folder: Path, kind: str = "gpt2", pad: str | None = "<pad>") -> str:
    torch.manual_seed(1)
    config = t.BertConfig(intermediate_size=48, max_position_embeddings=64, pad_token_id=0, **TINY)
    tokenizer = letters()
    tokenizer.pad_token = pad
    return on_disk(folder, t.BertModel(config) if kind == "bert" else lm(kind, 40), tokenizer)


def labels(count: int) -> list[dict]:
    """Of three replies, the one with more of the letter e is better."""
    chance, rows = torch.Generator().manual_seed(count), []
    for i in range(count):
        replies = [" " + "".join("abcdefgh"[k] for k in torch.randint(8, (6,), generator=chance)) for _ in range(3)]
        ratings = [reply.count("e") for reply in replies]
        rows.append({"prompt": "go " + "abc"[i % 3], "replies": replies, "ratings": ratings})
    return rows


@cases(("gpt2", "<pad>"), ("gpt2", None), ("llama", "<pad>"), ("bert", "<pad>"))
def test_training_and_the_reward_read_as_transformers_does(kind, pad, tmp_path):
    model = RewardModel(save(tmp_path / "trunk", kind, pad), seed=3)
    texts = ["go a the end.a", "abc", "go b dddd ee ff gg"]
    ids = [model.tokenizer(text).input_ids for text in texts]
    tasks = [Task(text, text[:4], replies=(text[4:],), scores=(1.0,)) for text in texts if len(text) > 4]
    given = WholeTexts(model.tokenizer, None, longest=model.context).rollouts(tasks)
    assert [rollout.turns[0].prompt + rollout.turns[0].action for rollout in given] == [ids[0], ids[2]]
    model.calibrate(ids)
    ours = model.scores(ids)
    assert float(ours.mean()) == pytest.approx(0, abs=1e-5)
    assert float(ours.std(correction=0)) == pytest.approx(1, abs=1e-5)
    folder = operant.models.loading.export(model, tmp_path / "export")
    theirs = t.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = t.AutoTokenizer.from_pretrained(folder)
    by_hand = []
    for text in texts:  # one at a time: nothing is padded
        out = float(theirs(**tokenizer(text, return_tensors="pt")).logits)
        by_hand.append(theirs.config.reward_gain * out + theirs.config.reward_bias)
    assert ours.tolist() == pytest.approx(by_hand, abs=1e-5)
    rollouts = [Rollout(Task("t", ""), 0, [], [text[4:]], query=text[:4]) for text in texts]
    assert RewardModelScore(str(folder))(rollouts) == pytest.approx(by_hand, abs=1e-5)
    assert RewardModel(str(folder)).scores(ids).tolist() == pytest.approx(by_hand, abs=1e-5)


def test_the_head_is_drawn_as_in_the_paper_and_not_reported_as_missing(tmp_path, caplog):
    trunk = save(tmp_path / "trunk")
    heads = [RewardModel(trunk, seed=seed).network.score.weight for seed in range(12)]
    assert float(torch.cat([head.flatten() for head in heads]).std()) == pytest.approx(33**-0.5, rel=0.1)
    assert "MISSING" not in caplog.text


@pytest.mark.slow
def test_it_learns_preferences(tmp_path):
    rows = write_rows(tmp_path / "labels.jsonl", labels(200))
    given = {"steps": 40, "batch": 16, "lr": 2e-3, "loss": {"kind": "ranking"}, "quiet": True, "out": tmp_path / "run"}
    policy = {"name": "reward_model", "trunk": save(tmp_path / "trunk")}
    model, right = RewardModel(str(operant.train(policy, rows, algorithm="reward-model", **given).path)), []
    for row in labels(101):
        scores = model.scores([model.tokenizer(row["prompt"] + reply).input_ids for reply in row["replies"]]).tolist()
        rated = [*zip(row["ratings"], scores)]
        right += [one[1] > other[1] for one in rated for other in rated if one[0] > other[0]]
    assert sum(right) / len(right) > 0.85


def test_a_run_is_resumed_to_the_bit_and_its_reward_is_frozen(tmp_path, capsys):
    trunk, rows = save(tmp_path / "trunk"), write_rows(tmp_path / "rows.jsonl", labels(24))
    common = ["--tasks", rows, "--trunk", trunk, "--batch", "8", "--quiet", "--kind", "ranking", "--steps", "2"]
    common += ["--evaluate", rows]
    assert main(["reward-model", *common, "--out", str(tmp_path / "whole")]) == 0
    pairs = [(a, b) for row in labels(24) for a in row["ratings"] for b in row["ratings"] if a > b]
    judged = page_data(tmp_path / "whole")["labels"]
    named = {"name": "unnamed", "of": len(pairs), "right": judged["right"]}
    assert judged["of"] == len(pairs) and judged["labellers"] == [named]
    assert brief(tmp_path / "whole").startswith("share of pairs in the right order 0.")
    given = {"evaluate": rows, "recipe": "reward-model", "tasks": rows, "trunk": trunk, "batch": 8, "kind": "ranking"}
    for run in operant.api.runs(**given, steps=2, quiet=True, out=tmp_path / "parts"):
        if len(run.metrics) == 1:
            break
    assert main(["train", "--resume", str(tmp_path / "parts")]) == 0
    ends = [load_tensors(tmp_path / name / "export/model.safetensors") for name in ("whole", "parts")]
    assert digest(ends[0]) == digest(ends[1])
    out, policy = tmp_path / "ppo", save(tmp_path / "policy")
    reward = resolve(str(tmp_path / "whole"))
    reward.check()
    before = digest(reward.members[0]._load()[0].state_dict())
    (tmp_path / "prompts.txt").write_text("go a\ngo b\n")
    operant.train(policy, str(tmp_path / "prompts.txt"), reward, steps=2, batch=4, max_tokens=4, quiet=True, out=out)
    assert digest(reward.members[0]._load()[0].state_dict()) == before
    named = ["--tasks", str(tmp_path / "prompts.txt"), "--reward", str(tmp_path / "whole"), "--steps", "1"]
    named += ["--batch", "4", "--max-tokens", "4", "--quiet", "--out"]
    assert main(["train", "--policy", str(out), *named, str(tmp_path / "again")]) == 0  # a run's folder is a model
    assert operant.runs.folder.read_config(tmp_path / "again")["policy"].endswith("ppo/export")
    capsys.readouterr()
    assert main(["train", "--policy", str(tmp_path / "whole"), *named, str(tmp_path / "odd")]) == 2
    assert "is a classifier or a reward model, and no language model" in capsys.readouterr().err
    assert main(["reward-model", *common, "--reward", "letters:e", "--out", str(tmp_path / "odd")]) == 2
    assert "it generates no replies that could be scored" in capsys.readouterr().err


def fixed(**known):
    """A member of an ensemble with known scores of texts."""
    return SimpleNamespace(tokenizer=None, labels=1, score=lambda texts: [known[text] for text in texts])


@cases(("mean", [2.0, 5.0]), ("min", [1.0, 5.0]), ("lower", [1.0, 5.0]))
def test_ensembles_and_references_by_hand(combine, wanted):
    reward = RewardModelScore("a,b", combine=combine)
    reward.members = [fixed(pa=1.0, pb=5.0, pr=0.5), fixed(pa=3.0, pb=5.0, pr=0.5)]
    rollouts = [Rollout(Task(n, "p", references=("r",) * (n == "a")), 0, [], [n], query="p") for n in "ab"]
    assert reward(rollouts) == pytest.approx(wanted)
    reward.minus_reference = True
    assert reward(rollouts) == pytest.approx([wanted[0] - 0.5, wanted[1]])


@cases(("min", -1.0), ("mean", 2.0), ("last", 4.0), ("none", 4.0))
def test_the_score_of_steps_by_hand(steps, wanted):
    """Each line that has text ends a step; the reply is read from its beginning to that end."""
    reward = RewardModelScore("a", steps=steps)
    reward.members = [fixed(**{"p1": 3.0, "p1\n\n2": -1.0, "p1\n\n2\n3": 4.0})]
    assert reward([Rollout(Task("a", "p"), 0, [], ["1\n\n2\n3"], query="p")]) == [pytest.approx(wanted)]


def test_held_out_labels_by_hand():
    """Anna prefers x to y (2 nats right) and y to z (1 nat wrong); Bo says that a and b are equal, and c is worse."""

    def replies(place, who, **labels):
        given = {text: [Turn([1], [2], reward=label)] for text, label in labels.items()}
        return [Rollout(Task(who, "q", who), place, turns, [text], query="q") for text, turns in given.items()]

    rollouts = replies(0, "anna", x=3.0, y=2.0, z=1.0) + replies(1, "bo", a=1.0, b=1.0, c=0.0)
    found = list(judged_labels.judgements(rollouts, [2.0, 0.0, 1.0, 0.5, 1.0, 0.5], single=False))
    assert [(one.better, one.worse, one.gap) for one in found] == [
        *[("x", "y", 2.0), ("x", "z", 1.0), ("y", "z", -1.0)],
        *[("a", "c", 0.0), ("b", "c", 0.5)],
    ]
    summary = judged_labels.summary(found)
    assert summary["labellers"] == [{"name": "anna", "of": 3, "right": 2.0}, {"name": "bo", "of": 2, "right": 1.5}]
    sure = {"0.5": 0.5, "0.6": 1 / (1 + math.exp(-0.5)), "0.7": 1 / (1 + math.e**-1), "0.8": 1 / (1 + math.e**-2)}
    assert {f"{bin['from']:.1f}": bin["confidence"] for bin in summary["calibration"]} == pytest.approx(sure)
    assert [(bin["of"], bin["right"]) for bin in summary["calibration"]] == [(1, 0.5), (1, 1.0), (2, 0.5), (1, 1.0)]
    assert [(one["better"], one["worse"], one["scores"]) for one in summary["worst"]] == [("y", "z", [0.0, 1.0])]
    single = list(judged_labels.judgements(rollouts[3:], [0.5, -1.0, 0.5], single=True))
    assert [(one.gap, one.good) for one in single] == [(0.5, True), (-1.0, True), (-0.5, False)]


def test_what_cannot_work_is_refused(tmp_path):
    trunk, bare, three = save(tmp_path / "trunk"), str(tmp_path / "bare"), str(tmp_path / "three")
    lm("gpt2", 40).save_pretrained(bare)
    config = t.DistilBertConfig(vocab_size=40, dim=32, n_layers=1, n_heads=2, id2label={0: "a", 1: "b", 2: "c"})
    seq2seq = on_disk(tmp_path / "t5", lm("t5"))
    on_disk(tmp_path / "three", t.DistilBertForSequenceClassification(config))
    learner = Learner(RewardModel(trunk), algorithm="reward-model")
    assert "preference/loss" in learner.step(["go", "go"], ["a", "b"], [1.0, 0.0])

    def trained(rows, **options):
        given = {"name": "reward_model", "trunk": trunk}
        operant.train(given, rows, algorithm="reward-model", steps=1, out=tmp_path / "run", **options)

    one_class = [{"prompt": "go", "replies": ["a", "b"], "ratings": [1, 1]}]
    single = [{"prompt": "go", "completion": "a", "label": True}]
    for make, words in (
        (lambda: RewardModel(bare), "has no tokenizer"),
        (lambda: RewardModel(three), "a classifier with 3 labels"),
        (lambda: RewardModel(seq2seq), "is an encoder-decoder: give a causal model"),
        (lambda: RewardModelScore(three).check(), "has 3 labels: use classifier:"),
        (lambda: Learner(trunk, algorithm="reward-model"), "use policy=reward_model"),
        (lambda: Learner(RewardModel(trunk), algorithm="rloo", reference=None).generate(["go"]), "and generates none"),
        (lambda: RewardModelScore("a", combine="max"), "mean, min or lower"),
        (lambda: RewardModelScore("a", combine="min"), "there is one model"),
        (lambda: RewardModelScore("a", steps="max"), "none, min, mean or last"),
        (lambda: RewardModel(trunk).calibrate([[5, 6]] * 3), "the same score"),
        (lambda: learner.step(["go"], ["a"]), r"use step\(queries, responses, scores\)"),
        (lambda: trained(one_class, loss={"kind": "pairwise"}), "two replies with different labels"),
        (lambda: trained(single, loss={"ties": "davidson"}), "none of 1 prompts has two replies"),
        (lambda: trained(one_class, loss={"kind": "rating"}), "all ratings are 1"),
        (lambda: trained(one_class, loss={"kind": "good"}), "all labels are"),
        (lambda: trained([{"text": "x"}]), "no labelled replies"),
    ):
        with pytest.raises(OperantError, match=words):
            make()


def test_a_model_that_only_guesses_is_named():
    measured = {"preference/accuracy": 0.51, "preference/longer_is_better": 0.56}
    history = History([{"step": 1, "preference/loss": 0.7}], evaluation={"after": {"metrics": measured}})
    (finding,) = diagnose(history)
    assert finding.name == "guesses" and "51 % of the held-out pairs" in finding.message
    assert "the longer reply gets 56 %" in finding.message and "noisy or few" in finding.cause
    measured |= {"preference/accuracy": 0.97, "preference/longer_is_better": 1.0}
    assert "its length may be all" in diagnose(history)[0].cause
    measured |= {"preference/accuracy": 0.62, "preference/longer_is_better": 0.56}
    assert diagnose(history) == []


# --- a judge ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("judge"), model())


@pytest.fixture
def server():
    """A chat model that finds each reply as good as it has a's, of which it says how likely yes is."""

    def reply(body):
        yes = min(0.9, 0.1 + 0.2 * body["messages"][-1]["content"].partition("|")[2].count("a"))
        listed = [{"token": " yes", "logprob": math.log(yes)}, {"token": "no", "logprob": math.log((1 - yes) / 2)}]
        return {"logprobs": {"content": [{"top_logprobs": listed}]}, "message": {"content": "yes"}}

    with Server(reply) as made:
        yield made


@pytest.mark.filterwarnings("ignore:judge")
def test_a_scale_of_words_by_hand(folder):
    """The model's own log-probs of three words behind the question, by a plain forward pass in float64."""
    reward = resolve(f"judge:{folder}", {"template": "{query}{reply}", "words": "a,b,c"})
    check(reward)
    twin, tokenizer = model().double(), letters()
    read = tokenizer("abce")["input_ids"]
    words = [tokenizer(f" {word}", add_special_tokens=False)["input_ids"] for word in "abc"]
    p = torch.stack([bare_logprobs(twin, read, word).sum() for word in words]).softmax(0)
    found = judge(reward, [rollout_of(reply, query="ab") for reply in ("ce", "ce", "c")])
    assert found.scores[0] == found.scores[1] == pytest.approx(float(p[0] + p[1] / 2), rel=1e-5)


def test_an_endpoint_is_asked_once_for_each_question(server, tmp_path):
    spec, how = f"judge:{server.url}#m", {"template": "{target}|{reply}", "words": "yes,no"}
    reward = resolve(spec, how | {"cache": str(tmp_path / "answers.sqlite")})
    replies = [rollout_of("aa", target="x"), rollout_of("b", target="x"), rollout_of("aa", target="x")]
    expected = [yes / (yes + (1 - yes) / 2) for yes in (0.5, 0.1)]
    assert judge(reward, replies).scores == pytest.approx([expected[0], expected[1], expected[0]])
    assert [body["messages"][0]["content"] for body in server.seen].count("x|aa") == 1 and len(server.seen) == 2


def test_the_agreement_with_gold_labels_is_said(server, tmp_path):
    """Three pairs, of which one is a tie and one is wrong, and a single reply that is called good: 1 + .5 + 0 + 1."""
    rows = [
        {"prompt": "p", "chosen": "aaa", "rejected": "b"},
        {"prompt": "q", "chosen": "a", "rejected": "ab"},
        {"prompt": "r", "chosen": "b", "rejected": "aa"},
        {"prompt": "s", "completion": "aaa", "label": True},
    ]
    path = write_rows(tmp_path / "gold.jsonl", rows)
    reward = resolve(f"judge:{server.url}#m", {"template": "|{reply}", "gold": path})
    check(reward)
    check(reward)
    agreed = [note.partition("agrees with ")[2] for note in reward.notes]
    assert agreed == [f"2.5 of 4 labels of {path} (62%; chance 50%)"]


def test_words_that_the_model_never_says_are_told(folder):
    with pytest.warns(UserWarning, match="gives the words qq, zz .* say little: ask for these words"):
        judge(resolve(f"judge:{folder}", {"words": "qq,zz", "template": "{reply}"}), [rollout_of("a")])


def test_labels_that_are_all_equal_are_refused(server, tmp_path):
    path = write_rows(tmp_path / "gold.jsonl", [{"prompt": "p", "replies": ["a", "b"], "ratings": [1, 1]}])
    with pytest.raises(OperantError, match="no two labels of a prompt differ"):
        check(resolve(f"judge:{server.url}#m", {"template": "|{reply}", "gold": path}))
