"""Methods that compare replies to one query: what a group is, what is refused, and that equal scores teach nothing."""

import pytest
import torch
from cases import cases
from toys import letters, lm

from operant import Learner, OperantError, Policy, Task, diagnose
from operant.api import runs
from operant.objectives.groups import group_relative
from operant.runs.config import configure
from operant.tools.report.diagnosis.history import History
from operant.tools.report.diagnosis.rewards import no_advantage

GIVEN = {"tasks": ["ab", "cde", "the end", "h"], "reward": "letters:a"}


def test_a_recipes_options_of_another_method_are_left_out():
    config = configure({"algorithm": "grpo"}, "sentiment")
    left = "advantage.lam kl.coef loss.value_clip loss.value_coef update.epochs"
    assert config.left_out == {"sentiment": left.split()}
    kl = config.learner["kl"]
    assert (config.train.samples, kl.coef, kl.loss_coef, config.train.batch) == (8, 0.0, 0.2, 128)
    assert configure({}, "sentiment").left_out == {} and configure({"algorithm": "ppo"}, "sentiment").left_out == {}


@cases(
    ("advantage.lam", 0.9, r"advantage.lam' is unknown with algorithm=grpo: it belongs to ppo"),
    ("loss.value_coef", 0.1, r"loss.value_coef' is unknown with algorithm=grpo: it belongs to ppo"),
    ("value.layers", 2, r"value.layers=2: algorithm grpo has no critic"),
    ("kl.coef", 0.1, r"kl.coef=0.1 with algorithm=grpo.*kl.loss_coef"),
    ("kl.control", "adaptive", r"kl.control=adaptive with algorithm=grpo: it is about KL in the reward"),
    ("kl.horizon", 10_000, r"kl.horizon=10000.* with algorithm=grpo: it is about KL in the reward"),
    ("kl.kind", "reverse", r"kl.kind=reverse with algorithm=grpo.*use kl.loss_coef and kl.loss_kind"),
    ("on_length", "bootstrap", "on_length=bootstrap with algorithm=grpo: it needs a critic"),
)
def test_options_of_another_method_that_were_typed_are_refused(option, value, message):
    with pytest.raises(OperantError, match=message):
        configure({"algorithm": "grpo", option: value}, "sentiment")
    with pytest.raises(OperantError, match=message):
        Learner(lm(), algorithm="grpo", **{option: value})


def test_without_a_reference_the_defaults_charge_no_kl():
    assert Learner(lm(), algorithm="grpo", reference=None).kl.loss_coef == 0.0
    assert configure(GIVEN | {"algorithm": "grpo", "reference": "none"}).learner["kl"].loss_coef == 0.0
    with pytest.raises(OperantError, match="nothing to measure KL to"):
        Learner(lm(), algorithm="grpo", reference=None, **{"kl.loss_coef": 0.1})
    assert Learner(lm(), reference=None).kl.coef == 0.0
    with pytest.raises(OperantError, match=r"kl.coef=0.5 with reference=None: there is nothing to measure KL to"):
        Learner(lm(), reference=None, **{"kl.coef": 0.5})


def test_what_was_left_out_is_one_line_on_the_console(tmp_path, capsys):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("{loss: {value_coef: 0.3}, advantage: {lam: 0.9}, batch: 8, steps: 1}", encoding="utf-8")
    given = {"algorithm": "rloo", "policy": lm(vocab=40), "tokenizer": letters(), "samples": 2} | GIVEN
    list(runs(tmp_path / "run", recipe=str(recipe), **given))
    said = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert len(said) == 1 and said[0].endswith("left out with algorithm=rloo: advantage.lam, loss.value_coef")


def test_a_preset_of_another_method_is_left_out_with_a_warning():
    with pytest.warns(UserWarning, match=r"preset trl .*left out with algorithm=grpo:.*kl.coef"):
        learner = Learner(lm(), algorithm="grpo", preset="trl")
    assert learner.kl.coef == 0.0 and learner.options["optimizer"].lr == 1.41e-5


