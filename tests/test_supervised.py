"""Supervised training on given replies: what becomes a row, what it costs, and whole runs of it."""

import json
import math
from random import Random

import pytest
from cases import cases
from toys import bare_logprobs, ids, letters, lm, on_disk

from operant import Learner, OperantError, Rollout, Task, Turn, diagnose, train
from operant.data import DataOptions, load_tasks
from operant.data.demonstrations import Demonstrations, WholeTexts
from operant.runs.evaluate import reply_losses
from operant.tools.cli import main

CHAT = (
    "{% for m in messages %}{% if m.role == 'user' %}q{{ m.content }}.{% else %}a{{ m.content }}!{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
STOP = 2


def turns(row, *, tokenizer=None, **options):
    tokenizer = tokenizer or letters()
    (task,) = load_tasks([row], tokenizer, DataOptions(**options), with_replies=True)
    made = Demonstrations(tokenizer, STOP, options.get("loss_on") == "all", options.get("max_length"))
    (rollout,) = made.rollouts([task])
    return [(turn.prompt, turn.action) for turn in rollout.turns]


SPOKEN = zip(("user", "assistant") * 2, ("hi", "ab", "go", "cd"))
TALK = [{"role": role, "content": said} for role, said in SPOKEN]


def test_rows_of_every_form_by_hand():
    assert turns({"prompt": "ab", "completion": " cd"}) == [(ids("ab"), [*ids(" cd"), STOP])]
    assert turns({"prompt": [5, 6], "completion": [7]}) == [([5, 6], [7, STOP])]
    for row, fields in (({"answer": "y"}, {"reply_field": "answer"}), ({"completion": "y"}, {})):
        assert turns(row | {"question": "x"}, text_field="question", **fields) == [(ids("x"), [*ids("y"), STOP])]
    assert turns({"text": "abc"}) == [(ids("a"), [*ids("bc"), STOP])]
    assert turns("abc") == [(ids("a"), [*ids("bc"), STOP])]
    assert turns({"prompt": "ab", "completion": "cd"}, loss_on="all") == [(ids("a"), [*ids("bcd"), STOP])]
    assert turns({"prompt": "ab", "completion": "cdef"}, max_length=4) == [(ids("ab"), ids("cd"))]
    assert turns({"w": "x", "y": "z"}, template="in {w}:", reply_field="y") == [(ids("in x:"), [*ids("z"), STOP])]
    # A template ends an answer itself. The second turn goes on from the ids of the first.
    first = ids("qhi.a"), ids("ab!")
    second = (first[0] + first[1] + ids("qgo.a"), ids("cd!"))
    assert turns({"messages": TALK}, tokenizer=letters(CHAT)) == [first, second]
    assert turns({"prompt": TALK[:1], "completion": TALK[1:2]}, tokenizer=letters(CHAT)) == [first]
    # A greeting before the first question belongs to the prompt.
    assert turns({"messages": TALK[1:]}, tokenizer=letters(CHAT)) == [(ids("aab!qgo.a"), ids("cd!"))]


@cases(
    ({"a": 1}, r"no reply to learn from \(fields: a\).*`prompt` and `completion`"),
    ({"messages": TALK[:1]}, r"no message has the role 'assistant'"),
    ({"prompt": 5, "completion": "x"}, r"the prompt is 5; it must be text, token ids, or messages"),
    ({"prompt": "x", "completion": None}, r"the reply is None; it must be text"),
    ({"messages": TALK}, r"a list of messages, and the tokenizer has no chat template"),
    ({"prompt": "abcdefgh", "completion": "x"}, r"its prompt of 8 tokens leaves nothing.*--data.max-chars"),
    ({"messages": TALK[1:2]}, r"no message stands before the answer"),
    (Task("mine", "x"), r"the task 'mine' has no replies"),
    ({"messages": [*TALK[:1], {"role": "assistant", "content": None}]}, r"messages with role and content as text"),
    ({"messages": [*TALK[:1], {"role": "assistant", "content": [{"type": "text", "text": "hi"}]}]}, "content as text"),
    ({"prompt": TALK[:1], "completion": TALK[:1]}, r"the reply has no message with role 'assistant'"),
    ({"prompt": TALK[:1], "replies": [TALK[:1]]}, r"task '[^']+': the reply has no message with role 'assistant'"),
)
def test_a_row_that_cannot_be_learnt_from_is_refused_by_name(row, message):
    with pytest.raises(OperantError, match=message):
        turns(row, max_length=8)


@cases(Demonstrations(letters(), STOP, encoder_decoder=True), WholeTexts(letters(), None))
def test_half_a_surrogate_pair_in_a_reply_is_refused(reading):
    with pytest.raises(OperantError, match="half a surrogate pair"):
        reading.rollouts([Task("a", "ab", replies=("c\ud83d",))])


@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5"])
def test_the_loss_is_the_cross_entropy_of_the_replies(kind):
    """By bare forward passes of single rows; temperature, minimum length and bans are about samples alone."""
    pairs = [("ab", "cde"), ("b", "a"), ("the", "en go"), ("ab", "x")]
    model = lm(kind, vocab=40).double()
    given = [(ids(p), [*ids(r), STOP]) for p, r in pairs]
    right = [float(-bare_logprobs(model, p, r).sum()) for p, r in given]
    known = {"temperature": 0.5, "min_tokens": 5, "banned": (7,), "max_tokens": 9, "lr": 0.0}
    learner = Learner(model, tokenizer=letters(), algorithm="sft", **known)
    metrics = learner.step([p for p, _ in pairs], [r for _, r in pairs])
    tokens, size = sum(len(r) for _, r in given), sum(len(r) for _, r in pairs)
    assert metrics["supervised/loss"] == pytest.approx(sum(right) / tokens, rel=1e-6)
    assert metrics["supervised/bits_per_byte"] == pytest.approx(sum(right) / math.log(2) / size, rel=1e-6)
    assert metrics["loss/total"] == pytest.approx(metrics["supervised/loss"])
    assert not [name for name in metrics if name.startswith(("reward/", "kl/", "value/"))]
    tasks = [Task(str(i), p, replies=(r,)) for i, (p, r) in enumerate(pairs)]
    found = reply_losses(Demonstrations(letters(), STOP, encoder_decoder=kind == "t5").rollouts(tasks), learner.policy)
    assert [g.nats for g in found] == pytest.approx(right, rel=1e-6)
    assert [g.bytes for g in found] == [len(r) for _, r in pairs]


def test_bits_per_byte_are_those_of_trained_turns():
    model = lm(vocab=40).double()
    turns = [Turn(ids("a"), ids("xyxyxyx"), trained=False), Turn([*ids("axyxyxyx"), *ids("b")], [*ids("cd"), STOP])]
    rollout = Rollout(Task("0", "a"), 0, turns, ["xyxyxyx", "cd"], demonstrated=True)
    right = float(-bare_logprobs(model, turns[1].prompt, turns[1].action).sum()) / math.log(2) / 2
    learner = Learner(model, tokenizer=letters(), algorithm="sft", lr=0.0, epochs=1)
    assert learner.learn([rollout], None)["supervised/bits_per_byte"] == pytest.approx(right, rel=1e-6)
    (held,) = reply_losses([rollout], learner.policy)
    assert (held.tokens, held.bytes) == (3, 2)


def test_given_replies_take_no_scores():
    learner = Learner(lm(), algorithm="sft")
    with pytest.raises(OperantError, match=r"scores: algorithm sft learns from demonstrations"):
        learner.step([[5]], [[6]], [1.0])
    with pytest.raises(OperantError, match=r"these are the policy's own replies with scores"):
        learner.step(learner.generate([[5]]), [1.0])
    for name in ("groups", "generation"):
        with pytest.raises(OperantError, match=name):
            learner.step([[5]], [[6]], **{name: [0]})


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model folder, and tasks: two letters, and another one that the second of them decides."""
    place = tmp_path_factory.mktemp("sft")
    on_disk(place / "model", lm("gpt2", vocab=40, spread=0.05))
    rows = [{"prompt": f"{a}{b}", "completion": chr(ord(b) + 8)} for a in "abcdefgh" for b in "abcdefgh"]
    (place / "train.jsonl").write_text("\n".join(json.dumps(r) for i, r in enumerate(rows) if i % 5), encoding="utf-8")
    (place / "held.jsonl").write_text("\n".join(json.dumps(r) for r in rows[::5]), encoding="utf-8")
    return place


def started(files, out, *more):
    places = {"policy": files / "model", "tasks": files / "train.jsonl", "evaluate": files / "held.jsonl", "out": out}
    options = places | {"batch": 16, "optimizer.lr": 1e-2, "max-tokens": 5, "watch-every": 0}
    words = [word for name, value in options.items() for word in (f"--{name}", f"{value}")]
    return main(["train", "sft", *words, *more])


def test_the_command_line_learns_and_evaluates(files, tmp_path, capsys):
    out = tmp_path / "whole"
    assert started(files, out, "--steps", "24", "--evaluate-every", "8") == 0
    told = capsys.readouterr().out
    before_after = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    before, after = before_after["before"]["loss"], before_after["after"]["loss"]
    assert before > 3 and after < 0.5 * before and before_after["after"]["bits_per_byte"] < 4
    assert f"loss on 13 held-out replies: {before:.3f} -> {after:.3f} nats per token" in told
    assert "It learned: held-out loss" in told and "nothing looks wrong" in told
    assert "  from the data: " in told and "\n  after  |" in told  # the policy's own answers at the end
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "supervised/loss" in page and "evaluate/loss" in page
    assert (out / "probes").is_dir() and main(["generate", str(out), "--prompt", "ab"]) == 0


@pytest.mark.slow
def test_rows_that_are_learnt_by_heart_are_a_finding(files, tmp_path):
    """Replies that nothing decides: the loss on the rows falls, the one on others rises."""
    names, random = [f"{a}{b}" for a in "abcdefgh" for b in "abcdefgh"], Random(1)
    tasks = [Task(n, n, replies=("".join(random.choices("ijklmnop", k=4)),)) for n in names]
    options = {"batch": 24, "steps": 60, "evaluate_every": 10, "optimizer.lr": 1e-2, "sampling.max_tokens": 6}
    given = {"tasks": tasks[:24], "evaluate": tasks[24:], "algorithm": "sft", "probes": 0, "out": tmp_path / "run"}
    run = train(str(files / "model"), **given, **options)
    held = [m["evaluate/loss"] for m in run.metrics if "evaluate/loss" in m]
    (found,) = diagnose(run)
    assert found.name == "overfits" and f"{min(held):.3g}" in found.message and f"{held[-1]:.3g} now" in found.message
    assert held[-1] > min(held) and run.metrics[-1]["supervised/loss"] < run.metrics[0]["supervised/loss"]


@cases(
    ({"kl.coef": 0.1}, "algorithm sft has no reference"),
    ({"samples": 2}, "it has demonstrations; use 1"),
    ({"score.scale": True}, "algorithm sft has no reward"),
    ({"query_tokens": 5}, "demonstrations need their whole prompts"),
    ({"reference": "builtin:reviews-lm"}, "algorithm sft has no reference; leave"),
    ({"data.loss_on": "some"}, "replies or all"),
    ({"loss_on": "all", "algorithm": "ppo", "reward": len}, "ppo learns from replies that the policy generates"),
)
def test_what_does_not_go_with_given_replies_is_refused(given, message, files, tmp_path):
    usual = {"policy": str(files / "model"), "algorithm": "sft", "out": tmp_path / "run"}
    with pytest.raises(OperantError, match=message):
        train(**{**usual, "tasks": [{"prompt": "a", "completion": "b"}]} | given)


def test_a_row_beyond_the_context_is_refused_before_a_step(files, tmp_path):
    long = [Task("a", "ab", replies=("c",)), Task("b", "ab", replies=("c" * 70,))]
    with pytest.raises(OperantError, match=r"task 'b' has 2 tokens, and with 71 of the reply.*--data.max-length"):
        train(str(files / "model"), tasks=long, algorithm="sft", out=tmp_path / "x")
    options = {"steps": 1, "batch": 2, "probes": 0, "data.max_length": 20}
    run = train(str(files / "model"), tasks=long, algorithm="sft", out=tmp_path / "x", **options)
    assert run.metrics[0]["rollout/ended_length"] == 0.5
