"""Every registered metric against its sentence: from raw rollouts, by plain arithmetic and bare rows in float64.

A table for each run says, name by name, what its steps must have logged. A metric without a row is an error.
"""

import json
import math
import time
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from again import END, Bare, Episode, Rules, Update, flat, k3, mean, std, watched, weights_of
from rigs import said
from toys import letters, lm
from worlds import Turns

from operant import Learner, Policy, Step, Task, machine
from operant.api import runs
from operant.metrics.registry import METRICS, describe
from operant.rewards.combine import weighted
from operant.runs import evaluate
from operant.tools.report import observers

V = 40

UPDATE = {
    "policy/loss": lambda s: mean(s.update.all("policy")),
    "policy/entropy": lambda s: mean(s.update.all("entropy")),
    "policy/clip_fraction": lambda s: mean(s.update.all("held")),
    "policy/approx_kl": lambda s: mean(np.log(s.update.ratio) ** 2) / 2,
    "policy/old_new_kl": lambda s: mean(s.update.all("old") - s.update.all("new")),
    "policy/old_new_k3": lambda s: mean(k3(s.update.all("old") - s.update.all("new"))),
    "policy/ratio_mean": lambda s: mean(s.update.ratio),
    "policy/ratio_std": lambda s: std(s.update.ratio),
    "policy/ratio_min": lambda s: min(s.update.ratio),
    "policy/ratio_max": lambda s: max(s.update.ratio),
    "policy/advantage_mean": lambda s: mean(s.update.all("advantages", s.update.epochs[0])),
    "policy/advantage_std": lambda s: std(s.update.all("advantages", s.update.epochs[0])),
    "policy/advantage_zero": lambda s: mean([not x.any() for m in s.update.epochs[0] for x in m.each]),
    "policy/skipped_steps": lambda s: 0,
    "value/loss": lambda s: mean(s.update.all("value_loss")),
    "value/error": lambda s: mean(s.update.all("error")),
    "value/prediction": lambda s: mean(s.update.all("values")),
    "value/clip_fraction": lambda s: mean(s.update.all("value_held")),
    "loss/total": lambda s: mean([m.loss for m in s.update.made]),
    "rollout/logprob_gap": lambda s: max(abs(s.update.gap)),
    "rollout/likelihood_gap": lambda s: mean(s.update.excess),
    "rollout/likelihood_z": lambda s: mean(s.update.excess) / std(s.update.excess) * math.sqrt(len(s.update.excess)),
    "update/grad_norm": lambda s: mean([m.norm for m in s.update.made]),
    "update/grad_norm_clipped": lambda s: mean([min(m.norm, s.update.rules.bound) for m in s.update.made]),
    "update/steps": lambda s: len(s.update.made),
    "update/epochs": lambda s: s.update.finished,
    "update/early_stopped": lambda s: 0,
    "update/refused": lambda s: 0,
}
"""What an update tells, where nothing goes wrong in it."""


# --- a world, two judges and a run in it ------------------------------------------------------------------------------
DOORS = ["up", "go on", "inn"]
GAMMA, LAM, TURN_GAMMA, TURN_LAM, COEF, TARGET, HORIZON, CLIP = 0.97, 0.9, 0.8, 0.5, 0.1, 3.0, 30, 1.2
RULES = Rules(whiten=True, entropy_coef=0.01, loss_coef=0.05, temperature=0.7, bound=0.5)
WORDS = ["ab", "cde", "fg", "h", "ijk", "lm", "nop", "q", "rs", "tuv", "wx", "y", "za", "ban", "ed", "o"]
FAIR = {"steps": 2, "batch": 32, "samples": 2, "max_tokens": 5, "temperature": RULES.temperature, "on_length": "drop"}
FAIR |= {"stop_tokens": (END, 4, 8, 12, 18, 22), "epochs": 2, "minibatch": 4, "micro_tokens": 64}
FAIR |= {"optimizer": {"lr": 1e-3, "schedule": "linear", "warmup": 0.5}, "max_grad_norm": RULES.bound}
FAIR |= {"score": {"scale": True, "normalise": True, "clip": CLIP}, "entropy_coef": RULES.entropy_coef}
FAIR["kl"] = {"kind": "k2", "coef": COEF, "control": "adaptive", "target": TARGET, "horizon": HORIZON}
FAIR["kl"] |= {"loss_coef": RULES.loss_coef, "loss_kind": "k3"}
FAIR["advantage"] = {"gamma": GAMMA, "lam": LAM, "turn_gamma": TURN_GAMMA, "turn_lam": TURN_LAM}
FAIR["advantage"] |= {"whiten_scope": "minibatch"}
FAIR |= {"value.init": "normal", "evaluate_every": 1, "evaluation.samples": 2, "probes": 16, "probe_every": 1}


def pays(turn, text):
    return 0.03 * len(text) - 0.05 * turn + 0.25 * text.count("e")


class Fair(Turns):
    """Four kinds of task: one reply; two; one and a choice, then a cut; one, a choice behind it, and one more."""

    def reset(self, tasks):
        self.kinds = {slot: task.target for slot, task in tasks.items()}
        return super().reset(tasks)

    def answer(self, slot, reply):
        turn = self.turn[slot] - 1
        paid = pays(turn, reply)
        match self.kinds[slot], turn:
            case 1, 0:
                return Step(" go on.", reward=paid)
            case 2, 0:
                return Step("a door.", fresh=True, reward=paid, options=DOORS)
            case 2, 1:
                return Step("en", reward=paid, truncated=True)
            case 3, 0:
                return Step(" doors.", reward=paid, options=DOORS)
            case 3, 1:
                return Step(" so.", reward=paid)
        return Step(reward=paid, terminated=True)


