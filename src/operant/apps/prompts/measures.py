"""How good prompts are, from the log-probs [P, E, C] of C class words for each of P prompts and E labelled texts.

RLPrompt (arXiv:2205.12548, section 3.1) pays the gap between the probability of the label and the largest other one,
200 times where it is positive and 180 times where it is not. A class is correct only if it is strictly the likeliest:
an answer that makes two classes equally likely is no answer.
"""

from collections.abc import Callable

import torch
from torch import Tensor

RIGHT, WRONG = 200.0, 180.0
CALIBRATIONS = ("none", "mean", "contextual")
"""Names of `bias`."""
CONTENT_FREE = ("N/A", "[MASK]", "")
"""The texts without content of Zhao et al. (2021)."""


def bias(calibrate: str, scored: Tensor, free: Tensor) -> Tensor:
    """What a calibration subtracts [P, 1, C], from log-probs of the scored texts [P, E, C] and, for `contextual`, of
    texts without content [P, F, C].

    none: 0. mean: the mean over the scored texts, so that no class is preferred as such. contextual: the log of each
    class's mean probability without content, which divides the probabilities by it, as W = diag(p)^-1 of Zhao et al.
    (arXiv:2102.09690, section 5) does.
    """
    if calibrate == "mean":
        return scored.mean(1, keepdim=True)
    if calibrate == "contextual":
        return free.log_softmax(-1).logsumexp(1, keepdim=True) - torch.tensor(free.shape[1]).log()
    return torch.zeros_like(scored[:, :1])


def _label_and_other(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The scores [P, E] of the labels, and the largest of the other classes, from [P, E, C]."""
    own = labels.expand(scores.shape[:-1])[..., None]
    return scores.gather(-1, own).squeeze(-1), scores.scatter(-1, own, -torch.inf).amax(-1)


def accuracy(logprobs: Tensor, labels: Tensor) -> Tensor:
    """[P, E] 1 where the label is strictly the likeliest class, from [P, E, C] and labels [E] or [P, E]."""
    label, other = _label_and_other(logprobs, labels)
    return (label > other).to(logprobs)


def gap(logprobs: Tensor, labels: Tensor) -> Tensor:
    """[P, E] 200 (p(label) - largest other p) if that is positive, else 180 times it, from [P, E, C]; a tie is 0."""
    label, other = _label_and_other(logprobs.softmax(-1), labels)
    return _paid(label - other)


def gap_historic(logprobs: Tensor, labels: Tensor) -> Tensor:
    """[P, E] the gap as RLPrompt computes it: a class exactly as likely as the label counts as -1.

    So an answer that makes all classes equally likely earns 200 (1 / C + 1), more than a certain right one (200).
    """
    probs = logprobs.softmax(-1)
    label = probs.gather(-1, labels.expand(probs.shape[:-1])[..., None])
    return _paid(label.squeeze(-1) - probs.masked_fill(probs == label, -1.0).amax(-1))


def _paid(gaps: Tensor) -> Tensor:
    return torch.where(gaps > 0, RIGHT, WRONG) * gaps


def likelihood(logprobs: Tensor, labels: Tensor) -> Tensor:
    """[P, E] the log-prob of the label among the classes, from [P, E, C]."""
    return _label_and_other(logprobs.log_softmax(-1), labels)[0]


def margin(logprobs: Tensor, labels: Tensor) -> Tensor:
    """[P, E] the log-prob of the label's word less the largest of the others, in nats, from [P, E, C]."""
    label, other = _label_and_other(logprobs, labels)
    return label - other


MEASURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gap": gap,
    "gap-historic": gap_historic,
    "accuracy": accuracy,
    "likelihood": likelihood,
    "margin": margin,
}
"""By name: from log-probs [P, E, C] and labels [E] or [P, E] to one number [P, E] for each prompt and text."""
