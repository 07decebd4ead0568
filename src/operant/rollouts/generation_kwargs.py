"""Translates transformers' generation arguments to `Sampling`, and checks how external replies were sampled.

from_generation_kwargs(sampling, {"max_new_tokens": 24, "do_sample": True})     # to generate with
declared(sampling, {"top_k": 50, "temperature": 0.7})                           # to score external replies
"""

import difflib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from operant.options import convert, kinds
from operant.sampling import Sampling
from operant.types import OperantError, Rollout, shown

_NEUTRAL = {
    "num_beams": (1, None),
    "num_return_sequences": (1, None),
    "repetition_penalty": (1, None),
    "length_penalty": (1, None),
    "no_repeat_ngram_size": (0, None),
    "typical_p": (1, None),
    "epsilon_cutoff": (0, None),
    "eta_cutoff": (0, None),
    "renormalize_logits": (False, None),
    "use_cache": (True, False, None),
    "bos_token_id": None,
    "pad_token_id": None,
    "early_stopping": None,
}
"""Arguments that `Sampling` does not have, and the values with which they change nothing; None: any value."""
_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "eos_token_id": "stop_tokens"}

_REFUSED = {
    "only_text": "is for a whole run: --sampling.only-text {}",
    "max_length": "counts the prompt too; use max_new_tokens",
    **dict.fromkeys(("padding_side", "dropout"), "is not supported in generation; it can be declared to `step`"),
    # of TRL's `generate`
    "return_prompt": "is not needed: reply.ids are its own tokens, and reply.query is the prompt; leave it out",
    "length_sampler": "draws a length for a batch: call it yourself, as in generate(queries, max_new_tokens=sampler())",
    "batch_size": "is not needed: memory decides how many replies are drawn at once; leave it out",
    "generate_ref_response": "is not done here: play with the engine of learner.engine_of(learner.reference.policy)",
}
"""Arguments that are known and that no generation takes, and why."""
_OWN = tuple(f.name for f in fields(Sampling))
_KNOWN = tuple(dict.fromkeys((*_OWN, *_RENAMED, *_NEUTRAL, "do_sample", "min_length", *_REFUSED)))


def from_generation_kwargs(base: Sampling, kwargs: Mapping[str, object]) -> Sampling:
    """`base`, changed by transformers' generation arguments or by fields of `Sampling`.

    `pad_token_id` is accepted and has no effect, because masks are made from lengths.
    """
    changes: dict[str, object] = {}
    types = kinds({"": Sampling})
    for name, value in sorted(kwargs.items(), key=lambda item: item[0] == "do_sample"):  # greedy has the last word
        if name not in _KNOWN:
            near = difflib.get_close_matches(str(name)[:100], _KNOWN, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(_KNOWN)}"
            raise OperantError(f"generation argument {shown(name)} is unknown{hint}")
        if name in _NEUTRAL:
            if _NEUTRAL[name] is not None and value not in _NEUTRAL[name]:
                raise OperantError(f"{name}={shown(value)} makes a distribution that cannot be scored; drop it")
        elif name == "do_sample":
            changes |= {} if value or value is None else {"top_k": 1}
        elif name == "min_length":
            if (convert(value, int | None, name) or 0) > 0:
                raise OperantError(f"min_length={value} counts the prompt too; use min_new_tokens, or min_length=-1")
        elif name in _REFUSED:
            raise OperantError(f"{name}={shown(value)} {_REFUSED[name].format(shown(value))}")
        elif value is not None:
            own = _RENAMED.get(name, name)
            changes[own] = convert(value, types[own], name)
    made = replace(base, **changes)
    new = made.stops - base.stops if base.only_text else ()
    return replace(made, banned=tuple(token for token in made.banned if token not in new)) if new else made


def drawn_with(rollouts: Sequence[Rollout], usual: Sampling) -> Sampling:
    """The sampling that all replies were generated with; `usual` for replies that do not store theirs."""
    found = list(dict.fromkeys(r.sampling or usual for r in rollouts)) or [usual]
    chose = any(turn.options is not None for r in rollouts for turn in r.turns)  # an option ends with a stop token
    ways = {(sampling.distribution, sampling.terminator if chose else None): sampling for sampling in found}
    if len(ways) > 1:
        one, other, *_ = ways.values()
        why = "one step scores all of them in one way; use a step for each"
        raise OperantError(f"these replies were sampled in {len(ways)} ways, as {one} and as {other}: {why}")
    return max(found, key=lambda sampling: sampling.max_tokens)


_HARMLESS = ("num_return_sequences", "use_cache", "bos_token_id", "pad_token_id", "early_stopping")
UNSCORED: dict[str, tuple[object, ...]] = {
    name: off for name, off in _NEUTRAL.items() if off and name not in _HARMLESS
} | {
    "do_sample": (True, None),
    "top_k": (0, None),
    "top_p": (1, None),
    "min_p": (0, None),
    "min_length": (-1, 0, None),
    "padding_side": ("left", None),
    "dropout": (False, None),
}
"""Arguments that change the distribution of replies and cannot be reproduced in scoring, with their neutral values.

`padding_side="right"`: prompts were padded between query and reply. `dropout`: the model was in training mode while it
generated.
"""


def declared(base: Sampling, generation: Mapping[str, object]) -> Sampling:
    """The sampling to score external replies with. Warns of arguments that scoring cannot reproduce.

    `generation`: the arguments that the replies were generated with. Temperature, limits and stop tokens change `base`.
    Raises: OperantError for an unknown name, with the nearest.
    """
    unscored = {k: v for k, v in generation.items() if k in UNSCORED and v not in UNSCORED[k]}
    scored = {k: v for k, v in generation.items() if k not in {*UNSCORED, *_HARMLESS, "max_length"}}
    sampling = from_generation_kwargs(base, scored)
    if unscored:
        named = ", ".join(f"{k}={v!r}" for k, v in unscored.items())
        why = "as the tokens that could be drawn are unknown: ratios and KL are biased"
        how = "generate with Learner.generate, or without these arguments"
        warnings.warn(f"replies sampled with {named} are scored as pure sampling, {why}; {how}", stacklevel=3)
    return replace(sampling, top_k=0, top_p=1.0, min_p=0.0)


def warned(sampling: Sampling) -> None:
    """Warn if the sampling's truncation biases the KL estimate."""
    if (message := sampling.warning()) is not None:
        warnings.warn(message, stacklevel=4)
