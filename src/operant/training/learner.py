"""Layer 2: `generate` replies, and `step` on replies with rewards, from here or elsewhere.

    learner = Learner("builtin:reviews-lm", preset="trl", **{"optimizer.lr": 1e-4})
    replies = learner.generate(["This film", "The plot"], max_new_tokens=24)
    metrics = learner.step(replies, [0.9, 0.1])
    metrics = learner.step(queries, responses, scores)

The trainer is written with this class, and so can be a loop of your own.
"""

import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from operant import distributed, machine
from operant.envs import for_evaluation
from operant.metrics import collect
from operant.models.policy import Policy
from operant.models.policy_state import PolicyState
from operant.models.twins import side_by_side
from operant.rewards.shaping import as_seen
from operant.rollouts.collate import cut, units
from operant.rollouts.generation_kwargs import from_generation_kwargs, warned
from operant.rollouts.play import Attempts, play
from operant.sampling import Sampling, check_ids
from operant.tally import Tally
from operant.training import step_arguments
from operant.training.objective import forward
from operant.training.parts import SOMETIMES, LearnerParts, default_engine
from operant.training.select import select_all
from operant.training.stages import Stages, TrainingStep, credited, sync
from operant.types import Batch, Engine, EngineParts, Env, OperantError, Rollout, Task, shown

HISTORY = 2000
"""The number of steps whose metrics stay in memory for `diagnose`."""
OF_TRL = {
    "save_pretrained": "operant.export(learner.policy, FOLDER) writes a transformers folder, learner.save(FOLDER) all "
    "that a later run goes on from",
    "push_to_hub": "operant.export(learner.policy, FOLDER), and push that folder with huggingface_hub",
    "log_stats": "what learner.step returns are plain numbers, to be logged as they are",
}
"""What does the work of TRL's trainer's methods."""