def wish(rollout):
    """What the query is worth whatever is said."""
    return (ord(rollout.task.prompt[0]) - ord("a")) / 5


def lengths(rollout):
    """Abstains where the first reply has fewer than four tokens."""
    first = len(rollout.turns[0].action)
    return None if first < 4 else first / 5 + wish(rollout)


def vowels(rollout):
    """Abstains where the first reply has three or five tokens."""
    if len(rollout.turns[0].action) in (3, 5):
        return None
    return 0.3 * sum(c in "aeiou" for text in rollout.texts for c in text) + wish(rollout)


PARTS = {"lengths": (lengths, 0.5), "vowels": (vowels, 2.0)}
JUDGE = weighted({name: (lambda rs, f=f: [f(r) for r in rs], weight) for name, (f, weight) in PARTS.items()})


def score(rollout):
    """The weighted sum of the parts that did not abstain; None where all did."""
    said = [weight * f(rollout) for f, weight in PARTS.values() if f(rollout) is not None]
    return sum(said) if said else None


def paid(rollout):
    """By the world, from the replies' texts: one number a turn."""
    return [pays(turn, text) for turn, text in enumerate(rollout.texts)]


def total(rollout):
    return None if score(rollout) is None else score(rollout) + sum(paid(rollout))


def kept(rollouts):
    """Those that are learnt from: judged, and not ended by their length."""
    return [r for r in rollouts if score(r) is not None and r.turns[-1].end != "length"]


def query_share(rollouts):
    """ICC(1, 1): of the totals, by task, from a table of the analysis of variance."""
    known = [r for r in rollouts if score(r) is not None]
    groups = {task: [total(r) for r in known if r.task.id == task] for task in dict.fromkeys(r.task.id for r in known)}
    groups = [np.array(x) for x in groups.values() if len(x) > 1]
    if len(groups) < 8:
        return None
    every, k = np.concatenate(groups), len(groups)
    sizes = np.array([len(x) for x in groups])
    between = sum(len(x) * (x.mean() - every.mean()) ** 2 for x in groups) / (k - 1)
    within = sum(((x - x.mean()) ** 2).sum() for x in groups) / (len(every) - k)
    n0 = (len(every) - (sizes**2).sum() / len(every)) / (k - 1)
    return max(0.0, (between - within) / (between + (n0 - 1) * within))


def credited(rollout, rewards, values, after):
    """[A] advantages of an episode, from its last action back; `after`: the value of what follows it."""
    sizes = [1 if turn.options else len(turn.action) for turn in rollout.turns]
    ends, ahead, advantages = set(np.cumsum(sizes) - 1), 0.0, []
    for place in reversed(range(sum(sizes))):
        discount, trace = (GAMMA * TURN_GAMMA, TURN_LAM) if place in ends else (GAMMA, LAM)
        ahead = rewards[place] + discount * after - values[place] + discount * trace * ahead
        after = values[place]
        advantages.append(ahead)
    return np.array(advantages[::-1])


class Known:
    """What is known of a step whose `episodes` are known."""

    @cached_property
    def gaps(self):
        return [e.old - e.ref for e in self.episodes]

    def tokens(self, name):
        return flat(getattr(e, name) for e in self.credited)


class Game(Known):
    """One step of the run in the world, with everything that its sentences speak of."""

    def __init__(self, number, logged, played, cuts, reference, past):
        self.logged, self.past, self.reference = logged, past, reference
        self.step, own = number, [p for p in played if not p.foreign]
        self.all = [p for p in own if p.stream == "train"][number - 1].rollouts
        self.kept = kept(self.all)
        self.turns = [turn for r in self.kept for turn in r.turns]
        self.texts = [text for r in self.kept for text in r.texts]
        self.words = [word for text in self.texts for word in words(text)]
        self.pairs = [pair for text in self.texts for pair in pairwise(words(text))]
        self.evaluated = [p for p in own if p.stream == "evaluate"][number]
        self.evaluated_before = next(p for p in own if p.stream == "evaluate")
        probes = [p for p in played if p.stream == "probe"]  # before: the policy, the reference, the policy twice
        self.probed_before, self.probed_reference, self.probed_twice = probes[:3]
        self.probed = probes[2 + number]
        self.cuts = [cut for cut in cuts if cut.step == number - 1]
        self.seen = [total(r) for game in [*past, self] for r in game.all if score(r) is not None]

    @cached_property
    def spread(self):
        """The deviation of all totals that were seen so far, by which everything that is paid is divided."""
        return np.std(self.seen, ddof=1) + np.finfo(np.float32).eps

    @cached_property
    def used(self):
        """Totals of reward and world as they are trained on: normalised, and clipped."""
        return [float(np.clip((total(r) - mean(self.seen)) / self.spread, -CLIP, CLIP)) for r in self.kept]

    @cached_property
    def coef(self):
        """Ziegler et al. (2019), section 2.2."""
        if not self.past:
            return COEF
        before = self.past[-1]
        return before.coef * (1 + np.clip(before.kl / TARGET - 1, -0.2, 0.2) * len(before.kept) / HORIZON)

    @property
    def kl(self):
        return mean([gap.sum() for gap in self.gaps])

    @cached_property
    def charged(self):
        return [gap**2 / 2 for gap in self.gaps]

    @cached_property
    def returns(self):
        """Of each reply: its total as it is trained on, less the penalty."""
        return [used - self.coef * charged.sum() for used, charged in zip(self.used, self.charged)]

    @cached_property
    def episodes(self):
        bare, made = Bare(self.cuts[0].weights, RULES.temperature), []
        for rollout in self.kept:
            old, _, values = bare.numbers(rollout)
            made.append(Episode(rollout, old, values=values, ref=self.reference.numbers(rollout)[0]))
        return made

    @cached_property
    def credited(self):
        bare, whole = Bare(self.cuts[0].weights), []
        for episode, used, charged in zip(self.episodes, self.used, self.charged):
            r, last = episode.rollout, episode.rollout.turns[-1]
            rewards = -self.coef * charged
            ends = np.cumsum([1 if turn.options else len(turn.action) for turn in r.turns]) - 1
            rewards[ends] += paid(r) / self.spread
            rewards[-1] += used - sum(paid(r)) / self.spread
            more = letters()("en", add_special_tokens=False)["input_ids"]
            after = bare.value_after(last.prompt + last.action + more) if r.end == "cut" else 0.0
            advantages = credited(r, rewards, episode.values, after)
            whole.append(replace(episode, advantages=advantages, returns=advantages + episode.values))
        return whole

    @cached_property
    def update(self):
        return Update(self.cuts, self.credited, replace(RULES, price=self.coef))


