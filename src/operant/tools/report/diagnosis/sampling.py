"""Rules for replies that were not sampled from the policy in training: a negative KL, or odd likelihoods.

KL is estimated as log-prob minus reference log-prob of the generated tokens. Its mean is at least 0 only if the policy
itself generated them, without distortion. In the same way the log-prob of a drawn token plus the entropy is 0 on
average (`rollout/likelihood_gap`). A sampling setting is named as the cause if it was declared or can be seen in the
replies; otherwise it is listed as a candidate.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from operant.rollouts.generation_kwargs import UNSCORED
from operant.tools.report.diagnosis.history import RECENT, Finding, History, capitalised, finding, number, percent

ERRORS = 3.0
"""A KL counts as negative if it is this many standard errors below 0. With two, a healthy start would raise one false
alarm in forty checks."""
FEW = 30
"""Replies. The spread of fewer says little about the error of their mean. Those of a policy that is still equal to its
reference have a KL of 0, and do not count."""
LEAST_NATS = 0.02
"""Nats per reply. A KL closer to 0 than this is rounding (with unchanged weights it is 0 to 1e-6)."""
ODD_Z = 6.0
"""Standard errors of the likelihood gap: the registry's healthy range, far beyond chance at any number of checks."""
ODD_GAP = 0.005
"""Nats per token. A gap below it could be float noise in half precision, and is too small to matter for training."""
SAME = 1e-3
"""Nats. If log-probs of sampling and training differ by less, both use the same distribution."""
BALANCE = 150.0
"""Nats, summed over all tokens. A nearly deterministic policy has rare draws that balance its common ones. If few were
expected, none may have come, and the common tokens then look too likely with hardly any spread."""


@dataclass(frozen=True)
class Setting:
    """How a declared sampling setting distorts the replies."""

    sign: int
    why: str
    remedy: str


_FILE = (Path(__file__).parent / "settings.toml").read_text(encoding="utf-8")
SETTINGS = {name: Setting(**entry) for name, entry in tomllib.loads(_FILE).items()}
_CUT = SETTINGS["top_k"].why
_MORE_LIKELY = (
    "top_k (the default of transformers' generate is top_k=50), top_p or min_p, which cut off a part of the "
    "distribution, a temperature below {temperature}, greedy or beam search"
)
_LESS_LIKELY = (
    "a temperature above {temperature}, dropout (a model in training mode), min_length or a penalty that suppresses "
    "tokens, padding counted as text or on the wrong side, replies of another model"
)


def other_sampler(history: History) -> Finding | None:
    """The replies do not come from the policy's own distribution: KL is below 0, or tokens are too (un)likely."""
    below, odd, padded = _negative_kl(history), _likelihood_gap(history), 0.0
    declared = history.declared.get("eos_token_id") or history.declared.get("stop_tokens")
    stops = declared or history.option("sampling.stop_tokens") or ()
    stops = {stops} if isinstance(stops, int) else set(stops)
    if history.external and history.rows and not history.option("sampling.fixed_length"):
        # The share of replies that go on after a stop token, where operant's own end.
        padded = sum(any(i in stops for i in (row.get("ids") or ())[:-1]) for row in history.rows) / len(history.rows)
    evidence = [text for text in (below and below[0], odd and odd[0]) if text]
    if padded:
        evidence.append(f"{percent(padded)} of the replies go on after their end token")
    if not evidence:
        return None
    joined = evidence[0] if len(evidence) == 1 else f"{', '.join(evidence[:-1])}, and {evidence[-1]}"
    gap = odd[1] if odd else 0.0
    cause, remedy = _external_cause(history, gap, padded) if history.external else _own_cause(history)
    name = "negative_kl" if below else "other_sampler" if odd else "padding"
    since = below[1] if below else odd[2] if odd else history.step
    return finding(name, since, evidence=capitalised(joined), cause=cause, remedy=remedy)


def _negative_kl(history: History) -> tuple[str, int] | None:
    """Return a clause about a KL below 0 and the step where it began; None if noise explains it."""
    names = ("kl/per_reply", "kl/per_reply_std", "rollout/count")
    current = [m for m in history.metrics if not m.get("rollout/staleness")]  # stale replies are of other weights
    steps = [[m[name] for name in names] for m in current if all(name in m for name in names)][-RECENT:]
    steps = [(kl, spread, count) for kl, spread, count in steps if kl is not None and spread is not None]
    if sum(count for _, spread, count in steps if spread > LEAST_NATS) < FEW:
        return None
    mean = sum(kl for kl, _, _ in steps) / len(steps)
    error = sum(spread**2 / count for _, spread, count in steps) ** 0.5 / len(steps)
    if mean > -LEAST_NATS or mean > -ERRORS * error:
        return None
    over = "1 step" if len(steps) == 1 else f"{len(steps)} steps"
    text = f"KL is {mean:.2f} nats a reply (mean of {over}, standard error {error:.2f}), and a KL is never below 0"
    return text, history.since("kl/per_reply", lambda x: x < 0)


