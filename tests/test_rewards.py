"""Rewards: small ones against numbers by hand, the checks of every answer, and the transformations of scores."""

import asyncio
import json
import math
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import cases
from scored import fixed, rollout_of
from tokenizers_of_words import WORDS, tokenizer_of
from toys import letters, on_disk

from operant import OperantError, Rollout, Sampling, Task, Turn
from operant.data.tasks import DataOptions, load_tasks
from operant.metrics.collect import of_judged
from operant.models.model_passes import batches
from operant.rewards import check, judge, prepare, resolve, shaping
from operant.rewards.classifier import Classifier
from operant.rewards.combine import MinusQuery, weighted
from operant.rewards.failure_policy import IsolationOptions
from operant.rewards.isolated import under
from operant.rewards.shaping import RunningMoments, ScoreOptions
from operant.sandbox.reward_call import keywords


# --- small rewards ----------------------------------------------------------------------------------------------------
@cases(
    ("letters:e", " Everyone here", 3, 5.0),
    ("length:4", "", 4, 0.0),
    ("length:4", "", 7, -0.75),
    ("length:<=4", "", 1, 0.0),
    ("length:<=4", "", 6, -0.5),
    (r"pattern:^\s*[A-Z].*[.!]$", " Good film.", 3, 1.0),
    (r"pattern:^\s*[A-Z].*[.!]$", " good film", 3, 0.0),
    ("repetition:1", "a b A b c", 3, 3 / 5 - 1),
    ("repetition:2", "so good so good so", 3, 2 / 4 - 1),
    ("repetition", "too short", 3, 0.0),
)
def test_text_rewards_by_hand(spec, reply, num_tokens, expected):
    assert resolve(spec)([rollout_of(reply, ids=range(num_tokens))]) == [pytest.approx(expected)]


@cases(
    ("music", " The MUSIC.", 1.0),
    ("music", " musical, or unmusic", 0.0),
    (["milk", "tea"], " milk, no coffee", 0.5),
    ("a.m.", " at 9 a.m. sharp", 1.0),
    ("", "", "must be a word"),
    (7, " 7", "target of the task 't/0' is 7"),
    (None, "", "--data.target-field"),
)
def test_keyword_looks_for_whole_words_of_the_target(target, reply, expected):
    rollout = replace(rollout_of(reply), task=Task("t/0", [1], target))
    if isinstance(expected, str):
        with pytest.raises(OperantError, match=expected):
            resolve("keyword")([rollout])
    else:
        assert resolve("keyword")([rollout]) == [expected]


def test_ended_asks_how_the_reply_ended():
    assert resolve("ended")([rollout_of("x", end=end) for end in ("stop", "length", "cut")]) == [1.0, 0.0, 0.0]


def test_vader_by_its_own_numbers():
    pytest.importorskip("vaderSentiment")
    good, bad = resolve("vader:reply")([rollout_of(" is good"), rollout_of(" is bad", query="good")])
    # One word of valence v scores v / sqrt(v^2 + 15): the lexicon has good 1.9 and bad -2.5.
    assert good == pytest.approx(1.9 / math.sqrt(1.9**2 + 15), abs=1e-4)
    assert bad == pytest.approx(-2.5 / math.sqrt(2.5**2 + 15), abs=1e-4)
    assert resolve("vader")([rollout_of("", query="good")])[0] == good


def test_vader_missing_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    with pytest.raises(OperantError, match=r"pip install 'operant\[vader\]'"):
        check(weighted({"mood": (resolve("vader"), 1.0)}))


# --- names ------------------------------------------------------------------------------------------------------------
def my_reward(rollouts):
    return [1.0] * len(rollouts)


