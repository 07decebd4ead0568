"""Layer 2: `generate`, and `step` from (query, response, reward) wherever the three come from.

    learner = Learner("builtin:reviews-lm", preset="trl", **{"optimizer.lr": 1e-4})
    replies = learner.generate(["This film", "The plot"], max_new_tokens=24)
    metrics = learner.step(replies, [0.9, 0.1])
    metrics = learner.step(queries, responses, scores)

The trainer is written with this class; a loop of one's own can be, too.
"""

import math
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from operant import distributed, machine
from operant.algorithms import DEFAULT, find, left_out_message
from operant.algorithms import preset as find_preset
from operant.engines.native.engine import NativeEngine
from operant.envs.single_turn import SingleTurn
from operant.metrics import collect
from operant.models.policy_state import PolicyState
from operant.models.loading import load_policy, load_reference
from operant.models.reference import PolicyCopy
from operant.objectives.kl import KLOptions, controller
from operant.options import values
from operant.rewards.shaping import RunningMoments, as_seen
from operant.rollouts.collate import collate, nothing
from operant.rollouts.external import to_rollouts
from operant.rollouts.generation_kwargs import declared, drawn_with, from_generation_kwargs, warn_of_unscored, warned
from operant.rollouts.play import Attempts, play
from operant.sampling import Sampling, check_ids
from operant.tally import Tally
from operant.training import refused_step
from operant.training.nonfinite import NonFinite, find_in_batch
from operant.training.objective import Objective, minibatch_whitening
from operant.training.optimizer import make_optimizer, rate
from operant.training.options import LearnerOptions, find_device, learner_options
from operant.training.refused_step import RefusedStep, refuse
from operant.training.scoring import (
    Bootstraps,
    bootstrap_prompts,
    charge_kl,
    score_batch,
    with_bootstraps,
    with_trunk_states,
)
from operant.training.select import TrainingBatch, select, select_all
from operant.training.update import UPDATES
from operant.types import Batch, Engine, Env, OperantError, Rollout, Task, shown

HISTORY = 2000
"""Steps whose metrics `diagnose` can look back on."""


class Progress:
    """How many steps and episodes have been trained on, and how many steps in a row, up to now, were refused."""

    def __init__(self) -> None:
        self.step, self.episodes, self.refused = 0, 0, 0

    def share(self, total: int | None) -> float:
        """In [0, 1]; 0 where the end is unknown."""
        return min(self.step / total, 1.0) if total else 0.0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "episodes": self.episodes, "refused": self.refused}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.episodes, self.refused = state["step"], state["episodes"], state.get("refused", 0)


@dataclass(frozen=True)
class LastStep:
    """What the last step trained on."""

    rollouts: list[Rollout]
    scores: Sequence[Any]
    """One a rollout, as the reward returned it."""
    batch: Batch
    places: list[int]
    """The indices of the rollouts that the batch was made of."""
    sampling: Sampling


class Scored(NamedTuple):
    """A batch before and after scoring."""

    collated: Batch
    bootstraps: Bootstraps
    scored: Batch


