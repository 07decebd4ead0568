"""Layer 2: `generate` replies, and `step` on replies with rewards, from here or elsewhere.

    learner = Learner("builtin:reviews-lm", preset="trl", **{"optimizer.lr": 1e-4})
    replies = learner.generate(["This film", "The plot"], max_new_tokens=24)
    metrics = learner.step(replies, [0.9, 0.1])
    metrics = learner.step(queries, responses, scores)

The trainer is written with this class, and so can be a loop of your own.
"""

import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch

from operant import distributed, machine
from operant.algorithms import DEFAULT, find, left_out_message
from operant.algorithms import preset as find_preset
from operant.engines.native.engine import NativeEngine
from operant.engines.own import OwnEngine
from operant.envs import SingleTurn, for_evaluation
from operant.metrics import collect
from operant.models.policy import Policy
from operant.models.policy_state import PolicyState
from operant.objectives.kl import KLOptions, controller
from operant.options import values
from operant.rewards import reward_metrics
from operant.rewards.shaping import RunningMoments, as_seen
from operant.rollouts.carried import PartialGroup, continue_replies
from operant.rollouts.collate import cut, played, spread_over, units
from operant.rollouts.generation_kwargs import declared, from_generation_kwargs, warn_of_unscored, warned
from operant.rollouts.play import Attempts, play
from operant.rollouts.prompts import Wanted
from operant.sampling import Sampling, check_ids
from operant.tally import Tally
from operant.training import refused_step, sharding, stages, step_arguments
from operant.training.objective import Objective, make_objective, measure_terms
from operant.training.options import LearnerOptions, check_length, check_reference, learner_options
from operant.training.own_optimizer import OwnOptimizer, check_given, with_kind
from operant.training.progress import LastStep, Progress
from operant.training.refused_step import RefusedStep
from operant.training.replay_buffer import ReplayBuffer
from operant.training.saved_learner import Saveable
from operant.training.scoring import (
    Bootstraps,
    charge_kl,
    forward_batch,
    score_batch,
    with_bootstraps,
    with_trunk_states,
    within_context,
)
from operant.training.setup import configured_sampling, load_trained_policy, make_copies, prepare_engine, tell_room
from operant.training.stages import TrainingStep
from operant.training.staleness import with_importance
from operant.training.update_rules import find_rule
from operant.types import Batch, Engine, EngineParts, Env, OperantError, Outputs, Rollout, Task, shown

if TYPE_CHECKING:
    from operant.keywords import LearnerArguments, OptimizerKeywords

HISTORY = 2000
"""The number of steps whose metrics stay in memory for `diagnose`."""