def test_resolve_takes_callables_names_modules_and_files(tmp_path, monkeypatch):
    assert resolve(my_reward) is my_reward
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    nice = "def nice(rollouts):\n    return [2.0]\n"
    for name, code in {"mine": nice, "broken": "import nothing_of_the_kind\n", "raising": "1 / 0\n"}.items():
        (tmp_path / f"{name}_for_a_test.py").write_text(code, encoding="utf-8")
    assert resolve("mine_for_a_test:nice")([rollout_of("")]) == [2.0]
    assert resolve("./mine_for_a_test.py:nice")([rollout_of("")]) == [2.0]
    (paid := lambda rollouts, *, pay=1.0: [pay]).check = print
    bound = resolve(paid, {"pay": 3.0})
    assert bound.check is print and bound([rollout_of("")]) == [3.0]
    for named, why in (
        ("mine_for_a_test:nic", "has no 'nic'; did you mean 'nice'"),
        ("broken_for_a_test:nice", "needs 'nothing_of_the_kind', which is not installed"),
        ("raising_for_a_test:nice", "raised ZeroDivisionError"),
    ):
        with pytest.raises(OperantError, match=why):
            resolve(named)


@cases(
    (lambda: [], "takes no argument: a reward gets the list of all replies"),
    (lambda rollouts, more: more, r"option more is missing: .* gets the list .* no default for 'more'"),
)
def test_a_function_that_is_no_reward_is_refused(reward, why):
    with pytest.raises(OperantError, match=why):
        resolve(reward)


def test_a_mapping_is_a_weighted_sum_with_parts_by_name():
    judged = judge(resolve({"letters:e": 0.5, "length:4": 2.0}), [rollout_of("eee", ids=[1, 2])])
    assert judged.scores == [0.5 * 3 + 2.0 * -0.5] and judged.parts == {"letters": [3.0], "length": [-0.5]}
    twice = judge(resolve({"letters:e": 1.0, "letters:a": -1.0, my_reward: 0.1}), [rollout_of("aae")])
    assert twice.parts == {"letters:e": [1.0], "letters:a": [2.0], "my_reward": [1.0]}
    with pytest.raises(OperantError, match=r"give each its own options"):
        resolve({"rouge": 1.0, "letters:e": 0.5}, {"several": "mean"})  # as `--reward.of-options` of a critic


# --- the checks of every answer ---------------------------------------------------------------------------------------
def test_answers_that_are_allowed():
    rollouts = [rollout_of("", ids=[1, 2, 3]) for _ in range(8)]
    answers = [1, np.float32(0.5), torch.tensor(0.25, requires_grad=True), None, [0.1, 0.2, 0.3], {"a": 1.0, "b": -3.0}]
    judged = judge(fixed([*answers, {"a": None, "b": 1.0}, {"a": None}]), rollouts)
    assert judged.scores == [1.0, 0.5, 0.25, None, [0.1, 0.2, 0.3], -2.0, 1.0, None]
    assert judged.parts["a"] == [None] * 5 + [1.0, None, None]
    assert judged.parts["fixed"] == [1.0, 0.5, 0.25, None, pytest.approx(0.6), None, None, None]
    assert judge(fixed(torch.ones(8)), rollouts).scores == [1.0] * 8
    assert judge(lambda rs: (1e18 for _ in rs), rollouts).scores == [1e18] * 8 and judge(fixed([]), []).scores == []


@cases(
    (math.nan, "nan"),
    (math.inf, "inf"),
    (torch.tensor(-math.inf), "-inf"),
    ("1.0", "'1.0', of type str"),
    ([1.0], "1 numbers where the rollout has 3 action tokens"),
    ([1.0, 2.0, math.nan], "nan"),
    (object(), "of type object"),
    ({"style": math.nan, "facts": 1.0}, "returned nan as its part 'style' for task"),
    *((score, f"returned {score:.0e} for task") for score in (3e38, -3e38)),  # whose squares overflow in float32
)
def test_an_answer_that_is_not_allowed_is_a_sentence(answer, what):
    rollouts = [rollout_of("fine"), rollout_of("x" * 200, task="imdb/17", query="A query")]
    with pytest.raises(OperantError) as caught:
        judge(fixed([1.0, answer], "politeness"), rollouts)
    message = str(caught.value)
    assert what in message
    for part in ("'politeness'", "'imdb/17'", "'A query'", "xxx...'", "return"):
        assert part in message
    assert len(message) < 400


