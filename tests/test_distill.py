"""Learning from hints: what the teacher reads, the divergence from it by hand, and what a hint is worth."""

from dataclasses import replace

import pytest
import torch
from cases import cases
from small_runs import same
from toys import ids, letters, lm
from worlds import Turns

from operant import Judgement, Learner, OperantError, Policy, Rollout, Step, Task, Turn, train
from operant.objectives.kl import EXACT
from operant.rollouts.collate import collate, nothing
from operant.rollouts.prompts import TeacherOptions, with_hints
from operant.training.update import weighted

T = 0.8
ASKED = Task("a", "ab", target="yes")


def episode(*pairs, task=ASKED, **more):
    """A rollout of (prompt, action) pairs of token ids."""
    return Rollout(task, 0, [Turn(list(p), list(a), [-1.0] * len(a)) for p, a in pairs], [""] * len(pairs), **more)


def read(rollout, **options):
    (made,) = with_hints([rollout], [None], letters(), TeacherOptions(**options))
    return [turn.prompt for turn in made.turns]


# --- where the hint stands --------------------------------------------------------------------------------------------
@cases(
    ({}, "the {hint}. {prompt}", ids("the yes. en go")),
    ({}, "{prompt} is {hint}!", ids("en go is yes!")),
    ({"feedback": "no"}, "{hint} {prompt}", ids("no en go")),
    ({"judgement": Judgement(0.0, {}, "", "bad")}, "{hint} {prompt}", ids("bad en go")),
    ({"judgement": vars(Judgement(0.0, {}, "", "bad"))}, "{hint} {prompt}", ids("bad en go")),  # of another process
)
def test_the_hint_stands_where_the_template_says(info, template, read_by_teacher):
    told, one = {"hint": "feedback"} if info else {}, episode((ids("en go"), ids("b")), info=info)
    assert read(one, template=template, **told) == [read_by_teacher]
    assert read(replace(one, info={}), hint="feedback", template=template) == [ids("en go")], "nothing to tell"
    assert read(episode(([1, *ids("go")], ids("b"))), template="{hint} {prompt}") == [[1, *ids("yes "), *ids("go")]]


def test_the_best_right_sibling_is_the_hint():
    """Scores above 0.5 are right: by hand, who reads whose reply; the message of a judgement where there is none."""
    told = {"info": {"judgement": Judgement(0.0, message="m")}}
    group = [episode((ids("a"), ids(x)), **told) for x in "bcde"]
    other = replace(episode((ids("a"), ids("f")), **told), group=1)
    rollouts = [replace(r, texts=[x]) for r, x in zip([*group, other], "bcdef", strict=True)]
    scores = [0.6, None, 0.9, 0.2, 1.0]
    made = with_hints(rollouts, scores, letters(), TeacherOptions(hint="sibling", right=0.5, template="{hint}{prompt}"))
    assert [r.turns[0].prompt for r in made] == [ids(x) for x in ("da", "da", "ba", "da", "ma")]
    with pytest.raises(OperantError, match="hint=sibling: the replies have no scores; give a reward"):
        with_hints(rollouts, [None] * 5, letters(), TeacherOptions(hint="sibling"))
    with pytest.raises(OperantError, match="'yes' is put into prompts, and the policy has no tokenizer: give token"):
        with_hints([other], [None], None, TeacherOptions())


def test_a_chat_gets_its_hint_in_the_last_message():
    tokenizer = letters("{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}a")
    talk = [{"role": "system", "content": "go"}, {"role": "user", "content": "ab"}]
    asked = tokenizer.apply_chat_template(talk, return_dict=True)["input_ids"]
    rollout = episode((asked, ids("b")), task=Task("a", talk, target="x"))
    (made,) = with_hints([rollout], [None], tokenizer, TeacherOptions(template="{prompt} {hint}"))
    assert made.turns[0].prompt == ids("sgo.uab x.a")


