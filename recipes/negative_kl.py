"""Why is my KL negative? Each cause provoked, and what the diagnosis says of it.

    python recipes/negative_kl.py             # every cause, declared and not; about a minute on one core
    python recipes/negative_kl.py top_k       # one of them

KL is estimated by log-prob minus reference log-prob of what was said. On average that is at least 0, if the policy
itself said it, undistorted. A bare `generate` of transformers distorts in many ways; here its replies go to
`learner.step(queries, responses, scores, generation={...})`. A tiny random model is pushed in one of
two ways:

- `variety`: scores are 0, and entropy earns a bonus. The policy becomes flatter than its reference, and its likeliest
  tokens lose most. If only those are drawn, each looks less likely than under the reference: KL below 0.
- `blame`: every score is -1, which teaches nothing. What was said is made unlikelier, until the critic expects -1. Over
  the policy's own draws that push is 0 on average, since their log-prob has a gradient of mean 0. Of another's draws it
  has not: the policy moves away from them, and their KL falls below 0.

In both KL is charged, so a negative one is paid like a reward. Two columns show it:

| replies                     | push    | KL a reply, last 5 steps | gap at step 1, nats | its z |
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

Either column alone misses something. A temperature that is too high makes KL positive all the same: the gap shows it.
min_length makes no gap at first, for this end token is rare: KL shows it (and the gap, once the end token has grown).
"""

import argparse
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from operant import Learner
from operant.diagnosis import Finding, diagnose, latest

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
    """What the policy is trained on, besides KL."""

    score: float
    steps: int
    options: dict[str, Any] = field(default_factory=dict)


PUSHES = {"variety": Push(0.0, 20, {"entropy_coef": 0.1}), "blame": Push(-1.0, 9, {"kl.coef": 0.05})}


@dataclass(frozen=True)
class Cause:
    """One wrong use of `generate`: what it is told, and what an honest caller would declare of it."""

    push: str
    how: dict[str, Any]
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
"""Padding declares nothing: it can be seen."""


def model() -> GPT2LMHeadModel:
    """A tiny model of its own weights, the same every time; dropout stands in its config, as in everybody's GPT-2."""
    torch.manual_seed(0)
    size = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    drop = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    special = {"bos_token_id": 1, "eos_token_id": STOP, "pad_token_id": 0}
    made = GPT2LMHeadModel(GPT2Config(initializer_range=0.3, **size, **drop, **special)).eval()
    end = made.lm_head.weight.data[STOP]
    made.transformer.ln_f.bias.data += 3 * end / end.dot(end)  # 3 nats for the end token, so that replies do end
    return made


def speak(lm: Any, seed: int, *, padded: bool = False, dropout: bool = False, **how: Any) -> list[list[int]]:
    """Replies by transformers' own `generate`; `padded` leaves in what follows the end token."""
    torch.manual_seed(seed)
    lm.train(dropout)
    queries = torch.tensor(QUERIES)
    with torch.no_grad():
        said = lm.generate(queries, attention_mask=torch.ones_like(queries), **PURE | how)
    lm.eval()
    replies = said[:, queries.shape[1] :].tolist()
    return replies if padded else [r[: r.index(STOP) + 1] if STOP in r else r for r in replies]


def provoke(push: str, how: dict[str, Any], declared: dict[str, Any], steps: int | None = None) -> Learner:
    """Train with replies that were sampled `how`, and were declared as `declared`."""
    learner, pushed = Learner(model(), **OPTIONS | PUSHES[push].options), PUSHES[push]
    for step in range(steps or pushed.steps):
        replies = speak(learner.policy.model, step, **how)
        learner.step(QUERIES, replies, [pushed.score] * REPLIES, generation=declared)
    return learner


def own(push: str, steps: int | None = None, **sampling: Any) -> Learner:
    """The same with operant's own `generate`."""
    learner, pushed = Learner(model(), **OPTIONS | PUSHES[push].options | sampling), PUSHES[push]
    for _ in range(steps or pushed.steps):
        learner.step(learner.generate(QUERIES), [pushed.score] * REPLIES)
    return learner


def kl(learner: Learner, steps: int = 5) -> tuple[float, float]:
    """Mean KL a reply over the last steps, and its standard error."""
    last = learner.history[-steps:]
    error = sum(m["kl/per_reply_std"] ** 2 / m["rollout/count"] for m in last) ** 0.5 / len(last)
    return sum(m["kl/per_reply"] for m in last) / len(last), error


def findings(learner: Learner, declared: dict[str, Any] | None = None) -> list[Finding]:
    """What the diagnosis says of the sampler, as if its replies had been `declared` so.

    What no score can know (top_k, say) changes what is said of a run and nothing in the run.
    """
    history = latest(learner)
    found = diagnose(history if declared is None else replace(history, declared=declared))
    return [f for f in found if f.metrics[:1] == ("kl/per_reply",)]


def tell(name: str, learner: Learner) -> None:
    """One row of the table."""
    (mean, error), first = kl(learner), learner.history[0]
    gap, z = (first.get(f"rollout/likelihood_{x}") for x in ("gap", "z"))
    odd = "" if gap is None else f"{gap:10.3f} {z:8.1f}"
    print(f"\n{name:24} {len(learner.history):6} {mean:8.2f} +- {error:.2f} {odd}")


def explain(title: str, found: Iterable[Finding]) -> None:
    """What is said, or that nothing is."""
    print(f"  {title}:" if found else f"  {title}: silent")
    for finding in found:
        print(f"    {finding.message}\n    cause: {finding.cause}\n    do: {finding.remedy}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Provoke each cause of a negative KL, one by one.")
    parser.add_argument("causes", nargs="*", metavar="CAUSE", help=f"of {', '.join(CAUSES)}; default: all")
    chosen = parser.parse_args().causes or list(CAUSES)
    for unknown in set(chosen) - set(CAUSES):
        parser.error(f"{unknown!r} is no cause; choose from {', '.join(CAUSES)}")
    warnings.simplefilter("ignore")  # that a declared setting cannot be scored is what this is about
    print(f"{'replies':24} {'steps':>6} {'KL a reply, at end':>16} {'first gap':>9} {'z':>8}")
    for push in sorted({CAUSES[name].push for name in chosen}):
        tell(f"operant's own, {push}", learner := own(push))
        explain("says", findings(learner))
        tell(f"pure generate, {push}", learner := provoke(push, {}, {}))
        explain("says", findings(learner))
    for name in chosen:
        cause = CAUSES[name]
        tell(name, learner := provoke(cause.push, cause.how, {}))
        explain("undeclared" if cause.declared else "says", findings(learner, {}))
        if "temperature" in cause.declared:  # can be scored, so declaring it changes the run
            tell(f"{name}, declared", learner := provoke(cause.push, cause.how, cause.declared))
            explain("declared", findings(learner))
        elif cause.declared:
            explain("declared", findings(learner, cause.declared))
    if "top_k" in chosen:
        stored = {"sampling.top_k": 10, "sampling.truncation": "stored"}
        tell("operant's top_k, stored", learner := own("variety", **stored))
        explain("says", findings(learner))


if __name__ == "__main__":
    main()