class Learner:
    """A policy, its critic and its reference, and everything that changes while they learn.

    `policy`: a name, a transformers model (with `tokenizer`), or a Policy. `reference`: "copy" (a frozen snapshot),
    None (no KL), a name or a Policy. `algorithm`: a row of the table; None: the preset's, or ppo. Options by name:
    `**{"kl.coef": 0.1}` or `kl={"coef": 0.1}`.
    `total_steps`: how many steps there will be, for options that follow the length of the run.
    Raises: OperantError for an unknown or impossible option, before any model loads.
    """

    def __init__(
        self,
        policy: Any,
        *,
        tokenizer: Any = None,
        reference: Any = "copy",
        algorithm: str | None = None,
        preset: str | None = None,
        engine: Engine | None = None,
        env: Env | None = None,
        total_steps: int | None = None,
        **options: Any,
    ):
        algorithm = algorithm or str(find_preset(preset).get("algorithm", DEFAULT))
        self.algorithm = find(algorithm)
        unmeasured = dict.fromkeys(("kl.coef", "kl.loss_coef"), 0.0) if reference is None else {}
        self.options, left_out = learner_options(algorithm, preset, options, above=unmeasured)
        if left_out:
            warnings.warn(left_out_message(f"preset {preset}", left_out, algorithm), stacklevel=2)
        self.own: LearnerOptions = self.options["learner"]
        self.kl: KLOptions = self.options["kl"]
        value = self.options["value"] if self.algorithm.needs.critic else None
        self._check_length(total_steps)
        prices = [name for name in ("coef", "loss_coef") if getattr(self.kl, name)]
        if prices and (reference is None or "reference" not in self.algorithm.copies):
            what = "reference=None" if reference is None else f"algorithm {algorithm!r}, which keeps no reference"
            price = f"kl.{prices[0]}={getattr(self.kl, prices[0])}"
            raise OperantError(f"{price} with {what}: there is nothing to measure KL to; leave one of them out")
        device = find_device(self.own.device)
        if self.own.keep_memory and device.type == "cpu":
            machine.keep_memory()
        model = self.options["model"]
        adapter = {"lora": self.options["lora"], "seed": self.own.seed, "device": device}
        with torch.random.fork_rng(devices=[]):  # a new critic is drawn from torch's own numbers
            torch.manual_seed(self.own.seed)
            self.policy = load_policy(policy, value=value, tokenizer=tokenizer, options=model, **adapter).to(device)
        if self.algorithm.needs.critic and not self.policy.has_values:
            raise OperantError(f"algorithm {algorithm!r} needs a critic: build the Policy with value=ValueOptions()")
        distributed.align(self.policy.trainable())
        self.sampling = self._sampling()
        self.reference = load_reference(reference, self.policy) if "reference" in self.algorithm.copies else None
        self.copies = {
            name: PolicyCopy(self.policy, rule) for name, rule in self.algorithm.copies.items() if name != "reference"
        }
        self.engine = engine or NativeEngine(self.policy)
        self.env = env or SingleTurn()
        self.optimizer = make_optimizer(self.policy, self.options["optimizer"])
        self.controller, self.moments = controller(self.kl), RunningMoments()
        self.total_steps, self.progress = total_steps, Progress()
        self.budget = self.options["update"].budget()
        self.clock = machine.Clock()
        self.attempts = Attempts()
        """Those that `generate` has made since the last step."""
        self.named = {
            "policy": refused_step.name(policy),
            "reference": refused_step.name(reference),
            "algorithm": algorithm,
        }
        self.last_step: LastStep | None = None
        self.updating = False
        """True from the first optimizer step to the last; also after one of them has failed."""
        self.refused: RefusedStep | None = None
        """Of the last step, where a number of it was not finite."""
        self.history: list[dict[str, float]] = []
        """Metrics of the steps so far; of very many, the first ones and the last."""
        self.distributions: dict[str, Any] = {}
        """Of the last step: `histograms`, norms by `blocks`, and now and then `gradients` by tensor."""

    def _check_length(self, total_steps: int | None) -> None:
        """Raises: OperantError for options that follow the length of the run, where that is not known."""
        optimizer, names = self.options["optimizer"], []
        names += [f"optimizer.schedule={optimizer.schedule}"] if optimizer.schedule != "constant" else []
        names += [f"optimizer.warmup={optimizer.warmup:g}"] if optimizer.warmup else []
        names += ["kl.control=linear"] if self.kl.control == "linear" else []
        if names and total_steps is None:
            raise OperantError(
                f"{' and '.join(names)} without total_steps: the number of steps decides what each step gets; "
                "give Learner(..., total_steps=...), or leave it constant"
            )
        if total_steps is not None and total_steps < 1:
            raise OperantError(f"total_steps={total_steps}: it must be at least 1, or None")

    def _sampling(self) -> Sampling:
        """The configured sampling; without stop tokens of its own, with the model's."""
        sampling: Sampling = warned(self.options["sampling"])
        sampling = sampling if sampling.stop_tokens else replace(sampling, stop_tokens=self.policy.stop_tokens)
        sampling.check_ids(self.policy.vocabulary)
        # The critic reads on behind a reply that was cut; a decoder begins with a token of its own.
        after = self.own.on_length == "bootstrap" and self.policy.encoder_decoder
        if (why := self.policy.misfit(1, sampling.max_tokens + after)) is not None:
            raise OperantError(f"sampling.max_tokens={sampling.max_tokens}: even the shortest prompt {why}; lower it")
        return sampling

    # --- play ---------------------------------------------------------------------------------------------------------

    def generate(self, queries: Sequence[Any], **generation: Any) -> list[Rollout]:
        """One reply for each query: a text, messages, ids [T] as list or tensor, or a Task.

        It may be called several times before a step: a query that comes again gets another reply, in the same group.
        `generation`: transformers' generation arguments, or the names of `Sampling`. They hold for this call, and
        travel with its replies to the `step` that learns from them.
        Raises: OperantError for an unknown argument (with the nearest), or sampling that cannot be scored exactly.
        """
        sampling = from_generation_kwargs(self.sampling, generation).for_training()
        if sampling != self.sampling:
            warned(sampling)
        if self.policy.tokenizer is None and sampling.stop_strings:
            raise OperantError("stop_strings need a tokenizer: Policy(model, tokenizer)")
        tasks = [q if isinstance(q, Task) else _task(q) for q in queries]
        attempts = deepcopy(self.attempts)  # counted once they have been made
        attempts.first = distributed.rank() << 20  # equal queries on several ranks get replies of their own
        rollouts = self.play(tasks, sampling=sampling, attempts=attempts)
        self.attempts = attempts
        return rollouts

    def play(
        self,
        tasks: Sequence[Task],
        *,
        sampling: Sampling | None = None,
        stream: str = "train",
        env: Env | None = None,
        engine: Engine | None = None,
        seed: int | None = None,
        attempts: Attempts | None = None,
        part: Sequence[int] | None = None,
    ) -> list[Rollout]:
        """Rollouts of tasks, with the random numbers of this step (or of `evaluate`, `probe`: step 0 always).

        `attempts`: those that the step has made before; None: none.
        `part`: the places of those that are played, each exactly as it is among all; None: every one.
        """
        sampling = sampling or self.sampling
        for task in tasks:
            if not isinstance(task.prompt, str) and all(isinstance(token, int) for token in task.prompt):
                check_ids(task.prompt, self.policy.vocabulary, f"the prompt of task {shown(task.id)}")
        with self.timing("generate" if stream == "train" else stream), self._threads(len(tasks)):
            return play(
                tasks,
                env=env or self.env,
                engine=engine or self.engine,
                tokenizer=self.policy.tokenizer,
                sampling=sampling,
                seed=self.own.seed if seed is None else seed,
                stream=stream,
                step=self.progress.step,
                attempts=attempts,
                part=part,
            )

    # --- learn --------------------------------------------------------------------------------------------------------

    def step(
        self,
        first: Sequence[Any],
        second: Sequence[Any],
        scores: Sequence[Any] | None = None,
        *,
        episodes: Sequence[int] | None = None,
        groups: Sequence[int] | None = None,
        next_values: Sequence[float] | None = None,
        generation: Mapping[str, Any] | None = None,
    ) -> dict[str, float]:
        """One step of learning: `step(replies, rewards)`, or `step(queries, responses, scores)` from anywhere.

        A method that learns from given replies (sft) takes `step(queries, responses)`; of responses that are texts it
        also learns to stop behind them.
        A score is a float, one float per action token, or None (the reply is left out). For triplets, one forward pass
        computes log-probs and values; `episodes` names which triplets are turns of one episode, in order, each paid its
        own score; `groups` says which attempts are compared with each other (None: those at equal queries), on this
        rank: all attempts of a group belong to one;
        `next_values` is the value of the state after each (0: the episode has ended). `generation` declares
        how foreign replies were sampled: temperature, limits and stop tokens are then scored in the same way, and what
        no score can know (top_k, min_length, dropout=True, padding_side="right") is named where it shows: `diagnose`.
        Returns the step's metrics. A step with a number that is not finite is refused: it warns, counts as
        `update/refused`, stands in `learner.refused`, and leaves all but `progress.step` as it was.
        Raises: OperantError for what the caller got wrong, with nothing changed.
        """
        about = {"episodes": episodes, "groups": groups, "next_values": next_values, "generation": generation}
        if self.algorithm.source == "data":
            return self._warned(self.learn(*self._given(first, second, scores, about)))
        if scores is None:
            named = [name for name, value in about.items() if value is not None]
            if named:
                raise OperantError(f"{', '.join(named)}: they go with step(queries, responses, scores)")
            rollouts = distributed.together(lambda: _grouped(first))
            sampling = distributed.together(lambda: drawn_with(rollouts, self.sampling))
            scored = list(second)
        else:
            sampling, unscored = declared(self.sampling, generation or {})
            if unscored:
                warn_of_unscored(unscored)
            plain = [None if s is None else s.tolist() if isinstance(s, torch.Tensor) else s for s in scores]
            given = {"tokenizer": self.policy.tokenizer, "sampling": sampling, "next_values": next_values}
            given |= {"declared": dict(generation or {}), "vocabulary": self.policy.vocabulary, "groups": groups}
            rewards = None if episodes is None else plain
            given |= {"episodes": episodes, "rewards": rewards}
            rollouts = distributed.together(lambda: to_rollouts(first, second, **given))
            scored = plain if episodes is None else [0.0] * len(rollouts)
        self._comparable(rollouts, named=groups is not None)
        return self._warned(self.learn(rollouts, scored, sampling))

    def _given(
        self, queries: Sequence[Any], responses: Sequence[Any], scores: Any, about: Mapping[str, Any]
    ) -> tuple[list[Rollout], None, Sampling]:
        named = [name for name, value in {"scores": scores, **about}.items() if value is not None]
        if named:
            raise OperantError(
                f"{', '.join(named)}: algorithm {self.named['algorithm']} learns from given replies as they are, with "
                "step(queries, responses)"
            )
        if any(isinstance(query, Rollout) for query in queries):
            raise OperantError(
                f"algorithm {self.named['algorithm']} learns from given replies, and these are the policy's own with "
                "scores: use step(queries, responses), or another algorithm"
            )
        known = {"tokenizer": self.policy.tokenizer, "sampling": self.sampling, "vocabulary": self.policy.vocabulary}
        return to_rollouts(queries, responses, ends=True, **known), None, self.sampling.plain

    def _comparable(self, rollouts: Sequence[Rollout], *, named: bool) -> None:
        """Raises: OperantError, on every rank, where a method that compares replies is given none to compare.

        `named`: the caller has said which belong together, with numbers of this rank's own.
        """
        least, sizes = self.algorithm.needs.samples, Counter(r.group for r in rollouts)
        if least > 1 and not named:
            ranks = Counter(query for part in distributed.gathered({_query(r) for r in rollouts}) for query in part)
            spread = sum(count > 1 for count in ranks.values())
            if spread:
                raise OperantError(
                    f"{spread} of the {len(ranks)} queries stand on several ranks, and replies are compared on one: "
                    "give all replies to a query to one rank, or say with groups= that they are not to be compared"
                )
        if least > 1 and not distributed.largest(int(max(sizes.values(), default=0) >= least)):
            raise OperantError(
                f"algorithm {self.named['algorithm']} compares at least {least} replies to one query, and each of the "
                f"{len(sizes)} groups has fewer, so every advantage would be 0: give queries several times, or groups="
            )

    def _warned(self, metrics: dict[str, float]) -> dict[str, float]:
        if self.refused is not None:
            warnings.warn(self.refused.message(), stacklevel=3)
        return metrics

    def learn(
        self, rollouts: list[Rollout], scores: Sequence[Any] | None, sampling: Sampling | None = None
    ) -> dict[str, float]:
        """Run one training step on scored rollouts and return its metrics.

        What a world has paid stands in the turns, and `scores` are added to it. Demonstrations have no scores, and are
        scored without temperature or masks.
        """
        usual = self.sampling.plain if self.algorithm.source == "data" else self.sampling
        tokens = sum(len(turn.prompt) + len(turn.action) for rollout in rollouts for turn in rollout.turns)
        with self._threads(min(tokens, self.budget.tokens)):
            return self._learn(rollouts, scores, sampling or usual)

    def _learn(self, rollouts: list[Rollout], scores: Sequence[Any] | None, sampling: Sampling) -> dict[str, float]:
        moments, lr = self.moments.state_dict(), self._learning_rate()
        self.controller.begin(self.progress.share(self.total_steps))
        coef = self.controller.coef
        try:
            selected = self._select(rollouts, scores)
            with self.timing("observe"):
                collated, bootstraps, batch = distributed.together(lambda: self._score(selected, sampling))
        except OperantError:
            self.moments.load_state_dict(moments)  # nothing else has changed so far
            raise
        with self.timing("advantage"):
            batch = self.credit(batch, coef)
        seen = batch.with_(states=None).to("cpu")
        tally = selected.tally.merge(collect.of_rollouts(selected.rollouts, texts=self.policy.tokenizer is not None))
        tally.merge(collect.of_batch(seen, coef))
        self.refused = self._refuse("observe", find_in_batch(seen), collated, bootstraps, sampling, coef)
        if self.refused is None:
            places = [rollout.place for rollout in selected.rollouts]
            tally.merge(self._update(batch, sampling, lr, coef, places))
        self.last_step = LastStep(rollouts, selected.raw_scores, seen, selected.places, sampling)
        pooled = distributed.pool(tally)
        metrics, self.distributions = collect.finish(pooled), collect.distributions(pooled)
        if self.refused is not None:
            metrics = {"update/refused": 1.0} | {k: x for k, x in metrics.items() if math.isfinite(x)}
            if self.refused.whole:
                self.moments.load_state_dict(moments)
        self._sync(metrics)
        return self._logged(metrics, coef, lr)

    def preview(self, rollouts: list[Rollout], scores: Sequence[Any] | None) -> tuple[Batch, list[int]]:
        """The batch that a step would train on, and the indices of its rollouts; nothing changes."""
        moments = self.moments.state_dict()
        try:
            selected = self._select(rollouts, scores)
        finally:
            self.moments.load_state_dict(moments)
        batch = self._score(selected, self.sampling).scored
        return self.credit(batch, self.controller.coef).to("cpu"), selected.places

    def _select(self, rollouts: list[Rollout], scores: Sequence[Any] | None) -> TrainingBatch:
        """The replies to train on, with their scores."""
        if self.algorithm.source == "data":
            return select_all(rollouts)
        tokenizer, drop = self.policy.tokenizer, self.own.on_length == "drop"
        scores = [0.0] * len(rollouts) if scores is None else scores
        return select(rollouts, scores, self.options["score"], self.moments, tokenizer, drop_lengths=drop)

    def _score(self, selected: TrainingBatch, sampling: Sampling) -> Scored:
        """Collate the replies and score them."""
        if not selected.rollouts:  # another rank has some
            batch, bootstraps = nothing(self.policy.numbers), Bootstraps()
        else:
            joined = not self.policy.encoder_decoder
            batch = collate(selected.rollouts, selected.scores, joined=joined, numbers=self.policy.numbers)
            lengths_too = self.own.on_length == "bootstrap"
            found = self.policy.has_values
            bootstraps = bootstrap_prompts(selected.rollouts, lengths_too=lengths_too) if found else Bootstraps()
        batch = batch.to(self.policy.device)
        return Scored(batch, bootstraps, self.scored(batch, bootstraps, sampling))

    def scored(self, batch: Batch, bootstraps: Bootstraps, sampling: Sampling) -> Batch:
        """The batch with all that decoding did not keep. Demonstrations need none of it: their loss is all there is."""
        if self.algorithm.source == "data":
            return with_trunk_states(batch, self.policy, self.budget.tokens)
        rescore, micro = self.own.rescore, self.budget.tokens
        rescore = self.policy.rounds if rescore is None else rescore
        reference = self.reference.policy if self.reference is not None else None
        batch = score_batch(batch, self.policy, reference, sampling, self.kl, micro_tokens=micro, rescore=rescore)
        return with_bootstraps(batch, bootstraps, self.policy, micro)

    def credit(self, batch: Batch, coef: float) -> Batch:
        """The batch with KL charged at `coef` a nat, and advantages."""
        batch = charge_kl(batch, coef, direct=self.kl.direct)
        if self.algorithm.advantage is not None:
            batch = self.algorithm.advantage(batch, **self.options["advantage"])
        return batch

    def objective(self, sampling: Sampling) -> Objective:
        """What the update descends on."""
        method, loss, advantage = self.algorithm, self.options["loss"], self.options["advantage"]
        return Objective(
            loss=partial(method.loss, **loss),
            unit=method.unit,
            per=method.per,
            horizon=sampling.max_tokens,
            entropy_gradient=bool(loss.get("entropy_coef")),
            whiten=minibatch_whitening(advantage.get("whiten_scope", "none"), advantage.get("unbiased", False)),
            kl=self.kl if self.reference is not None else None,
            reference=self.reference.policy if self.reference is not None else None,
        )

    def _update(self, batch: Batch, sampling: Sampling, lr: float, coef: float, places: list[int | None]) -> Tally:
        """Descend on the batch; an optimizer step with NaN or infinity is not made, ends the update, sets `refused`."""
        self.updating = True
        with self.timing("update"):
            tally, bad = UPDATES[self.algorithm.update](
                self.policy,
                self.optimizer,
                batch,
                self.objective(sampling),
                options=self.options["update"],
                optimizer_options=replace(self.options["optimizer"], lr=lr),
                sampling=sampling,
                seed=self.own.seed,
                step=self.progress.step,
                places=places,
                budget=self.budget,
                detailed=bool(self.own.watch_every) and self.progress.step % self.own.watch_every == 0,
            )
        self.updating = False
        if bad is not None:
            more = {"tokens": bad.tokens, "whole": bad.first}
            self.refused = self._refuse("update", bad.fault, bad.batch, Bootstraps(), sampling, coef, **more)
        return tally

    def _refuse(
        self,
        stage: str,
        fault: NonFinite | None,
        batch: Batch,
        bootstraps: Bootstraps,
        sampling: Sampling,
        coef: float,
        **more: Any,
    ) -> RefusedStep | None:
        known = {"tokenizer": self.policy.tokenizer, "sampling": sampling, "coef": coef, "tokens": self.budget.tokens}
        return refuse(stage, fault, batch, bootstraps, **known | more)

    def _threads(self, tokens: int) -> AbstractContextManager[None]:
        """While this lasts, torch computes with the threads that passes over so many tokens are worth."""
        own, here = self.own.threads, self.policy.device.type == "cpu"
        if isinstance(own, int):
            return machine.threads(own)
        return machine.threads(machine.worth(tokens, machine.largest(self.policy.model))) if here else nullcontext()

    @property
    def pays(self) -> bool:
        """Whether the world pays rewards of its own."""
        return getattr(self.env, "pays", True)

    def as_seen(self, rollouts: list[Rollout]) -> list[Rollout]:
        """The rollouts as a reward is shown them: truncated after `score.truncate_token`, where one is set."""
        return as_seen(rollouts, self.options["score"], self.policy.tokenizer, self.sampling)

    def _learning_rate(self) -> float:
        """The learning rate of this step. Raises: OperantError where the schedule has come to its end, which is 0."""
        options, step, total = self.options["optimizer"], self.progress.step, self.total_steps
        if total is not None and step >= total and options.schedule != "constant":
            raise OperantError(
                f"all total_steps={total} steps are done, and optimizer.schedule={options.schedule} has reached 0, so "
                "another step would change nothing: build the Learner with more total_steps"
            )
        return rate(options, step, total)

    def diagnose(self) -> list[Any]:
        """What looks wrong by now, worst first: `operant.diagnose(self)`."""
        import operant  # the diagnosis is a tool: the core imports none

        return operant.diagnose(self)

    def bundle(self, path: str | Path) -> Path:
        """Write what `operant replay` needs to make the refused step again. Raises: OperantError where it cannot."""
        about = {"step": self.progress.step, "options": self.option_values(), **self.named}
        return refused_step.write(path, self.refused, about, PolicyState(self.policy).state_dict())

    def _sync(self, metrics: dict[str, float]) -> None:
        """Bring what depends on the weights up to date: engine, copies, KL controller, counters."""
        self.progress.step += 1
        self.attempts = Attempts()
        self.progress.refused = self.progress.refused + 1 if self.refused is not None else 0
        self.policy.version = self.progress.step
        self.engine.sync(self.policy, self.policy.version)
        if self.refused is not None and self.refused.whole:
            return
        self.progress.episodes += int(metrics.get("rollout/count", 0))
        for copied in self.copies.values():
            copied.update(self.policy, self.progress.step)
        if "kl/per_reply" in metrics:
            replies = int(metrics["rollout/count"])
            self.controller.update(metrics["kl/per_reply"], metrics["kl/per_token"], replies)

    def _logged(self, metrics: dict[str, float], coef: float, lr: float) -> dict[str, float]:
        """The metrics with counters, coefficients and times; they are added to the history."""
        times = self.clock.take()
        known = {"step": self.progress.step, "episodes": self.progress.episodes, "update/lr": lr}
        known["update/micro_tokens"] = self.budget.tokens
        if self.reference is not None:
            known["kl/coef"] = coef
        if self.kl.loss_coef:
            known["kl/loss_coef"] = self.kl.loss_coef
        # Metrics of many steps are kept in memory, so the text of each name is kept only once.
        logged = {sys.intern(name): value for name, value in (known | metrics | times).items()}
        self.history.append(logged)
        if len(self.history) > HISTORY:
            del self.history[HISTORY // 10]  # the steps before it stay: they show what was usual at the start
        return logged

    def option_values(self) -> dict[str, Any]:
        """Every option by its full name."""
        return {f"{group}.{k}": v for group, made in self.options.items() for k, v in values(made).items()}

    def timing(self, phase: str) -> AbstractContextManager[None]:
        """Count the seconds of a phase of this step."""
        return self.clock.timing(phase)

    def parts(self) -> dict[str, Any]:
        """Everything that changes, by the name under which it registers in `RunState`."""
        copies = {f"shadow/{name}": copied for name, copied in self.copies.items()}
        reference = {"reference": self.reference} if self.reference is not None else {}
        return {
            "policy": PolicyState(self.policy),
            "optimizer": self.optimizer,
            "controller": self.controller,
            "moments": self.moments,
            "progress": self.progress,
            "budget": self.budget,
            **reference,
            **copies,
        }


def _grouped(rollouts: Sequence[Any]) -> list[Rollout]:
    """The rollouts with their groups counted by task: those that are kept from earlier steps have numbers of theirs."""
    wrong = next((r for r in rollouts if not isinstance(r, Rollout)), None)
    if wrong is not None:
        raise OperantError(f"step(replies, scores) takes what generate gave, and not {shown(wrong)}")
    numbers: dict[str, int] = {}
    groups = [numbers.setdefault(r.task.id, len(numbers)) for r in rollouts]
    return [r if r.group == group else replace(r, group=group) for r, group in zip(rollouts, groups, strict=True)]


def _query(rollout: Rollout) -> Any:
    """What attempts that are compared have in common."""
    return tuple(rollout.turns[0].prompt) if rollout.task.id.startswith("given/") else rollout.task.id


def _task(query: Any) -> Task:
    prompt = query.tolist() if isinstance(query, torch.Tensor) else query
    return Task(f"query/{prompt!r}", prompt if isinstance(prompt, str) else list(prompt))
