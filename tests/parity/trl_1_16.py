"""Hold GRPO's and RLOO's numbers to those of TRL 1.16.0's own trainers, on the same model, replies and scores.

    PYTHONPATH=src PYTHON_WITH_TRL tests/parity/trl_1_16.py        # `make parity` makes that python

Everything is done twice: in float64, where TRL's output head gives way to a plain one (the only thing of its that
computes in float32 regardless), to 1e-10; and in float32 with TRL as it is, to 1e-5. Gradients are those of all
parameters, as shares of the largest entry. The weights are three: the reference's, the old policy's that the replies
are scored under, and the new policy's, far enough from it that a third of all ratios is clipped.

Prints a line a quantity with the largest difference; exits 1 where one is above its bound, where a control (the same
quantity computed with a known fault) is not, and where something that differs on purpose no longer does.
"""

import sys
from dataclasses import dataclass, field, replace

import torch
from given_1_16 import HALVES, IN_LOSS, IN_REWARD, LOW, MAX_REPLY, OWN, ROWS, SETTINGS, Case, Numbers
from report import Report
from sides_1_16 import KINDS, Found, Ours, Theirs, alone, shares, stored, weights_of
from torch import Tensor

from operant.algorithms import ALGORITHMS
from operant.objectives import losses
from operant.objectives.kl import loss_term
from operant.tools.migrate.configuration import with_configuration
from operant.types import Batch, Outputs

DRAWS, FEW = 10, 3
DELTA, TWO_ABSTAIN = 1.6, {1: None, 7: None}


def bounded(out: Outputs, batch: Batch, *, clip: float, clip_high: float, dual_clip: float | None) -> dict[str, Tensor]:
    """The row's loss with the second bound of `losses.clipped`, for which the row has no option."""
    return losses.clipped(out, batch, low=clip, high=clip_high, dual_clip=dual_clip)


GRPO, RLOO = ALGORITHMS["grpo"], ALGORITHMS["rloo"]
ALGORITHMS |= {
    "per token": replace(GRPO, per="token"),
    "per sequence": replace(GRPO, per="sequence"),
    "per horizon": replace(GRPO, per="horizon"),
    "bounded": replace(GRPO, loss=bounded),
    "rloo per token": replace(RLOO, per="token"),
    "rloo against the mean": replace(RLOO, advantage=GRPO.advantage),
}


@dataclass(frozen=True)
class Form:
    """A loss of TRL's GRPOTrainer, the row and options of ours that are the same, and a fault."""

    theirs: dict
    row: str
    ours: dict = field(default_factory=dict)
    fault: str = ""
    faulty: tuple[str, dict] = ("grpo", {})


DR_GRPO, BONUS = {"loss_type": "dr_grpo", "scale_rewards": "none"}, {"loss_type": "bnpo", "entropy_coef": 0.1}
PLAIN, LONGER = {"advantage.scale": False}, {"sampling.max_tokens": MAX_REPLY + 1}
WARM, HALF = {"sampling.temperature": 1}, {"loss.entropy_coef": 0.05}
FORMS = {
    "grpo": Form({}, "grpo", {}, "a mean over tokens", ("per token", {})),
    "bnpo": Form({"loss_type": "bnpo"}, "per token", {}, "a mean of means", ("grpo", {})),
    "dapo": Form({"loss_type": "dapo"}, "per token", {}, "at temperature 1", ("per token", WARM)),
    "dr_grpo": Form(DR_GRPO, "per horizon", PLAIN, "a horizon of one more", ("per horizon", PLAIN | LONGER)),
    "luspo, token level": Form({"loss_type": "luspo"}, "per sequence", {}, "a mean over tokens", ("per token", {})),
    "grpo, no KL": Form(
        {"beta": 0.0}, "grpo", {"kl.loss_coef": 0.0}, "clipped alike on both sides", ("grpo", {"loss.clip_high": LOW})
    ),
    "grpo, KL without correction": Form(
        {"use_bias_correction_kl": False}, "grpo", {"kl.loss_kind": "plain_k3"}, "with the ratio", ("grpo", {})
    ),
    "grpo, delta": Form(
        {"delta": DELTA}, "bounded", {"loss.dual_clip": DELTA}, "no second bound", ("bounded", {"loss.dual_clip": None})
    ),
    "bnpo, entropy bonus": Form(BONUS, "per token", {"loss.entropy_coef": 0.1}, "half the bonus", ("per token", HALF)),
}