def test_fresh_prompts_have_a_hint_each_and_a_row_has_one():
    fresh = episode((ids("ab"), ids("c")), (ids("de"), ids("f")))
    plain = {"template": "{hint}{prompt}"}
    assert read(fresh, hint=lambda r: ["x", ""], **plain) == [ids("xab"), ids("de")]
    assert read(fresh, hint="answer", **plain) == [ids("deab"), ids("de")]
    row = episode((ids("ab"), ids("c")), (ids("ab") + ids("c") + ids("x"), ids("f")))
    assert read(row, **plain) == [ids("yesab"), ids("yesab") + ids("c") + ids("x")]
    behind = read(row, template="{prompt}{hint}")
    assert behind == [ids("abyes"), ids("abyes") + ids("c") + ids("x")], "the row goes on behind its hint"
    with pytest.raises(OperantError, match="a hint for turn 2 of task 'a', whose prompt goes on"):
        read(row, hint=lambda r: ["x", "y"])
    assert read(replace(row, turns=[row.turns[0], replace(row.turns[1], trained=False)]), **plain)[0] == ids("yesab")


@cases(
    ("target", "task 'a' has no answer in its target to tell the teacher"),
    (lambda r: 5, "teacher.hint gave 5 for task 'a' of 1 turns"),
    (lambda r: ["x", "y"], "give a text or token ids for all of them, or a list with one"),
    (lambda r: "x" * 80, "row 0 with its hint has 8[0-9] tokens"),
)
def test_a_hint_that_cannot_be_told_is_a_sentence(hint, message):
    learner = Learner(lm(vocab=40), tokenizer=letters(), algorithm="distill", **{"teacher.hint": hint})
    with pytest.raises(OperantError, match=message):
        learner.learn([episode((ids("ab"), ids("c")), task=Task("a", "ab", {"numbers": [1]}))], None)


# --- the divergence ---------------------------------------------------------------------------------------------------
def pooled(p, q, k):
    """The log-probs of k + 1 outcomes: the k likeliest of p, and all others together."""
    if k is None:
        return p, q
    top = p.argsort(-1, descending=True)[:, :k]
    others = torch.ones_like(p, dtype=torch.bool).scatter(-1, top, False)
    return [torch.cat([x.gather(-1, top), (x.exp() * others).sum(-1, keepdim=True).log()], -1) for x in (p, q)]


def divergence(student, teacher, prompt, told, action, kind, k=None):
    """[A] by bare forward passes: before each token of the reply, over the whole vocabulary or k + 1 outcomes."""
    p = (student(torch.tensor([prompt + action])).logits[0, len(prompt) - 1 : -1].double() / T).log_softmax(-1)
    with torch.no_grad():
        q = (teacher(torch.tensor([told + action])).logits[0, len(told) - 1 : -1].double() / T).log_softmax(-1)
    p, q = pooled(p, q, k)
    m = ((p.exp() + q.exp()) / 2).log()
    kl = {name: (a.exp() * (a - b)).sum(-1) for name, a, b in (("pq", p, q), ("qp", q, p), ("pm", p, m), ("qm", q, m))}
    return {"reverse": kl["pq"], "forward": kl["qp"], "jensen_shannon": (kl["pm"] + kl["qm"]) / 2}[kind]


EPISODES = [
    episode(([3, 4], [5, 6, 7]), ([8], [9, 10])),  # two rows
    episode(([3, 4], [5, 6]), ([3, 4, 5, 6, 11], [7])),  # one row
    episode(([9, 8, 7], [4])),
]
HINTS = {0: [[12, 13], [14]], 1: [15, 16, 17], 2: None}
TOLD = [[12, 13, 3, 4], [14, 8], [15, 16, 17, 3, 4], [15, 16, 17, 3, 4, 5, 6, 11], [9, 8, 7]]
"""What the teacher reads before each of the five replies, by hand."""


