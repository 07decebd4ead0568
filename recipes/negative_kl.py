"""Why is my KL negative? Each cause provoked, and what the diagnosis says of it.

    python recipes/negative_kl.py             # every cause, declared and not; about a minute or two on one core
    python recipes/negative_kl.py top_k       # one of them

KL is estimated by log-prob minus reference log-prob of what was said. On average that is at least 0, if the policy
itself said it, undistorted. A bare `generate` of transformers distorts in many ways; here its replies go to
`learner.step(queries, responses, scores, generation={...})`, once with the setting declared and once without.

A tiny random model first learns, honestly, to reply briefly, so that it has left its reference. Then scores are 0 and
KL alone is paid: an honest policy walks back towards KL 0, a distorted one is paid for going below.
"""

import argparse
import warnings
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from operant import Learner

STOP, VOCABULARY, LONGEST, REPLIES = 2, 20, 8, 64
QUERIES = [[5, 6, 7]] * REPLIES
PURE = {"do_sample": True, "top_k": 0, "max_new_tokens": LONGEST, "pad_token_id": 0, "eos_token_id": STOP}
OPTIONS = {"optimizer.lr": 5e-3, "max_tokens": LONGEST, "kl.coef": 0.5, "update.epochs": 2, "stop_tokens": (STOP,)}
CAUSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "min_length": ({"min_length": 9}, {"min_length": 9}),
    "top_k": ({"top_k": 4}, {"top_k": 4}),
    "top_p": ({"top_p": 0.6}, {"top_p": 0.6}),
    "temperature": ({"temperature": 0.5}, {"temperature": 0.5}),
    "padding": ({"padded": True}, {}),
    "dropout": ({"dropout": True}, {"dropout": True}),
}
"""What `generate` is told, and what is declared of it. Padding declares nothing: it can be seen."""


def model() -> GPT2LMHeadModel:
    """A tiny model of its own weights, the same every time; dropout stands in its config, as in everybody's GPT-2."""
    torch.manual_seed(0)
    size = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    drop = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    special = {"bos_token_id": 1, "eos_token_id": STOP, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(initializer_range=0.2, **size, **drop, **special)).eval()


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


def moved() -> Learner:
    """A learner whose policy has left its reference: brief replies were paid."""
    learner = Learner(model(), **OPTIONS)
    for _ in range(6):
        replies = learner.generate(QUERIES)
        learner.step(replies, [-len(r.ids) / LONGEST for r in replies])
    return learner


def provoke(how: dict[str, Any], declared: dict[str, Any], steps: int = 12) -> tuple[Learner, list[dict[str, float]]]:
    """Train on KL alone with replies that were sampled `how`, and were declared as `declared`."""
    learner, told = moved(), []
    for step in range(steps):
        replies = speak(learner.policy.model, step, **how)
        told.append(learner.step(QUERIES, replies, [0.0] * REPLIES, generation=declared))
    return learner, told


def honest(steps: int = 12) -> tuple[Learner, list[dict[str, float]]]:
    """The same with operant's own `generate`."""
    learner, told = moved(), []
    for _ in range(steps):
        told.append(learner.step(learner.generate(QUERIES), [0.0] * REPLIES))
    return learner, told


def tell(name: str, learner: Learner, told: list[dict[str, float]]) -> None:
    """One row of the table, and what the diagnosis says."""
    kl = sum(m["kl/per_reply"] for m in told[-5:]) / 5
    gap, z = told[0]["rollout/likelihood_gap"], told[0]["rollout/likelihood_z"]
    print(f"{name:24} {kl:10.2f} {gap:10.3f} {z:8.1f}")
    findings = [f for f in learner.diagnose() if f.metrics[:1] == ("kl/per_reply",)]
    for finding in findings:
        print(f"    {finding.says}\n    cause: {finding.cause}\n    do: {finding.remedy}")
    if not findings:
        print("    silent")


def main() -> None:
    parser = argparse.ArgumentParser(description="Provoke each cause of a negative KL, one by one.")
    parser.add_argument("causes", nargs="*", metavar="CAUSE", help=f"of {', '.join(CAUSES)}; default: all")
    chosen = parser.parse_args().causes or list(CAUSES)
    for unknown in set(chosen) - set(CAUSES):
        parser.error(f"{unknown!r} is no cause; choose from {', '.join(CAUSES)}")
    warnings.simplefilter("ignore")  # that a declared setting cannot be scored is what this is about
    print(f"{'replies':24} {'KL at end':>10} {'first gap':>10} {'z':>8}")
    tell("operant's own", *honest())
    tell("generate, pure", *provoke({}, {}))
    for name in chosen:
        how, declared = CAUSES[name]
        if declared:
            tell(f"{name}, declared", *provoke(how, declared))
        tell(f"{name}, undeclared", *provoke(how, {}))


if __name__ == "__main__":
    main()
