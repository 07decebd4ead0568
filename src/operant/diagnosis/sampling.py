"""Do the replies come from the policy that is trained? Negative KL, unlikely likelihoods, and the setting behind them.

KL is estimated by log-prob minus reference log-prob of what was said, which is at least 0 on average only where the
policy itself said it, undistorted. So is the log-prob of a drawn token plus the entropy: 0 on average
(`rollout/likelihood_gap`). A setting is named where it was declared or can be seen; otherwise it is only a candidate.
"""

from dataclasses import dataclass

from operant.diagnosis.history import RECENT, Finding, History, number, percent
from operant.rollouts.generation_kwargs import UNSCORED

ERRORS = 3.0
"""Standard errors below 0 that no sampling noise explains: two would accuse one look in forty at a healthy start."""
LEAST_NATS = 0.02
"""Less below 0 than this, a reply, is rounding (with unchanged weights KL is 0 to 1e-6)."""
ODD_Z = 6.0
"""Standard errors of the likelihood gap: the registry's band, far beyond chance at any number of looks."""
ODD_GAP = 0.005
"""Nats a token: gaps below it could be float noise in half precision, and move nothing."""
SAME = 1e-3
"""Nats: log-probs of sampling and training that differ by less are those of one distribution."""
BALANCE = 150.0
"""Nats over all tokens. A policy that is nearly sure has rare draws that hold the balance to its common ones: where few
were expected, none may have come, and the common ones seem likelier than they should with hardly any spread."""


@dataclass(frozen=True)
class Setting:
    """What a declared setting does to the replies."""

    sign: int
    """+1: replies become likelier than the policy's own; -1: unlikelier; 0: either."""
    why: str
    remedy: str


_CUT = "only the likelier tokens could be drawn, and KL is measured under the whole distribution"
SETTINGS = {
    "top_k": Setting(1, _CUT, "top_k=0"),
    "top_p": Setting(1, _CUT, "top_p=1.0"),
    "min_p": Setting(1, _CUT, "min_p=0"),
    "typical_p": Setting(0, "tokens were cut away, and KL is measured under the whole distribution", "typical_p=1.0"),
    "epsilon_cutoff": Setting(1, _CUT, "epsilon_cutoff=0"),
    "eta_cutoff": Setting(1, _CUT, "eta_cutoff=0"),
    "do_sample": Setting(1, "the likeliest token was always taken", "do_sample=True, top_k=0"),
    "num_beams": Setting(1, "a beam looks for likely replies and draws none", "num_beams=1"),
    "length_penalty": Setting(0, "beams were ranked by length", "num_beams=1"),
    "min_length": Setting(
        0, "the end token was suppressed, and is scored as if it could have come", "min_length=-1, or min_new_tokens"
    ),
    "repetition_penalty": Setting(0, "what had been said was made unlikelier", "repetition_penalty=1.0"),
    "no_repeat_ngram_size": Setting(-1, "likely tokens were forbidden", "no_repeat_ngram_size=0"),
    "renormalize_logits": Setting(0, "the logits were changed after the model", "renormalize_logits=False"),
    "padding_side": Setting(-1, "padding stood between query and reply when the policy spoke", "padding_side='left'"),
    "dropout": Setting(-1, "the model dropped units at random while it spoke", "model.eval() before generate"),
}
"""Everything that can be declared and not be scored (`generation.UNSCORED`)."""
_LIKELIER = (
    "top_k (transformers' generate has top_k=50 unless it is told top_k=0), top_p or min_p below the whole "
    "distribution, a temperature below {temperature}, greedy or beam search"
)
_UNLIKELIER = (
    "a temperature above {temperature}, dropout (a model in training mode), min_length or a penalty that keeps tokens "
    "from coming, padding counted as text or on the wrong side, replies of another model"
)


def other_sampler(history: History) -> Finding | None:
    """Replies that this policy's own distribution did not give: KL below 0, or tokens too likely or too unlikely."""
    below, odd, padded = _negative(history), _odd(history), _padded(history)
    if below is None and odd is None and not padded:
        return None
    evidence = [text for text in (below and below[0], odd and odd[0]) if text]
    if padded:
        evidence.append(f"{percent(padded)} of the replies go on after their end token")
    cause, remedy = _blame(history, odd[1] if odd else 0.0, padded)
    name = "negative_kl" if below else "other_sampler" if odd else "padding"
    curves = ("kl/per_reply", "rollout/likelihood_gap", "rollout/likelihood_z")
    says = _sentence(evidence)
    return Finding(name, "problem", says, cause, remedy, curves, below[1] if below else odd[2] if odd else history.step)


def _sentence(parts: list[str]) -> str:
    joined = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])}, and {parts[-1]}"
    return f"{joined[0].upper()}{joined[1:]}."


def _negative(history: History) -> tuple[str, int] | None:
    """What to say of a KL below 0, and since when; None where noise explains it."""
    held = [m for m in history.metrics if {"kl/per_reply", "kl/per_reply_std", "rollout/count"} <= m.keys()][-RECENT:]
    held = [m for m in held if m["kl/per_reply"] is not None and m["kl/per_reply_std"] is not None]
    if not held:
        return None
    mean = sum(m["kl/per_reply"] for m in held) / len(held)
    error = sum(m["kl/per_reply_std"] ** 2 / m["rollout/count"] for m in held) ** 0.5 / len(held)
    if mean > -LEAST_NATS or mean > -ERRORS * error:
        return None
    steps = "1 step" if len(held) == 1 else f"{len(held)} steps"
    said = f"KL is {mean:.2f} nats a reply (mean of {steps}, standard error {error:.2f}), and no true KL is below 0"
    return said, history.since("kl/per_reply", lambda x: x < 0)


