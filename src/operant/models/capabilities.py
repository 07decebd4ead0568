"""Finds out which fast ways of computing a model's hidden states are exact, by trying them on three short rows.

The plainest way is one row at a time, unpadded and uncached. The others are compared with it: rows padded on the right,
rows packed end to end and, in the engine, ways of decoding (`engines/native/capabilities.py`). A way that differs is
not used. A model whose logits are not a known function of the states that enter its output head is refused.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from operant.models import layout
from operant.models.choices import branches, separate_rows, states_with_options
from operant.models.hidden_states import HiddenStates, Modes
from operant.models.kernels import quick
from operant.types import Batch, OperantError, shown

FAILS = (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError)
"""Exceptions that a model raises when it cannot be called in some way."""

_warn_once = cache(warnings.warn)  # each text once: copies of a policy are tried, too
TOLERANCE = 2e-3
"""Largest difference, relative to the largest state: far above the rounding of float32, far below any real fault."""


@torch.no_grad()
def probe(policy: HiddenStates) -> Modes:
    """Try padding and packing on three rows of unequal length, and return the modes that are exact."""
    policy.modes = Modes()
    rows = three_rows(policy)
    try:
        plain = [plain_state(policy, row) for row in rows]
        ahead = looks_ahead(policy, rows[1])
        finish = _find_logit_function(policy, rows[0])
    except OperantError:
        raise
    except FAILS as error:
        raise OperantError(
            f"{type(policy.model).__name__}: what enters its output head cannot be computed from token ids alone "
            f"({type(error).__name__}: {shown(str(error))}); correct its config, or load another architecture"
        ) from error
    if ahead:
        raise OperantError(
            f"{type(policy.model).__name__}: its state at a token depends on the tokens after it, so it cannot say one "
            "token after another; set is_decoder in its config.json to true if it has that, or load a causal model"
        )
    padded = agrees(lambda: _padded(policy, rows), plain)
    return Modes(padded=padded, packed=packs_exactly(policy), finish=finish)


@torch.no_grad()
def packs_exactly(policy: HiddenStates) -> bool:
    """Whether rows shall be packed end to end, and each token then has the same state as in its row alone."""
    asked, modes = policy.options.packing, policy.modes
    wanted = asked == "on" or (asked == "auto" and quick(policy.device, policy.head.weight.dtype))
    if not wanted or policy.encoder_decoder or policy.device.type == "meta":
        return False
    rows = three_rows(policy)
    batch = Batch.given([row[:1] for row in rows], [row[1:] for row in rows]).to(policy.device)
    replaceable = policy.packing.replaceable
    try:
        policy.modes = replace(modes, packed=False)
        plain = torch.cat([policy.states(batch.rows(slice(i, i + 1))) for i in range(len(rows))])
        rows_end_to_end = layout.end_to_end(layout.in_front(policy.virtual, batch))  # packed even if that saves little
        exact = replaceable and close(policy.selected_states(batch, rows_end_to_end), plain)
        why = "its states differ" if replaceable else "its attention is no function by name"
    except FAILS as error:
        exact, why = False, str(error)
    finally:
        policy.modes = modes
    if not exact and (asked == "on" or replaceable):  # no warning for architectures that declare no support
        _warn_once(f"rows of {type(policy.model).__name__} are padded, not packed: {why}")
    return exact


@torch.no_grad()
def branches_exactly(policy: HiddenStates) -> bool:
    """Whether options that are computed as branches of their row have the same states as in rows of their own."""
    rows = three_rows(policy)
    # The last two tokens of a row, and its first one, are two options after the tokens before them.
    prompts, options = [row[:-2] for row in rows], [[row[-2:], row[:1]] for row in rows]
    batch = Batch.choosing(prompts, options).to(policy.device)
    grown, window = branches(batch, None), policy.packing.window
    if policy.packing.by_columns or (window is not None and max(map(len, rows)) > window):
        return False
    try:
        _, branched = states_with_options(policy, batch, grown, branched=True)
        return close(branched, policy.states(separate_rows(batch, grown)))
    except FAILS:
        return False


def check_trunk(policy: HiddenStates) -> None:
    """Freeze the trunk, and compare the states computed from its cached states with those of the whole model."""
    trunk = policy.trunk
    rows = three_rows(policy)
    batch = Batch.given([row[:2] for row in rows], [row[2:] for row in rows]).to(policy.device)
    other = batch.with_(tokens=(batch.tokens + 1) % policy.vocabulary)
    kwargs = policy.model_input(batch.rows(slice(0, 1))).kwargs
    run = partial(policy.call, **kwargs, use_cache=False)
    trunk.freeze(policy.model, policy.head, run, train_head=policy.options.train_head)
    with torch.no_grad():
        trunk.learn_to_skip(run)
        whole = policy.states(batch)
        try:
            states = policy.trunk_states(batch)
            policy.states(other)  # overwrites anything that a block has stored for a later one
            from_cache = policy.states(batch.with_(states=states))
        except FAILS as error:
            raise _no_trunk(policy, f"they cannot be started there ({type(error).__name__})") from error
    if not close(from_cache, whole):
        raise _no_trunk(policy, f"the states differ by {float((from_cache - whole).abs().max()):.2g}")


def _no_trunk(policy: HiddenStates, why: str) -> OperantError:
    return OperantError(
        f"model.train_layers={policy.options.train_layers}: the upper blocks of {type(policy.model).__name__} cannot "
        f"begin from cached states of the lower ones, {why}; train every layer, or use lora.rank"
    )


def three_rows(policy: HiddenStates) -> list[list[int]]:
    """Three prompts of unequal length. Their ids are spread over the vocabulary, and are the same in every run."""
    least = 5 if (policy.context or 99) >= 12 else 2
    lengths = (least, least + 3, least + 1)
    return [[(7 + 13 * i + 29 * j) % policy.vocabulary for j in range(n)] for i, n in enumerate(lengths)]


def agrees(compute: Callable[[], list[Tensor]], plain: list[Tensor]) -> bool:
    """Whether `compute` runs without an error and returns the states of the plainest way."""
    try:
        return all(close(a, b) for a, b in zip(compute(), plain, strict=True))
    except FAILS:
        return False


def plain_state(policy: HiddenStates, row: list[int]) -> Tensor:
    """[1, D] the state at the end of one row that is computed by itself."""
    return policy.last_states(**feed(policy, row), use_cache=False)[0]


def feed(policy: HiddenStates, row: list[int]) -> dict[str, Tensor]:
    kwargs = {"input_ids": torch.tensor([row], device=policy.device)}
    if policy.encoder_decoder:
        kwargs["decoder_input_ids"] = torch.tensor([[policy.start_token]], device=policy.device)
    return kwargs


def _padded(policy: HiddenStates, rows: list[list[int]]) -> list[Tensor]:
    tokens, mask = layout.pad(rows, "right", policy.device)
    kwargs, ends = {"input_ids": tokens}, mask.sum(1) - 1
    if policy.encoder_decoder:
        start = torch.full((len(rows), 1), policy.start_token, device=policy.device)
        kwargs |= {"attention_mask": mask.long(), "decoder_input_ids": start}
        ends = torch.zeros(len(rows), dtype=torch.long)
    with policy.catching(lambda hidden: hidden[torch.arange(len(rows)), ends]) as caught:
        policy.call(**kwargs, use_cache=False)
    return list(caught["states"][:, None])


def looks_ahead(policy: HiddenStates, row: list[int]) -> bool:
    """Whether the state before the last token depends on that token. Both calls have one shape, so they round alike."""
    kwargs = feed(policy, row)
    name = "decoder_input_ids" if policy.encoder_decoder else "input_ids"
    states = []
    for last in (row[-1], (row[-1] + 1) % policy.vocabulary):
        ids = [policy.start_token, *row[:2], last] if policy.encoder_decoder else [*row[:-1], last]
        kwargs[name] = torch.tensor([ids], device=policy.device)
        with policy.catching(lambda hidden: hidden[:, -2]) as caught:
            policy.call(**kwargs, use_cache=False)
        states.append(caught["states"])
    return not close(states[0], states[1], TOLERANCE / 20)


def _find_logit_function(policy: HiddenStates, row: list[int]) -> Callable[[Tensor], Tensor]:
    """Find the function that the model applies to the output of its head to get its logits."""
    config = policy.config.get_text_config() if hasattr(policy.config, "get_text_config") else policy.config
    names = "final_logit_softcapping", "logits_scaling", "logit_scale"
    cap, divide, times = (getattr(config, name, None) for name in names)
    known = (cap, lambda x: torch.tanh(x / cap) * cap), (divide, lambda x: x / divide), (times, lambda x: x * times)
    candidates: list[Callable[[Tensor], Tensor]] = [Modes().finish]
    candidates += [function for number, function in known if isinstance(number, (int, float)) and number]
    if (bias := dict(policy.model.named_buffers()).get("final_logits_bias")) is not None:  # of Marian and BART
        candidates.append(lambda x: x + bias.to(x))
    truth = policy.model(**feed(policy, row), use_cache=False).logits[:, -1]
    mine = policy.head(plain_state(policy, row))
    if mine.shape == truth.shape:  # the closest: a cap hardly changes small logits, such as those of fresh weights
        found = min(candidates, key=lambda candidate: float((candidate(mine) - truth).abs().max()))
        if close(found(mine), truth):
            return found
    raise OperantError(
        f"{type(policy.model).__name__}: its logits are not a known function of its last hidden states, so log-probs "
        "could not be exact; load another architecture, or report this one"
    )


def close(a: Tensor, b: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Whether two tensors of states differ by no more than rounding."""
    scale = b.abs().max().clamp(min=1e-6)
    limit = tolerance if b.dtype in (torch.float32, torch.float64) else 20 * tolerance
    return bool(((a - b).abs().max() / scale) < limit)