class Pair:
    """Both sides, and the weights that they share."""

    def __init__(self, theirs: Theirs, ours: Ours, name: str):
        self.theirs, self.ours, self.name = theirs, ours, name
        self.base = weights_of(ours.model)

    def batches(self, case: Case) -> tuple[dict, Batch]:
        """What each learns from, under the old weights."""
        self.old = case.moved(self.base, 0.05, 1)
        self.new = case.moved(self.old, 0.03, 2)
        return self.theirs.scored(case, self.old), self.ours.looked(case, self.old)[0]

    def compared(self, report: Report, theirs: Found, ours: Found, batch: Batch) -> None:
        """Loss and gradient, and the metrics that both have."""
        name, said, mine = self.name, theirs.metrics, ours.metrics
        report.same(f"{name}: loss", theirs.loss, ours.loss)
        report.same(f"{name}: gradient", *shares(theirs, ours))
        report.same(f"{name}: entropy", said["entropy"], mine["policy/entropy"])
        count = batch.actions.sum()  # TRL has its share of clipped tokens in float32
        clipped = round(said["clip_ratio/region_mean"] * float(count)), mine["policy/clip_fraction"] * float(count)
        # Ours also counts those that the second bound holds back.
        (report.differs if "delta" in name else report.same)(f"{name}: clipped tokens", *clipped)
        if "kl/in_loss" in mine:
            report.same(f"{name}: KL in the loss", said["kl"], mine["kl/in_loss"])


def by_row(batch: Batch, x: Tensor) -> Tensor:
    """[B] the value at the first action of each row."""
    return x[torch.arange(len(batch)), batch.actions.int().argmax(1)]


def told_of(inputs: dict, name: str) -> Tensor:
    """Of the tokens of all completions, end to end."""
    return inputs[name][inputs["completion_mask"].bool()]


def compare_forms(folder: str, numbers: Numbers, report: Report) -> None:
    """Each loss of GRPOTrainer that we can express, off policy."""
    for name, form in FORMS.items():
        mine = Ours(form.row, folder, numbers, **(IN_LOSS | form.ours))
        pair = Pair(Theirs("grpo", folder, numbers, **form.theirs), mine, name)
        row, options = form.faulty
        faulty = Ours(row, folder, numbers, **(IN_LOSS | options))
        for seed in range(DRAWS):
            case = Case(seed)
            inputs, batch = pair.batches(case)
            report.same("old log-probs", told_of(inputs, "old_per_token_logps"), batch.logprobs[batch.actions])
            if "ref_per_token_logps" in inputs:
                refs = batch.ref_logprobs[batch.actions]
                report.same("reference log-probs", told_of(inputs, "ref_per_token_logps"), refs)
            theirs = pair.theirs.loss(inputs, pair.new)
            pair.compared(report, theirs, pair.ours.loss(batch, pair.new), batch)
            wrong = faulty.loss(faulty.looked(case, pair.old)[0], pair.new)
            report.differs(f"{name}: gradient, {form.fault}", *shares(theirs, wrong))


def compare_methods(folder: str, numbers: Numbers, report: Report) -> None:
    """Losses of GRPOTrainer that have a method of their own here, with the options that its configuration becomes."""
    plain = {"use_bias_correction_kl": False, "importance_sampling_level": "sequence"}
    configurations = {
        "gspo": plain | {"loss_type": "grpo", "epsilon": 0.01, "epsilon_high": 0.02},
        "gspo, per token": plain | {"loss_type": "dapo", "epsilon": 0.01, "epsilon_high": 0.02},
        "cispo": {"loss_type": "cispo", "epsilon_high": 1.1},
        "sapo": {"loss_type": "sapo", "sapo_temperature_neg": 1.5, "sapo_temperature_pos": 0.9},
    }
    for name, options in configurations.items():
        given = SETTINGS | OWN["grpo"] | options | {"shuffle_dataset": True}
        found = with_configuration(KINDS["grpo"][0](folder, **given), {"tasks": [0] * ROWS})
        theirs = Theirs("grpo", folder, numbers, **options)
        groups = ("loss.", "kl.", "advantage.", "update.per")
        ours = {"loss.clip": ..., "loss.clip_high": ...} | {n: x for n, x in found.items() if n.startswith(groups)}
        pair = Pair(theirs, Ours(found["algorithm"], folder, numbers, **ours), name)
        faulty = Ours("per token" if name in ("sapo", "gspo") else "grpo", folder, numbers, **IN_LOSS)
        for seed in range(DRAWS):
            inputs, batch = pair.batches(Case(seed))
            theirs_found, ours_found = theirs.loss(inputs, pair.new), pair.ours.loss(batch, pair.new)
            report.same(f"{name}: loss", theirs_found.loss, ours_found.loss)
            report.same(f"{name}: gradient", *shares(theirs_found, ours_found))
            wrong = faulty.loss(faulty.looked(Case(seed), pair.old)[0], pair.new)
            report.differs(f"{name}: gradient, of grpo", *shares(theirs_found, wrong))


