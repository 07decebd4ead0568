"""Baselines against enumerations of all prompts, hand counts of calls, and a control with shuffled labels."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from cases import cases, slow
from tokenizers_of_words import byte_tokenizer, word_tokenizer
from toys import bare_table, lm

from operant import Learner, OperantError, Policy
from operant.apps.prompts import baselines
from operant.apps.prompts.baselines import Classification, Vocabulary, compare
from operant.apps.prompts.examples import Examples
from operant.apps.prompts.task_models import BlackBox, task_model
from operant.apps.prompts.templates import PromptTemplate
from operant.runs.evaluate import EvaluationOptions, Evaluator
from operant.sampling import counter, uniforms

WORDS = ("bad", "good")
NOUNS = ("film", "plot", "the", "a", "so", "is", "it", "long", "dull", "all", "in", "and")


def texts(count: int, seed: int) -> tuple[str, ...]:
    draws = torch.stack([uniforms([counter(seed, i) for i in range(count)], place) for place in range(3)], 1)
    return tuple(" ".join(NOUNS[i] for i in row) for row in (draws * len(NOUNS)).long().tolist())


def setting(train: int = 32, test: int = 40, **more) -> Classification:
    tokenizer = byte_tokenizer()
    model = task_model((lm("gpt2", len(tokenizer)), tokenizer))
    sides = [Examples(name, texts(n, n), tuple(i % 2 for i in range(n))) for name, n in (("a", train), ("b", test))]
    return Classification(model, PromptTemplate("{sentence} {prompt}"), WORDS, *sides, **more)


def accuracy(of: Classification, prompt: str, examples: Examples, offset: Sequence[float] = (0, 0)) -> float:
    tokenizer, model = of.model.tokenizer, of.model.model
    right = 0
    columns = [tokenizer.convert_tokens_to_ids(f"Ġ{word}") for word in WORDS]
    for text, label in examples:
        logits = bare_table(model, tokenizer(f"{text} {prompt}".strip()).input_ids, [0])[0, columns]
        scores = [float(x) - b for x, b in zip(logits, offset)]
        right += scores[label] > scores[1 - label]
    return right / len(examples)


def test_no_prompt_and_its_calibration():
    of = setting(train=16, test=20)
    bare, mean = baselines.compare(of, ["none", "none+mean"])
    assert (bare.prompt, bare.calls) == ("", 0) and bare.train == pytest.approx(accuracy(of, "", of.train))
    assert bare.test == pytest.approx(accuracy(of, "", of.test))
    # The mean of the training texts alone, taken to the others.
    tokenizer, model = of.model.tokenizer, of.model.model
    columns = [tokenizer.convert_tokens_to_ids(f"Ġ{word}") for word in WORDS]
    logits = [bare_table(model, tokenizer(text).input_ids, [0])[0, columns] for text in of.train.texts]
    offset = torch.stack(logits).mean(0).tolist()
    assert mean.test == pytest.approx(accuracy(of, "", of.test, offset))
    assert mean.train == pytest.approx(accuracy(of, "", of.train, offset))


def test_manual_takes_the_best_in_training():
    of = setting(measure="accuracy")
    prompts = ["it is", "so long and", "the plot"]
    row = baselines.manual(of, prompts)
    by_hand = [accuracy(of, prompt, of.train) for prompt in prompts]
    assert row.prompt == prompts[by_hand.index(max(by_hand))] and row.calls == 3 * len(set(of.train.texts))
    glued = replace(of, template=PromptTemplate("{sentence}{prompt}"))
    assert baselines.manual(glued, prompts).prompt == f" {row.prompt}"


WORDY = Vocabulary(words=NOUNS[:6])


def test_random_search_finds_the_best_of_what_it_may_try():
    """Of all 36 prompts of two words, searched with calls for far more, and with calls for none."""
    of = setting(measure="likelihood")
    every = [" ".join(pair) for pair in itertools.product(NOUNS[:6], repeat=2)]
    best = every[int(of.scores(every).argmax())]
    row = baselines.random_search(of, WORDY, calls=32 * 400, length=2)
    assert (row.prompt, row.detail["tried"]) == (best, 36)
    assert row.test == pytest.approx(accuracy(of, row.prompt, of.test))
    few = baselines.random_search(of, WORDY, calls=32 * 10, length=2)
    assert few.calls <= 32 * 10 and few.detail["tried"] <= 10
    with pytest.raises(OperantError, match="one prompt costs"):
        baselines.random_search(of, WORDY, calls=3, length=2)


@cases("none", slow("mean"), "contextual")
def test_halving_tries_more_prompts_at_equal_calls(calibrate):
    of = setting(measure="likelihood", calibrate=calibrate)
    numbered = tuple(f"{text} {i}" for i, text in enumerate(of.train.texts))
    of = replace(of, train=Examples("a", numbered, of.train.labels))
    vocabulary = Vocabulary(of.model.tokenizer)
    plain = baselines.random_search(of, vocabulary, calls=32 * 24, length=3)
    row = baselines.halving_search(of, vocabulary, calls=32 * 24, length=3)
    free = 3 * (calibrate == "contextual")
    # 8 texts, then 8 more for a half of the prompts, then 16 for a quarter: 16 calls a prompt.
    assert row.detail["tried"] == int(32 * 24 / (16 + free))
    assert plain.detail["tried"] == 32 * 24 // (32 + free)
    assert row.calls <= 32 * 24 and row.score == pytest.approx(float(of.scores([row.prompt])[0]))


def test_halving_keeps_a_prompt_that_is_best_on_all_texts():
    """A prompt that answers every text right against others that answer a coin's throw."""

    def ask(filled):
        return [line.split()[2] if line.endswith("|key key") else WORDS[counter(line) % 2] for line in filled]

    examples = Examples("x", tuple(f"text {i} {WORDS[i % 2]} " for i in range(64)), tuple(i % 2 for i in range(64)))
    of = Classification(BlackBox(ask, "ask"), PromptTemplate("{sentence}|{prompt}"), WORDS, examples, examples)
    row = baselines.halving_search(of, Vocabulary(words=["key", "w1", "w2", "w3"]), calls=64 * 60, length=2)
    assert (row.prompt, row.test, row.detail["rounds"]) == ("key key", 1.0, 4)