def kl(played, reference):
    """Mean over some replies of the sum of log-prob less the reference's."""
    bare = Bare(played.weights, RULES.temperature)
    return mean([(bare.numbers(r)[0] - reference.numbers(r)[0]).sum() for r in played.rollouts])


def scores(rollouts):
    return [total(r) for r in rollouts if score(r) is not None]


def best(rollouts):
    """Of each task's replies the best, where one was judged."""
    tasks = [scores(r for r in rollouts if r.task.id == task) for task in {r.task.id for r in rollouts}]
    return [max(x) for x in tasks if x]


def game(folder, patch):
    played, cuts = watched(patch)
    reference = lm(vocab=V, seed=1, spread=0.1).double()
    held_out = [Task(f"e/{i}", word[::-1] + "a", target=(i + 1) % 4) for i, word in enumerate(WORDS)]
    tasks = [Task(f"t/{i}", word, target=i % 4) for i, word in enumerate(WORDS)]
    given = {"policy": lm(vocab=V, spread=0.12).double(), "tokenizer": letters(), "reference": Policy(reference)}
    (*_, run) = runs(folder / "run", tasks=tasks, evaluate=held_out, reward=JUDGE, env=Fair(), **given, **FAIR)
    steps = []
    against = Bare({f"model.{k}": x for k, x in reference.state_dict().items()}, RULES.temperature)
    for number, line in enumerate((run.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines(), 1):
        steps.append(Game(number, json.loads(line), played, cuts, against, list(steps)))
    return steps


def words(text):
    return "".join(c if c.isalnum() else " " for c in text.lower()).split()


def repeated(text):
    """The share of a text's trigrams that stood in it before; None where it has none."""
    grams = list(zip(words(text), words(text)[1:], words(text)[2:]))
    return mean([gram in grams[:i] for i, gram in enumerate(grams)]) if grams else None


def fresh_prompts(episodes):
    """The share of the turns after a reply whose prompt does not begin with the row so far; None without such turns."""
    pairs = [(a.prompt + a.action, b.prompt) for turns in episodes for a, b in pairwise(turns) if a.action]
    return mean([prompt[: len(row)] != row for row, prompt in pairs]) if pairs else None


def share(texts, signs):
    return mean([c in signs for c in "".join(texts)])


TEXT = {
    "text/empty": lambda s: mean([not set(text) - set(" .,;:…\n\t\r") for text in s.texts]),
    "text/top_word": lambda s: max(s.words.count(word) for word in s.words) / len(s.words),
    "text/distinct_1": lambda s: len(set(s.words)) / len(s.words),
    "text/distinct_2": lambda s: len(set(s.pairs)) / len(s.pairs),
    "text/repeated": lambda s: mean(x) if (x := [r for t in s.texts if (r := repeated(t)) is not None]) else None,
    "text/exclamations": lambda s: share(s.texts, "!"),
    "text/emojis": lambda s: share(s.texts, PICTURES),
    "text/non_letters": lambda s: share(s.texts, PICTURES + SIGNS),
}
PICTURES, SIGNS = "\U0001f600\u2602", "~*/|"
"""Those that stand in some text here."""
ROLLOUT = {
    "rollout/count": lambda s: len(s.kept),
    "rollout/turns": lambda s: mean([len(r.turns) for r in s.kept]),
    "rollout/fresh_prompts": lambda s: fresh_prompts([r.turns for r in s.kept]),
    "rollout/query_tokens": lambda s: mean([len(turn.prompt) for turn in s.turns]),
    "rollout/query_tokens_std": lambda s: std([len(turn.prompt) for turn in s.turns]),
    "rollout/reply_tokens": lambda s: mean([len(turn.action) for turn in s.turns]),
    "rollout/reply_tokens_std": lambda s: std([len(turn.action) for turn in s.turns]),
    "rollout/ended_stop": lambda s: mean([turn.end == "stop" for turn in s.turns]),
    "rollout/ended_length": lambda s: mean([turn.end == "length" for turn in s.turns]),
    "rollout/ended_cut": lambda s: mean([r.end == "cut" for r in s.kept]),
}
GAME = {
    "rollout/staleness": lambda s: 0,
    "rollout/staleness_max": lambda s: 0,
    "step": lambda s: s.step,
    "episodes": lambda s: sum(len(g.kept) for g in [*s.past, s]),
    "reward/mean": lambda s: mean(scores(s.all)),
    "reward/std": lambda s: std(scores(s.all)),
    "reward/min": lambda s: min(scores(s.all)),
    "reward/max": lambda s: max(scores(s.all)),
    "reward/scaled_mean": lambda s: mean(s.used),
    "reward/scaled_std": lambda s: std(s.used),
    "reward/kl_penalty": lambda s: mean([s.coef * x.sum() for x in s.charged]),
    "reward/kl_penalty_std": lambda s: std([s.coef * x.sum() for x in s.charged]),
    "reward/return": lambda s: mean(s.returns),
    "reward/return_std": lambda s: std(s.returns),
    "reward/query_share": lambda s: query_share(s.all),
    "reward/abstained": lambda s: mean([score(r) is None for r in s.all]),
    "reward/world/mean": lambda s: mean([sum(paid(r)) for r in s.all]),
    "reward/world/std": lambda s: std([sum(paid(r)) for r in s.all]),
    "reward/world/abstained": lambda s: 0,
    "kl/per_reply": lambda s: mean([x.sum() for x in s.gaps]),
    "kl/per_reply_std": lambda s: std([x.sum() for x in s.gaps]),
    "kl/per_token": lambda s: mean(flat(s.gaps)),
    "kl/paid": lambda s: mean([x.sum() for x in s.charged]),
    "kl/k3": lambda s: mean([k3(x).sum() for x in s.gaps]),
    "kl/in_loss": lambda s: mean(s.update.all("in_loss")),
    "kl/coef": lambda s: s.coef,
    "kl/loss_coef": lambda s: RULES.loss_coef,
    "policy/sampled_entropy": lambda s: -mean([e.old.sum() for e in s.episodes]),
    "value/mean": lambda s: mean(s.tokens("values")),
    "value/std": lambda s: std(s.tokens("values")),
    "value/error_before": lambda s: mean((s.tokens("returns") - s.tokens("values")) ** 2),
    "value/explained_variance": lambda s: 1 - GAME["value/error_before"](s) / np.var(s.tokens("returns")),
    "value/explained_variance_fitted": lambda s: 1 - mean(s.update.all("error")) / np.var(s.tokens("returns")),
    "returns/mean": lambda s: mean(s.tokens("returns")),
    "returns/std": lambda s: std(s.tokens("returns")),
    "rollout/logprob_mean": lambda s: mean(s.tokens("old")),
    "rollout/ref_logprob_mean": lambda s: mean(s.tokens("ref")),
    "rollout/dropped": lambda s: mean([score(r) is not None and r.turns[-1].end == "length" for r in s.all]),
    "evaluate/reward": lambda s: mean(scores(s.evaluated.rollouts)),
    "evaluate/reward_std": lambda s: std(scores(s.evaluated.rollouts)),
    "evaluate/reward_before": lambda s: mean(scores(s.evaluated_before.rollouts)),
    "evaluate/unjudged": lambda s: mean([score(r) is None for r in s.evaluated.rollouts]) or None,
    "evaluate/best_of_k": lambda s: mean(best(s.evaluated.rollouts)),
    "evaluate/kl_per_reply": lambda s: kl(s.evaluated, s.reference),
    "probe/reward": lambda s: mean(scores(s.probed.rollouts)),
    "probe/count": lambda s: len(scores(s.probed.rollouts)),
    "probe/reward_before": lambda s: mean(scores(s.probed_before.rollouts)),
    "probe/reference_reward": lambda s: mean(scores(s.probed_reference.rollouts)),
    "probe/query_share": lambda s: query_share(s.probed_twice.rollouts),
    "probe/kl_per_reply": lambda s: kl(replace(s.probed, rollouts=kept(s.probed.rollouts)), s.reference),
    "update/lr": lambda s: 1e-3 * s.step / 2,  # it rises over the first half, and the schedule begins there
    "update/micro_tokens": lambda s: FAIR["micro_tokens"],
    "tokens/per_second": lambda s: sum(len(t.action) for r in s.all for t in r.turns) / s.logged["time/step"],
}
for part, (say, _) in PARTS.items():
    GAME[f"reward/{part}/mean"] = lambda s, say=say: mean([say(r) for r in s.all if say(r) is not None])
    GAME[f"reward/{part}/std"] = lambda s, say=say: std([say(r) for r in s.all if say(r) is not None])
    GAME[f"reward/{part}/abstained"] = lambda s, say=say: mean([say(r) is None for r in s.all])


# --- steps on replies from elsewhere ----------------------------------------------------------------------------------
PROMPTS = [[3, 4], [5], [6, 7, 8], [9], [10, 11], [12], [13, 14], [15]]
REPLIES = [[16], [17, 18, 19, 20], [21], [22, 3, 4], [5, 6], [7, 8, 9, 10, 11, 12], [13, 14, 2], [15, 16]]
SCORES = [1.0, -1.0, 0.5, -0.2, 0.9, -0.7, 0.3, 0.1]


def foreign(folder, patch, rules, *, algorithm="ppo", scores=SCORES, made=None, disturb=None, **options):
    """One step on replies whose log-probs and values were made up; an advantage is the score less the value."""
    _, cuts = watched(patch)
    options = {"minibatch": 3, "epochs": 3, "optimizer.lr": 6e-4, "max_grad_norm": None} | options
    if algorithm == "ppo":
        options = {"lam": 1.0, "whiten_scope": "none", "value.init": "normal", "reference": None} | options
    learner = Learner(lm(vocab=24, spread=0.2).double(), algorithm=algorithm, **options)
    if disturb is not None:
        next(iter(learner.policy.model.parameters())).register_hook(disturb)
    bare, noise, rollouts, episodes = Bare(weights_of(learner.policy)), np.random.default_rng(0), [], []
    against = None if learner.reference is None else Bare(weights_of(learner.reference.policy))
    for place, (prompt, reply, score) in enumerate(zip(PROMPTS, REPLIES, scores)):
        plain = said(prompt, reply, group=place // 3)
        before, _, now = bare.numbers(plain)
        old, values = before + noise.normal(0, 0.4, len(reply)), noise.normal(0, 1, len(reply))
        told = {"logprobs": old.tolist()} | ({"values": values.tolist()} if algorithm == "ppo" else {})
        rollouts.append(said(prompt, reply, group=place // 3, **told))
        if options.get("rescore"):  # what came along is not looked at
            old, values = before, now
        mine = scores[place // 3 * 3 : place // 3 * 3 + 3]
        better = score - values if algorithm == "ppo" else np.full(len(old), (score - mean(mine)) / (std(mine) + 1e-6))
        ref = None if against is None else against.numbers(plain)[0]
        episodes.append(Episode(rollouts[-1], old, better, np.full(len(old), score), values, ref))
    return [SimpleNamespace(logged=learner.learn(rollouts, scores), update=Update(cuts, episodes, rules, made))]


DIRECT = {name: say for name, say in UPDATE.items() if not name.startswith("rollout/likelihood")}
BOUND, THRESHOLD, DUAL = 0.15, 1.2, 1.3


def ended_early(step):
    """Whether the mean of the last epoch went beyond the bound with its last minibatch, and not before it."""
    last, means = step.update.epochs[-1], []
    for count in range(1, len(last) + 1):
        means.append(mean(k3(step.update.all("old", last[:count]) - step.update.all("new", last[:count]))))
    assert count > 1 and len(step.update.epochs) == 2
    return float(means[-1] > BOUND >= max(means[:-1]))


def skipped(folder, patch):
    """An update of which some optimizer steps are left out, and bad tokens that became likely are clipped, too."""

    def made(every):
        return [m for m in every if mean(np.exp(m.terms["new"] - m.terms["old"])) <= THRESHOLD]

    return foreign(folder, patch, Rules(dual=DUAL), made=made, ratio_threshold=THRESHOLD, dual_clip=DUAL)


def refused(folder, patch):
    """An update whose fourth gradient is no number."""
    calls = []

    def spoil(gradient):
        calls.append(1)
        return gradient * math.nan if len(calls) == 4 else gradient

    return foreign(folder, patch, Rules(), made=lambda every: every[:-1], disturb=spoil)


def halved(folder, patch):
    calls = []

    def run_out(gradient):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("out of memory")

    return foreign(folder, patch, Rules(), disturb=run_out, micro_tokens=256)


def grouped(folder, patch):
    """GRPO: replies are compared with those to the same query, and a token of a long one counts less."""
    more = {"algorithm": "grpo", "reference": Policy(lm(vocab=24, seed=1).double()), "kl.loss_coef": 0.04}
    return foreign(folder, patch, Rules(loss_coef=0.04, per="episode"), scores=[0.5, 0.5, 0.5, *SCORES[3:]], **more)


NO_CRITIC = {name: say for name, say in DIRECT.items() if not name.startswith("value/")}
stopped = partial(foreign, rules=Rules(), made=lambda every: every[:-1], target_kl=BOUND)
at_once = partial(foreign, rules=Rules(), made=lambda every: [], target_kl=1e-3)
NOTHING = {"update/early_stopped": lambda s: 1, "update/steps": lambda s: 0, "update/epochs": lambda s: 0}
NOTHING |= dict.fromkeys(("loss/total", "update/grad_norm"), lambda s: None)
"""It ends before its first optimizer step."""
SKIPPED = {"policy/skipped_steps": lambda s: 1 - len(s.update.made) / len(s.update.minibatches)}
IN_LOSS = {"kl/in_loss": lambda s: mean(s.update.all("in_loss")), "kl/loss_coef": lambda s: 0.04}
DIRECTLY = {
    "stopped": (stopped, DIRECT | {"update/early_stopped": ended_early}),
    "at_once": (at_once, NOTHING),
    "skipped": (skipped, DIRECT | SKIPPED),
    "refused": (refused, DIRECT | {"update/refused": lambda s: 1}),
    "halved": (halved, DIRECT | {"update/micro_tokens": lambda s: 128}),
    # Log-probs and values of a second pass take the place of those that came along.
    "rescored": (partial(foreign, rules=Rules(), rescore=True), DIRECT),
    # Each reply is whitened by itself: of one token, nothing is left.
    "alone": (partial(foreign, rules=Rules(whiten=True), minibatch=1, epochs=1, whiten_scope="minibatch"), DIRECT),
    "grouped": (grouped, NO_CRITIC | IN_LOSS),
}


# --- runs that show what these cannot ---------------------------------------------------------------------------------
class Truncated(Known):
    """One step of a run that draws from the likeliest tokens; its KL is that of the whole distributions."""

    def __init__(self, logged, played, cuts, reference):
        self.logged, self.reference, bare = logged, reference, Bare(cuts[0].weights, RULES.temperature)
        (train,) = [p for p in played if p.stream == "train"]
        self.evaluated = [p for p in played if p.stream == "evaluate"][-1]
        self.probed = [p for p in played if p.stream == "probe" and not p.foreign][-1]
        told = [bare.numbers(r) for r in train.rollouts]
        self.episodes = [Episode(r, old, ref=reference.numbers(r)[0]) for r, (old, *_) in zip(train.rollouts, told)]
        self.credited, self.entropy = self.episodes, flat(entropy for _, entropy, _ in told)


def truncated(folder, patch):
    played, cuts = watched(patch)
    reference = lm(vocab=V, seed=1, spread=0.1).double()
    options = {"steps": 1, "batch": 4, "max_tokens": 5, "temperature": RULES.temperature, "epochs": 1, "probes": 3}
    options |= {"top_k": 4, "truncation": "stored", "evaluate": WORDS[:3], "evaluate_every": 1}
    given = {"policy": lm(vocab=V, spread=0.3).double(), "tokenizer": letters(), "reference": Policy(reference)}
    rewards = {"reward": lambda rollouts: [1.0] * len(rollouts), "tasks": WORDS[4:8]}
    (*_, run) = runs(folder / "run", **given, **rewards, **options)
    bare = Bare({f"model.{k}": x for k, x in reference.state_dict().items()}, RULES.temperature)
    return [Truncated(run.metrics[0], played, cuts, bare)]


WHOLE = ("kl/per_reply", "kl/per_reply_std", "kl/per_token", "kl/k3", "evaluate/kl_per_reply")
WHOLE += ("rollout/logprob_mean", "rollout/ref_logprob_mean", "policy/sampled_entropy")
TRUNCATED = {name: GAME[name] for name in WHOLE} | {
    "probe/kl_per_reply": lambda s: kl(s.probed, s.reference),
    "policy/entropy": lambda s: mean(s.entropy),
    "rollout/likelihood_gap": lambda s: None,
    "rollout/likelihood_z": lambda s: None,
}

GIVEN = [
    ("ab", "the cat sat. the cat sat on the cat"),
    ("cd", "~ok* \U0001f600\u2602!"),
    ("", "once a cat was a cat. and a cat"),
    ("e", " . ,"),
    ("fgh", "No/ no no no|no 5!"),
    ("", "day \u00e4"),
]
"""Prompts and replies."""
HELD = [("ab", "a dog"), ("", "it ran and ran and ran away"), ("", "we ran"), ("c", "\u00e9!")]
LONGEST = 24


class Given:
    """A step on given replies; `after`: the held-out ones with the weights behind it."""

    def __init__(self, number, logged, rollouts, cuts, looks):
        self.logged, self.kept = logged, rollouts
        self.turns = [turn for r in rollouts for turn in r.turns]
        self.texts = [learnt_text(r) for r in rollouts]
        self.words = [word for text in self.texts for word in words(text)]
        self.pairs = [pair for text in self.texts for pair in pairwise(words(text))]
        self.costs = [costs(cut.weights, [rollouts[i] for i in cut.episodes]) for cut in cuts if cut.step == number - 1]
        self.before, self.after = [(costs(weights, held), held) for held, weights in (looks[0], looks[number])]


def costs(weights, rollouts):
    bare = Bare(weights)
    return -flat(bare.numbers(r)[0] for r in rollouts)


def learnt_text(rollout):
    """What the tokens that are learnt say: of a text alone its first token is none of them, nor is what was cut."""
    (reply,), (turn,) = rollout.task.replies, rollout.turns
    if len(turn.prompt) + len(turn.action) >= LONGEST:
        return letters().decode(turn.action)
    return reply if rollout.task.prompt else reply.removeprefix(letters().decode(turn.prompt))


def size(rollouts):
    return sum(len(learnt_text(r).encode()) for r in rollouts)


def given(folder, patch):
    _, cuts = watched(patch)
    looks, measured = [], evaluate.reply_losses

    def seen_losses(rollouts, policy, *more):
        looks.append((rollouts, weights_of(policy)))
        return measured(rollouts, policy, *more)

    patch.setattr(evaluate, "reply_losses", seen_losses)
    tasks, held = ([Task(f"{p}/{r}", p, replies=(r,)) for p, r in some] for some in (GIVEN, HELD))
    options = {"steps": 2, "batch": 6, "minibatch": 4, "epochs": 2, "optimizer.lr": 1e-2, "data.max_length": LONGEST}
    options |= {"algorithm": "sft", "evaluate": held, "evaluate_every": 1, "probes": 0, "max_grad_norm": None}
    steps, model = [], lm(vocab=V, spread=0.2).double()
    for run in runs(folder / "run", policy=model, tokenizer=letters(), tasks=tasks, **options):
        if len(run.metrics) > len(steps):
            rollouts = list(run.learner.last_step.rollouts)
            steps.append(Given(len(steps) + 1, run.metrics[-1], rollouts, cuts, looks))
    return steps


SUPERVISED = {
    "supervised/loss": lambda s: mean(flat(s.costs)),
    "supervised/bits_per_byte": lambda s: flat(s.costs).sum() / math.log(2) / size(s.kept) / 2,  # in two epochs
    "evaluate/loss": lambda s: mean(s.after[0]),
    "evaluate/loss_before": lambda s: mean(s.before[0]),
    "evaluate/bits_per_byte": lambda s: s.after[0].sum() / math.log(2) / size(s.after[1]),
    "loss/total": lambda s: mean([mean(x) for x in s.costs]),
    "update/steps": lambda s: 4,
    "update/epochs": lambda s: 2,
}


# --- time and size ----------------------------------------------------------------------------------------------------
class Hands:
    """A clock that stands still but for what is spent, and a GPU that only counts."""

    def __init__(self):
        self.now, self.spent, self.peak, self.stream = 0.0, {}, 0, "train"
        self.cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "none")
        self.cuda.max_memory_allocated = lambda: self.peak
        self.cuda.reset_peak_memory_stats = lambda: setattr(self, "peak", 0)

    def __getattr__(self, name):
        return getattr(torch, name)

    def __call__(self):
        return self.now

    def spend(self, seconds, phase=None):
        """In a phase of training; while something is looked at beside it, in that look."""
        phase = phase if self.stream == "train" else self.stream
        self.now += seconds
        self.peak += 10**9 * (phase == "update")
        self.spent[phase] = self.spent.get(phase, 0) + seconds

    def around(self, work, seconds, phase):
        def spending(*given, **more):
            self.spend(seconds, phase)
            return work(*given, **more)

        return spending


class Slow(Fair):
    """The same world, whose every answer takes three seconds."""

    def __init__(self, hands):
        self.hands = hands

    def reset(self, tasks):
        self.hands.stream = {"t": "train", "e": "evaluate", "p": "probe"}[next(iter(tasks.values())).id[0]]
        return super().reset(tasks)

    def step(self, replies):
        self.hands.spend(3, "generate")
        return super().step(replies)


class Witness:
    """A tracker that notes what was spent and held when a step is logged."""

    def __init__(self, hands):
        self.hands, self.steps, self.path = hands, [], None

    def start(self, config):
        pass

    def rollouts(self, step, rows):
        self.hands.stream = "train"
        self.hands.spend(5, "track")
        self.tokens = sum(row["reply_tokens"] for row in rows)

    def distributions(self, step, told):
        self.hands.spend(6, "track")

    def log(self, step, metrics):
        checkpoint = self.path / f"checkpoints/step-{step - 1:05d}"
        size = sum(file.stat().st_size for file in checkpoint.iterdir()) if step > 1 else None
        status = Path("/proc/self/status")
        lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
        resident = [int(line.split()[1]) * 1024 / 1e9 for line in lines if line.startswith("VmRSS")]
        about = {"tokens": self.tokens, "size": size, "resident": resident[0] if resident else None}
        self.steps.append(SimpleNamespace(logged=dict(metrics), step=step, spent=dict(self.hands.spent), **about))
        self.hands.spent.clear()
        self.hands.stream = "train"
        self.hands.now += 7  # of no phase and no step

    def close(self):
        pass


def clock(folder, patch):
    """A run of three steps in which every phase takes a time that is known."""
    hands = Hands()
    witness = Witness(hands)
    patch.setattr(time, "perf_counter", hands)
    patch.setattr(machine, "torch", hands)
    patch.setattr(observers, "write_report", hands.around(observers.write_report, 11, "report"))
    judge = weighted({"slow": (hands.around(lambda rollouts: [score(r) for r in rollouts], 13, "reward"), 1.0)})
    options = FAIR | {"steps": 3, "batch": 8, "evaluation.samples": 1, "probes": 2, "checkpoint_minutes": 0.0}
    options |= {"kl": options["kl"] | {"kind": "k1", "loss_coef": 0.0}, "keep": 5}
    tasks = [Task(f"t/{i}", word, target=i % 4) for i, word in enumerate(WORDS[:8])]
    held = [replace(task, id=f"e/{task.id}") for task in tasks[:3]]
    given = {"policy": lm(vocab=V, spread=0.1), "tokenizer": letters(), "show": [witness], "env": Slow(hands)}
    for run in runs(folder / "run", tasks=tasks, evaluate=held, reward=judge, **given, **options):
        if witness.path is None:  # the looks before the first step are over
            learner, witness.path = run.learner, run.path
            learner.reference.policy.model.register_forward_pre_hook(lambda *x: hands.spend(17, "observe"))
            advantage = hands.around(learner.algorithm.advantage, 19, "advantage")
            learner.algorithm = replace(learner.algorithm, advantage=advantage)
            learner.optimizer.step = hands.around(learner.optimizer.step, 23, "update")
            run.checkpoints._write = hands.around(run.checkpoints._write, 29, "checkpoint")
            hands.spent.clear()
    return witness.steps


INSIDE = ("generate", "reward", "observe", "advantage", "update", "evaluate", "probe", "track")
CLOCK = {f"time/{phase}": lambda s, phase=phase: s.spent.get(phase) for phase in (*INSIDE, "checkpoint", "report")} | {
    "time/step": lambda s: sum(s.spent[phase] for phase in INSIDE),
    "tokens/per_second": lambda s: s.tokens / sum(s.spent[phase] for phase in INSIDE),
    "checkpoint/bytes": lambda s: s.size,
    "memory/gpu_gb": lambda s: s.spent["update"] / 23,
    "memory/resident_gb": lambda s: None if s.resident is None else pytest.approx(s.resident, rel=0.02),
}
"""What the machine itself counts can only be read again: memory moves between two looks, so it is held to 2 %."""


def valued(folder, patch):
    """Replies of one token: Q of each is compared with its score, and V with the smaller Q."""
    learner = Learner(lm(vocab=V).double(), algorithm="ilql", **{"value.layers": 1, "value.init": "normal", "lr": 0.0})
    prompts, tokens, scores = [[5], [6, 7], [8]], [9, 10, 11], [0.5, -1.0, 2.0]
    heads, step = learner.policy.value_head, SimpleNamespace(scores=scores, v=[], q=[], taken=[])
    for prompt, token in zip(prompts, tokens, strict=True):
        states = learner.policy.model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0, -1]
        each = [net(states).detach() for net in (heads.one, heads.two)]
        step.v.append(float(heads.net(states).detach()))
        step.q.append([float(q[token]) for q in each])
        step.taken.append([float(q.log_softmax(-1)[token]) for q in each])
    tau = learner.options["loss"]["tau"]
    gaps = [min(q) - v for q, v in zip(step.q, step.v, strict=True)]
    step.expectile = [(tau if gap > 0 else 1 - tau) * gap**2 for gap in gaps]
    step.logged = learner.step(prompts, [[token] for token in tokens], scores)
    return [step]


VALUED = {
    "ilql/q_error": lambda s: mean([(r - q) ** 2 for r, both in zip(s.scores, s.q) for q in both]),
    "ilql/value_loss": lambda s: mean(s.expectile),
    "ilql/conservative": lambda s: mean([-taken for both in s.taken for taken in both]),
    "ilql/q": lambda s: mean([min(both) for both in s.q]),
}


def soft(folder, patch):
    """The copy is the policy in the first step, so its numbers are the policy's, less the reference's."""
    steps = []
    for reference in (None, Policy(lm(vocab=V, seed=1, spread=0.1).double())):
        learner = Learner(lm(vocab=V).double(), algorithm="soft_q", reference=reference, lr=0.0)
        prompts, tokens, step = [[5], [6, 7], [8]], [9, 10, 11], SimpleNamespace(q=[], v=[])
        models = [(1, learner.policy.model), *([] if reference is None else [(-1, reference.model)])]
        for prompt, token in zip(prompts, tokens, strict=True):
            logits = [(sign, model(torch.tensor([prompt])).logits[0, -1].detach()) for sign, model in models]
            step.q.append(sum(sign * float(x[token]) for sign, x in logits))
            step.v.append(sum(sign * float(x.exp().sum().log()) for sign, x in logits))
        step.logged = learner.step(prompts, [[token] for token in tokens], [0.5, -1.0, 2.0])
        steps.append(step)
    return steps


SOFT = {f"soft_q/{of}q": lambda s: mean(s.q) for of in ("", "target_")}
SOFT |= {f"soft_q/{of}v": lambda s: mean(s.v) for of in ("", "target_")}
SOFT |= {f"soft_q/{of}a": lambda s: mean(s.q) - mean(s.v) for of in ("", "target_")}


# --- the tables -------------------------------------------------------------------------------------------------------
RUNS = {"game": (game, {**UPDATE, **TEXT, **ROLLOUT, **GAME}), **DIRECTLY}
RUNS |= {"truncated": (truncated, TRUNCATED), "given": (given, {**ROLLOUT, **TEXT, **SUPERVISED})}
RUNS |= {"clock": (clock, CLOCK), "valued": (valued, VALUED), "soft": (soft, SOFT)}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """By name of a run: its steps, each with what was `logged`; every run is made once."""
    held = {}

    def of(name):
        if name not in held:
            with pytest.MonkeyPatch.context() as patch:
                held[name] = RUNS[name][0](tmp_path_factory.mktemp(name), patch)
        return held[name]

    return of


@pytest.mark.filterwarnings("ignore:replies come from a distribution")
@pytest.mark.parametrize(("run", "name"), [(run, name) for run, (_, table) in RUNS.items() for name in table])
def test_a_metric_is_what_its_sentence_says(run, name, steps):
    for step in steps(run):
        wanted = RUNS[run][1][name](step)
        if wanted is None:
            assert name not in step.logged
        else:
            plain = isinstance(wanted, (int, float))
            assert step.logged[name] == (pytest.approx(wanted, rel=1e-6, abs=1e-9) if plain else wanted)


def test_every_metric_has_a_row():
    rows = {describe(name).name for _, table in RUNS.values() for name in table}
    # test_dpo.py, test_labelled.py; test_trust_region.py; test_critic.py; test_engines.py; test_replay_buffer.py
    groups = ("preference/", "trust/", "critic/", "evaluate/critic/", "rollout/engine_gap", "replay/size")
    # test_games.py; test_rows.py, test_critic.py; test_selection.py; test_distill.py; test_isolated.py
    groups += ("game/", "evaluate/game/", "actions/", "memory/turns", "memory/forgotten")
    groups += ("given/", "select/", "distill/", "reward/outcome/")
    # test_judgement.py; test_evaluation_metrics.py, test_text_scores.py; test_staleness.py
    groups += ("outcome/", "evaluate/outcome/", "evaluate/bleu", "evaluate/chrf", "evaluate/distinct")
    groups += ("evaluate/exact_match", "evaluate/<metric>", "rollout/too_stale", "rollout/importance")
    groups += ("rollout/world_", "rollout/outgrown", "rollout/untrained", "rollout/unpaid")  # test_worlds.py
    # test_policy_gradients.py; test_ahead.py; test_tools.py; test_carried.py; test_redraw.py
    groups += ("policy/allowed_tokens", "time/ahead", "world/<name>", "rollout/carried")
    groups += ("rollout/redrawn", "rollout/drawn_per_used", "rollout/retired")
    assert rows | {name for name in METRICS if name.startswith(groups)} == set(METRICS)


def test_every_number_of_a_run_has_a_row(steps):
    assert {name for step in steps("game") for name in step.logged} <= {*RUNS["game"][1], *CLOCK}


def test_the_game_is_hard(steps):
    """What could hide a wrong count is there: each kind of reply, of turn and of clipping."""
    for step in steps("game"):
        told, sizes = step.logged, [len(cut.episodes) for cut in step.cuts]
        assert min(told["reward/abstained"], told["rollout/dropped"]) > 0 and 0 < told["rollout/ended_cut"] < 1
        assert {len(r.turns) for r in step.all} == {1, 2, 3} and any(t.options for t in step.turns)
        assert len(sizes) >= 6 and max(step.used) == CLIP
        assert min(told["policy/clip_fraction"], told["value/clip_fraction"]) > 0.1
        assert min(told[f"{who}/query_share"] for who in ("reward", "probe")) > 0.01
        assert 0 < told["reward/abstained"] < told["reward/lengths/abstained"] != told["reward/vowels/abstained"]
        assert told["update/grad_norm"] > RULES.bound and abs(told["kl/paid"] / told["kl/per_reply"] - 1) > 0.1
    first, second = steps("game")
    assert first.coef != second.coef and "evaluate/unjudged" in second.logged and "text/repeated" in first.logged