def _likelihood_gap(history: History) -> tuple[str, float, int] | None:
    """Return a clause about the likelihood gap, the gap, and the step where it began; None if noise explains it."""
    z, gap = history.last("rollout/likelihood_z"), history.recent("rollout/likelihood_gap")
    if not z or gap is None or abs(gap) < ODD_GAP:
        return None
    difference = history.recent("rollout/logprob_gap")
    if not history.external and difference is not None and difference < SAME:
        return None  # sampled here and scored alike: the gap is chance, in a policy that is nearly deterministic
    together = sum(z) / len(z) ** 0.5
    if gap * together <= 0:  # a nearly deterministic policy had one rare draw: the signs of mean and pooled z differ
        return None
    tokens = sum(history.last("rollout/count")) * (history.recent("rollout/reply_tokens") or 0.0)
    if abs(together) <= ODD_Z or 0 < gap * tokens < BALANCE:
        return None
    how = "more likely" if gap > 0 else "less likely"
    text = f"tokens are {number(abs(gap))} nats {how} than this policy's own ({abs(together):.0f} standard errors)"
    return text, gap, history.since("rollout/likelihood_z", lambda x: x * gap > 0)


def _external_cause(history: History, gap: float, padded: float) -> tuple[str, str]:
    """Return cause and remedy for external replies: declared or visible settings if any fit, else candidates."""
    named = {k: SETTINGS[k] for k, v in history.declared.items() if k in SETTINGS and v not in UNSCORED[k]}
    fitting = {k: s for k, s in named.items() if not gap or s.sign in (0, 1 if gap > 0 else -1)}
    causes = [f"{k}={history.declared[k]!r}, as declared: {s.why}" for k, s in fitting.items()]
    remedies = [s.remedy for s in fitting.values()]
    if padded:
        causes.append("padding is counted as text: the policy never generated the tokens after the end token")
        remedies.append("cut every reply after its first end token, before `step`")
    if causes:
        return "; ".join(causes), f"Sample with {', '.join(remedies)}" if fitting else remedies[0]
    kinds = [_MORE_LIKELY] if gap > 0 else [_LESS_LIKELY] if gap < 0 else [_MORE_LIKELY, _LESS_LIKELY]
    temperature = history.declared.get("temperature") or history.option("sampling.temperature", 1.0)
    candidates = "; or ".join(kinds).format(temperature=f"{temperature:g}")
    declared = f"the declared {', '.join(named)} would do the opposite" if named else "no declared setting explains it"
    return (
        f"the replies do not come from this policy's own distribution; {declared}, and the replies alone do not show "
        f"which setting it was. Candidates: {candidates}",
        "Sample with `learner.generate`, or with do_sample=True, top_k=0, top_p=1.0, temperature=1.0, min_length=-1 "
        "and the model in eval mode; and declare it: `learner.step(..., generation={...})`",
    )


def _own_cause(history: History) -> tuple[str, str]:
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    on = {n: history.option(f"sampling.{n}") for n in off if history.option(f"sampling.{n}", off[n]) != off[n]}
    if on:
        named = ", ".join(f"sampling.{name}={value}" for name, value in on.items())
        options = " ".join(f"--sampling.{name} {off[name]:g}" for name in on)
        exact = "charge a KL that cannot be negative: `--kl.kind reverse`"
        if history.option("mask.by", "policy") != "policy":  # without a truncation there would be no mask
            return f"{named}, the method's mask: {_CUT}", exact
        return f"{named}: {_CUT}", f"`{options}`, or {exact}"
    return (
        "the engine does not generate with the policy in training: its weights were not synchronised, or it samples "
        "in its own way",
        "look at rollout/logprob_gap, and let the engine's `sync` load the new weights",
    )


def declared_otherwise(history: History) -> Finding | None:
    if not history.external:
        return None
    own = dict.fromkeys(("min_new_tokens", "min_tokens"), "sampling.min_tokens")
    own = {"temperature": "sampling.temperature"} | own
    different = {
        name: history.option(full)
        for name, full in own.items()
        if history.declared.get(name) is not None and history.option(full) not in (None, history.declared[name])
    }
    if not different:
        return None
    named = ", ".join(f"{name}={history.declared[name]} (here {value})" for name, value in different.items())
    same = " ".join(f"--{own[name]} {history.declared[name]}" for name in different)
    return finding("declared_otherwise", history.step, settings=named, options=same)


def evaluated_otherwise(history: History) -> Finding | None:
    beams, given = history.option("evaluation.beams", 1), history.option("evaluation.sampling") or {}
    names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "eos_token_id": "stop_tokens"}
    own = {name: history.option(f"sampling.{names.get(name, name)}") for name in given} | {"do_sample": True}
    neutral = {n for n in given if n != "do_sample" and f"sampling.{names.get(n, n)}" not in history.config}
    other = {name: value for name, value in given.items() if name not in neutral and value != own[name]}
    if history.option("form") == "prompt" and other == {"top_k": 1}:
        other = {}  # such a run is to find one prompt, and its policy's is the likeliest one
    parts = [f"{name} {value} (training {own[name]})" for name, value in other.items()]
    parts += [f"{beams} beams (training draws)"] * (beams > 1)
    if not parts or (not history.option("evaluate") and not history.evaluation):
        return None
    undo = ["--evaluation.sampling none"] * bool(other) + ["--evaluation.beams 1"] * (beams > 1)
    return finding("evaluated_otherwise", history.step, settings=", ".join(parts), options=" ".join(undo))