@cases("informed", "black box")
def test_greedy_search_reaches_a_coordinate_optimum(kind):
    """With calls to spare, no change of one token among all tokens improves the prompt."""
    of = setting(train=8, test=8, measure="likelihood")
    words, vocabulary = NOUNS[:6], WORDY
    if kind == "informed":
        vocabulary = Vocabulary(byte_tokenizer())  # as a policy of the same model has it
        vocabulary.ids = [of.model.tokenizer.convert_tokens_to_ids(f"Ġ{noun}") for noun in words]
    row = baselines.greedy_search(of, vocabulary, calls=8 * 300, length=2, candidates=40)
    parts = row.prompt.split()
    others = [" ".join((*parts[:i], word, *parts[i + 1 :])) for i in range(2) for word in words]
    others = [f" {prompt}" for prompt in others] if kind == "informed" else others
    assert row.detail["gradient"] == (kind == "informed") and row.calls <= 8 * 300
    assert row.score is not None and row.score >= float(of.scores(others).max()) - 1e-6


def test_greedy_search_keeps_to_its_calls():
    of = setting(train=8, test=8, measure="likelihood")
    row = baselines.greedy_search(of, Vocabulary(of.model.tokenizer), calls=300, length=3, seed=1)
    assert 300 - 8 * 2 - 8 <= row.calls <= 300


def test_in_context_examples_stand_before_the_text():
    seen = []
    examples = Examples("x", ("one", "two", "three", "four"), (0, 1, 0, 1))
    model = BlackBox(lambda filled: (seen.extend(filled), ["good"] * len(filled))[1], "ask")
    of = Classification(model, PromptTemplate("{sentence} {prompt}"), WORDS, examples, examples)
    row = baselines.in_context(of, prompt="is", seed=2)
    *shown, asked = seen[0].split("\n")
    told = [line.split(" is ") for line in shown]
    assert asked == "one is" and {word for _, word in told} == {"bad", "good"}
    assert all(WORDS[dict(examples)[text]] == word for text, word in told)
    assert (row.test, row.calls) == (0.5, 0)
    assert baselines.in_context(of, tries=3, prompt="is").calls == 3 * 4


def test_the_head_is_a_logistic_regression():
    """Against Newton's method on the difference of the two classes' weights, and on texts that a line separates."""
    of = setting(train=30, test=40)
    row = baselines.head(of, decay=2.0)
    states = {what: of.model.features(of.template, "", getattr(of, what).texts) for what in ("train", "test")}
    centre, scale = states["train"].mean(0), states["train"].std(0) + 1e-6
    scaled = [(states[what] - centre) / scale for what in ("train", "test")]
    x, held_out = (torch.cat([rows, torch.ones(len(rows), 1)], 1) for rows in scaled)
    y, w = torch.tensor(of.train.labels).double(), torch.zeros(x.shape[1], dtype=torch.float64)
    penalty = torch.eye(len(w), dtype=torch.float64)  # two columns w / 2 and -w / 2 with decay 2
    penalty[-1, -1] = 0
    for _ in range(50):
        p = (x @ w).sigmoid()
        curvature = x.T @ (x * (p * (1 - p))[:, None]) + penalty
        w = w - torch.linalg.solve(curvature, x.T @ (p - y) + penalty @ w)
    assert row.train == pytest.approx(float(((x @ w > 0) == (y == 1)).double().mean()))
    assert row.test == pytest.approx(float(((held_out @ w > 0) == (torch.tensor(of.test.labels) == 1)).double().mean()))
    easy = Examples("easy", ("dull film", "so film", "dull a plot", "so the plot"), (0, 1, 0, 1))
    assert baselines.head(replace(of, train=easy), decay=1.0).train == 1.0
    chosen = baselines.head(of)
    assert chosen == baselines.head(of, decay=chosen.detail["decay"])
    with pytest.raises(OperantError, match="leave this baseline out"):
        baselines.head(replace(of, model=BlackBox(lambda filled: ["good"] * len(filled), "ask")))


