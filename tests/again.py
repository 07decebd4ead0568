"""Recomputes a training step by plain arithmetic on single rows in float64, to check the metrics of an update.

Nothing here uses the library's own computation. Only the replies, the weights that generated them and the episodes of
each minibatch are taken from the run.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from toys import lm

from operant import Learner, Rollout
from operant.training import update

END = 2


def mean(x):
    return float(np.mean(x))


def std(x):
    return float(np.std(x))


def flat(arrays):
    return np.concatenate([np.asarray(x, dtype=float) for x in arrays])


def k3(gap):
    """exp(-d) - 1 + d."""
    return np.exp(-gap) - 1 + gap


# --- recording a run --------------------------------------------------------------------------------------------------
@dataclass
class Played:
    """A call of `Learner.play`: the rollouts and the weights that generated them."""

    stream: str
    foreign: bool
    rollouts: list[Rollout]
    weights: dict


@dataclass
class Cut:
    """A minibatch: its step, its episodes and the weights before its update."""

    step: int
    episodes: list[int]
    weights: dict


def weights_of(policy):
    return {name: x.detach().clone() for name, x in policy.state_dict().items()}


def watched(patch):
    """Lists that fill up during a run: the calls of `Learner.play`, and the minibatches of the updates."""
    played, cuts = [], []
    play, accumulate = Learner.play, update.accumulate

    def recorded_play(self, tasks, *, stream="train", engine=None, **more):
        made = play(self, tasks, stream=stream, engine=engine, **more)
        played.append(Played(stream, engine is not None, made, weights_of(self.policy)))
        return made

    def recorded_accumulate(policy, whole, *args, **more):
        cuts.append(Cut(policy.module.version, sorted(set(whole.episodes.tolist())), weights_of(policy.module)))
        return accumulate(policy, whole, *args, **more)

    patch.setattr(Learner, "play", recorded_play)
    patch.setattr(update, "accumulate", recorded_accumulate)
    return played, cuts


class Bare:
    """A policy at one moment: transformers' own forward pass of one row, and a critic of two tensors."""

    def __init__(self, weights, temperature=1.0):
        named = {k.removeprefix("model."): x for k, x in weights.items() if k.startswith("model.")}
        self.model = lm(vocab=len(named["lm_head.weight"])).double()
        self.model.load_state_dict(named)
        self.critic = [x.clone().requires_grad_() for k, x in weights.items() if k.startswith("value_head.")]
        self.temperature = temperature

    def row(self, prompt, action, temperature):
        """Log-probs [A, V] of the next token at each action, and the values [A] there."""
        ids = torch.tensor([prompt + action])
        out = self.model(ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
        before, values = slice(len(prompt) - 1, -1), None
        if self.critic:
            slope, bias = self.critic
            values = out.hidden_states[-1][0, before] @ slope[0] + bias
        return (out.logits[0, before] / temperature).log_softmax(-1), values

    def turn(self, turn):
        """Log-prob, entropy and value of each action."""
        if turn.options is None:
            logp, values = self.row(turn.prompt, turn.action, self.temperature)
            return logp.gather(-1, torch.tensor(turn.action)[:, None])[:, 0], -(logp.exp() * logp).sum(-1), values
        scores = []
        for option in turn.options:  # its mean log-prob, the end included
            logp, values = self.row(turn.prompt, [*option, END], 1.0)
            scores.append(logp.gather(-1, torch.tensor([*option, END])[:, None]).mean() / self.temperature)
        table = torch.stack(scores).log_softmax(0)
        return table[[turn.chosen]], -(table.exp() * table).sum()[None], None if values is None else values[:1]

    def episode(self, rollout):
        pieces = zip(*(self.turn(turn) for turn in rollout.turns))
        return [None if piece[0] is None else torch.cat(piece) for piece in pieces]

    def numbers(self, rollout):
        with torch.no_grad():
            return [None if x is None else x.numpy() for x in self.episode(rollout)]

    def value_after(self, ids):
        with torch.no_grad():
            return float(self.row(ids, [0], 1.0)[1][0])


# --- recomputing an update --------------------------------------------------------------------------------------------
@dataclass
class Episode:
    """The numbers of one episode's actions before the update, each [A]."""

    rollout: Rollout
    old: np.ndarray
    advantages: np.ndarray | None = None
    returns: np.ndarray | None = None
    values: np.ndarray | None = None
    ref: np.ndarray | None = None


@dataclass
class Rules:
    """The objective of a run."""

    clip: float = 0.2
    dual: float | None = None
    value_clip: float = 0.2
    value_coef: float = 0.1
    entropy_coef: float = 0.0
    loss_coef: float = 0.0
    price: float = 0.0
    """Coefficient of KL (k2) in the reward, whose own gradient is part of the loss."""
    whiten: bool = False
    per: str = "token"
    temperature: float = 1.0
    bound: float = math.inf


class Minibatch:
    """One minibatch, recomputed from its episodes and the weights before its update."""

    def __init__(self, cut, episodes, rules):
        members = [episodes[i] for i in cut.episodes]
        bare = Bare(cut.weights, rules.temperature)
        new, entropy, values = (list(x) for x in zip(*(bare.episode(e.rollout) for e in members)))
        sizes = [len(x) for x in new]
        old = torch.tensor(flat(e.old for e in members))
        new, entropy = torch.cat(new), torch.cat(entropy)
        used, spread = flat(e.advantages for e in members), 1.0
        if rules.whiten:
            # Of a minibatch of one action there is no deviation to divide by.
            spread = math.sqrt(np.var(used) + 1e-8) if len(used) > 1 else 1.0
            used = (used - used.mean()) / spread
        self.each = np.split(used, np.cumsum(sizes)[:-1])
        adv, ratio = torch.tensor(used), (new - old).exp()
        plain, bounded = -adv * ratio, -adv * ratio.clamp(1 - rules.clip, 1 + rules.clip)
        policy, clipped = torch.maximum(plain, bounded), bounded > plain
        if rules.dual is not None:
            clipped = clipped | ((adv < 0) & (policy > -adv * rules.dual))
            policy = torch.where(adv < 0, torch.minimum(policy, -adv * rules.dual), policy)
        terms = {"advantages": adv, "policy": policy, "held": clipped, "new": new, "old": old, "entropy": entropy}
        loss = policy - rules.entropy_coef * entropy
        if bare.critic:
            values, returns, before = torch.cat(values), *self._tensors(members, "returns", "values")
            # Within the range it is the value itself, to the bit: a sum of differences would differ by rounding.
            near = torch.minimum(torch.maximum(values, before - rules.value_clip), before + rules.value_clip)
            error, far = (values - returns) ** 2, (near - returns) ** 2
            terms |= {"values": values, "error": error, "value_held": far > error}
            terms["value_loss"] = torch.maximum(error, far) / 2
            loss = loss + rules.value_coef * terms["value_loss"]
        if members[0].ref is not None:
            gap = new - self._tensors(members, "ref")[0]
            terms["in_loss"] = ratio * (torch.exp(-gap) - 1 + gap)
            loss = loss + rules.loss_coef * terms["in_loss"]
            loss = loss + rules.price / spread * ratio.detach() * gap**2 / 2
        if rules.per == "token":
            whole = loss.mean()
        else:
            whole = torch.stack([piece.mean() for piece in loss.split(sizes)]).mean()
        slopes = torch.autograd.grad(whole, [*bare.model.parameters(), *bare.critic], allow_unused=True)
        self.norm = math.sqrt(sum(float((g**2).sum()) for g in slopes if g is not None))
        self.loss, self.terms = float(whole.detach()), {k: x.detach().numpy().astype(float) for k, x in terms.items()}

    @staticmethod
    def _tensors(members, *names):
        return [torch.tensor(flat(getattr(e, name) for e in members)) for name in names]


class Update:
    """All minibatches of a step; `made` selects those that an optimizer step followed."""

    def __init__(self, cuts, episodes, rules, made=None):
        self.rules = rules
        self.minibatches = [Minibatch(cut, episodes, rules) for cut in cuts]
        self.made = self.minibatches if made is None else made(self.minibatches)
        count, self.epochs = 0, []
        for minibatch, cut in zip(self.minibatches, cuts):
            self.epochs += [[]] if count % len(episodes) == 0 else []
            self.epochs[-1].append(minibatch)
            count += len(cut.episodes)
        self.finished = sum(sum(len(m.each) for m in epoch) == len(episodes) for epoch in self.epochs)

    def all(self, name, minibatches=None):
        return np.concatenate([m.terms[name] for m in minibatches or self.minibatches])

    @cached_property
    def ratio(self):
        return np.exp(self.all("new") - self.all("old"))

    @cached_property
    def gap(self):
        """Log-probs with unchanged weights minus those of sampling."""
        return self.minibatches[0].terms["new"] - self.minibatches[0].terms["old"]

    @cached_property
    def excess(self):
        """Log-prob plus entropy, with the weights before the update."""
        return self.minibatches[0].terms["new"] + self.minibatches[0].terms["entropy"]