# --- what a group is --------------------------------------------------------------------------------------------------
def test_triplets_are_grouped_by_equal_query_or_by_name():
    """Scores 0, 1 | 2, 4: by query the pairs have means 0.5 and 3; named the other way round 1 and 2.5."""
    queries, replies, scores = [[5], [6], [5], [6]], [[7], [8], [9], [10]], [0.0, 2.0, 1.0, 4.0]
    learner = Learner(lm(), algorithm="grpo", max_tokens=2, **{"advantage.scale": False})

    def advantages(**more):
        learner.step(queries, replies, scores, **more)
        return learner.last_step.batch.advantages.sum(1).tolist()

    assert advantages() == pytest.approx([-0.5, -1.0, 0.5, 1.0])
    assert advantages(groups=[0, 0, 1, 1]) == pytest.approx([-1.0, 1.0, -1.5, 1.5])
    assert advantages(groups=torch.tensor([0, 0, 1, 1])) == pytest.approx([-1.0, 1.0, -1.5, 1.5])
    with pytest.raises(OperantError, match="3 groups for 4 queries"):
        advantages(groups=[0, 0, 1])
    # Where all but one of a group abstain, nothing is left to compare.
    learner.step([[5]] * 3 + [[6]] * 2, [[7], [8], [9], [10], [11]], [0.0, None, 1.0, 5.0, None])
    assert learner.last_step.batch.advantages.sum(1).tolist() == pytest.approx([-0.5, 0.5, 0.0])


def test_triplets_without_anything_to_compare_are_refused():
    learner = Learner(lm(), algorithm="grpo", max_tokens=2)
    before = [p.detach().clone() for p in learner.policy.trainable()]
    with pytest.raises(OperantError, match=r"grpo compares at least 2 replies to one query.*3 groups has fewer"):
        learner.step([[5], [6], [7]], [[7], [8], [9]], [0.0, 2.0, 1.0])
    assert all(map(torch.equal, before, learner.policy.trainable())) and learner.progress.step == 0


# --- generate, generate, step -----------------------------------------------------------------------------------------
def test_replies_of_several_calls_are_those_of_one_call():
    queries = [[5, 6], [7], [5, 6], [7], [5, 6]]
    whole, learner = Learner(lm(), max_tokens=6).generate(queries), Learner(lm(), max_tokens=6)
    with pytest.raises(OperantError):
        learner.generate([[5, 6], [999]])  # a call that fails counts nothing
    one_by_one = [reply for query in queries for reply in learner.generate([query])]
    assert [r.ids for r in one_by_one] == [r.ids for r in whole]
    assert [r.group for r in one_by_one] == [r.group for r in whole] == [0, 1, 0, 1, 0]
    assert [r.place for r in one_by_one] == [r.place for r in whole] == [0, 1, 2, 3, 4]
    assert len({tuple(one_by_one[i].ids) for i in (0, 2, 4)}) == 3  # one query, three replies
    learner.step(one_by_one, [0.1, 0.2, 0.3, 0.4, 0.5])
    assert learner.generate([[7]])[0].group == 0


def test_replies_of_an_earlier_step_are_compared_with_their_own():
    """Group numbers begin anew with every step, and both pairs would be group 0."""
    learner = Learner(lm(), algorithm="grpo", max_tokens=3, **{"advantage.scale": False})
    pool = learner.generate([[5], [5]])
    learner.step(learner.generate([[6], [6]]), [1.0, 0.0])
    learner.step(pool + learner.generate([[7], [7]]), [1.0, 2.0, 5.0, 7.0])
    batch = learner.last_step.batch
    assert (batch.advantages.sum(1) / batch.actions.sum(1)).tolist() == pytest.approx([-0.5, 0.5, -1.0, 1.0])


def test_what_a_step_does_not_take_is_a_sentence():
    learner = Learner(lm(), max_tokens=2)
    with pytest.raises(OperantError, match=r"takes the rollouts that generate returned, and not 'a'"):
        learner.step(["a"], [1.0])
    one, none = r"reward of turn 0 is .*: each turn of an episode has one", r"\['a'\] names no episode and no group"
    for reward, name, said in (([1.0], 0, one), (torch.ones(2), 0, one), (10**400, 0, one), (1.0, ["a"], none)):
        with pytest.raises(OperantError, match=said):
            learner.step([[5], [5]], [[6], [7]], [reward, 2.0], episodes=[name, name])


