"""TRL 1.16.0's trainers and our learner, each asked the same: what is learnt from, loss and gradient, training.

TRL's methods run as they are, but for generation, which hands out given replies. Their log-probs come from a fused
output head that computes in float32 whatever the model has; where `Numbers.exact`, a plain one takes its place, so that
what is left are differences of meaning.
"""

import logging
import tempfile
import types
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from given_1_16 import END, NUM_PROMPTS, OPTIONS, OWN, SETTINGS, SHAPES, TEMPERATURE, VOCABULARY, Case, Numbers, Weights
from torch import Tensor, nn

from operant import Batch, Learner
from operant.distributed import GradientSum
from operant.rollouts.collate import token_weights
from operant.rollouts.external import to_rollouts
from operant.training.objective import accumulate

warnings.simplefilter("ignore")

from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from tokenizers.pre_tokenizers import WhitespaceSplit  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, PrinterCallback  # noqa: E402
from transformers.utils.logging import disable_progress_bar  # noqa: E402
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # noqa: E402
from trl.trainer.utils import FusedCausalLMOutput, split_tensor_dict  # noqa: E402

disable_progress_bar()
logging.getLogger("trl").setLevel(logging.ERROR)  # it warns of every reply that nobody judges

KINDS = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}


@dataclass(frozen=True)
class Found:
    """What one side says of a loss."""

    loss: float
    gradient: Tensor
    """[N] of all parameters, end to end."""
    metrics: dict[str, float]


def shares(theirs: Found, ours: Found) -> tuple[Tensor, Tensor]:
    """Both gradients, as shares of the largest entry."""
    size = theirs.gradient.abs().max()
    return theirs.gradient / size, ours.gradient / size


def stored(shape: str) -> str:
    """A random model of a shape in a folder, from which TRL takes its reference."""
    folder = tempfile.mkdtemp()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(SHAPES[shape]).save_pretrained(folder)
    return folder


def loaded(folder: str, numbers: Numbers) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=numbers.kind)


