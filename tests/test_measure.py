"""How replies read, and whether they were drawn from the policy that is said to have spoken: by hand and by chance."""

import math

import pytest
import torch
from toys import letters, lm

from operant import Learner
from operant.diagnosis import latest
from operant.metrics.collect import of_texts, top_word


def test_texts_are_measured_by_hand():
    told = of_texts(["the cat the cat the", "  \n", "Oh! 5 \U0001f600 ~", "the"]).result()
    # words: the cat the cat the | oh 5 | the = 8; pairs: the-cat cat-the the-cat cat-the | oh-5
    assert told["text/empty"] == 1 / 4
    assert told["text/top_word"] == 4 / 8
    assert told["text/distinct_1"] == 4 / 8 and told["text/distinct_2"] == 3 / 5
    assert told["text/repeated"] == pytest.approx(1 / 3)  # the-cat-the twice among three; nobody else has a trigram
    characters = len("the cat the cat the") + 3 + len("Oh! 5 \U0001f600 ~") + 3
    assert told["text/exclamations"] == 1 / characters and told["text/emojis"] == 1 / characters
    assert told["text/non_letters"] == 2 / characters  # the emoji and the tilde
    assert top_word(["The cat", "the dog"]) == ("the", 0.5) and top_word(["", "!"]) == ("", 0.0)


def test_texts_of_other_scripts_are_letters():
    told = of_texts(["Привет, мир", "日本語です。", "naïve café"]).result()
    assert told["text/non_letters"] == pytest.approx(1 / 27)  # the ideographic full stop alone
    assert told["text/emojis"] == 0


def drawn(model, count, *, length=12, temperature=1.0, top_k=0, seed=0):
    """Replies by a loop of our own over the bare model."""
    torch.manual_seed(seed)
    ids = torch.tensor([[5, 6]] * count)
    with torch.no_grad():
        for _ in range(length):
            scores = model(ids).logits[:, -1] / temperature
            if top_k:
                scores = scores.masked_fill(scores < scores.topk(top_k).values[:, -1:], -torch.inf)
            scores[:, 2] = -torch.inf  # nobody ends early: lengths are alike
            ids = torch.cat([ids, torch.multinomial(scores.softmax(-1), 1)], 1)
    return ids[:, 2:]


@pytest.mark.parametrize(
    "how, low, high",
    [({}, -4, 4), ({"top_k": 3}, 6, 99), ({"temperature": 0.5}, 6, 99), ({"temperature": 2.0}, -99, -6)],
)
def test_replies_of_another_sampler_show_at_the_first_step(how, low, high):
    model = lm("gpt2", vocab=20, spread=0.2)
    model.generation_config.eos_token_id = None
    learner = Learner(model, max_tokens=12, fixed_length=True, banned=(2,), epochs=1, **{"optimizer.lr": 1e-9})
    replies = drawn(learner.policy.model, 128, **how)
    metrics = learner.step([[5, 6]] * 128, list(replies), [0.0] * 128)
    assert low < metrics["rollout/likelihood_z"] < high, metrics["rollout/likelihood_z"]


def test_the_likelihood_gap_is_entropy_plus_logprob():
    model = lm("gpt2", vocab=20, spread=0.2)
    learner = Learner(model, max_tokens=3, epochs=1, **{"optimizer.lr": 1e-9})
    query, reply = [5, 6], [7, 8, 9]
    with torch.no_grad():
        logp = learner.policy.model(torch.tensor([query + reply])).logits[0, 1:-1].double().log_softmax(-1)
    excess = [float(-(p.exp() * p).sum() + p[token]) for p, token in zip(logp, reply)]
    metrics = learner.step([query], [reply], [1.0])
    mean = sum(excess) / 3
    spread = math.sqrt(sum((x - mean) ** 2 for x in excess) / 3)
    assert metrics["rollout/likelihood_gap"] == pytest.approx(mean, abs=1e-5)
    assert metrics["rollout/likelihood_z"] == pytest.approx(mean / spread * math.sqrt(3), rel=1e-4)


def test_truncated_replies_with_their_allowed_tokens_claim_nothing():
    learner = Learner(lm("gpt2", vocab=20), max_tokens=4, top_k=3, truncation="stored")
    metrics = learner.step(learner.generate([[5, 6]] * 8), [0.0] * 8)
    assert "rollout/likelihood_gap" not in metrics


@pytest.mark.parametrize("scored", [{"temperature": 0.5}, {"eos_token_id": 2}])
def test_what_can_be_scored_is_scored_as_declared(scored):
    model = lm("gpt2", vocab=20, spread=0.2)
    learner = Learner(model, max_tokens=12, banned=(2,) if "temperature" in scored else (), **{"optimizer.lr": 1e-9})
    replies = drawn(learner.policy.model, 128, temperature=scored.get("temperature", 1.0))
    metrics = learner.step([[5, 6]] * 128, list(replies), [0.0] * 128, generation=scored)
    if "temperature" in scored:
        assert abs(metrics["rollout/likelihood_z"]) < 4
    assert latest(learner).external and latest(learner).declared == scored


def test_what_cannot_be_scored_is_declared_with_a_warning():
    learner = Learner(lm("gpt2", vocab=len(letters())), tokenizer=letters(), max_tokens=4)
    with pytest.warns(UserWarning, match=r"top_k=5, min_length=8, dropout=True are scored as pure sampling"):
        learner.step(["ab"], ["cd"], [1.0], generation={"top_k": 5, "min_length": 8, "dropout": True, "num_beams": 1})
    history = latest(learner)
    assert history.external and history.declared["top_k"] == 5 and history.rows[0]["reply"] == "cd"
    learner.step(learner.generate(["ab"]), [1.0])
    assert not latest(learner).external and latest(learner).declared == {}
    assert latest(learner).config["kl.coef"] == learner.kl.coef
