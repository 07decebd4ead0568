"""Why is my KL negative? This script provokes each cause and prints what the diagnosis reports.

    python recipes/negative_kl.py             # every cause, declared and undeclared; about a minute on one core
    python recipes/negative_kl.py top_k       # one cause

KL is estimated by the log-prob minus the reference log-prob of the sampled tokens. Its mean is at least 0 if the tokens
were drawn from the policy's own, undistorted distribution. A plain `generate` of transformers distorts it in many ways;
here its replies go to `learner.step(queries, responses, scores, generation={...})`. A tiny random model is trained with
one of two objectives:

- `variety`: scores are 0 and entropy gets a bonus. The policy becomes flatter than its reference, and its most likely
  tokens lose most. If only these are drawn, each is less likely than under the reference, and KL is below 0.
- `blame`: every score is -1, which carries no information. The sampled tokens are made less likely until the critic
  predicts -1. For the policy's own samples this has no effect on average, because their log-prob has a gradient of mean
  0. For other samples it has: the policy moves away from them, and their KL falls below 0.

In both objectives KL is charged, so that a negative KL acts as a reward. Two columns of the table show the problem:

| replies                     | push    | KL per reply, last 5     | gap at step 1, nats | its z |
|-----------------------------|---------|--------------------------|---------------------|-------|
| operant's own               | variety |            1.41 +- 0.10  |               0.07  |   1.1 |
| operant's own               | blame   |            2.23 +- 0.13  |               0.07  |   1.1 |
| top_k 10 of 200             | variety |           -2.40 +- 0.10  |               1.21  |  40.2 |
| the same, operant's, stored | variety |           -4.09 +- 0.11  |              (none) |       |
| top_p 0.5                   | variety |           -1.56 +- 0.11  |               1.26  |  44.8 |
| temperature 0.5             | variety |           -2.06 +- 0.10  |               1.42  |  44.2 |
| temperature 1.4             | blame   |            3.20 +- 0.32  |              -0.82  | -12.4 |
| min_length above the limit  | blame   |           -6.71 +- 0.20  |              -0.05  |  -0.8 |
| padding counted as text     | blame   |          -10.91 +- 0.76  |              -0.16  |  -2.7 |
| dropout                     | blame   |          -10.09 +- 0.37  |              -1.62  | -20.0 |

Neither column is sufficient alone. With a temperature that is too high KL is positive, and only the gap shows it. With
min_length there is no gap at first, because this end token is rare, and only KL shows it (later the gap does, too).
"""

import argparse
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from operant import Learner
from operant.tools.report.diagnosis import Finding, diagnose, latest

STOP, VOCABULARY, LONGEST, REPLIES = 2, 200, 12, 64
QUERIES = [[5, 6, 7]] * REPLIES
PURE = {"do_sample": True, "top_k": 0, "max_new_tokens": LONGEST, "pad_token_id": 0, "eos_token_id": STOP}
OPTIONS = {
    "optimizer.lr": 1e-3,
    "update.epochs": 2,
    "max_tokens": LONGEST,
    "stop_tokens": (STOP,),
    "kl.coef": 0.2,
    "advantage.lam": 1.0,
    "advantage.whiten_scope": "none",
    "value.detach": True,
}


@dataclass(frozen=True)
class Push:
    """An objective besides KL: the score of every reply, the number of steps, and options."""

    score: float
    steps: int
    options: dict[str, Any] = field(default_factory=dict)


PUSHES = {"variety": Push(0.0, 20, {"entropy_coef": 0.1}), "blame": Push(-1.0, 9, {"kl.coef": 0.05})}


@dataclass(frozen=True)
class Cause:
    """A wrong use of `generate`: the objective, its settings, and how the settings should be declared to `step`."""

    push: str
    settings: dict[str, Any]
    declared: dict[str, Any]


CAUSES = {
    "top_k": Cause("variety", {"top_k": 10}, {"top_k": 10}),
    "top_p": Cause("variety", {"top_p": 0.5}, {"top_p": 0.5}),
    "cold": Cause("variety", {"temperature": 0.5}, {"temperature": 0.5}),
    "hot": Cause("blame", {"temperature": 1.4}, {"temperature": 1.4}),
    "min_length": Cause("blame", {"min_length": LONGEST + 1}, {"min_length": LONGEST + 1}),
    "padding": Cause("blame", {"padded": True}, {}),
    "dropout": Cause("blame", {"dropout": True}, {"dropout": True}),
}
"""Padding needs no declaration, because it is visible in the replies."""


def model() -> GPT2LMHeadModel:
    """A tiny random model, the same every time; its config has dropout, as that of GPT-2 has."""
    torch.manual_seed(0)
    size = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    drop = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    special = {"bos_token_id": 1, "eos_token_id": STOP, "pad_token_id": 0}
    made = GPT2LMHeadModel(GPT2Config(initializer_range=0.3, **size, **drop, **special)).eval()
    end = made.lm_head.weight.data[STOP]
    made.transformer.ln_f.bias.data += 3 * end / end.dot(end)  # 3 nats for the end token, so that replies do end
    return made


