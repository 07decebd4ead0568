"""Text metrics by hand (test_metric_values.py has more), and whether the likelihood gap shows another sampler."""

from types import SimpleNamespace

import pytest
import torch
from cases import cases
from toys import letters, lm

from operant import Learner, machine
from operant.metrics.collect import of_texts, query_share
from operant.models.model_passes import passes
from operant.rewards.words import top_word, words
from operant.tools.report.diagnosis import latest


def test_the_most_frequent_word_by_hand():
    assert top_word(["The cat", "the dog"]) == ("the", 0.5) and top_word(["", "!"]) == ("", 0.0)
    assert words("हिन्दी की का, Nai\u0308ve 3½ \u2764\ufe0f 1\ufe0f\u20e3") == "हिन्दी की का nai\u0308ve 3½ 1".split()


def test_the_share_of_queries_with_groups_of_two_and_four_by_hand():
    """Mean squares of 256/21 between and 3/2 within; the mean size of unequal groups is (24 - 80/24) / 7 = 62/21."""
    scores = [(score, number) for number, group in enumerate([[0, 2]] * 4 + [[4, 6, 4, 6]] * 4) for score in group]
    assert query_share(*zip(*scores)) == pytest.approx((256 / 21 - 1.5) / (256 / 21 + (62 / 21 - 1) * 1.5))


def test_texts_of_other_scripts_are_letters():
    metrics = of_texts(["Привет, мир", "日本語です。", "naïve café", "हिन्दी"]).result()  # the last has 3 marks
    assert metrics["text/non_letters"] == pytest.approx(1 / 33)  # only the ideographic full stop
    assert metrics["text/emojis"] == 0 and of_texts(["\ufffd\u2602"]).result()["text/emojis"] == 0.5


def drawn(model, count, *, length=12, temperature=1.0, top_k=0, seed=0):
    torch.manual_seed(seed)
    ids = torch.tensor([[5, 6]] * count)
    with torch.no_grad():
        for _ in range(length):
            scores = model(ids).logits[:, -1] / temperature
            if top_k:
                scores = scores.masked_fill(scores < scores.topk(top_k).values[:, -1:], -torch.inf)
            scores[:, 2] = -torch.inf  # no reply ends early: all lengths are equal
            ids = torch.cat([ids, torch.multinomial(scores.softmax(-1), 1)], 1)
    return ids[:, 2:]


@cases(({}, -4, 4), ({"top_k": 3}, 6, 99), ({"temperature": 2.0}, -99, -6))
def test_replies_of_another_sampler_show_at_the_first_step(settings, low, high):
    model = lm("gpt2", vocab=20, spread=0.2)
    model.generation_config.eos_token_id = None
    learner = Learner(model, max_tokens=12, fixed_length=True, banned=(2,), epochs=1, **{"optimizer.lr": 1e-9})
    metrics = learner.step([[5, 6]] * 128, list(drawn(learner.policy.model, 128, **settings)), [0.0] * 128)
    assert low < metrics["rollout/likelihood_z"] < high, metrics["rollout/likelihood_z"]


def test_declared_settings_are_used_in_scoring():
    learner = Learner(lm("gpt2", vocab=20, spread=0.2), max_tokens=12, banned=(2,), **{"optimizer.lr": 1e-9})
    replies = drawn(learner.policy.model, 128, temperature=0.5)
    metrics = learner.step([[5, 6]] * 128, list(replies), [0.0] * 128, generation={"temperature": 0.5})
    assert abs(metrics["rollout/likelihood_z"]) < 4
    assert latest(learner).external and latest(learner).declared == {"temperature": 0.5}


def test_declared_settings_that_cannot_be_scored_give_a_warning():
    learner = Learner(lm("gpt2", vocab=len(letters())), tokenizer=letters(), max_tokens=4)
    with pytest.warns(UserWarning, match=r"top_k=5, min_length=8, dropout=True are scored as pure sampling"):
        learner.step(["ab"], ["cd"], [1.0], generation={"top_k": 5, "min_length": 8, "dropout": True, "num_beams": 1})
    history = latest(learner)
    assert history.external and history.declared["top_k"] == 5 and history.rows[0]["reply"] == "cd"
    learner.step(learner.generate(["ab"]), [1.0])
    assert not latest(learner).external and latest(learner).declared == {}
    assert latest(learner).config["kl.coef"] == learner.kl.coef


def test_between_two_passes_torch_has_the_threads_of_the_caller():
    class Model(torch.nn.Linear):
        device = torch.device("cpu")

        def forward(self, **_):
            return torch.get_num_threads()

    tokenizer, texts = SimpleNamespace(pad_token="p", pad_token_id=0), [{"input_ids": [1, 2]}, {"input_ids": [3]}]
    with machine.threads(2):
        found = [(out, torch.get_num_threads()) for *_, out in passes(Model(2, 2), tokenizer, texts, 1)]
    assert found == [(1, 2), (1, 2)]