def compare_accumulated(folder: str, numbers: Numbers, report: Report) -> None:
    """The same over two accumulated pieces: ours knows the whole minibatch, TRL's `bnpo` averages means of pieces."""
    for name in ("grpo", "dapo", "dr_grpo", "luspo, token level", "bnpo"):
        form = FORMS[name]
        theirs = Theirs("grpo", folder, numbers, **(form.theirs | HALVES))
        pair = Pair(theirs, Ours(form.row, folder, numbers, **(IN_LOSS | form.ours)), f"{name}, accumulated")
        tell = report.other if name == "bnpo" else report.same
        for seed in range(FEW):
            inputs, batch = pair.batches(Case(seed))
            theirs, ours = pair.theirs.loss(inputs, pair.new, pieces=2), pair.ours.loss(batch, pair.new)
            tell(f"{pair.name}: gradient", *shares(theirs, ours))


def compare_advantages(folder: str, numbers: Numbers, report: Report) -> None:
    """Of GRPO's groups, also with an abstention; the reward of RLOO with its KL, the others' mean taken off."""
    deviation, clipped = {"advantage.deviation": "population"}, {"reward_clip_range": (-0.5, 0.5)}
    sides = [
        ("grpo, scaled by group", "grpo", {}, "grpo", {"advantage.deviation": "sample"}, ("grpo", deviation)),
        ("grpo, not scaled", "grpo", {"scale_rewards": "none"}, "grpo", {"advantage.scale": False}, ("grpo", {})),
        ("rloo", "rloo", {}, "rloo", IN_REWARD, ("rloo", {})),
        ("rloo, no KL", "rloo", {"beta": 0.0}, "rloo", {}, ("rloo against the mean", {"advantage.scale": False})),
        ("rloo, scores clipped", "rloo", clipped, "rloo", IN_REWARD | {"score.clip": 0.5}, ("rloo", IN_REWARD)),
    ]
    for name, kind, theirs, row, ours, (wrong, options) in sides:
        pair = Pair(Theirs(kind, folder, numbers, **theirs), Ours(row, folder, numbers, **ours), name)
        faulty = Ours(wrong, folder, numbers, **options)
        for seed in range(DRAWS):
            inputs, batch = pair.batches(Case(seed))
            said, mine = inputs["advantages"], by_row(batch, batch.advantages)
            report.same(f"advantages, {name}", said, mine)
            other = faulty.looked(Case(seed), pair.old)[0]
            report.differs(f"advantages, {name}, faulty", said, by_row(other, other.advantages))
            if kind == "rloo" and "kl" in pair.theirs.told():
                report.same(f"KL a token, {name}", pair.theirs.told()["kl"], batch.kl[batch.actions].mean())
            compare_abstention(pair, Case(seed).judged(TWO_ABSTAIN), report)


def compare_abstention(pair: Pair, case: Case, report: Report) -> None:
    """Who gets no score takes no part in the mean of the group; for TRL, it has advantage 0."""
    inputs = pair.theirs.scored(case, pair.old)
    batch, kept = pair.ours.looked(case, pair.old)
    said = torch.zeros_like(inputs["advantages"])
    said[torch.tensor(kept)] = by_row(batch, batch.advantages).to(said)
    report.same(f"advantages, {pair.name}, two abstain", inputs["advantages"], said)