def generate(lm: Any, seed: int, *, padded: bool = False, dropout: bool = False, **settings: Any) -> list[list[int]]:
    """Generate replies with transformers' own `generate`; `padded` keeps the padding after the end token."""
    torch.manual_seed(seed)
    lm.train(dropout)
    queries = torch.tensor(QUERIES)
    with torch.no_grad():
        rows = lm.generate(queries, attention_mask=torch.ones_like(queries), **PURE | settings)
    lm.eval()
    replies = rows[:, queries.shape[1] :].tolist()
    return replies if padded else [r[: r.index(STOP) + 1] if STOP in r else r for r in replies]


def provoke(push: str, settings: dict[str, Any], declared: dict[str, Any], steps: int | None = None) -> Learner:
    """Train on replies sampled with `settings` and declared to `step` as `declared`."""
    learner, pushed = Learner(model(), **OPTIONS | PUSHES[push].options), PUSHES[push]
    for step in range(steps or pushed.steps):
        replies = generate(learner.policy.model, step, **settings)
        learner.step(QUERIES, replies, [pushed.score] * REPLIES, generation=declared)
    return learner


def own(push: str, steps: int | None = None, **sampling: Any) -> Learner:
    """Train in the same way on replies of operant's own `generate`."""
    learner, pushed = Learner(model(), **OPTIONS | PUSHES[push].options | sampling), PUSHES[push]
    for _ in range(steps or pushed.steps):
        learner.step(learner.generate(QUERIES), [pushed.score] * REPLIES)
    return learner


def kl(learner: Learner, steps: int = 5) -> tuple[float, float]:
    """Mean KL per reply over the last steps, and its standard error."""
    last = learner.history[-steps:]
    error = sum(m["kl/per_reply_std"] ** 2 / m["rollout/count"] for m in last) ** 0.5 / len(last)
    return sum(m["kl/per_reply"] for m in last) / len(last), error


def findings(learner: Learner, declared: dict[str, Any] | None = None) -> list[Finding]:
    """The findings about the sampler, as if its replies had been `declared` in this way.

    Settings that scoring cannot reproduce, such as top_k, change only the diagnosis of a run, not the run itself.
    """
    history = latest(learner)
    found = diagnose(history if declared is None else replace(history, declared=declared))
    return [f for f in found if f.metrics[:1] == ("kl/per_reply",)]


def print_row(name: str, learner: Learner) -> None:
    """Print one row of the table."""
    (mean, error), first = kl(learner), learner.history[0]
    gap, z = (first.get(f"rollout/likelihood_{x}") for x in ("gap", "z"))
    odd = "" if gap is None else f"{gap:10.3f} {z:8.1f}"
    print(f"\n{name:24} {len(learner.history):6} {mean:8.2f} +- {error:.2f} {odd}")


def print_findings(title: str, found: Iterable[Finding]) -> None:
    """Print the findings, or that there are none."""
    print(f"  {title}:" if found else f"  {title}: no findings")
    for finding in found:
        print(f"    {finding.message}\n    cause: {finding.cause}\n    do: {finding.remedy}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Provoke each cause of a negative KL separately.")
    parser.add_argument("causes", nargs="*", metavar="CAUSE", help=f"of {', '.join(CAUSES)}; default: all")
    chosen = parser.parse_args().causes or list(CAUSES)
    for unknown in set(chosen) - set(CAUSES):
        parser.error(f"unknown cause {unknown!r}; choose from {', '.join(CAUSES)}")
    warnings.simplefilter("ignore")  # the warnings about settings that cannot be scored are expected here
    print(f"{'replies':24} {'steps':>6} {'KL per reply, end':>16} {'first gap':>9} {'z':>8}")
    for push in sorted({CAUSES[name].push for name in chosen}):
        print_row(f"operant's own, {push}", learner := own(push))
        print_findings("diagnosis", findings(learner))
        print_row(f"pure generate, {push}", learner := provoke(push, {}, {}))
        print_findings("diagnosis", findings(learner))
    for name in chosen:
        cause = CAUSES[name]
        print_row(name, learner := provoke(cause.push, cause.settings, {}))
        print_findings("undeclared" if cause.declared else "diagnosis", findings(learner, {}))
        if "temperature" in cause.declared:  # can be scored, so declaring it changes the run
            print_row(f"{name}, declared", learner := provoke(cause.push, cause.settings, cause.declared))
            print_findings("declared", findings(learner))
        elif cause.declared:
            print_findings("declared", findings(learner, cause.declared))
    if "top_k" in chosen:
        stored = {"sampling.top_k": 10, "sampling.truncation": "stored"}
        print_row("operant's top_k, stored", learner := own("variety", **stored))
        print_findings("diagnosis", findings(learner))


if __name__ == "__main__":
    main()
