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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from operant import distributed, machine
from operant.algorithms import DEFAULT, find, left_out_message
from operant.algorithms import preset as find_preset
from operant.engines.native.engine import NativeEngine
from operant.envs.single_turn import SingleTurn
from operant.metrics import collect
from operant.models.kept import Kept
from operant.models.loading import load_policy, load_reference
from operant.models.reference import PolicyCopy
from operant.objectives.kl import KLOptions, controller
from operant.rewards.shaping import RunningMoments, as_seen
from operant.rollouts.external import to_rollouts
from operant.rollouts.generation_kwargs import declared, drawn_with, from_generation_kwargs, warn_of_unscored, warned
from operant.rollouts.play import Attempts, play
from operant.sampling import Sampling, check_ids
from operant.training import refused_step
from operant.training.lessons import Learnt, Lesson, Progress, choose, unjudged
from operant.training.nonfinite import of_batch
from operant.training.optimizer import make_optimizer, rate
from operant.training.options import LearnerOptions, find_device, learner_options
from operant.training.passes import Passes
from operant.training.refused_step import Refusal, refuse
from operant.training.update import UPDATES, Updated
from operant.types import Batch, Engine, Env, OperantError, Rollout, Task, shown

HISTORY = 2000
"""Steps whose metrics `diagnose` can look back on."""


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
        self.passes = Passes(self.policy, self.reference, self.algorithm, self.options, self.budget)
        self.named = {
            "policy": refused_step.name(policy),
            "reference": refused_step.name(reference),
            "algorithm": algorithm,
        }
        self.learnt: Learnt | None = None
        self.updating = False
        """True from the first optimizer step to the last; also after one of them has failed."""
        self.refused: Refusal | None = None
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
            warnings.warn(self.refused.says(), stacklevel=3)
        return metrics

    def learn(
        self, rollouts: list[Rollout], scores: Sequence[Any] | None, sampling: Sampling | None = None
    ) -> dict[str, float]:
        """Scores to weights. What a world has paid stands in the turns, and `scores` are what comes on top.

        Given replies have none, and are scored without temperature or masks.
        """
        tokens = sum(len(turn.prompt) + len(turn.action) for rollout in rollouts for turn in rollout.turns)
        with self._threads(min(tokens, self.budget.tokens)):
            return self._learn(rollouts, scores, sampling)

    def _threads(self, tokens: int) -> AbstractContextManager[None]:
        """While this lasts, torch computes with the threads that passes over so many tokens are worth."""
        own, here = self.own.threads, self.policy.device.type == "cpu"
        if isinstance(own, int):
            return machine.threads(own)
        return machine.threads(machine.worth(tokens, machine.largest(self.policy.model))) if here else nullcontext()

    def _learn(
        self, rollouts: list[Rollout], scores: Sequence[Any] | None, sampling: Sampling | None
    ) -> dict[str, float]:
        usual = self.sampling.plain if self.algorithm.source == "data" else self.sampling
        sampling, moments = sampling or usual, self.moments.state_dict()
        lr = self._rate()
        self.controller.begin(self.progress.share(self.total_steps))
        coef = self.controller.coef
        try:
            lesson = self._choose(rollouts, scores)
            with self.timing("observe"):
                given, after, batch = distributed.together(lambda: self.passes.looked_at(lesson, sampling))
        except OperantError:
            self.moments.load_state_dict(moments)  # the only thing that has moved so far
            raise
        with self.timing("advantage"):
            batch = self.passes.credited(batch, coef)
        seen = batch.with_(states=None).to("cpu")
        tally = lesson.tally.merge(collect.of_rollouts(lesson.rollouts, texts=self.policy.tokenizer is not None))
        tally.merge(collect.of_batch(seen, coef))
        how = {"tokenizer": self.policy.tokenizer, "sampling": sampling, "coef": coef, "tokens": self.budget.tokens}
        self.refused = refuse("observe", of_batch(seen), given, after, **how)
        if self.refused is None:
            self.updating = True
            with self.timing("update"):
                told, bad = self._update(batch, sampling, lr, [r.place for r in lesson.rollouts])
            self.updating = False
            tally.merge(told)
            if bad is not None:
                how |= {"tokens": bad.tokens, "whole": bad.first}
                self.refused = refuse("update", bad.fault, bad.batch, {}, **how)
        self.learnt = Learnt(rollouts, lesson.given, seen, lesson.places, sampling)
        pooled = distributed.pool(tally)
        metrics, self.distributions = collect.finish(pooled), collect.distributions(pooled)
        if self.refused is not None:
            metrics = {"update/refused": 1.0} | {k: x for k, x in metrics.items() if math.isfinite(x)}
            if self.refused.whole:
                self.moments.load_state_dict(moments)
        self._follow(metrics)
        self.history.append(told := self._told(metrics, coef, lr))
        if len(self.history) > HISTORY:
            del self.history[HISTORY // 10]  # what was usual at the start stays
        return told

    def look(self, rollouts: list[Rollout], scores: Sequence[Any] | None) -> tuple[Batch, list[int]]:
        """What a step would learn from, and which rollouts that is made of; nothing changes."""
        held = self.moments.state_dict()
        try:
            lesson = self._choose(rollouts, scores)
        finally:
            self.moments.load_state_dict(held)
        *_, batch = self.passes.looked_at(lesson, self.sampling)
        return self.passes.credited(batch, self.controller.coef).to("cpu"), lesson.places

    def _choose(self, rollouts: list[Rollout], scores: Sequence[Any] | None) -> Lesson:
        if self.algorithm.source == "data":
            return unjudged(rollouts)
        tokenizer, drop = self.policy.tokenizer, self.own.on_length == "drop"
        scores = [0.0] * len(rollouts) if scores is None else scores
        return choose(rollouts, scores, self.options["score"], self.moments, tokenizer, drop_lengths=drop)

    @property
    def pays(self) -> bool:
        """Whether the world pays rewards of its own."""
        return getattr(self.env, "pays", True)

    def as_seen(self, rollouts: list[Rollout]) -> list[Rollout]:
        """The rollouts as a reward is shown them: truncated after `score.truncate_token`, where one is set."""
        return as_seen(rollouts, self.options["score"], self.policy.tokenizer, self.sampling)

    def _rate(self) -> float:
        """The learning rate of this step. Raises: OperantError where the schedule has come to its end, which is 0."""
        options, step, total = self.options["optimizer"], self.progress.step, self.total_steps
        if total is not None and step >= total and options.schedule != "constant":
            raise OperantError(
                f"all total_steps={total} steps are done, and optimizer.schedule={options.schedule} has reached 0, so "
                "another step would change nothing: build the Learner with more total_steps"
            )
        return rate(options, step, total)

    def _update(self, batch: Batch, sampling: Sampling, lr: float, places: list[int | None]) -> Updated:
        return UPDATES[self.algorithm.update](
            self.policy,
            self.optimizer,
            batch,
            self.passes.objective(sampling),
            options=self.options["update"],
            steering=replace(self.options["optimizer"], lr=lr),
            sampling=sampling,
            seed=self.own.seed,
            step=self.progress.step,
            places=places,
            budget=self.budget,
            closely=bool(self.own.watch_every) and self.progress.step % self.own.watch_every == 0,
        )

    def diagnose(self) -> list[Any]:
        """What looks wrong by now, worst first: `operant.diagnose(self)`."""
        import operant  # the diagnosis is a tool: the core imports none

        return operant.diagnose(self)

    def bundle(self, path: str | Path) -> Path:
        """Write what `operant replay` needs to make the refused step again. Raises: OperantError where it cannot."""
        about = {"step": self.progress.step, "options": self.passes.given(), **self.named}
        return refused_step.write(path, self.refused, about, Kept(self.policy).state_dict())

    def _follow(self, metrics: dict[str, float]) -> None:
        """Update what depends on the new weights: the engine, the copies, the KL controller, the counters."""
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

    def _told(self, metrics: dict[str, float], coef: float, lr: float) -> dict[str, float]:
        times = self.clock.take()
        known = {"step": self.progress.step, "episodes": self.progress.episodes, "update/lr": lr}
        known["update/micro_tokens"] = self.budget.tokens
        if self.reference is not None:
            known["kl/coef"] = coef
        if self.kl.loss_coef:
            known["kl/loss_coef"] = self.kl.loss_coef
        told = known | metrics | times
        return {sys.intern(name): value for name, value in told.items()}  # steps are kept: their names only once

    def timing(self, phase: str) -> AbstractContextManager[None]:
        """Count the seconds of a phase of this step."""
        return self.clock.timing(phase)

    def parts(self) -> dict[str, Any]:
        """Everything that changes, by the name under which it registers in `RunState`."""
        copies = {f"shadow/{name}": copied for name, copied in self.copies.items()}
        reference = {"reference": self.reference} if self.reference is not None else {}
        return {
            "policy": Kept(self.policy),
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