def test_compare_returns_a_row_for_each_name_and_seed():
    of = setting(train=16, test=10)
    of = replace(of, dev=of.test)
    rows = compare(of, calls=16 * 12, length=2, seeds=(0, 1))
    names = [(row.name, row.calibrate) for row in rows]
    seeded = ("random", "halving", "greedy", "in-context")
    expected = [tuple((*name.split("+"), "none")[:2]) for name in (*baselines.USUAL, "head")]
    assert names == [pair for pair in expected for _ in range(2 if pair[0] in seeded else 1)]
    assert all(row.calls <= 16 * 12 and row.dev == row.test for row in rows)
    assert {row.name for row in rows} == set(baselines.NAMES)
    again = compare(of, ["halving+mean"], calls=16 * 12, length=2, seeds=(1,))
    assert again == [row for row in rows if (row.name, row.calibrate, row.seed) == ("halving", "mean", 1)]


@cases((["randm"], "did you mean 'random'"), (["head+mean"], "each but head"), (["random+median"], "unknown"))
def test_unknown_baselines(names, sentence):
    with pytest.raises(OperantError, match=sentence):
        compare(setting(), names)


def test_a_black_box_needs_words_to_search_with():
    examples = Examples("x", ("one", "two"), (0, 1))
    model = BlackBox(lambda filled: ["good"] * len(filled), "ask")
    of = Classification(model, PromptTemplate("{sentence} {prompt}"), WORDS, examples, examples)
    with pytest.raises(OperantError, match="at least two words"):
        compare(of, ["random"])
    rows = compare(of, ["none", "random", "greedy"], calls=10, vocabulary=Vocabulary(words=["a", "b"]), length=1)
    assert [row.test for row in rows] == [0.5] * 3


@cases(
    ({"measure": "gaps"}, "measure='gaps'"),
    ({"calibrate": "median"}, "calibrate='median'"),
    ({"train": Examples("x", ("a", "b"), (0, 0))}, "the train texts of 'x': all 2 texts"),
    ({"test": Examples("x", ("a", "b"), (1, 1))}, "the test texts of 'x': all 2 texts"),
    ({"dev": Examples("x", ("a", "b"), (0, 2))}, "label 2, which has no word"),
    ({"template": PromptTemplate("{sentence} {prompt} {mask}")}, "leave {mask} out"),
)
def test_settings_that_cannot_be_measured(change, sentence):
    with pytest.raises(OperantError, match=sentence):
        replace(setting(), **change)


def test_a_vocabulary_leaves_out_what_is_no_text():
    tokenizer = word_tokenizer()
    made = Vocabulary(tokenizer)
    assert not set(made.ids) & set(tokenizer.all_special_ids)
    drawn = made.draw(5, 3, 0, "x")
    assert drawn == made.draw(5, 3, 0, "x") != made.draw(5, 3, 1, "x")
    assert all(len(ids) == 3 and set(ids) <= set(made.ids) for ids in drawn)


@cases(True, False)
def test_a_policy_that_writes_only_text_draws_what_searches_draw(stops):
    """Most pieces of one byte are no character. Stop tokens remain where a reply may stop."""
    policy = Policy(lm("gpt2", 420), tokenizer := byte_tokenizer())  # with 20 rows or so that no token has
    how = {"max_tokens": 12, "stop_tokens": (2,), "fixed_length": not stops, "min_p": 0.5, "truncation": "stored"}
    own = tokenizer.convert_tokens_to_ids("z")
    learner = Learner(policy, algorithm="grpo", banned=(own,), only_text=True, **how)
    allowed = {*range(420)} - {*learner.sampling.banned}
    assert allowed == {*Vocabulary(tokenizer).ids} - {own} | ({2} if stops else set())
    assert {"a", "7", "!", "Film", " film", " the"} <= {tokenizer.decode([i]) for i in allowed}
    assert all({*rollout.ids} <= allowed and rollout.reply.isprintable() for rollout in learner.generate([[5, 6]] * 32))
    asked = Evaluator(learner, [], None, EvaluationOptions(sampling={"stop_tokens": [7]}))
    for other in (asked.sampling, learner.generate([[5, 6]], eos_token_id=7)[0].sampling):  # 2 is a stop token no more
        assert {*range(420)} - {*other.banned} == allowed - {2} | ({7} if stops else set())
    odd = [i for i in range(len(tokenizer)) if i not in allowed]
    assert {"\ufffd", "\n", "\x1b", " ", "<s>", "z"} <= {tokenizer.decode([i]) for i in odd}


def test_only_text_is_refused_where_it_would_do_nothing():
    for name, value in {"only_text": True, "stop_strings": ["x"]}.items():
        with pytest.raises(OperantError, match=f"{name} needs? a tokenizer"):
            Learner(lm("gpt2", 20), algorithm="grpo", **{name: value})
    with pytest.raises(OperantError, match=r"for a whole run: --sampling\.only-text True"):
        Learner(Policy(lm("gpt2", 400), byte_tokenizer()), algorithm="grpo").generate([[5]], only_text=True)
