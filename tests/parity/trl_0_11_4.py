"""Hold PPO's numbers to those of TRL 0.11.4's own functions, on the same random inputs.

    PYTHONPATH=src PYTHON_WITH_TRL tests/parity/trl_0_11_4.py        # `make parity` makes that python

Runs where TRL is installed; what it takes from operant imports torch and nothing else. TRL's functions are called on
an object that skipped its constructor, so no model, tokenizer or Hub is needed, with the defaults of its `PPOConfig`;
ours get the values of our preset `trl`. What stands off the mask is noise on their side and 0 on ours.

Prints a line a quantity with the largest absolute difference; exits 1 where one is above 1e-5, and also where a control
(the same quantity computed with a known fault) is not.
"""

import sys
import warnings
from types import SimpleNamespace

import torch
from report import Report
from torch import Tensor

from operant import Batch, Outputs, Rollout, Sampling, Task, Turn
from operant.algorithms import preset
from operant.models import logprobs as vocabulary
from operant.objectives import advantages, kl, losses
from operant.rewards import shaping
from operant.rollouts import collate
from operant.training.scoring import charge_kl

warnings.simplefilter("ignore")

from trl import PPOConfig, PPOTrainer  # noqa: E402
from trl.trainer.utils import AdaptiveKLController, RunningMoments  # noqa: E402

BOUND = 1e-5
NUM_REPLIES, VOCABULARY, MAX_QUERY, MAX_REPLY = 8, 17, 6, 9
KINDS = {"kl": "k1", "abs": "absolute", "mse": "k2", "full": "reverse"}
# TRL's names on the left; ours, from `losses.ppo` and `losses.total`, on the right.
METRICS = {"loss/policy": "policy/loss", "loss/value": "value/loss", "loss/total": "loss", "val/error": "value/error"}
METRICS |= {"policy/approxkl": "policy/approx_kl", "policy/policykl": "policy/old_new_kl"}
METRICS |= {"policy/clipfrac": "policy/clip_fraction", "val/clipfrac": "value/clip_fraction"}
METRICS |= {"val/vpred": "value/prediction"}

# Every option that both have: ours, and the field of TRL's PPOConfig.
OPTIONS = {"batch": "batch_size", "optimizer.lr": "learning_rate", "optimizer.max_grad_norm": "max_grad_norm"}
OPTIONS |= {"update.epochs": "ppo_epochs", "update.minibatch": "mini_batch_size"}
OPTIONS |= {"update.ratio_threshold": "ratio_threshold", "kl.coef": "init_kl_coef", "kl.target": "target"}
OPTIONS |= {"kl.horizon": "horizon", "loss.clip": "cliprange", "loss.value_clip": "cliprange_value"}
OPTIONS |= {"loss.value_coef": "vf_coef", "advantage.gamma": "gamma", "advantage.lam": "lam"}


def ours_of(group: str) -> dict:
    """The options of one group under the preset: {"clip": 0.2, ...}."""
    return {name.split(".")[1]: value for name, value in preset("trl").items() if name.startswith(f"{group}.")}


