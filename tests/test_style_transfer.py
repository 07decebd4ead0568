"""Style transfer by prompts: rewrites and what they are worth, by stand-ins whose numbers are worked out by hand.

The stand-ins for content and style read tokens as unit vectors of their own, so BERTScore's F is the overlap of two
texts in letters, and the style of a text is that of its last letter.
"""

import ast
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from cases import cases
from completion_server import Server
from page_commands import snippets
from toys import PIECES, SPECIAL, lm, on_disk
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2Model

from operant import OperantError, Rollout, Task, rewards
from operant.apps.prompts.style_transfer import StyleTransfer, TransferQuality
from operant.apps.prompts.transfer import Rewriter, source_of
from operant.data import DataOptions, load_tasks
from operant.engines.completions import Completions
from operant.metrics.evaluation import measure, prepared, resolve
from operant.models.safe_loading import load_model, load_tokenizer
from operant.runs import named_parts
from operant.storage.hub import find_model

REVIEWS = "builtin:reviews-lm"
SIZE = 40
"""Width of the stand-ins: each token of `letters` has a coordinate of its own."""


def save(model, folder: Path) -> str:
    """Save a model whose token vectors are the unit vectors, with the tokenizer of letters."""
    body = getattr(model, "transformer", model)
    with torch.no_grad():
        body.wte.weight.copy_(torch.eye(SIZE))
        body.wpe.weight.zero_()
        body.ln_f.weight.fill_(math.sqrt((1 - 1 / SIZE) / SIZE + 1e-5))  # undoes the norm of a unit vector
        for part in (body.h[0].attn.c_proj, body.h[0].mlp.c_proj):
            part.weight.zero_()  # the block adds nothing
    return on_disk(folder, model)


def shape(**more) -> GPT2Config:
    return GPT2Config(vocab_size=SIZE, n_positions=64, n_embd=SIZE, n_layer=1, n_head=2, **SPECIAL, **more)