@pytest.mark.parametrize("answers", [[1.0], [1.0] * 3, None, "ab", 1.0, {"a": 1.0, "b": 2.0}, torch.tensor(1.0)])
def test_the_wrong_number_of_answers_is_an_error(answers):
    with pytest.raises(OperantError, match=r"'fixed' returned .* for 2 rollouts .*'t/0'.*one entry per rollout"):
        judge(fixed(answers), [rollout_of(""), rollout_of("")])


def test_an_exception_names_the_sample_and_keeps_its_cause():
    prices = {f"t/{i}": 1.0 for i in range(7) if i != 4}

    def price(rollouts):
        return [prices[r.task.id] for r in rollouts]

    said = r"KeyError: 't/4' \(test_rewards.py, line \d+\) while .* task 't/4' .*None"
    with pytest.raises(OperantError, match=said) as caught:
        judge(price, [rollout_of(f"reply {i}", task=f"t/{i}") for i in range(7)])
    assert isinstance(caught.value.__cause__, KeyError)


@cases(
    (lambda rollout: len(rollout.reply), r"no attribute 'reply' \(it gets the list of all replies, and returns a"),
    (lambda rollout: rollout["reply"], r"not str \(it gets the list of all replies"),
    (lambda rollouts: sys.exit(3), r"SystemExit: 3 \(test_rewards.py, line \d+\).* --isolation.on-error drop"),
    (lambda rollouts: [json.loads(r.reply) for r in rollouts], r"\(test_rewards.py, line \d+\).*isolated:"),
)
def test_what_a_reward_raises_is_said_with_its_line_and_a_remedy(reward, said):
    with pytest.raises(OperantError, match=said):
        judge(reward, [rollout_of("ab")])


def test_async_rewards_are_awaited_together_and_keep_their_loop():
    """Each of two waits for the other."""
    events, loops = {"a": threading.Event(), "b": threading.Event()}, set()

    def meets(mine, other):
        async def of_trl(prompts, completions, **kwargs):
            loops.add(asyncio.get_running_loop())
            events[mine].set()
            assert await asyncio.to_thread(events[other].wait, 5)
            return [float(len(text)) for text in completions]

        return of_trl

    async def plain(rollouts):
        return [float(len(r.reply)) for r in rollouts]

    both = weighted({"a": (meets("a", "b"), 1.0), "b": (meets("b", "a"), 2.0), "c": (plain, 1.0)})
    for made in (under(both, IsolationOptions(on_error="drop")), both):
        judged = judge(made, [rollout_of("ab"), rollout_of("cde")])
        assert judged.scores == [8.0, 12.0] and judged.parts["c"] == [2.0, 3.0]
    assert len(loops) == 1

    async def inside():  # as in a notebook, whose thread has a loop
        return judge(plain, [rollout_of("ab")]).scores

    assert asyncio.run(inside()) == [2.0]


def test_an_exception_that_does_not_happen_again_names_no_sample():
    answers = iter([ConnectionError("reset")])

    def flaky(rollouts):
        if error := next(answers, None):
            raise error
        return [0.0] * len(rollouts)

    with pytest.raises(OperantError, match="while judging 4 rollouts, the first task 't/0'"):
        judge(flaky, [rollout_of("", task=f"t/{i}") for i in range(4)])


