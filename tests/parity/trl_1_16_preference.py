"""Hold the losses over labelled replies to those of TRL 1.16.0's own trainers: DPO, KTO, and reward models.

    PYTHONPATH=src PYTHON_WITH_TRL tests/parity/trl_1_16_preference.py        # `make parity` makes that python

TRL tokenises and pads the same rows itself, and exchanges KTO's replies itself. As in `trl_1_16.py`, everything is done
in float64 with a plain output head, to 1e-10, and in float32 with TRL as it is, to 1e-5; the policy's weights differ
from the reference's, and gradients are those of all parameters, as shares of the largest entry.
"""

import sys
import tempfile
import types
from collections import defaultdict
from collections.abc import Sequence

import torch
from given_1_16 import OPTIONS, SETTINGS, Case, Numbers, Weights
from report import Report
from sides_1_16 import Found, Ours, gradient_of, loaded, place, shares, stored, texts, weights_of, words
from torch import Tensor, nn

from operant import Batch, Learner, Outputs
from operant.objectives.labelled import reward_model
from operant.rollouts.external import to_rollouts

from datasets import Dataset  # isort: skip
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardTrainer  # isort: skip
from trl.trainer.utils import FusedCausalLMOutput  # isort: skip

DRAWS, PAIRS, BETA, SMOOTHING = 10, 9, 0.15, 0.2
KINDS = {"dpo": (DPOConfig, DPOTrainer), "kto": (KTOConfig, KTOTrainer)}
COMMON = (
    *("use_cpu", "bf16", "fp16", "gradient_checkpointing", "disable_dropout", "pad_to_multiple_of", "report_to"),
    *("save_strategy", "logging_strategy", "disable_tqdm", "seed"),
)
OWN = {
    "dpo": {"label_smoothing": 0.0, "f_divergence_type": "reverse_kl", "use_weighting": False, "ld_alpha": None},
    "kto": {"loss_type": "kto", "desirable_weight": 1.3, "undesirable_weight": 0.7},
}
WEIGHTS = {"loss.good_weight": 1.3, "loss.bad_weight": 0.7}


class Rows:
    """Prompts of unequal length, and to each a better and a worse reply, as texts."""

    def __init__(self, seed: int):
        case = Case(seed)
        draw = torch.Generator().manual_seed(seed)
        more = [torch.randint(1, 18, (int(n),), generator=draw).tolist() for n in torch.randint(1, 6, (PAIRS,))]
        self.seed, self.moved = seed, case.moved
        self.prompts = texts([[3 + i, *ids] for i, ids in enumerate(more)])
        self.better, self.worse = ([f" {text}" for text in texts(case.replies[i : i + PAIRS])] for i in (0, PAIRS))
        # Of equal replies, TRL counts the order as wrong, and ours as half right.
        self.worse = [worse + " t2" * (worse == better) for better, worse in zip(self.better, self.worse, strict=True)]

    def of(self, kind: str) -> Dataset:
        if kind == "dpo":
            return Dataset.from_dict({"prompt": self.prompts, "chosen": self.better, "rejected": self.worse})
        labels = [bool(i % 3) for i in range(PAIRS)]
        return Dataset.from_dict({"prompt": self.prompts, "completion": self.better, "label": labels})


class Theirs:
    """One of TRL's trainers, with the rows as it has tokenised them."""

    def __init__(self, kind: str, folder: str, numbers: Numbers, rows: Rows, **options):
        settings, trainer = KINDS[kind]
        self.kind, self.numbers, self.model = kind, numbers, loaded(folder, numbers)
        given = {name: SETTINGS[name] for name in COMMON} | {"per_device_train_batch_size": PAIRS, "beta": BETA}
        given |= OWN[kind] | {"max_length": None, "precompute_ref_log_probs": False} | options
        known = {"model": self.model, "ref_model": loaded(folder, numbers), "processing_class": words()}
        known |= {"args": settings(output_dir=tempfile.mkdtemp(), **given), "train_dataset": rows.of(kind)}
        self.trainer = trainer(**known)
        self.model.train()
        if numbers.exact:
            for model in (self.model, self.trainer.ref_model):
                plain_head(model)
        self.rows = list(self.trainer.train_dataset)

    def loss(self, weights: Weights, pieces: int = 1) -> Found:
        """Under `weights`; in several pieces, the mean of theirs, as gradient accumulation has it."""
        place(self.model, weights)
        size = PAIRS // pieces
        with self.numbers.by_default():
            parts = [self.trainer.data_collator(self.rows[i : i + size]) for i in range(0, PAIRS, size)]
            losses = [self.trainer.compute_loss(self.model, part) / pieces for part in parts]
            torch.stack(losses).sum().backward()
        told = {name: values[-1] for name, values in self.trainer._metrics["train"].items()}
        return Found(sum(map(float, losses)), gradient_of(self.model), told)