def classifier(folder: Path, names: tuple[str, str], odds: dict[str, float]) -> str:
    """A classifier by whose last letter a text has the second label at these odds; other letters have odds 1."""
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    model = GPT2ForSequenceClassification(shape(**labels))
    row = torch.zeros(SIZE)
    for letter, value in odds.items():
        row[PIECES.index(letter)] = math.log(value)
    row[0] = -row.sum()  # the norm takes the mean away, which is 0 so
    with torch.no_grad():
        model.score.weight.copy_(torch.stack([torch.zeros(SIZE), row]))
    return save(model, folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Folders: `reader`, `writer`, `styles` (g, h are positive, b is negative), `fluent` (b, h are acceptable)."""
    place = tmp_path_factory.mktemp("models")
    return {
        "reader": save(GPT2Model(shape()), place / "reader"),
        "styles": classifier(place / "styles", ("negative", "positive"), {"g": 9.0, "h": 3.0, "b": 1 / 3}),
        "fluent": classifier(place / "fluent", ("odd", "acceptable"), {"b": 3.0, "h": 3.0, "g": 1 / 3}),
        "writer": on_disk(place / "writer", lm("gpt2", vocab=len(PIECES))),
    }


class Script:
    """A task model that says the same texts again and again, and keeps what it was asked."""

    __name__ = "script"

    def __init__(self, *texts: str):
        self.texts, self.asked = texts, []

    def __call__(self, texts):
        self.asked += texts
        return [self.texts[i % len(self.texts)] for i in range(len(texts))]


def task(sentence: str = "acf", style: str = "positive", name: str = "t/0") -> Task:
    return Task(name, sentence, target={"sentence": sentence, "style": style})


def rollout(prompt: str = "Say it:", *given: str) -> Rollout:
    return Rollout(task(*given), 0, [], [prompt])


def reward(models, script, **options) -> StyleTransfer:
    named = {"content_model": models["reader"], "layer": 0, "style_model": models["styles"], "groups": 2, "samples": 2}
    return StyleTransfer(script, **named | options)


# --- the numbers of the reward ----------------------------------------------------------------------------------------
FOUR = ('acg" and', ' acf"', '" nothing', "xg. oh")
"""Rewrites acg, acf, an empty one, and `xg.` by its full stop.

content: 2 of 3 letters, 3 of 3, 0, 0; style: 9/10, 1/2, 0, 1/2. So they are worth 78.33, 75, 0, 25."""


def test_a_prompt_is_worth_the_mean_of_the_best_of_each_group(models):
    script = Script(*FOUR)
    (found,) = rewards.resolve(reward(models, script))([rollout()])
    assert script.asked == ['Say it: "acf" "'] * 4
    assert found.score == pytest.approx((78.3333 + 25) / 2, abs=1e-3) and found.message == "acg"
    wanted = {"content": (66.6667 + 100) / 4, "style": (90 + 50 + 50) / 4, "single": (78.3333 + 75 + 25) / 4}
    wanted |= {"top_content": 66.6667, "top_style": 90.0}
    assert found.parts == pytest.approx(wanted, abs=1e-3)


@cases(
    ({"groups": 1, "samples": 4}, 78.3333),
    ({"groups": 4, "samples": 1}, (78.3333 + 75 + 25) / 4),
    ({"baseline": 0.5}, (75 + 25) / 2),  # content (2/3 - .5) / .5 = 1/3, and 1; the best of the first group is acf
    ({"baseline": 0.9}, (75 + 25) / 2),  # 2/3 is below the baseline, and counts as 0, not less
    ({"ends": ""}, (78.3333 + 37.5) / 2),  # the last one is `xg. oh`, whose style is 3/4
)
def test_options_of_the_score(options, score, models):
    (found,) = reward(models, Script(*FOUR), **options)([rollout()])
    assert found.score == pytest.approx(score, abs=1e-3)


def test_an_embedding_counts_letters_twice_unlike_bertscore(models):
    """aac and acf: (2, 1, 0) and (1, 1, 1), 3 / sqrt(15); BERTScore: precision 3/3, recall 2/3, so .8."""
    for content, kept in (("embedding", 300 / math.sqrt(15)), ("bertscore", 80.0)):
        (found,) = reward(models, Script("aac"), content=content)([rollout()])
        assert found.parts["content"] == pytest.approx(kept, abs=1e-3)


def test_a_baseline_is_measured_on_pairs_of_sentences(models):
    """acf and acg share 2 of 3 letters, acg and xyz none: 1/3. So acg keeps (2/3 - 1/3) / (2/3) of acf, a half."""
    judged = reward(models, Script("acg"), baseline=None)
    with pytest.raises(OperantError, match="baseline=None is not measured yet"):
        judged([rollout()])
    with pytest.raises(OperantError, match="two different sentences"):
        judged.read_tasks([task(), task()])
    rewards.prepare(judged, [task(text, name=text) for text in ("acf", "acg", "xyz")])
    (found,) = judged([rollout()])
    assert found.parts["content"] == pytest.approx(50, abs=1e-3)
    assert judged.notes == ["style_transfer.baseline=0.3333, over 2 pairs of sentences"]


def test_each_task_asks_for_its_own_style(models):
    judged = reward(models, Script("acb", "acg"))
    scores = [one.parts["style"] for one in judged([rollout("p", "acf", "positive"), rollout("p", "acf", "negative")])]
    assert scores == pytest.approx([(25 + 90) / 2, (75 + 10) / 2], abs=1e-3)


# --- rewrites ---------------------------------------------------------------------------------------------------------
@cases(
    ('good food" , "bad', {}, "good food"),
    (' so good! and "', {}, "so good!"),
    ("endless", {}, "endless"),
    ("is it? No.", {"ends": ""}, "is it? No."),
    ("a) b (c", {"quote": ")"}, "a"),
    ("a]b.c", {"ends": "]"}, "a]"),
    ('"', {}, ""),
)
def test_a_rewrite_ends_with_the_quotation(text, options, rewrite):
    assert Rewriter(Script(text), **options)([("p", "s")], 1) == [[rewrite]]


PAIRS = [("Better:", "the film was dull"), ("so", "i love it and it is great"), ("Better:", "the film was dull")]


def test_rewrites_do_not_depend_on_the_batch_nor_on_other_calls():
    whole = Rewriter(REVIEWS)(PAIRS, 3)
    assert whole[0] == whole[2] and len(set(whole[0])) > 1
    small = Rewriter(REVIEWS, batch=2)
    assert small([PAIRS[1]], 3) + small([PAIRS[0]], 2) == [whole[1], whole[0][:2]]
    assert small([PAIRS[0]], 3, "evaluation")[0] != whole[0] != Rewriter(REVIEWS, seed=1)([PAIRS[0]], 3)[0]


def test_greedy_rewrites_are_those_of_transformers():
    """The likeliest tokens, at most max(1.5 n, n + 10) for a sentence of n, until the quotation or a sign ends it."""
    folder = Path(find_model(REVIEWS))
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    for (prompt, sentence), found in zip(PAIRS[:2], Rewriter(REVIEWS, top_k=1)(PAIRS[:2], 1), strict=True):
        ids = tokenizer(f'{prompt} "{sentence}" "', return_tensors="pt").input_ids
        count = len(tokenizer(sentence).input_ids)
        most = max(math.ceil(1.5 * count), count + 10)
        out = model.generate(ids, do_sample=False, max_new_tokens=most, attention_mask=torch.ones_like(ids))
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        text = text.split('"')[0].strip()
        assert found == [re.split(r"(?<=[.!?])", text)[0]]


def test_an_endpoint_draws_each_rewrite_by_itself(models, tmp_path):
    with Server(lambda body: {"text": "ac" + "gbh"[body["seed"]] + '" and'}) as server:
        client = Completions(server.url, "m", temperature=1.0, seed=0, cache=tmp_path / "a", key_variable="NONE")
        for _ in range(2):
            assert Rewriter(client)([("Say it:", "acf")], 3) == [["acg", "acb", "ach"]]
    assert [body["prompt"] for body in server.seen] == ['Say it: "acf" "'] * 3


# --- evaluation -------------------------------------------------------------------------------------------------------
def test_quality_of_single_rewrites_and_of_selected_ones_by_hand(models):
    """Rewrites of acf: acg keeps 2/3, is positive, not fluent; acb fluent, not positive; ach both; the last is empty.

    The reward prefers acg (odds 9 to 1), whose product is 0: a choice by the reward is better where it looks alone.
    """
    script = Script("acg", "acb", "ach", '"')
    given = {"model": script, "content_model": models["reader"], "layer": 0, "style_model": models["styles"]}
    metric = resolve({"style_transfer": {"reward": given, "samples": 4, "fluency_model": models["fluent"]}})
    metric[0].check()
    prepared(metric, [task()])
    found = measure(metric, [rollout()])
    ends = ("content", "style", "fluency", "joint")
    single, selected = (
        [found.of_replies[f"style_transfer/{of}{name}"][0] for name in ends] for of in ("", "selected/")
    )
    assert single == pytest.approx([50, 50, 50, 66.6667 / 4], abs=1e-3)
    assert selected == pytest.approx([66.6667, 100, 0, 0], abs=1e-3)
    assert found.of_all == pytest.approx({"style_transfer/gm": 50, "style_transfer/selected/gm": 0}, abs=1e-3)


def test_a_judge_of_its_own_measures_and_does_not_select(models, tmp_path):
    """The judge finds b positive alone; the reward still selects acg. Without fluency, joint is content times style."""
    judge = classifier(tmp_path / "judge", ("negative", "positive"), {"b": 3.0, "g": 1 / 3})
    more = {"style_judge": judge, "perplexity_model": models["writer"]}
    quality = TransferQuality(reward(models, Script("acg", "acb")), samples=2, **more)
    found = quality([rollout()])
    assert "fluency" not in found
    numbers = [found[name][0] for name in ("style", "joint", "selected/style")]
    assert numbers == pytest.approx([50, 100 / 3, 0], abs=1e-3)
    assert found["gm"] == pytest.approx(math.sqrt(66.6667 * 50), abs=1e-3)
    nats = [quality.language.nats([("", text)])[0] for text in ("acg", "acb")]
    assert found["perplexity"] == pytest.approx(math.exp(sum(n for n, _ in nats) / sum(t for _, t in nats)))
    assert found["selected/perplexity"] == pytest.approx(math.exp(nats[0][0] / nats[0][1]))


# --- tasks ------------------------------------------------------------------------------------------------------------
def formed(rows, **options):
    return load_tasks(rows, None, DataOptions(), form=named_parts.form("style_transfer", options), cue=True)


def test_a_row_asks_for_the_other_style():
    rows = [{"text": "i hate it", "label": 0}, {"text": "i love it ", "label": "positive", "reference": "i hate it"}]
    first, second = formed(rows)
    assert (first.prompt, first.target) == ("i hate it", {"sentence": "i hate it", "style": "positive"})
    assert source_of(second) == ("i love it", "negative") and second.references == ("i hate it",)
    assert [one.prompt for one in formed(rows, prompt="Rewrite:")] == ["Rewrite:", "Rewrite:"]
    assert [one.target["style"] for one in formed(rows, only="positive")] == ["negative"]
    (old,) = formed([{"line": "Go you.", "age": 1}], text="line", label="age", styles="modern,old")
    assert old.target == {"sentence": "Go you.", "style": "modern"}


@cases(
    ({"text": "a", "label": 2}, {}, "label is '2'; it must be 0, 1 or one of the styles negative, positive"),
    ({"label": 1}, {}, "reads text, and the row has no such field"),
    ({"text": "a", "label": 1}, {"styles": "good"}, "form.styles='good': name two styles"),
    ({"text": "a", "label": 1}, {"only": "good"}, "form.only='good'"),
)
def test_a_row_that_is_none_is_named(row, options, why):
    with pytest.raises(OperantError, match=re.escape(why)):
        formed([row], **options)


# --- mistakes ---------------------------------------------------------------------------------------------------------
@cases(
    (Task("t/3", "x"), "the target of the task 't/3' is None; it must hold a sentence and the style"),
    (Task("t/3", "x", target={"sentence": " ", "style": "positive"}), "it must hold a sentence and the style"),
    (Task("t/3", "x", target={"sentence": "a", "style": "happy"}), "has no label 'happy'; its labels are"),
    (task("a" * 40), "does not fit into the model's context of 64: leave it out, lower max_tokens"),
)
def test_tasks_that_cannot_be_judged_are_refused(given, why, models):
    judged = reward(models, models["writer"])
    with pytest.raises(OperantError, match=re.escape(why)):
        rewards.prepare(judged, [given])


def test_models_of_another_kind_are_refused(models, tmp_path):
    t5, bare = tmp_path / "t5", tmp_path / "bare"
    on_disk(t5, lm("t5", vocab=len(PIECES)))
    shutil.copytree(models["writer"], bare, ignore=shutil.ignore_patterns("token*", "special*"))
    for folder, why in ((t5, "does not write on behind a text"), (bare, "has no tokenizer"), ("./gone", "gone")):
        with pytest.raises(OperantError, match=why):
            rewards.check(reward(models, str(folder)))


@cases(
    (lambda texts: texts[1:], "for 4 texts: it must return a list with one answer"),
    (lambda texts: [None for _ in texts], "it must return a text for each"),
    (lambda texts: 1 / 0, "raised ZeroDivisionError"),
)
def test_a_function_that_fails_is_named(function, why, models):
    with pytest.raises(OperantError, match=why):
        reward(models, function)([rollout()])


@pytest.mark.slow
def test_the_snippet_of_the_page_runs(capsys):
    (snippet,) = snippets("docs/prompts.md#style-transfer-by-prompts")
    exec(snippet, {})
    *judged, quality, rewrites = capsys.readouterr().out.splitlines()
    assert len(judged) == 2 and all(0 < int(line.split()[0]) < 100 for line in judged)
    assert "'selected/joint'" in quality and len(ast.literal_eval(rewrites)[0]) == 3