@cases(
    *(("gpt2", 48_000_000, None, ways) for ways in EXACT),
    *(("gpt2", 40, 3, ways) for ways in EXACT),
    ("gpt2", 48_000_000, 500, "reverse"),
    ("llama", 40, None, "forward"),
)
def test_loss_and_gradient_are_those_of_bare_models(kind, chunk, likeliest, ways, monkeypatch):
    """Rows of other lengths for the teacher, in micro-batches of one row and in chunks of two tokens."""
    monkeypatch.setattr("operant.models.logprobs.BUDGET", chunk)
    student, teacher = lm(kind).double(), lm(kind, seed=1).double()
    rollouts = [replace(r, task=Task(str(i), [3])) for i, r in enumerate(EPISODES)]
    known = {"teacher.hint": lambda r: HINTS[int(r.task.id)], "loss.divergence": ways, "loss.likeliest": likeliest}
    known |= {"update.micro_tokens": 8 if chunk == 40 else 8192, "temperature": T, "lr": 0.0, "max_grad_norm": None}
    known |= {"reference": Policy(teacher), "keep_gradients": True}
    metrics = Learner(Policy(student), algorithm="distill", **known).learn(rollouts, None)
    mine = [p.grad.clone() for p in student.parameters()]
    twin = lm(kind).double()
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    k = 3 if likeliest == 3 else None  # 500 tokens are the whole vocabulary
    pairs = zip(turns, TOLD, strict=True)
    loss = torch.cat([divergence(twin, teacher, t.prompt, told, t.action, ways, k) for t, told in pairs]).mean()
    loss.backward()
    tolerance = 1e-9 if kind == "gpt2" else 1e-5  # llama's norms are float32
    assert metrics["distill/divergence"] == pytest.approx(float(loss.detach()), rel=tolerance)
    assert metrics["loss/total"] == pytest.approx(metrics["distill/divergence"], rel=1e-12)
    for a, b in zip(mine, twin.parameters(), strict=True):
        assert torch.allclose(a, b.grad, rtol=0, atol=tolerance * 10)


def test_a_choice_is_distilled_over_its_options():
    """The divergence of the distribution over options, by bare log-probs of each."""
    student, teacher = lm().double(), lm(seed=1).double()
    options, prompt, told = [[5, 6], [7], [8, 9, 10]], [3, 4], [12, 3, 4]
    turn = Turn(prompt, [7], [-1.0], options=options, chosen=1)
    known = {"reference": Policy(teacher), "lr": 0.0, "teacher.hint": lambda r: [12]}
    learner = Learner(Policy(student), algorithm="distill", **known)
    metrics = learner.learn([Rollout(Task("a", prompt), 0, [turn], ["x"])], None)

    def scores(model, before):
        found = []
        for option in options:
            whole = [*option, 2]
            with torch.no_grad():
                logits = model(torch.tensor([before + whole])).logits[0, len(before) - 1 : -1].log_softmax(-1)
            found.append(logits[range(len(whole)), whole].mean())
        return torch.stack(found).log_softmax(0)

    p, q = scores(student, prompt), scores(teacher, told)
    assert metrics["distill/divergence"] == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-9)


# --- the teacher ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_the_teacher_follows_by_its_rate_and_is_saved(rate, tmp_path):
    hint = {"teacher.hint": lambda r: [7, 8], "teacher.rate": rate}
    learner = Learner(lm(), algorithm="distill", lr=1e-2, max_tokens=4, seed=1, **hint)
    first = [p.clone() for p in learner.policy.model.parameters()]
    learner.learn(learner.generate([[3, 4], [5]] * 4), None)
    both = zip(first, learner.policy.model.parameters(), learner.reference.policy.model.parameters(), strict=True)
    for before, now, teacher in both:
        assert torch.allclose(teacher, before + rate * (now - before), atol=1e-6)
    learner.save(tmp_path / "learner")
    again = Learner.load(tmp_path / "learner", policy=lm(), **{"teacher.hint": hint["teacher.hint"]})
    whole, halved = (one.learn(one.generate([[3], [5, 6]] * 4), None) for one in (learner, again))
    assert whole["loss/total"] == halved["loss/total"] > 0
    learner.save(tmp_path / "learner")  # the teacher has moved meanwhile


# --- learning ---------------------------------------------------------------------------------------------------------
ANSWER = {3: 7, 4: 8, 5: 9}
"""The right reply to each question."""


@pytest.fixture(scope="module")
def told():
    """The weights of a model that says the token before a question; without one it says anything."""
    model = lm(vocab=12, spread=0.1)
    learner = Learner(model, algorithm="sft", lr=1e-2, max_tokens=1, fixed_length=True)
    said = [6, 7, 8, 9, 10]
    queries = [[hint, question] for hint in said for question in ANSWER] + [[question] for question in ANSWER] * 5
    replies = [[hint] for hint in said for _ in ANSWER] + [[hint] for hint in said for _ in ANSWER]
    for _ in range(50):
        learner.step(queries, replies)
    return model.state_dict()