# --- several rewards --------------------------------------------------------------------------------------------------
def test_abstaining_in_a_weighted_sum():
    """A sample on which all parts abstain is dropped and counted, never scored 0."""
    a, b = fixed([1.0, None, None], "a"), fixed([10.0, 20.0, None], "b")
    judged = judge(weighted({"a": (a, 0.7), "b": (b, 0.3)}), [rollout_of("")] * 3)
    assert judged.scores == [pytest.approx(3.7), pytest.approx(6.0), None]
    numbers = of_judged(judged).result()
    assert (numbers["reward/b/std"], numbers["reward/b/abstained"]) == (5.0, pytest.approx(1 / 3))
    assert (numbers["reward/a/mean"], numbers["reward/b/mean"]) == (1.0, 15.0)
    assert numbers["reward/a/abstained"] == pytest.approx(2 / 3)
    with pytest.raises(OperantError, match="'b' returned nan"):
        judge(weighted({"a": (a, 0.7), "b": (fixed([1.0, math.nan, 1.0], "other"), 0.3)}), [rollout_of("")] * 3)


def test_per_token_and_whole_scores_meet_on_the_last_token():
    parts = {"tokens": (fixed([[1.0, 2.0, 3.0]]), 2.0), "whole": (fixed([0.5]), 4.0), "none": (fixed([None]), 9.0)}
    assert judge(weighted(parts), [rollout_of("")]).scores == [[2.0, 4.0, 8.0]]
    played = replace(rollout_of(""), turns=[Turn([1], [2, 3], trained=False)])  # without an action
    assert judge(weighted(parts | {"tokens": (fixed([[]]), 2.0)}), [played]).scores == [2.0]
    two = {"one": (fixed([[1.0, 2.0, 3.0]]), 1.0), "two": (fixed([[1.0, 1.0, 1.0]]), 1.0)}
    assert judge(weighted(two), [rollout_of("")]).scores == [[2.0, 3.0, 4.0]]


def test_weighted_sums_nest_and_are_plain_rewards():
    inner = weighted({"x": (fixed([2.0]), 1.0), "y": (fixed([3.0]), 1.0)})
    outer = weighted({"in": (inner, 2.0), "z": (fixed([1.0], "another"), 1.0)})
    judged = judge(outer, [rollout_of("")])
    assert outer([rollout_of("")]) == judged.scores == [11.0]
    assert judged.parts == {"in/x": [2.0], "in/y": [3.0], "z": [1.0]}


def test_minus_query_scores_and_subtracts_each_query_once():
    calls = []

    def count(rollouts):
        calls.append([r.text for r in rollouts])
        return [None if "?" in r.reply else float(len(r.text)) for r in rollouts]

    rollouts = [rollout_of(" is good"), rollout_of(" was"), rollout_of("??"), rollout_of("!", query="Her", task="t/1")]
    reward = MinusQuery(count)
    assert judge(reward, rollouts).scores == [8.0, 4.0, None, 1.0]
    assert calls[0] == ["The film", "Her"]
    assert judge(reward, rollouts).parts == {"count": [8.0, 4.0, None, 1.0]}
    parts = {"x": (MinusQuery(fixed([1.0])), 1.0), "y": (MinusQuery(resolve("letters:e")), 3.0)}
    assert judge(weighted(parts), [rollout_of("eel")]).parts == {"x": [0.0], "y": [2.0]}
    with pytest.raises(OperantError, match="scores each token"):
        judge(MinusQuery(lambda rs: [[0.0] * len(r.ids) for r in rs]), [rollout_of("")])
    assert judge(resolve("minus_query:letters:e"), [rollout_of("eel")]).scores == [2.0]