def compare_kl(folder: str, numbers: Numbers, report: Report) -> None:
    """The KL term at every token: TRL tells the mean over what its `tool_mask` leaves, which is one token here."""
    for name, theirs, kind in (("", {}, "k3"), (", without correction", {"use_bias_correction_kl": False}, "plain_k3")):
        trainer = Theirs("grpo", folder, numbers, loss_type="bnpo", **theirs)
        pair = Pair(trainer, Ours("per token", folder, numbers, **(IN_LOSS | {"kl.loss_kind": kind})), name)
        for seed in range(FEW):
            inputs, old = pair.batches(Case(seed))
            new = pair.ours.looked(Case(seed), pair.new)[0]
            at = old.actions
            mine = loss_term(kind, new.logprobs[at], old.logprobs[at], old.ref_logprobs[at])
            where = inputs["completion_mask"].nonzero()
            said = [pair.theirs.loss(inputs | {"tool_mask": one(inputs, *place)}, pair.new) for place in where]
            kl = torch.tensor([found.metrics["kl"] for found in said], dtype=torch.float64)
            report.same(f"KL at each token{name}", kl / (1 + kl), mine / (1 + kl))
            wrong = loss_term("k2", new.logprobs[at], old.logprobs[at], old.ref_logprobs[at])
            report.differs(f"KL at each token{name}, k2", kl / (1 + kl), wrong / (1 + kl))


def one(inputs: dict, row: Tensor, column: Tensor) -> Tensor:
    mask = torch.zeros_like(inputs["completion_mask"])
    mask[row, column] = 1
    return mask


def compare_rloo(folder: str, numbers: Numbers, report: Report) -> None:
    """RLOOTrainer's ratio is that of whole replies: ours on policy, and where a reply is one token."""
    pair = Pair(Theirs("rloo", folder, numbers), Ours("rloo", folder, numbers, **IN_REWARD), "rloo")
    faulty = Ours("rloo per token", folder, numbers, **IN_REWARD)
    for seed in range(DRAWS):
        case = Case(seed)
        inputs, batch = pair.batches(case)
        said, mine, count = inputs["old_logps"], (batch.logprobs * batch.actions).sum(1), batch.actions.sum(1)
        report.same("rloo: old log-prob of a reply, a token of it", said / count, mine / count)
        theirs, ours = pair.theirs.loss(inputs, pair.old), pair.ours.loss(batch, pair.old)
        report.same("rloo, on policy: gradient", *shares(theirs, ours))
        report.other("rloo, on policy: loss", theirs.loss, ours.loss)
        wrong = faulty.loss(faulty.looked(case, pair.old)[0], pair.old)
        report.differs("rloo, on policy: gradient, a mean over tokens", *shares(theirs, wrong))
        theirs, ours = pair.theirs.loss(inputs, pair.new), pair.ours.loss(batch, pair.new)
        report.other("rloo, off policy: gradient", *shares(theirs, ours))
    pair.name = "rloo, off policy, replies of one token"
    for seed in range(DRAWS):
        inputs, batch = pair.batches(Case(seed, longest=1))
        theirs, ours = pair.theirs.loss(inputs, pair.new), pair.ours.loss(batch, pair.new)
        pair.compared(report, theirs, ours, batch)
    free = Ours("rloo", folder, numbers, **(IN_REWARD | {"loss.clip": 0.99, "loss.clip_high": 99.0}))
    report.differs(f"{pair.name}: gradient, not clipped", *shares(theirs, free.loss(batch, pair.new)))


def compare_training(folder: str, numbers: Numbers, report: Report) -> None:
    """The weights after TRL's own loop: two batches, several iterations of each, Adam, gradients clipped."""
    cases = [Case(seed) for seed in range(2)]
    sides = [
        ("dapo", "grpo", {"loss_type": "dapo"}, "per token", IN_LOSS, 3),
        ("grpo", "grpo", {}, "grpo", IN_LOSS, 3),
        ("rloo", "rloo", {}, "rloo", IN_REWARD, 1),
        ("rloo", "rloo", {}, "rloo", IN_REWARD, 3),
    ]
    for name, kind, theirs, row, ours, epochs in sides:
        trainer = Theirs(kind, folder, numbers, cases, num_iterations=epochs, **HALVES, **theirs)
        learner = Ours(row, folder, numbers, **(ours | {"update.epochs": epochs}))
        base = weights_of(learner.model)
        after = trainer.train(epochs * len(cases), base), learner.train(cases, base)
        what = f"{name}: weights after {len(cases)} batches of {epochs} iterations"
        tell = report.other if kind == "rloo" and epochs > 1 else report.same
        tell(what, *after)
        if kind == "grpo":
            less = Ours(row, folder, numbers, **(ours | {"update.epochs": epochs - 1})).train(cases, base)
            report.differs(f"{what}, one fewer", after[0], less)


