"""A language model as a judge: its scores by hand, its agreement with gold labels, and what is refused."""

import math

import pytest
import torch
from completion_server import Server
from small_runs import model
from texts import write_rows
from toys import letters, on_disk

from operant import OperantError, Rollout, Task, Turn
from operant.rewards import check, judge, resolve


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("judge")
    on_disk(path, model())
    return path


@pytest.fixture
def server():
    """A chat model that finds each reply as good as it has a's, of which it says how likely yes is."""

    def reply(body):
        yes = min(0.9, 0.1 + 0.2 * body["messages"][-1]["content"].partition("|")[2].count("a"))
        listed = [{"token": " yes", "logprob": math.log(yes)}, {"token": "no", "logprob": math.log((1 - yes) / 2)}]
        return {"logprobs": {"content": [{"top_logprobs": listed}]}, "message": {"content": "yes"}}

    with Server(reply) as made:
        yield made


def said(reply, query="ab", target=None):
    return Rollout(Task("t", query, target=target), 0, [Turn([5], [6])], [reply], query=query)


@pytest.mark.filterwarnings("ignore:judge")
def test_a_scale_of_words_by_hand(folder):
    """The model's own log-probs of three words behind the question, by a plain forward pass in float64."""
    reward = resolve(f"judge:{folder}", {"template": "{query}{reply}", "words": "a,b,c"})
    check(reward)
    twin, tokenizer = model().double(), letters()
    read = tokenizer("abce")["input_ids"]
    words = [tokenizer(f" {word}", add_special_tokens=False)["input_ids"] for word in "abc"]

    def nats(word):
        with torch.no_grad():
            scores = twin(torch.tensor([read + word])).logits[0, len(read) - 1 : -1].log_softmax(-1)
        return scores[range(len(word)), word].sum()

    p = torch.stack([nats(word) for word in words]).softmax(0)
    found = judge(reward, [said("ce"), said("ce"), said("c")])
    assert found.scores[0] == found.scores[1] == pytest.approx(float(p[0] + p[1] / 2), rel=1e-5)


def test_an_endpoint_is_asked_once_for_each_question(server, tmp_path):
    spec, how = f"judge:{server.url}#m", {"template": "{target}|{reply}", "words": "yes,no"}
    reward = resolve(spec, how | {"cache": str(tmp_path / "answers.sqlite")})
    replies = [said("aa", target="x"), said("b", target="x"), said("aa", target="x")]
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
        judge(resolve(f"judge:{folder}", {"words": "qq,zz", "template": "{reply}"}), [said("a")])


def test_labels_that_are_all_equal_are_refused(server, tmp_path):
    path = tmp_path / "gold.jsonl"
    path.write_text('{"prompt": "p", "replies": ["a", "b"], "ratings": [1, 1]}\n', encoding="utf-8")
    with pytest.raises(OperantError, match="no two labels of a prompt differ"):
        check(resolve(f"judge:{server.url}#m", {"template": "|{reply}", "gold": str(path)}))