def right(model):
    """The probability of the right reply without a hint."""
    with torch.no_grad():
        found = [model(torch.tensor([[q]])).logits[0, -1].softmax(-1)[a] for q, a in ANSWER.items()]
    return float(sum(found)) / len(found)


@cases((lambda r: [ANSWER[r.turns[0].prompt[-1]]], 1.0), (lambda r: [6], 0.0), ("sibling", 1.0))
def test_a_teacher_who_is_told_the_answer_teaches_it(hint, end, told):
    """Also a teacher who follows, and is told the first right reply of the policy itself (SDPO)."""
    model = lm(vocab=12)
    model.load_state_dict(told)
    own = {"teacher.hint": hint, "teacher.rate": 0.05 if hint == "sibling" else 0.0}
    learner = Learner(model, algorithm="distill", lr=5e-3, max_tokens=1, fixed_length=True, **own)
    assert 0.1 < right(model) < 0.35
    for _ in range(15):
        played = learner.generate([[question] for question in ANSWER] * 8)
        learner.step(played, [float(r.ids == [ANSWER[r.turns[0].prompt[-1]]]) for r in played])
    assert abs(right(model) - end) < 0.1


class Twice(Turns):
    """A world of two turns with fresh prompts: two questions, and the answer in the info of the end."""

    pays, first = False, Step("ab", fresh=True)

    def answer(self, slot, reply):
        last = self.turn[slot] == 2
        return Step("" if last else "cd", fresh=True, terminated=last, info={"feedback": "x"} if last else {})


def test_a_run_without_a_reward_plays_a_world_and_resumes(tmp_path):
    given = {"tasks": [f"go {i}" for i in range(4)], "algorithm": "distill", "env": Twice, "batch": 4, "probes": 0}
    given |= {"teacher.hint": "feedback", "max_tokens": 3, "tokenizer": letters(), "lr": 1e-2}
    whole = train(lm(vocab=40), out=tmp_path / "whole", steps=2, **given)
    assert whole.metrics[-1]["distill/divergence"] > 0 and "reward/mean" not in whole.metrics[-1]
    train(lm(vocab=40), out=tmp_path / "half", steps=1, **given)
    assert same(train(lm(vocab=40), out=tmp_path / "half", steps=2, resume=True, **given), whole)


def test_a_reward_is_measured_and_not_trained_on():
    ends = []
    for scores in ([1.0, 0.0, 0.5, 0.25], [0.0, 1.0, 0.0, 1.0], None):
        learner = Learner(lm(), algorithm="distill", lr=1e-2, max_tokens=3, **{"teacher.hint": lambda r: [7]})
        metrics = learner.learn(learner.generate([[3], [4], [5], [6]]), scores)
        assert metrics.get("reward/mean") == (None if scores is None else sum(scores) / 4)
        ends.append(torch.cat([p.detach().flatten() for p in learner.policy.parameters()]))
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


def test_rows_of_the_teacher_follow_those_of_the_batch():
    """Cut to some rows, the actions of both are the same tokens in the same order."""
    made = with_hints(EPISODES, [None] * 3, None, TeacherOptions(hint=lambda r: HINTS[EPISODES.index(r)]))
    both = collate(EPISODES, [0.0] * 3).with_(hinted=collate(made, [0.0] * 3))
    for rows in ([0], [2, 1], [3, 0, 2]):
        part = both.rows(torch.tensor(rows))
        assert torch.equal(part.tokens[part.actions], part.hinted.tokens[part.hinted.actions])
    assert both.sizes() == [7, 4, 9, 4]


def test_a_rank_without_replies_has_a_teacher_for_the_row_that_it_takes_part_with():
    learner = Learner(lm(), algorithm="distill", **{"teacher.hint": lambda rollout: [12]})
    part = weighted(nothing().with_(hinted=nothing()), [], learner.objective(learner.sampling))
    assert int(part.actions.sum()) == int(part.hinted.actions.sum()) == 1 and not part.weights.any()