class Case:
    """Random replies with random log-probs, values and logits, laid out once as TRL has them and once as we do.

    TRL's tensors are [B, T - 1] and speak at place t about token t + 1; ours are [B, T] and speak about token t.
    """

    def __init__(self, seed: int, scale: float, flush: bool = False):
        """`flush`: all rows end at the same place, so there is no padding."""
        draw = torch.Generator().manual_seed(seed)
        pick = lambda low, high: int(torch.randint(low, high + 1, (), generator=draw))  # noqa: E731
        noise = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
        self.queries = [[pick(1, VOCABULARY - 1) for _ in range(pick(1, MAX_QUERY))] for _ in range(NUM_REPLIES)]
        self.replies = [[pick(0, VOCABULARY - 1) for _ in range(pick(1, MAX_REPLY))] for _ in range(NUM_REPLIES)]
        if flush:
            self.replies = [[1] * (MAX_QUERY + MAX_REPLY - len(query)) for query in self.queries]
        self.scores = noise(NUM_REPLIES) * 2
        width = max(len(q) + len(r) for q, r in zip(self.queries, self.replies))
        shape = (NUM_REPLIES, width - 1)
        self.ids = torch.zeros(NUM_REPLIES, width, dtype=torch.long)
        self.mask = torch.zeros(shape, dtype=torch.long)
        for row, (query, reply) in enumerate(zip(self.queries, self.replies)):
            self.ids[row, : len(query) + len(reply)] = torch.tensor(query + reply)
            self.mask[row, len(query) - 1 : len(query) + len(reply) - 1] = 1
        self.logits, self.new_logits, self.ref_logits = (noise(*shape, VOCABULARY) * scale for _ in range(3))
        self.new_logits = self.logits + 0.3 * self.new_logits
        logits = (self.logits, self.new_logits, self.ref_logits)
        self.logprobs, self.new_logprobs, self.ref_logprobs = map(self.chosen, logits)
        self.values, self.new_values = noise(*shape), noise(*shape)

    def chosen(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(-1).gather(-1, self.ids[:, 1:, None]).squeeze(-1)

    def ours(self, x: Tensor) -> Tensor:
        """From TRL's layout to ours: one place to the right, 0 off actions."""
        return torch.nn.functional.pad(x * self.mask, (1, 0))

    def theirs(self, x: Tensor) -> Tensor:
        """From our layout to TRL's, action tokens only."""
        return x[:, 1:] * self.mask

    def collated(self) -> Batch:
        """As a step makes it: from rollouts, with the score on the last token."""
        pairs = enumerate(zip(self.queries, self.replies))
        rollouts = [Rollout(Task(str(row), query), row, [Turn(query, reply)], [""]) for row, (query, reply) in pairs]
        made = collate.collate(rollouts, self.scores.tolist())
        assert torch.equal(made.actions[:, 1:].long(), self.mask), "the two layouts disagree about what was chosen"
        return made.with_(**{name: self.ours(getattr(self, name)) for name in ("logprobs", "ref_logprobs", "values")})

    def exact(self) -> Tensor:
        """Our exact KL(policy || reference) at every action, from the one place that sees the vocabulary."""
        where = self.mask.bool()
        whole, zeros = (lambda x: x, self.ref_logits[where]), torch.zeros(int(where.sum()), dtype=torch.long)
        given = (lambda x: x, self.logits[where], self.ids[:, 1:][where], zeros, Sampling())
        known = vocabulary.score(*given, vocabulary=VOCABULARY, against=whole)
        return self.ours(torch.zeros_like(self.logprobs).masked_scatter(where, known["reverse"]))


def trl_trainer(**changes) -> PPOTrainer:
    """TRL's trainer without its constructor: the pure part of it needs a configuration and a KL controller."""
    trainer = object.__new__(PPOTrainer)
    trainer.config = PPOConfig(exp_name="parity", **changes)
    config = trainer.config
    trainer.kl_ctl = AdaptiveKLController(config.init_kl_coef, config.target, config.horizon)
    return trainer


def compare_rewards(case: Case, report: Report) -> None:
    """The KL penalty of each kind, and the rewards that it leaves."""
    made = case.collated()
    for theirs, ours in KINDS.items():
        trainer = trl_trainer(kl_penalty=theirs)
        logs, refs = case.logprobs, case.ref_logprobs
        if theirs == "full":
            logs, refs = case.logits.log_softmax(-1), case.ref_logits.log_softmax(-1)
        rewards, _, penalty = trainer.compute_rewards(case.scores, logs, refs, case.mask)
        paid = case.exact() if theirs == "full" else kl.estimate(ours, made.logprobs, made.ref_logprobs)
        left = charge_kl(made.with_(kl=paid), ours_of("kl")["coef"]).rewards
        report.same(f"KL penalty, {theirs}", penalty * case.mask, case.theirs(paid))
        report.same(f"rewards, {theirs}", rewards * case.mask, case.theirs(left))
    report.differs("rewards, score one token early", rewards * case.mask, case.theirs(left.roll(-1, 1)))


def compare_advantages(case: Case, report: Report) -> None:
    """GAE, returns and whitening, gamma 1 and below."""
    for name, changes in {"": {}, ", gamma .9, lam .8": {"gamma": 0.9, "lam": 0.8}}.items():
        compare_credit(case, report, name, changes)


def compare_whitened_rewards(case: Case, report: Report) -> None:
    """With rewards whitened first, on rows without padding.

    TRL's whitening also moves the zeros of the padding, which then flow back into the reply; ours does not.
    """
    compare_credit(case, report, ", whitened rewards", {"whiten_rewards": True})


def compare_credit(case: Case, report: Report, name: str, changes: dict[str, float | bool]) -> None:
    made, trainer = case.collated(), trl_trainer(**changes)
    rewards, _, _ = trainer.compute_rewards(case.scores, case.logprobs, case.ref_logprobs, case.mask)
    values, theirs, returns = trainer.compute_advantages(case.values, rewards, case.mask)
    made = charge_kl(made.with_(kl=kl.estimate("k1", made.logprobs, made.ref_logprobs)), ours_of("kl")["coef"])
    options = ours_of("advantage") | changes
    ours = advantages.with_gae(made, **options)
    report.same(f"values{name}", values, case.theirs(ours.values))
    report.same(f"advantages{name}", theirs * case.mask, case.theirs(ours.advantages))
    report.same(f"returns{name}", returns * case.mask, case.theirs(ours.returns))
    biased = advantages.with_gae(made, **(options | {"unbiased": False}))
    report.differs(f"advantages{name}, biased variance", theirs * case.mask, case.theirs(biased.advantages))


def compare_losses(case: Case, report: Report) -> None:
    """Policy, value and total loss, their metrics, and the gradient that they send back."""
    trainer, mask = trl_trainer(), case.mask
    rewards, _, _ = trainer.compute_rewards(case.scores, case.logprobs, case.ref_logprobs, mask)
    values, advantage, returns = trainer.compute_advantages(case.values, rewards, mask)
    new_logprobs, new_values = (x.clone().requires_grad_() for x in (case.new_logprobs, case.new_values))
    given = (case.logprobs, values, case.new_logits, new_values, new_logprobs, mask, advantage, returns)
    policy_loss, value_loss, stats = trainer.loss(*given)
    (policy_loss + value_loss).backward()

    made = case.collated()
    weights = collate.token_weights(made, "token")
    made = made.with_(weights=weights, advantages=case.ours(advantage), returns=case.ours(returns))
    mine = [case.ours(x).requires_grad_() for x in (case.new_logprobs, case.new_values)]
    out = Outputs(logprobs=mine[0], raw_logprobs=mine[0], values=mine[1])
    options = ours_of("loss")
    named = losses.ppo(out, made, **options)
    losses.total(named["loss"], made).backward()
    for theirs, ours in METRICS.items():
        report.same(f"ppo/{theirs}", stats[theirs], losses.total(named[ours].detach(), made))
    report.same("gradient by log-probs", new_logprobs.grad, case.theirs(mine[0].grad))
    report.same("gradient by values", new_values.grad, case.theirs(mine[1].grad))
    report.same("ppo/policy/ratio", stats["policy/ratio"] * mask, case.theirs(named["policy/ratio_mean"]))
    named = losses.ppo(out, made, **(options | {"value_clip": None}))
    report.differs("ppo/loss/value, not clipped", stats["loss/value"], losses.total(named["value/loss"], made))
    per_reply = made.with_(weights=collate.token_weights(made, "episode"))
    report.differs("ppo/loss/total, mean of means", stats["loss/total"], losses.total(named["loss"], per_reply))


def compare_controller(report: Report) -> None:
    """The adaptive coefficient over 200 steps of a wandering KL."""
    config = PPOConfig(exp_name="parity")
    theirs = AdaptiveKLController(config.init_kl_coef, config.target, config.horizon)
    ours = kl.controller(kl.KLOptions(**ours_of("kl")))
    wander = torch.Generator().manual_seed(0)
    for _ in range(200):
        measured = float(12 * torch.rand((), generator=wander))
        theirs.update(measured, config.batch_size)
        ours.update(measured, measured / 20, config.batch_size)
        report.same("ppo/kl_coef, adaptive", float(theirs.value), ours.coef)


def compare_scores(report: Report) -> None:
    """Scaling, normalising and clipping of scores by running moments.

    `step` of 0.11.4 stops with an AttributeError here, because its moments are plain floats on which it calls `.to`:
    its own `RunningMoments` gives the moments, and the two lines that follow in `step` are written out.
    """
    draw = torch.Generator().manual_seed(1)
    batches = [3 * torch.randn(NUM_REPLIES, generator=draw) + 1 for _ in range(5)]
    eps = torch.finfo(torch.float32).eps
    for name, norm, clip in [("scaled", False, None), ("normalised", True, None), ("normalised, clipped", True, 0.5)]:
        theirs, ours = RunningMoments(SimpleNamespace(use_distributed=False)), shaping.RunningMoments()
        for scores in batches:
            theirs.update(scores)
            ours.update(scores.tolist())
            expected = (scores - theirs.mean if norm else scores) / (theirs.std + eps)
            expected = expected if clip is None else expected.clip(-clip, clip)
            made = [shaping.centred(score, ours) if norm else score for score in scores.tolist()]
            made = [shaping.scaled(score, ours) for score in made]
            made = made if clip is None else [shaping.clipped(score, clip) for score in made]
            report.same(f"scores, {name}", expected, made)


def compare_options(report: Report) -> None:
    """The preset's values are the defaults of TRL's PPOConfig."""
    config = PPOConfig(exp_name="parity")
    for ours, theirs in OPTIONS.items():
        mine, given = preset("trl")[ours], getattr(config, theirs)
        same = mine is given if None in (mine, given) else mine == given
        report.same(f"option {ours} = {theirs}", 0.0, 0.0 if same else float("inf"))
    named = [(config.adap_kl_ctrl, True), (config.kl_penalty, "kl"), (config.whiten_rewards, False)]
    ours = (ours_of("kl")["control"], kl.KLOptions(**ours_of("kl")).kind, ours_of("advantage").get("whiten_rewards"))
    good = all(a == b for a, b in named) and ours == ("adaptive", "k1", None)
    report.same("options adap_kl_ctrl, kl_penalty, whiten_rewards", 0.0, 0.0 if good else float("inf"))


def main() -> int:
    report = Report(BOUND)
    for seed in range(20):
        case = Case(seed, scale=0.5 + seed % 4)
        for compare in (compare_rewards, compare_advantages, compare_losses):
            compare(case, report)
        compare_whitened_rewards(Case(seed, scale=1.0, flush=True), report)
    compare_controller(report)
    compare_scores(report)
    compare_options(report)
    return 0 if report.told() else 1


if __name__ == "__main__":
    sys.exit(main())