def weights_of(model: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@torch.no_grad()
def place(model: nn.Module, weights: Weights) -> None:
    for name, p in model.named_parameters():
        p.copy_(weights[name])


def flat(model: nn.Module) -> Tensor:
    """[N] the weights, end to end."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradient_of(model: nn.Module) -> Tensor:
    """[N] of all parameters; it is taken off them."""
    found = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])
    model.zero_grad()
    return found


@torch.no_grad()
def alone(model: nn.Module, case: Case, weights: Weights) -> Tensor:
    """Log-probs of all replies, end to end, each row by itself: no padding, no batch, transformers' own forward."""
    place(model, weights)
    found = []
    for query, reply in zip(case.queries, case.replies, strict=True):
        ids = torch.tensor([query + reply])
        logits = type(model).forward(model, ids, attention_mask=torch.ones_like(ids)).logits[0, len(query) - 1 : -1]
        found.append((logits / TEMPERATURE).log_softmax(-1).gather(-1, torch.tensor(reply)[:, None])[:, 0])
    return torch.cat(found)


def words() -> PreTrainedTokenizerFast:
    """A word an id."""
    made = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t1"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=f"t{END}", pad_token="t0", padding_side="left")


def texts(prompts: Sequence[Sequence[int]]) -> list[str]:
    return [" ".join(f"t{i}" for i in ids) for ids in prompts]


class Theirs:
    """One of TRL's trainers."""

    def __init__(self, kind: str, folder: str, numbers: Numbers, cases: Sequence[Case] = (), **options):
        """`cases`: those that `train` will go through, one a batch."""
        self.numbers, self.to_come, self.case = numbers, iter(cases), None
        settings, trainer = KINDS[kind]
        self.model = loaded(folder, numbers)
        prompts = texts([prompt for case in cases for prompt in case.prompts]) or ["t1"] * NUM_PROMPTS
        given = SETTINGS | OWN[kind] | options
        known = {"model": self.model, "reward_funcs": self.judge, "processing_class": words()}
        known |= {"args": settings(output_dir=tempfile.mkdtemp(), **given)}
        self.trainer = trainer(train_dataset=Dataset.from_dict({"prompt": prompts}), **known)
        self.trainer.remove_callback(PrinterCallback)
        self.trainer._generate_single_turn = self.said if kind == "rloo" else lambda *a: (self.said(*a), None)
        self.trainer.current_gradient_accumulation_steps = given["gradient_accumulation_steps"]
        self.model.train()
        if numbers.exact:
            for model in (self.model, self.trainer.ref_model):
                plain_head(model)

    def judge(self, prompts: list[str], **ignored) -> list[float | None]:
        assert prompts == texts(self.case.queries)
        return self.case.scores

    def said(self, prompt_ids: list[list[int]], *ignored) -> list[list[int]]:
        """In place of generation: `train` goes on to the next case, otherwise the case stays."""
        self.case = next(self.to_come, self.case)
        assert prompt_ids == self.case.queries, "the trainer has other prompts"
        return self.case.replies

    def told(self) -> dict[str, float]:
        """The last value of each metric."""
        return {name: values[-1] for name, values in self.trainer._metrics["train"].items()}

    def scored(self, case: Case, weights: Weights) -> dict:
        """The batch that TRL's loss takes, made under `weights`."""
        self.case = case
        place(self.model, weights)
        with self.numbers.by_default():
            return self.trainer._generate_and_score_completions([{"prompt": text} for text in texts(case.queries)])

    def loss(self, inputs: dict, weights: Weights, pieces: int = 1) -> Found:
        """Under `weights`; in several pieces as gradient accumulation has them."""
        place(self.model, weights)
        with self.numbers.by_default():
            losses = [self.trainer.compute_loss(self.model, part) for part in split_tensor_dict(inputs, pieces)]
            torch.stack(losses).sum().backward()
        return Found(sum(map(float, losses)), gradient_of(self.model), self.told())

    def train(self, steps: int, weights: Weights) -> Tensor:
        """The weights [N] after TRL's own loop."""
        place(self.model, weights)
        self.trainer.args.max_steps = steps
        with self.numbers.by_default():
            self.trainer.train()
        return flat(self.model)


def plain_head(model: nn.Module | None) -> None:
    """What TRL's fused head computes, in the model's own numbers; without a KL term there is no reference."""

    def forward(self, labels=None, fused_lm_head=False, **given):
        out = type(self).forward(self, **given)
        if not fused_lm_head:
            return out
        logprobs = (out.logits[:, :-1] / TEMPERATURE).log_softmax(-1)
        off, ids = labels[:, 1:] == -100, labels[:, 1:].clamp(min=0)
        chosen, entropy = logprobs.gather(-1, ids[..., None])[..., 0], -(logprobs.exp() * logprobs).sum(-1)
        return FusedCausalLMOutput(log_probs=chosen.masked_fill(off, 0), entropy=entropy.masked_fill(off, 0))

    if model is not None:
        model.forward = types.MethodType(forward, model)


class Ours:
    """Our learner."""

    def __init__(self, algorithm: str, folder: str, numbers: Numbers, **options):
        given = {name: x for name, x in (OPTIONS | options).items() if x is not ...}
        self.learner = Learner(loaded(folder, numbers), algorithm=algorithm, **given)
        self.model = self.learner.policy.model

    def looked(self, case: Case, weights: Weights) -> tuple[Batch, list[int]]:
        """What a step would learn from under `weights`, and from which rows."""
        place(self.model, weights)
        about = {"sampling": self.learner.sampling, "groups": case.groups, "vocabulary": VOCABULARY}
        return self.learner.preview(to_rollouts(case.queries, case.replies, tokenizer=None, **about), case.scores)

    def loss(self, batch: Batch, weights: Weights) -> Found:
        """As an update computes it of one minibatch, under `weights`."""
        place(self.model, weights)
        learner = self.learner
        objective = learner.objective(learner.sampling)
        whole = batch.with_(weights=token_weights(batch, objective.per, objective.horizon))
        together = GradientSum(learner.policy)
        tally = accumulate(together, whole, objective, learner.sampling, learner.budget, gap=False)
        return Found(tally.sums["loss/total"][0], gradient_of(self.model), tally.result())

    def train(self, cases: Sequence[Case], weights: Weights) -> Tensor:
        """The weights [N] after a step of each case."""
        place(self.model, weights)
        for case in cases:
            self.learner.step(case.queries, case.replies, case.scores, groups=case.groups)
        return flat(self.model)