class Learner(Saveable):
    """A policy with its critic, its reference, and all state that changes during training.

    policy: a name, a transformers model (with `tokenizer`) or a Policy. reference: "copy" (a frozen snapshot of the
    policy), None (no KL), a name or a Policy. algorithm: a name, module:object or an `Algorithm`; None: the
    preset's, or ppo.
    engine: what generates the replies, or a function that makes it from the policy; None: the policy itself.
    total_steps: the number of steps of the run, for schedules that depend on it.
    optimizer: a torch.optim.Optimizer of the policy's trained parameters, or a function from their list to one.
    lr_scheduler: its scheduler, or a function from the optimizer to one; it makes a step after every training step.
    Nothing else sets the learning rate then, and 16-bit weights have no float32 masters.
    Options are passed by name: `**{"kl.coef": 0.1}` or `kl={"coef": 0.1}`. composed: all of them by group, composed and
    checked already by `runs.config.configure`.
    Raises: OperantError for an unknown or impossible option, before any model loads.
    """

    def __init__(
        self,
        policy: Any,
        *,
        tokenizer: Any = None,
        reference: Any = "copy",
        algorithm: Any = None,
        preset: str | None = None,
        engine: Engine | Callable[[Policy], Engine] | None = None,
        env: Env | None = None,
        total_steps: int | None = None,
        optimizer: "OptimizerKeywords | Any" = None,
        lr_scheduler: Any = None,
        composed: Mapping[str, Any] | None = None,
        **options: "Unpack[LearnerArguments]",
    ):
        name: Any = algorithm or find_preset(preset).get("algorithm", DEFAULT)
        self.algorithm = find(name)
        chosen: Mapping[str, Any] = options
        if composed is None:
            optimizer, chosen = with_kind(optimizer, chosen)
        without_kl = dict.fromkeys(("kl.coef", "kl.loss_coef"), 0.0) if reference is None else {}
        if composed is not None and (given := ([] if preset is None else ["preset"]) + sorted(chosen)):
            raise OperantError(
                f"{', '.join(given)} beside composed=, which has every option already: give these to "
                "runs.config.configure, or leave composed out"
            )
        if composed is None:
            self.options, left_out = learner_options(name, preset, chosen, above=without_kl)
        else:
            self.options, left_out = dict(composed), []
        if left_out:
            warnings.warn(left_out_message(f"preset {preset}", left_out, f"algorithm={name}"), stacklevel=2)
        self.own: LearnerOptions = self.options["learner"]
        self.kl: KLOptions = self.options["kl"]
        check_length(self.options, total_steps)
        check_reference(self.options, name, reference)
        check_given(self.options, optimizer, lr_scheduler)
        sharding.check(self.algorithm.update, self.options)
        self.named = {"policy": refused_step.name(policy), "reference": refused_step.name(reference)}
        self.named["algorithm"] = name if isinstance(name, str) else "an algorithm of your own"
        others = {"tokenizer": tokenizer, "engine": engine, "env": env}
        others |= {"algorithm": name, "optimizer": optimizer, "lr_scheduler": lr_scheduler}
        self.given = self.named | {argument: refused_step.name(thing) for argument, thing in others.items()}
        """What the constructor was given: names, and the classes of objects in angle brackets."""
        self.copied: dict[str, str] = {}
        """Of a loaded learner: the names of the models that its folder has copies of, by the path of the copy."""
        self.policy = load_trained_policy(policy, name, self.options, tokenizer)
        """The `Policy` in training."""
        self.sampling = configured_sampling(self.options, self.policy)
        self.reference, self.copies = make_copies(self.algorithm, self.policy, reference, self.options)
        sharding.divide(self)
        is_made = hasattr(engine, "generate") and not inspect.isclass(engine)
        self.engine = cast(Engine, engine if is_made else cast(Any, engine or default_engine)(self.policy))
        prepare_engine(self.engine, self.own, name, self.copies.get(self.algorithm.mask or ""))
        self.env = env or SingleTurn()
        tell_room(self.env, self.policy, self.sampling)
        own = None if optimizer is None else OwnOptimizer(self.policy, optimizer, lr_scheduler)
        self.rule = find_rule(self.algorithm.update)(self.policy, self.options, own)
        self.wanted = Wanted(self.options["condition"]) if self.algorithm.condition else None
        """The returns that play asks for; None: prompts state none."""
        replay = self.options.get("replay")
        self.buffer = ReplayBuffer(replay, self.own.seed, self.own.max_staleness) if replay and replay.share else None
        """Earlier replies; None: a step learns from its own replies alone."""
        self.controller, self.moments = controller(self.kl), RunningMoments()
        self.total_steps, self.progress = total_steps, Progress()
        self.budget, self.clock = self.options["update"].budget(), machine.Clock()
        self.attempts = Attempts()
        """The attempts that `generate` has made since the last step."""
        self.last_step: LastStep | None = None
        self.updating = False
        """True during the optimizer steps of an update, and still True after one of them raised."""
        self.refused: RefusedStep | None = None
        """The last step, if it was refused because of NaN or infinity."""
        self.history: list[dict[str, float]] = []
        """The metrics of the steps so far; of more than `HISTORY` steps, the first ones and the last."""
        self.distributions: dict[str, Any] = {}
        """Of the last step: `histograms`, norms by `blocks`, and every `watch_every` steps `gradients` by tensor."""
        self.observing, self.learning = stages.before_update(self), stages.update_and_after(self)
        """The stages of a step: those that change only the moments of scores, and those from the advantages on."""

    def __repr__(self) -> str:
        named = f"{self.named['algorithm']}, reference={self.named['reference']}"
        return f"Learner({named}, step={self.progress.step}, policy={self.policy!r})"

    # --- play ---------------------------------------------------------------------------------------------------------

    def generate(self, queries: Sequence[Any], **generation: Any) -> list[Rollout]:
        """Generate one reply for each query: a text, messages, ids [T] as list or tensor, or a Task.

        It may be called several times before a step: a repeated query gets another reply, in the same group.
        generation: transformers' generation arguments, or the names of `Sampling`. They apply to this call, and are
        stored in its rollouts for the `step` that trains on them.
        Raises: OperantError for an unknown argument (with the nearest), or sampling that cannot be scored exactly.
        """
        sampling = from_generation_kwargs(self.sampling, generation).for_training()
        if sampling != self.sampling:
            warned(sampling)
        if self.policy.tokenizer is None and sampling.stop_strings:
            raise OperantError("stop_strings need a tokenizer: Policy(model, tokenizer)")
        if isinstance(queries, (str, Task)) or (len(queries) and isinstance(queries[0], (int, float))):
            raise OperantError(
                f"generate takes a list of queries and returns a reply to each; {shown(queries)} is one query: put it "
                "into brackets, generate([...])"
            )
        tasks = [q if isinstance(q, Task) else _task(q) for q in queries]
        attempts = deepcopy(self.attempts)  # if `play` fails, none of them counts
        attempts.first = distributed.rank() << 20  # equal queries on several ranks get different replies
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
        """Play tasks to the end, with the random numbers of this step.

        stream: which random numbers are used; `evaluate` and `probe` always use those of step 0, and play in what
        the world's `for_evaluation` returns, if it has one.
        attempts: the attempts that were made before in this step; None: no attempts.
        part: indices of the tasks to play; each rollout is the same as if all were played. None: all tasks.
        """
        sampling = sampling or self.sampling
        for task in tasks:
            if not isinstance(task.prompt, str) and all(isinstance(token, int) for token in task.prompt):
                check_ids(task.prompt, self.policy.vocabulary, f"the prompt of task {shown(task.id)}")
        with self.timing("generate" if stream == "train" else stream), self._threads(len(tasks)):
            return play(
                tasks,
                env=env or (self.env if stream == "train" else for_evaluation(self.env)),
                engine=engine or self.engine,
                tokenizer=self.policy.tokenizer,
                sampling=sampling,
                seed=self.own.seed if seed is None else seed,
                stream=stream,
                step=self.progress.step,
                attempts=attempts,
                part=part,
                fits=lambda prompt, reply: self.policy.misfit(prompt, reply) is None,
                opening=self.wanted.opening(self.policy.tokenizer, training=stream == "train") if self.wanted else None,
            )

    def continue_replies(
        self, groups: Sequence[PartialGroup], count: int, tokens: int, attempts: Callable[[Sequence[int]], list[Task]]
    ) -> tuple[list[Rollout], list[PartialGroup], list[PartialGroup]]:
        """Draw at most `tokens` more of each reply, again and again until `count` groups have ended.

        Returns the rollouts of these groups, these groups, and the others, as `rollouts.carried.continue_replies`.
        """
        with self.timing("generate"), self._threads(len(groups)):
            known = {"engine": self.engine, "tokenizer": self.policy.tokenizer, "sampling": self.sampling}
            return continue_replies(groups, count, tokens, attempts=attempts, seed=self.own.seed, **known)

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
        """Run one training step: `step(replies, rewards)`, or `step(queries, responses, scores)` from elsewhere.

        Methods that learn from demonstrations (sft) take `step(queries, responses)`; responses that are texts are
        followed by the stop token. Those that learn from labels (dpo) take `step(queries, responses, scores)`.

        A score is a float, one float per action token, a `Judgement`, or None, which leaves the reply out. For queries,
        responses and scores, log-probs and values are computed in one forward pass, and these arguments can be added,
        one entry each:
        episodes: the episode of each response. Those of one episode are its turns, in order, each with its own reward.
        groups: the group of each response, within which a method compares; None: responses to equal queries. All of a
        group must be on one rank.
        next_values: for methods with a critic, the value of the state after the last response of an episode that was
        cut; 0 at all others.
        generation: how the responses were sampled. Temperature, limits and stop tokens are used to score them. The
        others (top_k, min_length, dropout=True, padding_side="right") cannot be used for scoring, so `diagnose` names
        them if something looks wrong.

        Returns the metrics of the step. A step with NaN or infinity is refused: it warns, `update/refused` is 1,
        `learner.refused` describes it, and only `progress.step` changes.
        Raises: OperantError for an error of the caller, with nothing changed.
        """
        name = self.named["algorithm"]
        for given in (first, second, scores):
            if isinstance(given, (str, int, float)):
                raise OperantError(
                    f"step takes lists with one entry a reply, and got {shown(given)}: put it into [...]"
                )
        others = {"episodes": episodes, "groups": groups, "next_values": next_values, "generation": generation}
        if self.algorithm.source == "data":
            known = {"algorithm": name, "policy": self.policy, "sampling": self.sampling}
            known["labels"] = self.algorithm.needs.labels
            parsed = step_arguments.from_demonstrations(first, second, {"scores": scores, **others}, **known)
        elif scores is None:
            parsed = step_arguments.from_generated(first, second, others, self.sampling)
        else:
            ahead = distributed.largest(int(next_values is not None and any(next_values)))
            if ahead and not self.algorithm.needs.critic:
                raise OperantError(f"next_values: algorithm {name} has no critic to use them; leave them out")
            sampling, unscored = declared(self.sampling, generation or {})
            if unscored:
                warn_of_unscored(unscored)
            known = {"policy": self.policy, "sampling": sampling}
            parsed = step_arguments.from_triplets(first, second, scores, **others, **known)
        step_arguments.check_comparable(parsed.rollouts, self.algorithm, name, groups_named=groups is not None)
        if self.algorithm.source == "data" and self.algorithm.needs.labels:
            step_arguments.check_labels(parsed.rollouts, self.algorithm, self.options["loss"])
        judged, before = step_arguments.judged(parsed), self.history[-1] if self.history else None
        metrics = self.learn(parsed.rollouts, judged.scores if judged else parsed.scores, parsed.sampling)
        if judged is not None:
            metrics |= reward_metrics(judged, before)
        if self.refused is not None:
            warnings.warn(self.refused.message(), stacklevel=2)
        return metrics

    def learn(
        self, rollouts: list[Rollout], scores: Sequence[Any] | None, sampling: Sampling | None = None
    ) -> dict[str, float]:
        """Run one training step on rollouts and their scores, and return its metrics.

        The scores are added to the rewards that an environment paid, which are stored in the turns. Demonstrations have
        no scores, and are scored without temperature or masks.
        Raises: OperantError for scores that cannot be trained on, or after the last step of a schedule.
        """
        default = self.sampling.plain if self.algorithm.source == "data" else self.sampling
        if self.algorithm.needs.action_values:  # what the language model itself says is trained
            sampling = replace(sampling or default, guidance=0.0)
        tokens = sum(len(turn.prompt) + len(turn.action) for rollout in rollouts for turn in rollout.turns)
        with self._threads(min(tokens, self.budget.tokens)):
            return self._learn(rollouts, scores, sampling or default)

    def _learn(self, rollouts: list[Rollout], scores: Sequence[Any] | None, sampling: Sampling) -> dict[str, float]:
        """Run the stages of a training step."""
        moments_before, lr = self.moments.state_dict(), self.rule.learning_rate(self.progress.step, self.total_steps)
        self.controller.begin(self.progress.share(self.total_steps), self.total_steps)
        step = TrainingStep(rollouts, scores, sampling, lr, self.controller.coef)
        try:
            for stage in self.observing:
                stage(self, step)
        except OperantError:
            self.moments.load_state_dict(moments_before)  # nothing else has changed so far
            raise
        for stage in self.learning:
            stage(self, step)
        pooled = distributed.pool(step.tally)
        metrics, self.distributions = collect.finish(pooled), collect.distributions(pooled)
        if self.refused is not None:
            metrics = {"update/refused": 1.0} | {k: x for k, x in metrics.items() if math.isfinite(x)}
            if self.refused.whole:
                self.moments.load_state_dict(moments_before)
        stages.sync(self, metrics)
        return self._log(metrics, step.coef, lr)

    def preview(self, rollouts: list[Rollout], scores: Sequence[Any] | None) -> tuple[Batch, list[int]]:
        """Return the batch that a step would train on, and the indices of its rollouts. Nothing changes.

        Raises: OperantError as `step`.
        """
        moments, step = self.moments.state_dict(), TrainingStep(rollouts, scores, self.sampling)
        try:
            self.observing[0](self, step)
        finally:
            self.moments.load_state_dict(moments)
        with sharding.present(self):
            return self._credited(step).to("cpu"), step.selected.places

    def _credited(self, step: TrainingStep) -> Batch:
        """The batch of a step whose replies are selected, with its advantages."""
        stages.score(self, step)
        return self.credit(self.look(step.batch, step.sampling), self.controller.coef)

    def measure(self, rollouts: list[Rollout]) -> dict[str, float]:
        """The metrics of the method's own loss on demonstrations, such as held-out ones, by name. Nothing changes.

        On several ranks, every rank passes the same rollouts.
        """
        sampling, tally = self.sampling.plain, Tally()
        step = TrainingStep(rollouts, None, sampling)
        stages.select_given(self, step)
        with sharding.present(self):
            batch = self._credited(step)
            objective, budget = self.objective(sampling), self.budget.tokens
            for rows in cut(batch, units(batch, self.algorithm.unit), budget, packed=self.policy.packs(batch)):
                measure_terms(self.policy, batch.rows(torch.tensor(rows)), objective, sampling, tally)
        return tally.result()

    def score(self, batch: Batch, bootstraps: Bootstraps, sampling: Sampling) -> Batch:
        """Add log-probs, values, reference log-probs and KL to a collated batch.

        Demonstrations need none of these, unless the method compares the policy with its reference.
        """
        if (self.algorithm.source == "data" and self.reference is None) or self.algorithm.condition:
            return with_trunk_states(batch, self.policy, self.budget.tokens)
        taught, batch = batch.hinted, batch.with_(hinted=None)
        weighted, rescore = self.own.importance != "none", self.rescores
        reference = self.reference.policy if self.reference is not None else None
        micro, sampled, unscored = self.budget.tokens, batch.logprobs, batch.unscored
        batch = score_batch(batch, self.policy, reference, sampling, self.kl, micro_tokens=micro, rescore=rescore)
        if weighted:
            kind, known = self.own.importance, {"mask": self.own.importance_mask, "unscored": unscored}
            batch = with_importance(batch, sampled, kind, self.own.importance_cap, **known)
        batch = with_bootstraps(batch, bootstraps, self.policy, micro)
        return batch.with_(hinted=taught)

    def look(self, batch: Batch, sampling: Sampling) -> Batch:
        """Add the fields of the method's hook `look` to a scored batch. Every rank must call: it may read all rows."""
        if self.algorithm.look is None:
            return batch
        models = {"policy": self.policy} | {name: copied.policy for name, copied in self.copies.items()}
        models |= {"reference": self.reference.policy} if self.reference is not None else {}

        @torch.no_grad()
        def outputs(name: str, other: Batch | None = None) -> Outputs:
            seen = batch.with_(hinted=None) if other is None else within_context(other, self.policy)
            seen = seen if name == "policy" else models[name].drop_foreign_states(seen, self.policy)
            return forward_batch(seen, models[name], sampling, self.budget.tokens)

        return batch.with_(extra=self.algorithm.look(batch, outputs))

    def credit(self, batch: Batch, coef: float) -> Batch:
        """Charge the KL penalty at `coef` a nat, and add advantages to the batch."""
        batch = charge_kl(batch, coef, direct=self.kl.direct)
        if self.algorithm.advantage is None:
            return batch
        rows, part = played(batch)
        credited = self.algorithm.advantage(part, **self.options["advantage"])
        return credited if batch.demonstrated is None else spread_over(batch, rows, credited)

    def objective(self, sampling: Sampling) -> Objective:
        """The objective that the update minimises."""
        reference = self.reference.policy if self.reference is not None else None
        return make_objective(self.algorithm, self.options, reference, sampling)

    def _threads(self, tokens: int) -> AbstractContextManager[None]:
        """A context in which torch uses as many threads as passes over so many tokens are worth."""
        if isinstance(self.own.threads, int):
            return machine.threads(self.own.threads)
        if self.policy.device.type != "cpu":
            return nullcontext()
        return machine.threads(machine.worth(tokens, machine.largest(self.policy.model)))

    @property
    def optimizer(self) -> Any:
        """The optimizer of the update rule; None if it has none."""
        return self.rule.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self.rule.optimizer = optimizer

    @property
    def rescores(self) -> bool:
        """Whether log-probs and values are computed again, instead of taking those of the engine."""
        usual = self.policy.rounds or EngineParts.of(self.engine).own_numbers
        return self.own.importance != "none" or (usual if self.own.rescore is None else self.own.rescore)

    @property
    def pays(self) -> bool:
        """Whether the environment pays rewards."""
        return getattr(self.env, "pays", True)

    def as_seen(self, rollouts: list[Rollout]) -> list[Rollout]:
        """The rollouts as a reward sees them: cut after `score.truncate_token`, if that is set."""
        return as_seen(rollouts, self.options["score"], self.policy.tokenizer, self.sampling)

    def bundle(self, path: str | Path) -> Path:
        """Write a folder for `operant replay` to repeat the refused step. Raises: OperantError if there is none."""
        about = {"step": self.progress.step, "options": self.option_values(), **self.named}
        return refused_step.write(path, self.refused, about, PolicyState(self.policy).state_dict())

    def _log(self, metrics: dict[str, float], coef: float, lr: float) -> dict[str, float]:
        """Return the metrics with counters, coefficients and times added, and append them to the history."""
        known = {"step": self.progress.step, "episodes": self.progress.episodes, "update/lr": lr}
        known["update/micro_tokens"] = self.budget.tokens
        if self.reference is not None:
            known["kl/coef"] = coef
        if self.kl.loss_coef:
            known["kl/loss_coef"] = self.kl.loss_coef
        # The history has the same names in every step: interning stores the text of each name once.
        logged = {sys.intern(name): value for name, value in (known | metrics | self.clock.take()).items()}
        self.history.append(logged)
        if len(self.history) > HISTORY:
            del self.history[HISTORY // 10]  # the steps before it stay, because they show the start of the run
        return logged

    def option_values(self) -> dict[str, Any]:
        """Every option by its full name."""
        return {f"{group}.{k}": v for group, made in self.options.items() for k, v in values(made).items()}

    @contextmanager
    def engine_of(self, policy: Policy) -> Iterator[Engine]:
        """The engine with the weights of another policy, such as the reference; afterwards it has its own again.

        An engine in another process keeps its weights: here, the native one stands in for it.
        """
        with sharding.present(self, policy):
            if EngineParts.of(self.engine).own_weights:
                yield default_engine(policy)
                return
            self.engine.sync(policy, policy.version)
            try:
                yield self.engine
            finally:
                self.engine.sync(self.policy, self.policy.version)

    def timing(self, phase: str) -> AbstractContextManager[None]:
        """A context that measures the seconds of a phase of this step."""
        return self.clock.timing(phase)

    def parts(self) -> dict[str, Any]:
        """All state that changes, by the name under which it is registered in `RunState`."""
        copies = {f"shadow/{name}": copied for name, copied in self.copies.items()}
        reference = {"reference": self.reference} if self.reference is not None else {}
        return {
            "policy": PolicyState(self.policy, self.policy.shards),
            **sharding.parts_of_rule(self),
            "controller": self.controller,
            "moments": self.moments,
            "progress": self.progress,
            "budget": self.budget,
            **({"wanted": self.wanted} if self.wanted is not None else {}),
            **({"replay": self.buffer} if self.buffer is not None else {}),
            **reference,
            **copies,
        }


def default_engine(policy: Any) -> Engine:
    """The engine in this process: native for a transformers model, and otherwise the policy's own `generate`."""
    return NativeEngine(policy) if isinstance(policy, Policy) else OwnEngine(policy)


def _task(query: Any) -> Task:
    """A task with the query as its prompt; equal queries have equal ids."""
    prompt = query.tolist() if isinstance(query, torch.Tensor) else query
    return Task(f"query/{prompt!r}", prompt if isinstance(prompt, str) else list(prompt))