# --- a classifier with its own tokenizer ------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A folder with a tiny BERT that has dropout in its config and 12 positions."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    labels = {"id2label": {0: "NEGATIVE", 1: "POSITIVE"}, "label2id": {"NEGATIVE": 0, "POSITIVE": 1}}
    more = {"max_position_embeddings": 12, "hidden_dropout_prob": 0.5, "initializer_range": 1.0}
    config = BertConfig(vocab_size=len(WORDS), **shape, **more, **labels)
    folder = tmp_path_factory.mktemp("bert")
    words = tokenizer_of(WORDS, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")
    on_disk(folder, BertForSequenceClassification(config), words)
    return folder


def by_hand(folder, words: list[str]) -> torch.Tensor:
    """Logits of one text, from the model alone: no padding, no tokenizer."""
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification.from_pretrained(folder).eval()
    ids = [2, *(WORDS.index(w) for w in words), 3]
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def test_classifier_scores_do_not_depend_on_the_neighbours(bert):
    texts = ["good", "the film was bad bad bad bad", "the film", "bad film was good"]
    reward = Classifier(str(bert), batch=2)
    expected = [by_hand(bert, t.split()).softmax(-1)[1].item() for t in texts]
    assert reward.score(texts) == pytest.approx(expected, abs=1e-5)
    assert reward.score(texts[::-1]) == pytest.approx(expected[::-1], abs=1e-5)
    assert len({round(p, 3) for p in expected}) == 4, "the texts must differ for this test to mean anything"


def test_classifier_label_output_and_what_it_reads(bert):
    rollout = rollout_of(" was good", query="the film")
    both = by_hand(bert, ["the", "film", "was", "good"])
    for options, expected in (
        ({"label": "negative"}, both[0]),
        ({"label": 1, "text": "reply"}, by_hand(bert, ["was", "good"])[1]),
    ):
        assert Classifier(str(bert), output="logit", **options)([rollout]) == pytest.approx([expected.item()], abs=1e-4)
    asked = [replace(rollout, task=Task("t", [1], mood)) for mood in ("positive", "negative", "Positive", 0)]
    of_tasks = Classifier(str(bert), label="task.target", output="logit")
    assert of_tasks(asked) == pytest.approx([both[i].item() for i in (1, 0, 1, 0)], abs=1e-4)
    with pytest.raises(OperantError, match=r"^task 'a': .* has no label None; its labels are 0: NEGATIVE, 1: POSITIVE"):
        prepare(of_tasks, [asked[0].task, Task("a", "x")])
    assert resolve(f"classifier:{bert}#0")([rollout]) == pytest.approx([both.softmax(-1)[0].item()], abs=1e-5)


def test_classifier_cuts_long_text_on_the_left(bert):
    long = ["bad"] * 30 + ["the", "film", "was", "good"] * 2 + ["good", "was"]  # 12 positions: the last 10 words stay
    expected = by_hand(bert, long[-10:]).softmax(-1)[1].item()
    assert Classifier(str(bert)).score([" ".join(long)]) == pytest.approx([expected], abs=1e-5)


@cases(
    ({"name": "no-such/classifier"}, "cannot be downloaded"),
    ({"name": "./nothing"}, "no such folder"),
    ({"name": "builtin:nothing"}, "does not exist"),
    ({"label": "happy"}, "no label 'happy'; its labels are 0: NEGATIVE, 1: POSITIVE"),
    ({"label": 2}, "no label 2"),
    ({"output": "odds"}, "output"),
    ({"text": "query"}, "text"),
    ({"batch": 0}, "batch"),
)
def test_check_reports_what_is_wrong_of_a_classifier(given, why, bert, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OperantError, match=why):
        check(Classifier(**{"name": str(bert)} | given))


def test_loading_draws_no_progress_bar(bert, capfd):
    check(Classifier(str(bert)))
    assert "Loading weights" not in capfd.readouterr().err


def test_a_language_model_is_no_classifier(bert, tmp_path):
    from transformers import BertConfig, BertForMaskedLM

    BertForMaskedLM(BertConfig.from_pretrained(bert)).save_pretrained(tmp_path)
    tokenizer_of(WORDS, pad_token="[PAD]").save_pretrained(tmp_path)
    with pytest.raises(OperantError, match=r"lacks weights \(.*classifier"):
        check(Classifier(str(tmp_path)))


@pytest.mark.parametrize("pad", [None, "[PAD]"])
def test_a_causal_classifier_reads_at_the_last_token(tmp_path, pad):
    """One output, a reward model; without a padding token batches have one length, and no id counts as padding."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=9, n_embd=16, n_layer=1, n_head=2, n_positions=16, num_labels=1, pad_token_id=4)
    model = GPT2ForSequenceClassification(config)
    model.save_pretrained(tmp_path)
    tokenizer_of(WORDS, **({"pad_token": pad} if pad else {})).save_pretrained(tmp_path)
    texts = ["the film was good", "bad", "film", "the film was bad good"]  # "good" is id 4
    with torch.no_grad():
        states = [model.eval().transformer(torch.tensor([[WORDS.index(w) for w in t.split()]]))[0] for t in texts]
        expected = [model.score(s[0, -1]).item() for s in states]
    assert Classifier(str(tmp_path), output="logit").score(texts) == pytest.approx(expected, abs=1e-5)
    assert Classifier(str(tmp_path)).score(texts) == pytest.approx([1 / (1 + math.exp(-x)) for x in expected], abs=1e-5)


def test_batches_are_of_similar_length():
    assert list(batches([9, 1, 5, 2, 6], 2, pads=True)) == [[1, 3], [2, 4], [0]]
    assert list(batches([3, 1, 3, 3], 2, pads=False)) == [[1], [0, 2], [3]]


# --- transformations of scores ----------------------------------------------------------------------------------------
def test_running_moments_by_hand():
    """Of numbers far from 0, and with a checkpoint between."""
    moments = RunningMoments()
    moments.update([1e6 + 1.0, 1e6 + 2.0, 1e6 + 3.0])
    assert (moments.mean, moments.var, moments.std) == (1e6 + 2.0, pytest.approx(2 / 3), 1.0)
    again = RunningMoments()
    again.load_state_dict(moments.state_dict())
    again.update([1e6 + 7.0])
    again.update([])
    assert (again.count, again.mean) == (4, 1e6 + 3.25) and again.var == pytest.approx(np.var([1, 2, 3, 7]))
    assert again.std == pytest.approx(np.std([1, 2, 3, 7], ddof=1))


def test_a_constant_reward_is_not_blown_up():
    """0.1 has no exact float: the variance of a constant came out as rounding, and 0.1 became 838,860.8."""
    moments = RunningMoments()
    for count in (1, 7, 64):
        moments.update([0.1] * count)
    assert moments.std == 1.0 and shaping.scaled(0.1, moments) == pytest.approx(0.1)
    assert shaping.scaled(shaping.centred(0.1, moments), moments) == 0.0
    thirds = RunningMoments()
    for _ in range(9):
        thirds.update([0.7] * 3)  # the mean of these is 0.7 only up to rounding
    assert shaping.centred(0.7, thirds) == 0.0 and shaping.centred(0.2, thirds, pay=0.5) == pytest.approx(-0.5)


def score(reward, rollouts, options, moments, tokenizer=None):
    """The reward's scores of the rollouts as it sees them, and the scores for training."""
    judged = judge(reward, shaping.as_seen(rollouts, options, tokenizer, Sampling()))
    return judged.scores, shaping.processed(judged.scores, rollouts, options, moments, tokenizer)[0]


def test_scores_are_scaled_then_clipped_if_there_are_any():
    options, moments = ScoreOptions(scale=True, normalise=True, clip=1.0), RunningMoments()
    judged, used = score(fixed([1.0, None, 3.0, 8.0]), [rollout_of("")] * 4, options, moments)
    std = math.sqrt(((1 - 4) ** 2 + (3 - 4) ** 2 + (8 - 4) ** 2) / 2)
    assert judged == [1.0, None, 3.0, 8.0]
    assert used == [pytest.approx(-3 / std), None, pytest.approx(-1 / std), 1.0] and moments.count == 3
    _, used = score(fixed([0.0, 4.0]), [rollout_of("")] * 2, ScoreOptions(scale=True), RunningMoments())
    assert used == pytest.approx([0.0, 4 / math.sqrt(8)])
    assert score(fixed([1.0]), [rollout_of("")], ScoreOptions(), moments)[1] == [1.0]


def test_per_token_scores_are_scaled_as_their_sum():
    options, moments = ScoreOptions(normalise=True), RunningMoments()
    _, used = score(fixed([[1.0, 0.0, 1.0], [2.0, 2.0, 2.0]]), [rollout_of("")] * 2, options, moments)
    std = math.sqrt(8)  # of the totals 2 and 6
    assert used[0] == pytest.approx([1 / std, 0.0, (1 - 4) / std]) and sum(used[0]) == pytest.approx((2 - 4) / std)


def test_missing_stop_replaces_or_adds():
    rollouts = [rollout_of("", end=end) for end in ("stop", "length", "length", "world")]
    scores, found = [3.0, 3.0, None, 3.0], [True] * 4
    assert shaping.penalised(scores, rollouts, found, ScoreOptions(missing_stop=-1.0)) == [3.0, -1.0, None, 3.0]
    adds = ScoreOptions(missing_stop=-1.0, missing_stop_mode="add")
    assert shaping.penalised(scores, rollouts, found, adds) == [3.0, 2.0, None, 3.0]
    assert shaping.penalised(scores, rollouts, found, ScoreOptions()) == scores
    tokens = [[1.0, 2.0, 3.0]]
    assert shaping.penalised(tokens, rollouts[1:2], [True], ScoreOptions(missing_stop=-1.0)) == [[0.0, 0.0, -1.0]]
    assert shaping.penalised(tokens, rollouts[1:2], [True], adds) == [[1.0, 2.0, 2.0]]
    lost = Rollout(Task("t", "x"), 0, [], [], end="raised")  # the world has failed before any reply
    assert shaping.processed([None], [lost], ScoreOptions(missing_stop=-1.0), RunningMoments(), None)[0] == [None]


def test_a_reply_near_its_limit_loses_score_in_proportion():
    """DAPO's soft overlong punishment (arXiv:2503.14476, equation 13): limit 10, the last 4 tokens cost."""
    elsewhere = [rollout_of("", ids=range(n)) for n in (1, 6, 7, 9, 10)]  # their limit is unknown
    rollouts = [replace(rollout, sampling=Sampling(max_tokens=10)) for rollout in elsewhere]
    options = ScoreOptions(overlong_tokens=4, overlong_penalty=2.0)
    assert shaping.penalised([1.0] * 5, rollouts, [True] * 5, options) == [1.0, 1.0, 0.5, -0.5, -1.0]
    assert shaping.penalised([1.0] * 5, elsewhere, [True] * 5, options) == [1.0] * 5


def test_truncation_at_a_token_as_in_ziegler_et_al():
    """The first full stop at position >= 2 ends the text, and stays in it; without one the score is the penalty."""
    tokenizer = letters()
    rollouts = [rollout_of(text, ids=tokenizer(text).input_ids) for text in ("a.ce.f", "ab.c.f", "a.cd")]
    seen = []

    def reward(rs):
        seen.extend(r.reply for r in rs)
        assert [len(r.ids) for r in rs] == [6, 6, 4], "all token ids stay, for training"
        return [0.5, 0.6, 0.7]

    options = ScoreOptions(truncate_token=".", truncate_after=2)
    assert score(reward, rollouts, options, RunningMoments(), tokenizer)[1] == [0.5, 0.6, -1.0]
    assert seen == ["a.ce.", "ab.", "a.cd"]
    # Where the full stop also stops the reply, it still belongs to the text that is judged.
    stops = Sampling(stop_tokens=(*tokenizer(".").input_ids,))
    assert shaping.as_seen(rollouts[1:2], options, tokenizer, stops)[0].reply == "ab."
    assert (shaping.first_at([26, 26], 26, 2), shaping.first_at([1, 26, 26], 26, 2)) == (None, 2)
    with pytest.raises(OperantError, match="is 2 tokens"):
        score(reward, rollouts, ScoreOptions(truncate_token=".."), RunningMoments(), tokenizer)


# --- reward functions of TRL's form -----------------------------------------------------------------------------------
def answers(*targets, messages=False):
    prompt = [{"role": "user", "content": "How many?"}] if messages else "How many?"
    tasks = [Task(f"t/{i}", prompt, target) for i, target in enumerate(targets)]
    return [Rollout(t, i, [Turn([1], [5, 6])], [f"It is {i}."], query="How many?") for i, t in enumerate(tasks)]


def by_column(completions, answer, **kwargs):
    return [float(right in text) for text, right in zip(completions, answer, strict=True)]


def test_a_function_of_trls_form_gets_what_trl_passes():
    seen: list[dict] = []

    def reward(prompts, completions, log_metric, log_extra, **kwargs):
        seen.append({"prompts": prompts, "completions": completions, **kwargs})
        log_metric("long", 2)
        log_extra("gold", ["a", "b"])
        return [0.5, None]

    for messages in (False, True):
        judged = judge(reward, answers({"answer": "0", "level": 1}, {"answer": "7", "level": 2}, messages=messages))
        assert judged.scores == [0.5, None] and judged.parts["long"] == [2, 2] and judged.remark(1).message == "gold: b"
    same = {"completion_ids": [[5, 6], [5, 6]], "answer": ["0", "7"], "level": [1, 2]}
    assert seen[0] == same | {"prompts": ["How many?"] * 2, "completions": ["It is 0.", "It is 1."]}
    assert seen[1]["prompts"] == [[{"role": "user", "content": "How many?"}]] * 2
    assert seen[1]["completions"][1] == [{"role": "assistant", "content": "It is 1."}]


def test_a_column_is_a_key_of_the_target_or_the_target_itself():
    assert judge(by_column, answers({"answer": "0"}, {"answer": "7"})).scores == [1.0, 0.0]
    assert judge(by_column, answers("0", "7")).scores == [1.0, 0.0]
    assert judge(lambda completions: [1.0 * len(c) for c in completions], answers("0")).scores == [8.0]
    assert judge(resolve({by_column: 2.0, "length:9": 0.0}), answers("0", "7")).scores == [2.0, 0.0]
    assert judge(resolve([resolve({by_column: 2.0}), by_column]), answers("0", "7")).scores == [3.0, 0.0]
    given = [{"answer": "0"}, None, {"word": "7"}]
    assert keywords(by_column, answers(*given))["answer"] == ["0", None, None]
    loaded = load_tasks([{"text": "a", **(row or {})} for row in given], options=DataOptions(target_field="*"))
    columns = [("0", None), (None, None), (None, "7")]
    assert [task.target for task in loaded] == [{"answer": x, "word": y} for x, y in columns]


@cases(
    (by_column, [None], r"asks for answer, .*data\.target_field=answer"),
    (by_column, [{"word": "0"}, None], r"for answer, which the tasks do not have \(they have word\); name the col"),
    (lambda completions, trainer_state: [1.0], ["0"], r"asks for trainer_state.*only TRL's trainer has that"),
    (lambda completions, log_extra: log_extra("x", [1, 2]) or [1.0], ["0"], r"log_extra\(.x., ...\): 2 values for 1"),
    (lambda completions, log_metric: log_metric("x", 1) or 0.5, ["0"], "returned one float for 1 rollouts"),
)
def test_a_column_that_is_not_there_is_named(reward, targets, why):
    with pytest.raises(OperantError, match=why):
        judge(reward, answers(*targets))
