"""The reward `prompt`: numbers calculated by hand, equal draws, and what wrong input gets before training."""

import math
from collections.abc import Sequence

import pytest
import torch
from cases import cases
from page_commands import snippets
from toys import bare_table

from operant.apps.prompts import measures
from operant.apps.prompts.examples import Examples
from operant.apps.prompts.prompt_reward import PromptReward
from operant.apps.prompts.task_models import task_model
from operant.rewards import check, prepare, resolve
from operant.types import OperantError, Rollout, Task, Turn

WORDS = ("bad", "good")
LOG = math.log
# Two prompts, three texts, two words: probabilities of "good".
GOOD = {"up": {"a": 0.9, "b": 0.6, "c": 0.5}, "down": {"a": 0.1, "b": 0.2, "c": 0.7}}
LABELS = {"a": 1, "b": 0, "c": 1}


def answers(texts: Sequence[str]) -> list[dict[str, float]]:
    """Log-probs of "text prompt" by the table; a text without content is answered by its prompt alone."""
    found = []
    for filled in texts:
        text, _, prompt = filled.rpartition(" ")
        good = GOOD[prompt].get(text, 0.8)
        found.append({"bad": LOG(1 - good), "good": LOG(good)})
    return found


def task(name: str = "toy", texts: str = "abc", id: str = "t") -> Task:
    return Task(id, "", target={"name": name, "examples": [[text, LABELS[text]] for text in texts]})


def rollout(prompt: str, of: Task, version: int = 0) -> Rollout:
    return Rollout(of, 0, [Turn([0], [5, 6], [-1.0, -1.0], [0.0, 0.0], "stop", version=version)], [prompt])


def reward(**options) -> PromptReward:
    return PromptReward(answers, **{"words": WORDS, **options})


# --- measures -------------------------------------------------------------------------------------------------------
def test_measures_by_hand():
    of = task()
    up, down = reward()([rollout("up", of), rollout("down", of)])
    # Gaps of p(label) to the other: up .8, -.2, 0; down -.8, .6, .4.
    assert up.score == pytest.approx((200 * 0.8 + 180 * -0.2 + 0) / 3)
    assert down.score == pytest.approx((180 * -0.8 + 200 * 0.6 + 200 * 0.4) / 3)
    assert up.parts["accuracy"] == pytest.approx(1 / 3)  # a tie is not right
    assert down.parts["accuracy"] == pytest.approx(2 / 3)
    assert up.parts["likelihood"] == pytest.approx((LOG(0.9) + LOG(0.4) + LOG(0.5)) / 3)
    assert up.parts["margin"] == pytest.approx((LOG(9) + LOG(4 / 6) + 0) / 3)
    for name in ("accuracy", "likelihood", "margin"):
        assert reward(measure=name)([rollout("up", of)])[0].score == up.parts[name]
    # As published, the tie of c counts as a gap of .5 + 1.
    assert reward(measure="gap-historic")([rollout("up", of)])[0].score == pytest.approx((160 - 36 + 300) / 3)


def test_the_historic_gap_is_that_of_the_published_code():
    """RLPrompt's lines for the gap (fsc_reward.py), one example at a time, also where classes tie."""
    torch.manual_seed(0)
    logprobs = torch.randint(-2, 3, (5, 40, 4)).double()
    labels = torch.randint(4, (40,))
    found = measures.gap_historic(logprobs, labels)
    for prompt in range(5):
        probs = logprobs[prompt].softmax(-1)
        for i, label in enumerate(labels.tolist()):
            own = probs[i, label]
            gap = own - torch.where(probs[i] == own, torch.tensor(-1.0, dtype=torch.float64), probs[i]).max()
            assert found[prompt, i] == pytest.approx(float(gap * (200 if gap > 0 else 180)))


def test_calibration_by_hand():
    """Log-odds of up: log 9, log 1.5, 0, less their mean log(13.5) / 3.

    Without content p(good) = .8: p / p_cf of up is .9/.8 against .1/.2, .6/.8 against .4/.2, .5/.8 against .5/.2.
    """
    (up,) = reward(measure="margin", calibrate="mean")([rollout("up", task())])
    mean = LOG(13.5) / 3
    assert up.score == pytest.approx(((LOG(9) - mean) - (LOG(1.5) - mean) + (0 - mean)) / 3)
    assert up.parts["accuracy"] == pytest.approx(2 / 3)
    (up,) = reward(measure="likelihood", calibrate="contextual")([rollout("up", task())])
    assert up.score == pytest.approx(sum(map(LOG, [1.125 / (1.125 + 0.5), 2 / 2.75, 0.625 / (0.625 + 2.5)])) / 3)


# --- which texts and prompts are computed -----------------------------------------------------------------------------
def test_equal_prompts_are_computed_once():
    asked, of = [], task()

    def ask(texts):
        asked.extend(texts)
        return answers(texts)

    scores = PromptReward(ask, words=WORDS)([rollout(prompt, of) for prompt in ("up", "down", "up", "up")])
    assert len(asked) == len(set(asked)) == 6 and scores[0] == scores[2] == scores[3] != scores[1]
    # Tasks of one example are each scored on their own.
    rollouts = [rollout("up", task(texts=text, id=text)) for text in "abc"] + [rollout("down", task(texts="a"))]
    scores = PromptReward(ask, words=WORDS, measure="likelihood")(rollouts)
    assert [s.score for s in scores] == pytest.approx([LOG(0.9), LOG(0.4), LOG(0.5), LOG(0.1)])
    # Held-out tasks are scored on all their examples, and are none of the best prompts.
    asked.clear()
    made = PromptReward(ask, words=WORDS, examples=10)
    made.read_tasks([many()])
    made([rollout("up", task())])
    assert len(asked) == 3 and made.best == []