def test_two_ways_of_sampling_are_not_one_step():
    """Each reply carries what it was sampled with: the step scores with that, and with one at a time."""
    learner = Learner(lm(), max_tokens=6, watch_every=0)
    cold, warm = learner.generate([[5, 6]] * 4, temperature=0.5), learner.generate([[5, 6]] * 4, temperature=2.0)
    with pytest.raises(OperantError, match=r"temperature=0.5.*temperature=2.0.*a step for each"):
        learner.step(cold + warm, [0.0, 1.0] * 4)
    assert learner.step(cold, [0.0, 1.0, 0.5, 0.2])["rollout/logprob_gap"] < 1e-4
    assert (few := learner.generate([[5]], max_new_tokens=3, stop_tokens=[])[0].sampling).max_tokens == 3 and few.stops


# --- equal scores -----------------------------------------------------------------------------------------------------
@cases(0.0, 1e-5)
def test_equal_scores_have_advantage_zero_whatever_kl_is(coef):
    """Paid into the return, the noise of KL alone had mean advantages of 0.8 to 0.9 for any coefficient."""
    options = {"kl.loss_coef": coef, "max_grad_norm": None, "max_tokens": 6}
    learner = Learner(lm(), algorithm="grpo", reference=Policy(lm(seed=1)), **options)
    metrics = learner.step(learner.generate([[5, 6], [7]] * 4), [0.7] * 8)
    assert metrics["kl/per_reply"] > 0.1 and metrics["policy/advantage_zero"] == 1.0
    assert not learner.last_step.batch.advantages.any()
    assert (metrics["update/grad_norm"] > 0) == (coef > 0)  # the KL of the loss is all that moves it
    assert "constant" in {finding.name for finding in diagnose(History([metrics] * 3))}


def test_a_spread_that_is_rounding_is_none():
    """Around 1,000 float32 counts in steps of 6e-5: without a bound, noise came out as advantages of 0.7."""
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    scaled = group_relative(torch.tensor([1000.0, 1000.0 + 6e-5, 1000.0, 0.5, 0.75, 1.0]), groups)
    assert not scaled[:3].any() and scaled[3:].tolist() == pytest.approx([-1.2247, 0.0, 1.2247], abs=1e-3)


@cases(("population", 3, 1e-6), ("sample", 2, 1e-4))
def test_both_deviations_by_hand(deviation, freedom, added):
    returns, groups = torch.tensor([0.0, 1.0, 5.0, 3.0], dtype=torch.float64), torch.tensor([0, 0, 0, 1])
    std = (sum((x - 2) ** 2 for x in (0, 1, 5)) / freedom) ** 0.5 + added
    mine = group_relative(returns, groups, deviation=deviation)
    assert mine.tolist() == pytest.approx([-2 / std, -1 / std, 3 / std, 0.0], rel=1e-12)


@pytest.mark.parametrize("name", ["policy/advantage_zero", "preference/unpaired"])
@pytest.mark.parametrize(("zero", "level"), [([1], "problem"), ([0, 1, 0], None), ([1, 1, 0], "warning")])
def test_most_steps_without_advantages_or_pairs_are_a_finding(zero, level, name):
    found = no_advantage(History([{"step": i, name: share} for i, share in enumerate(zero, 1)]))
    assert (found and found.level) == level


def test_a_step_whose_advantages_are_all_zero_is_a_finding():
    for algorithm, more, said in (
        ("rloo", {"reference": None}, "every advantage"),
        ("online-dpo", {}, "no prompt had a better and a worse reply"),
    ):
        learner = Learner(lm(), algorithm=algorithm, max_tokens=4, **more)
        learner.step(learner.generate([Task("a", [5]), Task("b", [6])] * 4), [1.0, 2.0] * 4)
        found = next(f for f in diagnose(learner) if f.name in ("no_advantage", "constant"))
        assert found.name == "no_advantage" and said in found.message