def compare_others(folder: str, numbers: Numbers, report: Report) -> None:
    """What TRL computes and ours does not, by the nearest form of ours."""
    sides = [
        ("grpo, ratio of a sequence", {"importance_sampling_level": "sequence"}, {}),
        ("grpo, entropy bonus", {"entropy_coef": 0.1}, {"loss.entropy_coef": 0.1}),
        ("grpo, truncated replies left out", {"mask_truncated_completions": True}, {"on_length": "drop"}),
        ("grpo, two abstain", {}, {}),
    ]
    for name, told, options in sides:
        pair = Pair(Theirs("grpo", folder, numbers, **told), Ours("grpo", folder, numbers, **IN_LOSS, **options), name)
        for seed in range(DRAWS):
            case = Case(seed, ended="truncated" in name)
            inputs, batch = pair.batches(case.judged(TWO_ABSTAIN) if "abstain" in name else case)
            theirs, ours = pair.theirs.loss(inputs, pair.new), pair.ours.loss(batch, pair.new)
            report.other(f"{name}: gradient", *shares(theirs, ours))


def compare_abstained(folder: str, numbers: Numbers, report: Report) -> None:
    """Without a KL term, a reply without a score only counts in TRL's number of replies: 18 for our 16."""
    free = Ours("grpo", folder, numbers, **(IN_LOSS | {"kl.loss_coef": 0.0}))
    pair = Pair(Theirs("grpo", folder, numbers, beta=0.0), free, "grpo, no KL, two abstain")
    for seed in range(DRAWS):
        inputs, batch = pair.batches(Case(seed).judged(TWO_ABSTAIN))
        theirs, ours = shares(pair.theirs.loss(inputs, pair.new), pair.ours.loss(batch, pair.new))
        report.same(f"{pair.name}: gradient, ours * {len(batch)} / {ROWS}", theirs, ours * len(batch) / ROWS)


def compare_positions(numbers: Numbers, report: Report) -> None:
    """A model that counts positions from the start of the row, padding included: TRL pads prompts on the left."""
    folder = stored("gpt2")
    pair = Pair(Theirs("grpo", folder, numbers), Ours("grpo", folder, numbers, **IN_LOSS), "gpt2")
    for seed in range(DRAWS):
        for name, tell, case in (
            ("prompts of one length", report.same, Case(seed, flush=True)),
            ("prompts of several lengths", report.other, Case(seed)),
        ):
            inputs, batch = pair.batches(case)
            said, mine = told_of(inputs, "old_per_token_logps"), batch.logprobs[batch.actions]
            tell(f"gpt2, {name}: old log-probs", said, mine)
            report.same(f"gpt2, {name}: ours, and rows without padding", alone(pair.theirs.model, case, pair.old), mine)
            found = pair.theirs.loss(inputs, pair.new), pair.ours.loss(batch, pair.new)
            tell(f"gpt2, {name}: gradient", *shares(*found))


def compare_equal_scores(folder: str, numbers: Numbers, report: Report) -> None:
    """A group of equal scores has advantage 0; in float32, TRL divides the rounding of their mean by itself + 1e-4."""
    if numbers.exact:
        return
    pair = Pair(Theirs("grpo", folder, numbers), Ours("grpo", folder, numbers, **IN_LOSS), "equal scores")
    for seed in range(DRAWS):
        inputs, batch = pair.batches(Case(seed).judged(dict.fromkeys(range(ROWS), 1.003 + seed / 50)))
        report.same("ours of equal scores: advantages, and 0", torch.zeros(ROWS), by_row(batch, batch.advantages))
        report.other("grpo, equal scores: advantages", inputs["advantages"], by_row(batch, batch.advantages))


FIRST = compare_advantages, compare_kl, compare_forms, compare_methods, compare_accumulated
THEN = compare_rloo, compare_training, compare_others, compare_abstained, compare_equal_scores


def main() -> int:
    folder, good = stored("opt"), True
    for numbers in (Numbers(exact=True), Numbers(exact=False)):
        print("float64, TRL's output head replaced" if numbers.exact else "float32, TRL as it is")
        report = Report(numbers.bound)
        for compare in (*FIRST, *THEN):
            compare(folder, numbers, report)
        compare_positions(numbers, report)
        good = report.told() and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
