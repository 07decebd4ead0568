"""Canaries: the task is to say a given token, whose best mean reward is 1. Learning finds it, noise does not.

Of 12 tokens one is wanted, so chance is 0.083. Under shuffled rewards a policy still wanders: the mean of the last four
steps has a standard deviation of up to 0.06 over 16 seeds, so that of one seed stays below 0.083 + 3 * 0.06. Where a
third of the replies get their own scores, one seed ends above that bound with every method but trpo (0.19) and decision
(0.04).
"""

import pytest
from canaries import ABSENT, CHANCE, NOISE, PROMPTS, VOCABULARY, WANTED, learner, score, shuffled
from cases import slow, slow_but

from operant.algorithms import ALGORITHMS
from operant.sampling import counter

ROWS = {"ppo": {}, "grpo": {"kl.loss_coef": 0.0, "epochs": 2}, "rloo": {"epochs": 2}, "sft": {}}
ROWS |= {"decision": {"condition.template": lambda value: [round(5 * value)], "epochs": 4}}
ELSEWHERE = {"distill", "ilql", "dpo", "online-dpo", "kto", "reward-model", "outcome-critic"}
"""Their canaries stand in files of their own: one learns without a reward, the others from recorded replies, labels."""
ROWS |= {
    "a2c": {"minibatch": 8, "optimizer.lr": 3e-3},
    "reinforce": {"minibatch": 8},
    "coderl": {"minibatch": 8, "score.centre": True, "advantage.gamma": 1.0},
    "nlpo": {"top_p_least": 8},
}
ROWS |= {"trpo": {"update.target_kl": 0.1, "fisher_share": 1.0, "critic_epochs": 10, "minibatch": ABSENT}}
ROWS |= {"soft_q": {"advantage.shape": (0.0, 1.0, 0.0, 40.0), "target.rate": 0.5, "epochs": 4}}
ROWS |= {"gigpo": ROWS["grpo"], "rejection": {"learner.select": "top:25%", "epochs": 4}}
ROWS |= {name: {"epochs": 2} for name in ("dapo", "gspo", "sapo", "dppo", "maxrl", "reinforce++-baseline")}
ROWS |= {"dr-grpo": {"epochs": 2}, "cispo": {"minibatch": 8}, "opo": {"minibatch": 8}, "reinforce++": {"epochs": 2}}
ROWS |= {"pass-at-k": {"epochs": 2, "advantage.k": 2}}
ROWS |= {"vapo": {"epochs": 2, "advantage.right": 0.8, "advantage.alpha": 1.0}}
CONTROL = {"optimizer.lr": 4e-3, "epochs": 1}
CONTROLS = {"trpo": {"update.target_kl": 0.02}, "a2c": {"optimizer.lr": 1e-3}}
"""Of methods whose steps have another size: RMSProp's first one is ten times its rate."""


def own(step, scores):
    return scores


def leaking(step, scores):
    """Shuffled, but for every third reply, which gets its own."""
    return [s if i % 3 == 0 else other for i, (s, other) in enumerate(zip(scores, shuffled(step, scores), strict=True))]


def run(student, steps, credit=own, count=32):
    """Mean reward of every step, before its update; of given replies, behind it."""
    means, prompts = [], PROMPTS * (count // 4)
    for step in range(steps):
        if student.algorithm.source == "data":
            student.step(prompts, [demonstrated(credit, step, i) for i in range(count)])
        replies = student.generate(prompts)
        scores = [score(r) for r in replies]
        means.append(sum(scores) / count)
        if student.algorithm.source != "data":
            assert student.step(replies, credit(step, scores)).get("rollout/logprob_gap", 0.0) < 1e-3
    return means


def demonstrated(credit, step, i):
    """A reply as it should be; for a control, of tokens by chance."""
    if credit is own or (credit is leaking and i % 3 == 0):
        return [WANTED] * 5
    return [counter(9, step, i, place) % VOCABULARY for place in range(5)]


def above(row, credit, seeds=1):
    """How far the mean reward ends above the bound, as a mean over seeds."""
    ends = []
    for seed in range(seeds):
        means = run(learner(algorithm=row, seed=seed, **ROWS[row] | CONTROLS.get(row, CONTROL)), 12, credit, count=64)
        ends.append(sum(means[-4:]) / 4)
    return sum(ends) / seeds - CHANCE - 3 * NOISE / seeds**0.5


def test_every_row_of_the_table_has_a_canary():
    assert set(ROWS) == set(ALGORITHMS) - ELSEWHERE


DAILY = ("ppo", "soft_q")
"""Updates of all methods are held to their claims every day, in test_expected_gradients.py, test_group_methods.py and
others. Of TRPO a seed does not show a leak."""
OTHERS = [*(slow(row, "gpt2") for row in ROWS if row not in DAILY), slow("ppo", "llama")]


@pytest.mark.parametrize(("row", "kind"), [*((row, "gpt2") for row in DAILY), *OTHERS])
def test_a_method_finds_the_optimum(row, kind):
    more = {"steps": 14, "count": 48} if row == "trpo" else {"steps": 12}  # TRPO makes one step a batch
    own = ROWS[row] | ({"update.target_kl": 0.15, "critic_epochs": 3} if row == "trpo" else {})
    means = run(learner(kind, algorithm=row, **own), **more)
    assert (means[0] < 0.2 or row == "sft") and means[-1] > 0.95


# Without an outcome critic coderl computes what reinforce does: the ends are the same to the last bit.
@pytest.mark.parametrize("row", slow_but(DAILY[:1], [row for row in ROWS if row != "coderl"]))
def test_shuffled_rewards_teach_nothing(row):
    assert above(row, shuffled) < 0


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row != "decision"])  # its own returns are seen too rarely there
def test_the_control_sees_a_leak(row):
    """A third of the replies is enough to show."""
    assert above(row, leaking, 4 if row == "trpo" else 1) > 0
