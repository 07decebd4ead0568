"""Losses of preference optimisation: how likely replies of known order are under the policy and under its reference.

h(y) = log pi(y | x) - log pi_ref(y | x) is the log-ratio of a whole reply, and beta * h(y) its implicit reward.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from operant.objectives.labelled import Groups, right
from operant.tally import ROUNDING
from operant.types import Batch, OperantError, Outputs, require, shown

KINDS = ("sigmoid", "robust", "hinge", "ipo", "ipo-mean")


def preference(
    out: Outputs,
    batch: Batch,
    *,
    kind: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    pairs: str = "all",
) -> dict[str, Tensor]:
    r"""Direct preference optimisation [B], from the pairs of a better reply w and a worse reply l to one prompt.

    kind, with $d = h(y_w) - h(y_l)$, `beta` $\beta$ and `label_smoothing` $\epsilon$:
    sigmoid: $-(1 - \epsilon) \log\sigma(\beta d) - \epsilon \log\sigma(-\beta d)$ (arXiv:2305.18290, equation 7; with
    $\epsilon$ cDPO: a share of the labels is wrong). robust:
    $(-(1 - \epsilon) \log\sigma(\beta d) + \epsilon \log\sigma(-\beta d)) / (1 - 2 \epsilon)$ (arXiv:2403.00409), whose
    expectation is that of right labels. hinge: $\max(0, 1 - \beta d)$ (arXiv:2305.10425, arXiv:2309.06657). ipo:
    $(d - 1 / 2\beta)^2$ (arXiv:2310.12036, equation 17). ipo-mean: the same, where each h is divided by the number of
    tokens of its reply.
    pairs: all, the mean over every pair of a prompt; ends: only the best replies against the worst ones.
    """
    require(kind in KINDS, f"loss.kind={shown(kind)}: it must be {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    require(pairs in ("all", "ends"), f"loss.pairs={shown(pairs)}: it must be all or ends")
    _check_beta(beta)
    if not 0 <= label_smoothing < 0.5:
        raise OperantError(f"loss.label_smoothing={label_smoothing:g}: it must be at least 0 and below 0.5")
    if label_smoothing and kind not in ("sigmoid", "robust"):
        raise OperantError(f"loss.label_smoothing with loss.kind={kind}: it is for sigmoid and robust; leave it out")
    groups = Groups.of(batch)
    ratios = groups.sums(out.raw_logprobs - batch.ref_logprobs, batch)
    better, worse = groups.pairs()
    if pairs == "ends":
        highest, lowest = groups.extremes()
        at = highest[better] & lowest[worse]
        better, worse = better[at], worse[at]
    of, gap = groups.numbers[better], ratios[better] - ratios[worse]
    match kind:
        case "sigmoid":
            loss = -(1 - label_smoothing) * logsigmoid(beta * gap) - label_smoothing * logsigmoid(-beta * gap)
        case "robust":
            loss = -(1 - label_smoothing) * logsigmoid(beta * gap) + label_smoothing * logsigmoid(-beta * gap)
            loss = loss / (1 - 2 * label_smoothing)
        case "hinge":
            loss = torch.relu(1 - beta * gap)
        case _:
            per = ratios / groups.sums(torch.ones_like(batch.rewards), batch) if kind == "ipo-mean" else ratios
            loss = (per[better] - per[worse] - 1 / (2 * beta)) ** 2
    known = {"loss": loss, "accuracy": right(gap), "margin": beta * gap}
    known |= {"better": ratios[better], "worse": ratios[worse]}
    terms = {f"preference/{name}": groups.reported(x, of) for name, x in known.items()}
    unpaired = 1.0 - (torch.bincount(of, minlength=groups.count) > 0).to(ratios)
    terms["preference/unpaired"] = groups.reported(unpaired, torch.arange(groups.count, device=of.device))
    return {"loss": groups.mean(loss, of), **terms}


def kto(
    out: Outputs, batch: Batch, *, beta: float = 0.1, good_weight: float = 1.0, bad_weight: float = 1.0
) -> dict[str, Tensor]:
    r"""Kahneman-Tversky optimisation [B], from replies that are good (label 1) or bad (0) (arXiv:2402.01306, eq. 7-8).

    $\lambda_g (1 - \sigma(\beta (h(y) - z_0)))$ of a good reply, $\lambda_b (1 - \sigma(\beta (z_0 - h(y))))$ of a bad
    one, with $\lambda$ = `good_weight` and `bad_weight`. $z_0$ is `batch.extra["baseline"]`, and has no gradient.
    """
    _check_beta(beta)
    if min(good_weight, bad_weight) < 0 or not good_weight + bad_weight:
        weights = f"loss.good_weight={good_weight:g} and loss.bad_weight={bad_weight:g}"
        raise OperantError(f"{weights}: none may be negative, and one must be above 0")
    groups = Groups.of(batch)
    ratios, good = groups.sums(out.raw_logprobs - batch.ref_logprobs, batch), groups.labels > 0.5
    baseline = ratios.new_zeros(len(ratios)).index_copy(0, groups.rows, batch.extra["baseline"].to(ratios))
    gap = torch.where(good, ratios - baseline, baseline - ratios)
    chance = torch.sigmoid(-beta * gap)
    loss = torch.where(good, good_weight * chance, bad_weight * chance)
    none = torch.full_like(ratios, torch.nan)
    return {
        "loss": loss[groups.rows],
        "preference/loss": groups.once(loss),
        "preference/accuracy": groups.once(right(gap)),
        "preference/better": groups.once(torch.where(good, ratios, none)),
        "preference/worse": groups.once(torch.where(good, none, ratios)),
        "preference/baseline": groups.once(baseline),
    }


def paired(labels: Sequence[Sequence[float]], loss: Mapping[str, object], *, whole: bool) -> list[bool]:
    """Of the labels of each prompt: whether two differ."""
    found = [max(x) - min(x) > ROUNDING * max(map(abs, x)) for x in labels]
    if not any(found):
        raise OperantError(
            f"none of {len(labels)} prompts has two replies with different labels, and a pair is a better reply and a "
            "worse one: give `chosen` and `rejected`, or several replies with `ranks` or `ratings`; replies that are "
            "good or bad each by itself are for algorithm=kto"
        )
    return found


def good_or_bad(labels: Sequence[Sequence[float]], loss: Mapping[str, object], *, whole: bool) -> list[bool]:
    """True for the labels of each prompt. whole: they are those of all prompts, and not those of a step."""
    classes = {label for of_prompt in labels for label in of_prompt}
    if other := sorted(classes - {0.0, 1.0}):
        give = "give `label` or `good`; ranks and ratings are for algorithm=dpo"
        label = other[0] if other[0] == -1 else abs(other[0])  # ranks count below 0
        why = f"a reply is labelled {label:g}, and the method learns from good (1) and bad (0) replies"
        raise OperantError(f"{why}: {give}")
    if whole and len(classes) == 1:
        only, other = ("good", "bad") if 1.0 in classes else ("bad", "good")
        raise OperantError(
            f"all labels are {only}, and the method also needs {other} replies; algorithm=sft imitates good ones"
        )
    return [True] * len(labels)


def _check_beta(beta: float) -> None:
    require(beta > 0, f"loss.beta={beta:g}: it must be above 0; a smaller one allows more distance from the start")