def many() -> Task:
    return Task("many", "", target={"name": "toy", "examples": [[f"text {i}", i % 2] for i in range(40)]})


def test_a_step_draws_the_same_examples_for_all_prompts():
    drawn: dict[tuple[str, int], set[str]] = {}
    for made in range(2):  # as a resumed run, which makes its reward anew
        for version in (3, 4):

            def ask(texts, version=version, made=made):
                for filled in texts:
                    text, _, prompt = filled.rpartition(" ")
                    drawn.setdefault((f"{made}{prompt}", version), set()).add(text)
                return answers(texts)

            again = PromptReward(ask, words=WORDS, examples=10)
            again.read_tasks([many()])
            again([rollout("up", many(), version), rollout("down", many(), version)])
    assert {len(texts) for texts in drawn.values()} == {10}
    for version in (3, 4):
        assert drawn["0up", version] == drawn["0down", version] == drawn["1up", version]
        assert sum(int(text.split()[1]) % 2 for text in drawn["0up", version]) == 5
    assert drawn["0up", 3] != drawn["0up", 4]


def test_the_best_prompts_are_remembered_with_their_means():
    of, other = task(), task(texts="b", id="b")
    made = reward(measure="likelihood", keep=2)
    made([rollout("up", of, 1), rollout("down", of, 1)])
    made([rollout("up", other, 2)])
    up = (LOG(0.9) + LOG(0.4) + LOG(0.5)) / 3
    best = {prompt.text: prompt for prompt in made.best}
    assert best["up"].score == pytest.approx((up + LOG(0.4)) / 2)
    assert (best["up"].times, best["up"].step, best["up"].ids) == (2, 1, [5, 6])
    assert [p.score for p in made.best] == sorted((p.score for p in made.best), reverse=True)
    again = reward(keep=2)
    again.load_state_dict(made.state_dict())
    assert again.best == made.best
    made.keep = 1
    made([rollout("down", of, 3)])
    assert len(made.best) == 1


def test_the_built_in_task_model_agrees_with_plain_transformers():
    options = {"template": "{sentence}{prompt}", "words": "terrible,great", "measure": "margin"}
    made = resolve("prompt:builtin:reviews-lm", options)
    examples = [["an utter bore", 0], ["a joy from start to end", 1], ["never boring", 1]]
    of = Task("t", "", target={"name": "sst-2", "examples": examples})
    check(made)
    prepare(made, [of])
    prompts = [" The movie is", ". Truly", " all in all"]
    found = [judgement.score for judgement in made([rollout(prompt, of) for prompt in prompts])]
    plain = task_model("builtin:reviews-lm")
    tokenizer, model = plain.tokenizer, plain.model
    low, high = (tokenizer(word).input_ids[0] for word in (" terrible", " great"))
    for prompt, score in zip(prompts, found):
        margins = []
        for text, label in examples:
            scores = bare_table(model, tokenizer(text + prompt).input_ids, [0])[0]
            margins.append(float(scores[high] - scores[low]) * (1 if label else -1))
        assert score == pytest.approx(sum(margins) / 3, abs=1e-4)


# --- what wrong input gets --------------------------------------------------------------------------------------------
@cases(
    ({}, task(texts="ac"), r"all 2 texts have the label 1 \('good'\)"),
    ({"words": ("bad", "good", "fine")}, task(), r"no text has the label 2 \('fine'\)"),
    ({}, Task("t", "", target={"name": "toy", "examples": [["a", 0], ["b", 2]]}), "label 2, and there are 2 words"),
    ({"words": ("bad",)}, task(), "at least two different"),
    ({"words": None}, task(), "'toy' is no published set"),
    ({"calibrate": "mean"}, task(texts="a"), "scored on 1 text"),
    ({"calibrate": "mean", "examples": 1}, task(), "scored on 1 text"),
    ({"template": "{sentence} {prompt} {mask}"}, task(), "leave {mask} out"),
    ({}, Task("t", "", target=1), "labelled texts"),
)
def test_tasks_that_cannot_be_scored_are_refused_before_training(options, of, sentence):
    made = reward(**options)
    with pytest.raises(OperantError, match=sentence):
        check(made)
        prepare(made, [of])
    prepare(reward(), [task(texts=text, id=text) for text in "abc"])  # one class in each is fine, if all have both


def test_the_longest_text_must_leave_room_for_the_prompt():
    options = {"template": "{sentence}{prompt}", "words": "terrible,great", "prompt_tokens": 6}
    made = resolve("prompt:builtin:reviews-lm", options)
    of = Task("t", "", target={"name": "sst-2", "examples": [["good" + " good" * 249, 1], ["bad", 0]]})
    check(made)
    prepare(made, [of])
    of.target["examples"][0][0] += " good"
    with pytest.raises(OperantError, match=r"has 251 tokens .* a prompt of 6 .* reads 256"):
        prepare(made, [of])


def test_a_task_model_and_a_label_for_each_text_are_needed():
    with pytest.raises(OperantError, match="needs a task model"):
        resolve("prompt")
    with pytest.raises(OperantError, match="2 texts with 1 labels"):
        Examples("x", ("a", "b"), (0,))


@pytest.mark.slow
def test_the_snippets_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space = {}
    for snippet in snippets("docs/prompts.md#task-models-what-answers-a-prompt"):
        exec(snippet, space)
    assert space["logprobs"].shape == (2, 2, 2)
    assert (tmp_path / "runs" / "prompts" / "metrics.jsonl").is_file()