def plain_head(model: nn.Module) -> None:
    """What TRL's fused head computes, in the model's own numbers; what its metrics alone read is 0."""

    def forward(self, labels=None, fused_lm_head=False, **given):
        logprobs = type(self).forward(self, **given).logits[:, :-1].log_softmax(-1)
        off, ids = labels[:, 1:] == -100, labels[:, 1:].clamp(min=0)
        chosen = logprobs.gather(-1, ids[..., None])[..., 0].masked_fill(off, 0)
        none = torch.zeros_like(chosen)
        return FusedCausalLMOutput(log_probs=chosen, entropy=none, mean_logits=none, is_top1=none.bool())

    model.forward = types.MethodType(forward, model)


class Labelled(Ours):
    """Our learner, on labelled replies."""

    def __init__(self, algorithm: str, folder: str, numbers: Numbers, **options):
        given = {name: x for name, x in OPTIONS.items() if not name.startswith(("loss.", "kl."))}
        given |= {"sampling.temperature": 1.0, "update.epochs": 1, "loss.beta": BETA} | options
        self.learner = Learner(loaded(folder, numbers), algorithm=algorithm, **given)
        self.model = self.learner.policy.model

    def batch(self, rows: Sequence[dict], weights: Weights) -> Batch:
        """What a step would learn from, of the rows as TRL has tokenised them."""
        place(self.model, weights)
        given = []
        for group, row in enumerate(rows):
            if "completion_ids" in row:
                given.append((row["prompt_ids"], row["completion_ids"], float(row["label"]), group))
            else:
                given.append((row["prompt_ids"], row["chosen_ids"], 1.0, group))
                given.append((row["prompt_ids"], row["rejected_ids"], 0.0, group))
        queries, replies, labels, groups = (list(column) for column in zip(*given, strict=True))
        known = {"tokenizer": None, "sampling": self.learner.sampling, "rewards": labels, "groups": groups}
        return self.learner.preview(to_rollouts(queries, replies, **known), None)[0]


SMOOTH = {"label_smoothing": SMOOTHING}
FORMS = {
    "sigmoid": ({}, {}, {"loss.beta": 2 * BETA}, "twice beta"),
    "robust": (SMOOTH, {"loss.label_smoothing": SMOOTHING}, {"loss.label_smoothing": 0.0}, "labels taken as right"),
    "hinge": ({}, {}, {"loss.kind": "sigmoid"}, "sigmoid"),
    "ipo": ({}, {"loss.kind": "ipo-mean"}, {"loss.kind": "ipo"}, "sums in the place of means"),
}
"""By TRL's `loss_type`: its options, ours, and those of a fault with its name."""


def compare_dpo(folder: str, numbers: Numbers, report: Report) -> None:
    """Each loss of DPOTrainer that we have; one pass, and three accumulated ones."""
    for name, (told, options, fault, called) in FORMS.items():
        options = {"loss.kind": name} | options
        ours, faulty = (Labelled("dpo", folder, numbers, **more) for more in (options, options | fault))
        base = weights_of(ours.model)
        for seed in range(DRAWS):
            rows = Rows(seed)
            theirs, weights = Theirs("dpo", folder, numbers, rows, loss_type=[name], **told), rows.moved(base, 0.05, 1)
            said, batch = theirs.loss(weights), ours.batch(theirs.rows, weights)
            mine = ours.loss(batch, weights)
            report.same(f"dpo, {name}: loss", said.loss, mine.loss)
            report.same(f"dpo, {name}: gradient", *shares(said, mine))
            report.same(f"dpo, {name}: gradient, accumulated", *shares(theirs.loss(weights, pieces=3), mine))
            compare_metrics(f"dpo, {name}", said, mine, report)
            report.differs(f"dpo, {name}: gradient, {called}", *shares(said, faulty.loss(batch, weights)))
            if name == "sigmoid" and seed == 0:
                smooth = Labelled("dpo", folder, numbers, **{"loss.label_smoothing": SMOOTHING})
                ignored = Theirs("dpo", folder, numbers, rows, loss_type=[name], **SMOOTH).loss(weights)
                report.other("dpo, sigmoid, label smoothing: loss", ignored.loss, smooth.loss(batch, weights).loss)


def compare_metrics(name: str, said: Found, mine: Found, report: Report) -> None:
    right = round(PAIRS * said.metrics["rewards/accuracies"])  # TRL has its share in float32
    report.same(f"{name}: pairs in order", right, PAIRS * mine.metrics["preference/accuracy"])
    report.same(f"{name}: margin", said.metrics["rewards/margins"], mine.metrics["preference/margin"])
    for side, ours in (("chosen", "better"), ("rejected", "worse")):
        report.same(f"{name}: {side}", said.metrics[f"rewards/{side}"], BETA * mine.metrics[f"preference/{ours}"])