class Learner(LearnerParts):
    """A policy with its critic, its reference, and all state that changes during training.

    policy: a name, a transformers model (with `tokenizer`) or a Policy; an object is trained in place, so that another
    run, or a resume, begins with it as it is then.
    reference: "copy" (a frozen snapshot of the policy), None (no KL), a name, or a model or Policy, which is copied
    unless its weights are frozen. algorithm: a name, module:object or an `Algorithm`; None: the preset's, or ppo.
    engine: what generates the replies, or a function that makes it from the policy; None: the policy itself.
    total_steps: the number of steps of the run, for schedules that depend on it.
    optimizer: a torch.optim.Optimizer of the policy's trained parameters, or a function from their list to one.
    lr_scheduler: its scheduler, or a function from the optimizer to one; it makes a step after every training step.
    Nothing else sets the learning rate then, and 16-bit weights have no float32 masters.
    Options are passed by name: `**{"kl.coef": 0.1}` or `kl={"coef": 0.1}`. composed: all of them by group, composed and
    checked already by `runs.config.configure`.
    Raises: OperantError for an unknown or impossible option, before any model loads.
    """

    if not TYPE_CHECKING:  # with it, a type checker would believe in every name

        def __getattr__(self, name: str) -> None:
            hint = f": {OF_TRL[name]}" if name in OF_TRL else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def __repr__(self) -> str:
        named = f"{self.named['algorithm']}, reference={self.named['reference']}"
        return f"Learner({named}, step={self.progress.step}, policy={self.policy!r})"

    # --- play ---------------------------------------------------------------------------------------------------------

    def generate(self, queries: Sequence[object], **generation: object) -> list[Rollout]:
        """Generate one reply for each query: a text, messages, ids [T] as list or tensor, or a Task.

        It may be called several times before a step: a repeated query gets another reply, in the same group.
        generation: transformers' generation arguments, or the names of `Sampling`. They apply to this call, and are
        stored in its rollouts for the `step` that trains on them.
        Raises: OperantError for an unknown argument (with the nearest), or sampling that cannot be scored exactly.
        """
        made = from_generation_kwargs(self.sampling, generation)
        needs = made != self.sampling and (made.only_text or made.stop_strings or not made.stop_tokens)
        sampling = (made.of(self.policy) if needs else made).for_training()
        if sampling != self.sampling:
            warned(sampling)
        alone = isinstance(queries, (str, Task, Mapping)) or (isinstance(queries, torch.Tensor) and queries.ndim == 1)
        if alone or (len(queries) and isinstance(queries[0], (int, float, Mapping))):
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
        with self.clock.timing("generate" if stream == "train" else stream), self.threads(len(tasks)):
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

    # --- learn --------------------------------------------------------------------------------------------------------

    def step(
        self,
        first: Sequence[object],
        second: Sequence[object],
        scores: Sequence[object] | None = None,
        *,
        episodes: Sequence[object] | None = None,
        groups: Sequence[object] | None = None,
        next_values: Sequence[float] | None = None,
        generation: Mapping[str, object] | None = None,
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
        named = dict(scores=scores, episodes=episodes, groups=groups, next_values=next_values, generation=generation)
        parsed = step_arguments.parsed(self, first, second, named)
        judged, before = step_arguments.judged(parsed), self.history[-1] if self.history else None
        metrics = self.learn(parsed.rollouts, judged.scores if judged else parsed.scores, parsed.sampling)
        if judged is not None:
            metrics |= collect.reward_metrics(judged, before)
        if self.refused is not None:
            warnings.warn(self.refused.message(), stacklevel=2)
        return metrics

    def learn(
        self, rollouts: list[Rollout], scores: Sequence[object] | None, sampling: Sampling | None = None
    ) -> dict[str, float]:
        """Run one training step on rollouts and their scores, and return its metrics.

        The scores are added to the rewards that an environment paid, which are stored in the turns. Demonstrations have
        no scores, and are scored without temperature or masks.
        Raises: OperantError for scores that cannot be trained on, or after the last step of a schedule.
        """
        default = self.sampling.plain if self.algorithm.source == "data" else self.sampling
        tokens = sum(len(turn.prompt) + len(turn.action) for rollout in rollouts for turn in rollout.turns)
        with self.threads(min(tokens, self.budget.tokens)):
            return self._learn(rollouts, scores, sampling or default)

    def _learn(self, rollouts: list[Rollout], scores: Sequence[object] | None, sampling: Sampling) -> dict[str, float]:
        moments_before, lr = self.moments.state_dict(), self.rule.learning_rate(self.progress.step, self.total_steps)
        share = min(self.progress.step / self.total_steps, 1.0) if self.total_steps else 0.0
        self.controller.begin(share, self.total_steps)
        step = TrainingStep(rollouts, scores, sampling, lr, self.controller.coef)
        try:
            self.stages.run(step, "select", "mix")
            with self.clock.timing("observe"), self.present():
                distributed.together(lambda: self.stages.run(step, "rows", "score"))
                distributed.together(lambda: self.stages.run(step, "look"))
            distributed.together(lambda: self.stages.run(step, "credit"))
        except BaseException:
            self.moments.load_state_dict(moments_before)  # nothing else has changed so far
            raise
        self.stages.run(step, "update")
        pooled = distributed.pool(step.tally)
        metrics, self.distributions = collect.finish(pooled), collect.distributions(pooled)
        if self.refused is not None:
            metrics = {"update/refused": 1.0} | {k: x for k, x in metrics.items() if math.isfinite(x)}
            if self.refused.whole:
                self.moments.load_state_dict(moments_before)
        sync(self, metrics)
        self.updating = False  # an engine that did not take the weights leaves a step that nobody may save
        known = {"step": self.progress.step, "episodes": self.progress.episodes, "update/lr": lr}
        known["update/micro_tokens"] = self.budget.tokens
        if self.reference is not None:
            known["kl/coef"] = step.coef
        if self.kl.loss_coef:
            known["kl/loss_coef"] = self.kl.loss_coef
        # The history has the same names in every step: interning stores the text of each name once.
        logged = {sys.intern(name): value for name, value in (known | metrics | self.clock.take()).items()}
        self.history.append(logged)
        if len(self.history) > HISTORY:
            del self.history[HISTORY // 10]  # the steps before it stay, because they show the start of the run
        return logged

    @cached_property
    def stages(self) -> Stages:
        """What a step of this learner does, by its method and options."""
        return Stages(self)

    def preview(self, rollouts: list[Rollout], scores: Sequence[object] | None) -> tuple[Batch, list[int]]:
        """Return the batch that a step would train on, and the indices of its rollouts. Nothing changes.

        Raises: OperantError as `step`.
        """
        moments, step = self.moments.state_dict(), TrainingStep(rollouts, scores, self.sampling)
        try:
            self.stages.run(step, "select")
        finally:
            self.moments.load_state_dict(moments)
        return self._credited(step).to("cpu"), step.logged()[2]

    def _credited(self, step: TrainingStep) -> Batch:
        """The batch of a step whose replies are selected, with its advantages."""
        with self.present():
            self.stages.run(step, "rows", "score", "look")
        return credited(self, step.batch, self.controller.coef)

    def measure(self, rollouts: list[Rollout]) -> dict[str, float]:
        """The metrics of the method's own loss on demonstrations, such as held-out ones, by name. Nothing changes.

        On several ranks, every rank passes the same rollouts.
        """
        sampling, tally = self.sampling.plain, Tally()
        step = TrainingStep(rollouts, None, sampling)
        step.selected = step.learnt = select_all(rollouts)
        batch = self._credited(step)
        objective, budget = self.objective(sampling), self.budget.tokens
        with self.present(), torch.no_grad():
            for rows in cut(batch, units(batch, self.algorithm.unit), budget, packed=self.policy.packs(batch)):
                piece = batch.rows(torch.tensor(rows))
                for name, x in forward(self.policy, piece, objective, sampling)[1].items():
                    if name != "loss":
                        tally.mean(name, x, piece.actions if x.ndim == 2 else ~x.isnan())
        return tally.result()

    def threads(self, tokens: int) -> AbstractContextManager[None]:
        """A context in which torch uses as many threads as passes over so many tokens are worth."""
        if isinstance(self.own.threads, int):
            return machine.threads(self.own.threads)
        if self.policy.device.type != "cpu":
            return nullcontext()
        return side_by_side(self.policy, tokens)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of the update rule; None if it has none."""
        return self.rule.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.rule.optimizer = optimizer

    def as_seen(self, rollouts: list[Rollout]) -> list[Rollout]:
        """The rollouts as a reward sees them: cut after `score.truncate_token`, if that is set."""
        return as_seen(rollouts, self.options["score"], self.policy.tokenizer, self.sampling)

    def bundle(self, path: str | Path) -> Path:
        """Write a folder for `operant replay` to repeat the refused step. Raises: OperantError if there is none."""
        options = {name: SOMETIMES["plain_option"](value) for name, value in self.option_values().items()}
        about = {"step": self.progress.step, "options": options, **self.named}
        return SOMETIMES["bundle"](path, self.refused, about, PolicyState(self.policy).state_dict())

    # --- on disk ------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> Path:
        """Write everything that `load` needs to go on bit-identically, in place of an earlier save of this learner.

        The folder is complete or, after a kill or with a full disk, as it was before. `operant.export` writes a model
        folder for other programs. With several ranks, every rank calls it. Raises: OperantError after an update that
        failed half-way.
        """
        return SOMETIMES["save"](self, Path(folder))

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        policy: object = None,
        tokenizer: object = None,
        reference: object = None,
        algorithm: object = None,
        engine: object = None,
        env: object = None,
        optimizer: object = None,
        lr_scheduler: object = None,
        **options: object,
    ) -> Self:
        """The learner that was saved in a folder: its next step is the one that it would have made next.

        What the constructor was given by name, and its options, are in the folder. Arguments that were Python objects,
        such as a loaded model or an optimizer, are to be given again, as they were at first.
        """
        objects = {"policy": policy, "tokenizer": tokenizer, "reference": reference, "algorithm": algorithm}
        objects |= {"engine": engine, "env": env, "optimizer": optimizer, "lr_scheduler": lr_scheduler}
        return SOMETIMES["load"](cls, Path(folder), objects, options)

    @contextmanager
    def engine_of(self, policy: Policy) -> Iterator[Engine]:
        """The engine with the weights of another policy, such as the reference; afterwards it has its own again.

        An engine in another process keeps its weights: here, the native one stands in for it.
        """
        with self.present(policy):
            if EngineParts.of(self.engine).own_weights:
                yield default_engine(policy)
                return
            self.engine.sync(policy, policy.version)
            try:
                yield self.engine
            finally:
                self.engine.sync(self.policy, self.progress.step)


def _task(query: object) -> Task:
    """A task with the query as its prompt; equal queries have equal ids."""
    prompt = query.tolist() if isinstance(query, torch.Tensor) else query
    return Task(f"query/{prompt!r}", prompt if isinstance(prompt, str) else list(prompt))