def _odd(history: History) -> tuple[str, float, int] | None:
    """What to say of a likelihood gap, the gap, and since when; None where noise explains it."""
    z, gap = history.values("rollout/likelihood_z")[-RECENT:], history.recent("rollout/likelihood_gap")
    if not z or gap is None or abs(gap) < ODD_GAP or _agrees(history):
        return None
    together = sum(z) / len(z) ** 0.5
    if gap * together <= 0:  # a nearly sure policy had one rare draw: the mean and the standard errors disagree
        return None
    if abs(together) <= ODD_Z or 0 < gap * _tokens(history) < BALANCE:
        return None
    how = "likelier" if gap > 0 else "unlikelier"
    said = f"tokens are {number(abs(gap))} nats {how} than this policy's own ({abs(together):.0f} standard errors)"
    return said, gap, history.since("rollout/likelihood_z", lambda x: x * gap > 0)


def _agrees(history: History) -> bool:
    """Whether replies were drawn here and are scored alike: what is odd then is chance, in a policy that is sure."""
    apart = history.recent("rollout/logprob_gap")
    return not history.foreign and apart is not None and apart < SAME


def _tokens(history: History) -> float:
    """How many tokens the recent steps' gap is a mean of."""
    counts, each = history.values("rollout/count")[-RECENT:], history.recent("rollout/reply_tokens")
    return sum(counts) * (each or 0.0)


def _padded(history: History) -> float:
    """The share of foreign replies that go on after a stop token; own replies end there."""
    told = history.declared.get("eos_token_id") or history.declared.get("stop_tokens")
    stops = told or history.option("sampling.stop_tokens") or ()
    stops = {stops} if isinstance(stops, int) else set(stops)
    if not history.foreign or not stops or not history.rows or history.option("sampling.fixed_length"):
        return 0.0
    return sum(any(i in stops for i in (row.get("ids") or ())[:-1]) for row in history.rows) / len(history.rows)


def _blame(history: History, gap: float, padded: float) -> tuple[str, str]:
    """Cause and remedy: what was declared or is seen; failing that, what it might be."""
    if not history.foreign:
        return _own(history)
    named = {k: SETTINGS[k] for k, v in history.declared.items() if k in SETTINGS and v not in UNSCORED[k]}
    fitting = {k: s for k, s in named.items() if not gap or s.sign in (0, 1 if gap > 0 else -1)}
    causes = [f"{k}={history.declared[k]!r}, as declared: {s.why}" for k, s in fitting.items()]
    remedies = [s.remedy for s in fitting.values()]
    if padded:
        causes.append("padding is counted as text: what follows the end token was never said by the policy")
        remedies.append("cut every reply after its first end token, before `step`")
    if causes:
        return "; ".join(causes), f"Sample with {', '.join(remedies)}" if fitting else remedies[0]
    return _candidates(history, gap, named)


def _own(history: History) -> tuple[str, str]:
    """Replies that `generate` made here."""
    cuts = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    on = {n: history.option(f"sampling.{n}") for n, off in cuts.items() if history.option(f"sampling.{n}", off) != off}
    if on:
        named = ", ".join(f"sampling.{name}={value}" for name, value in on.items())
        off = " ".join(f"--sampling.{name} {cuts[name]:g}" for name in on)
        return f"{named}: {_CUT}", f"`{off}`, or charge a KL that cannot be negative: `--kl.kind reverse`"
    return (
        "the engine that speaks is not the policy that is trained: weights that were not synchronised, or sampling of "
        "its own",
        "look at rollout/logprob_gap, and let the engine's `sync` load the new weights",
    )


def _candidates(history: History, gap: float, named: dict[str, Setting]) -> tuple[str, str]:
    kinds = [_LIKELIER] if gap > 0 else [_UNLIKELIER] if gap < 0 else [_LIKELIER, _UNLIKELIER]
    temperature = history.declared.get("temperature") or history.option("sampling.temperature", 1.0)
    listed = "; or ".join(kinds).format(temperature=f"{temperature:g}")
    excuse = (
        f"the declared {', '.join(named)} would do the opposite, and"
        if named
        else "no setting was declared that does it, and"
    )
    return (
        f"the replies do not come from this policy's own distribution; {excuse} which it was cannot be seen. "
        f"Candidates: {listed}",
        "Sample with `learner.generate`, or with do_sample=True, top_k=0, top_p=1.0, temperature=1.0, min_length=-1 "
        "and the model in eval mode; and declare it: `learner.step(..., generation={...})`",
    )


def declared_otherwise(history: History) -> Finding | None:
    """A declared temperature or least length that is not the learner's own: scored rightly, and worth a note."""
    own = {
        "temperature": "sampling.temperature",
        "min_new_tokens": "sampling.min_tokens",
        "min_tokens": "sampling.min_tokens",
    }
    if not history.foreign:
        return None
    apart = {
        name: history.option(full)
        for name, full in own.items()
        if history.declared.get(name) is not None and history.option(full) not in (None, history.declared[name])
    }
    if not apart:
        return None
    told = ", ".join(f"{name}={history.declared[name]} (here {value})" for name, value in apart.items())
    same = " ".join(f"--{own[name]} {history.declared[name]}" for name in apart)
    return Finding(
        "declared_otherwise",
        "note",
        f"The replies were declared as sampled with {told}.",
        "they are scored as declared, so ratios and KL are right; `generate` would sample differently",
        f"`{same}`, so that one setting holds everywhere",
        ("kl/per_reply",),
        history.step,
    )