def compare_kto(folder: str, numbers: Numbers, report: Report) -> None:
    """KTOTrainer in one pass; in three, its baseline is that of each, and ours does not change."""
    ours = Labelled("kto", folder, numbers, **WEIGHTS)
    faulty = Labelled("kto", folder, numbers)
    base, seen = weights_of(ours.model), 0
    for seed in range(DRAWS):
        rows = Rows(seed)
        theirs, weights = Theirs("kto", folder, numbers, rows), rows.moved(base, 0.05, 1)
        said, batch = theirs.loss(weights), ours.batch(theirs.rows, weights)
        mine = ours.loss(batch, weights)
        seen += said.metrics["kl"] > 0.01
        report.same("kto: baseline", said.metrics["kl"], mine.metrics["preference/baseline"])
        report.same("kto: loss", said.loss, mine.loss)
        report.same("kto: gradient", *shares(said, mine))
        report.differs("kto: gradient, equal weights", *shares(said, faulty.loss(batch, weights)))
        without = ours.loss(batch.with_(extra={"baseline": torch.zeros_like(batch.extra["baseline"])}), weights)
        report.differs("kto: gradient, without a baseline", *shares(said, without))
        for side, of_ours in (("chosen", "better"), ("rejected", "worse")):
            report.same(f"kto: {side}", said.metrics[f"rewards/{side}"], BETA * mine.metrics[f"preference/{of_ours}"])
        report.other("kto, accumulated: gradient", *shares(theirs.loss(weights, pieces=3), mine))
    assert seen, "the baseline was 0 in every draw"


def compare_reward_model(numbers: Numbers, report: Report) -> None:
    """RewardTrainer's loss of given scores, with margins and without, and its gradient by the scores."""
    for seed in range(DRAWS):
        draw = torch.Generator().manual_seed(seed)
        given = torch.randn(2 * PAIRS, generator=draw, dtype=torch.float64).to(numbers.kind)
        margins = torch.rand(PAIRS, generator=draw, dtype=torch.float64).to(numbers.kind)
        for name, margin, factor in (("", {}, 0.0), (", margin", {"margin": margins}, 1.0)):
            scores = given.clone().requires_grad_()
            model = lambda scores=scores, **ignored: types.SimpleNamespace(logits=scores[:, None])  # noqa: E731
            trainer = RewardTrainer.__new__(RewardTrainer)
            trainer.args = types.SimpleNamespace(center_rewards_coefficient=None)
            trainer.model = types.SimpleNamespace(training=False)
            trainer.accelerator = types.SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x)
            trainer._total_train_tokens, trainer._metrics = 0, {"eval": defaultdict(list)}
            theirs = RewardTrainer.compute_loss(trainer, model, dict(margin))
            (gradient,) = torch.autograd.grad(theirs, scores)
            mine, of_mine = ours_of_scores(given, margins, factor)
            report.same(f"reward model, pairs{name}: loss", theirs.detach(), mine)
            report.same(f"reward model, pairs{name}: gradient", gradient, of_mine)
        wrong, _ = ours_of_scores(given, margins, 0.5)
        report.differs("reward model, pairs, margin: loss, half the margin", theirs.detach(), wrong)


def ours_of_scores(given: Tensor, margins: Tensor, factor: float) -> tuple[float, Tensor]:
    """Our loss of the same scores, and its gradient by them; the label of a better reply is its margin."""
    batch = Batch.given([[1]] * 2 * PAIRS, [[2]] * 2 * PAIRS)
    batch = batch.with_(groups=torch.arange(2 * PAIRS) % PAIRS)
    rewards, values = torch.zeros(batch.tokens.shape, dtype=given.dtype), torch.zeros(2 * PAIRS, 2, dtype=given.dtype)
    rewards[:PAIRS, 1], values[:, 1] = margins, given
    values.requires_grad_()
    out = Outputs(*[torch.zeros_like(rewards)] * 2, values=values)
    loss = reward_model(out, batch.with_(rewards=rewards), kind="pairwise", margin=factor)["loss"].mean()
    (gradient,) = torch.autograd.grad(loss, values)
    return float(loss), gradient[:, 1]


def main() -> int:
    folder, good = stored("opt"), True
    for numbers in (Numbers(exact=True), Numbers(exact=False)):
        print("float64, TRL's output head replaced" if numbers.exact else "float32, TRL as it is")
        report = Report(numbers.bound)
        compare_dpo(folder, numbers, report)
        compare_kto(folder, numbers, report)
        compare_reward_model(numbers, report)
        good = report.told() and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
