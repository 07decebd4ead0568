"""Rollouts that are generated ahead: a thread plays those of later steps while a step is judged and trained on.

The rollouts of step s start when step s - n starts, with the weights from before its update, so a rollout is at most n
updates old and does not depend on timing. The thread has n + 1 copies of the trained weights: training changes its own
in place. Planned steps are part of the run's state, as their tasks and weights: a resumed run plays them again.

With `partial_rollout_tokens=k`, a step draws at most k tokens of each reply, and the next one continues those that have
not ended (`rollouts.carried`). The first step begins twice as many tasks as a step trains on, so that each later one
has enough replies which end; so does one after the batch has grown. With `rollouts_ahead=0` a step is planned when it
begins, and played here.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from operant import distributed
from operant.data import Order
from operant.envs import SingleTurn
from operant.machine import Clock
from operant.models.policy import Policy
from operant.models.reference import PolicyCopy
from operant.rollouts.carried import PartialGroup, continue_replies, new_groups
from operant.runs.config import TrainOptions
from operant.runs.scored_rollouts import Played, greedy_replies, play_part
from operant.sampling import Sampling
from operant.training.learner import Learner
from operant.training.parts import Progress
from operant.training.saved_learner import stateful_parts
from operant.types import Completion, Engine, EngineParts, OperantError, RewardFn, Task, require

TasksOf = Callable[[Sequence[int]], list[Task]]


@dataclass
class PlannedStep:
    """A step whose rollouts are generated ahead."""

    step: int
    """Its number, from 0: that of its random numbers."""
    version: int
    """The version of the weights that play it."""
    tasks: list[int]
    """The indices of its tasks, over all ranks, each once."""
    future: Future[tuple[Played, float]] | None = None
    """Its rollouts, and the seconds that they took; None: they have not been asked for."""
    trained: list[PartialGroup] = field(default_factory=list)
    """With `carry`, once it has been played: the replies that it trains on, in order."""


class KeptWeights:
    """Copies of the trained weights of a policy, by version: of as many versions in a row as there are copies."""

    def __init__(self, policy: Policy, count: int):
        self.copies = [PolicyCopy(policy, ("every", 1), values=policy.value_head is not None) for _ in range(count)]
        self.versions = set[int]()

    def keep(self, policy: Policy, version: int) -> None:
        """Copy the weights of the policy, in place of those that are `count` versions older."""
        self.of(version).update(policy, 0)
        self.versions = {known for known in self.versions if known > version - len(self.copies)} | {version}

    def of(self, version: int) -> PolicyCopy:
        """The copy for a version."""
        return self.copies[version % len(self.copies)]

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        return {str(version): self.of(version).own() for version in sorted(self.versions)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        self.versions = {int(version) for version in state}
        for version in self.versions:
            for name, weight in self.of(version).own().items():
                weight.copy_(state[str(version)][name])


class Ahead:
    """The steps that are planned, and the thread that plays them. tasks_of: from indices to what is attempted."""

    def __init__(self, learner: Learner, order: Order, reward: RewardFn | None, train: TrainOptions, tasks_of: TasksOf):
        self.learner, self.order, self.reward, self.tasks_of = learner, order, reward, tasks_of
        n, carry = train.rollouts_ahead, train.partial_rollout_tokens
        self.n, self.carry, self.per_step = n, carry, train.batch // train.samples
        self.planned = deque[PlannedStep]()
        self.begun = dict[int, list[PartialGroup]]()
        """By step, the groups that it continues."""
        self.weights: Any = None
        """What `InTurn` has given the engine, until the thread uses it."""
        self.kept = KeptWeights(learner.policy, n + 1 if n else 0)
        self.thread: ThreadPoolExecutor | None = None
        if carry:
            option, env, engine = f"partial_rollout_tokens={carry}", learner.env, learner.engine
            single, more = isinstance(env, SingleTurn), EngineParts.of(engine).generate_more
            require(single, f"{option} with the world {type(env).__name__}: it plays more than one reply")
            require(more, f"{option} with the engine {type(engine).__name__}: it cannot continue a reply; use native")
        if n:
            self._start()

    def _start(self) -> None:
        """Start the thread, and give it a learner of its own. Refuse what cannot be played ahead."""
        learner, policy, n, parts = self.learner, self.learner.policy, self.n, EngineParts.of(self.learner.engine)
        for what, kind, thing in (("world", "env", learner.env), ("engine", "engine", learner.engine)):
            if any(stateful_parts(kind, thing)):
                which = f"the {what} {type(thing).__name__}, which has a state (state_dict)"
                why = "a resumed run plays the steps ahead again, and the state has moved on; use rollouts_ahead=0"
                raise OperantError(f"rollouts_ahead={n} with {which}: {why}, or a {what} without a state")
        if parts.own_numbers and parts.follows and distributed.world() > 1:
            where = f"on several ranks with the engine {type(learner.engine).__name__}"
            why = "they share a server, whose weights change for all of them at once"
            raise OperantError(f"rollouts_ahead={n} {where}: {why}; use engine=ray, or rollouts_ahead=0")
        if not parts.own_weights and policy.rounds and policy.device.type == "cpu":
            where = "with model.precision=bfloat16 on a CPU"
            why = "training switches the kernels of attention, also for the thread that generates"
            raise OperantError(f"rollouts_ahead={n} {where}: {why}; use engine=ray, float32 or a GPU")
        threads, self.player = torch.get_num_threads(), copy(learner)
        self.thread = ThreadPoolExecutor(1, "ahead", torch.set_num_threads, (threads,))
        # The number of threads is one setting of the process, so it must not follow the size of each call.
        self.player.own = replace(learner.own, threads=threads)
        if parts.own_weights:
            learner.engine = InTurn(learner.engine, self)
        else:
            learner.own, self.player.engine = self.player.own, copy(learner.engine)

    def begin(self) -> None:
        """Begin a step: plan those ahead of it and start what is planned."""
        now, total = self.learner.progress.step, self.learner.total_steps
        first = self.planned[-1].step + 1 if self.planned else now
        for step in range(first, now + self.n + 1):
            self.planned.append(PlannedStep(step, now, self.order.take(self._count(now))))
        for planned in self.planned if self.thread is not None else ():
            if planned.version not in self.kept.versions:
                planned.version = now  # it is new, or a light checkpoint lacks its weights
                self.kept.keep(self.learner.policy, now)
            if planned.future is None and (total is None or planned.step < total):
                planned.future = self.thread.submit(self._play_ahead, planned)

    def _count(self, now: int) -> int:
        """Number of the tasks that one more step begins, planned behind the others."""
        if not self.carry:
            return self.per_step
        left = len(self.begun.get(now, []))
        for planned in self.planned:
            left = max(left + len(planned.tasks) - self.per_step, 0)
        return max(2 * self.per_step - left, 0)

    def tasks(self) -> list[int]:
        """The indices of the tasks that the step trains on, each once; with `carry`, once it has been played."""
        first = self.planned[0]
        return [group.task for group in first.trained] if self.carry else first.tasks

    def played(self) -> Played:
        """The rollouts of the step that has begun, in the phase `generate`. Raises: OperantError as `play`."""
        first = self.planned[0]
        if self.thread is None:
            return self._play(self.learner, first)
        assert first.future is not None  # `begin` has asked for it
        with self.learner.clock.timing("generate"):
            try:
                played, self.learner.clock.seconds["ahead"] = first.future.result()
            except OperantError:
                first.future = None  # it is asked for again
                raise
        return played

    def done(self) -> None:
        """The step that had begun has changed the weights: forget its rollouts."""
        self.begun.pop(self.planned.popleft().step, None)
        self.kept.versions &= {planned.version for planned in self.planned}

    def rest(self) -> None:
        """Wait until nothing is being played, so that the engine and the world are free."""
        wait([planned.future for planned in self.planned if planned.future is not None])

    def close(self) -> None:
        """End the thread, after the step that it plays."""
        if self.thread is not None:
            self.thread.shutdown(cancel_futures=True)

    def carried(self) -> dict[str, float]:
        """`rollout/carried`: the share of the replies of the step, which has been played, that an earlier one began."""
        if not self.carry:
            return {}
        first = self.planned[0]
        return {"rollout/carried": sum(g.step < first.step for g in first.trained) / max(len(first.trained), 1)}

    def _play(self, player: Learner, planned: PlannedStep) -> Played:
        """Play a step. It continues what the step before it has left, and begins its own tasks."""
        if not self.carry:
            return play_part(player, self.tasks_of(planned.tasks), self.reward)
        groups = [*self.begun.get(planned.step, []), *new_groups(planned.step, planned.tasks)]
        count = min(self.per_step, len(groups))  # the batch may have grown since the step was planned
        with player.clock.timing("generate"), player.threads(len(groups)):
            known = {"engine": player.engine, "tokenizer": player.policy.tokenizer, "sampling": player.sampling}
            known |= {"attempts": self.tasks_of, "seed": player.own.seed}
            played, planned.trained, rest = continue_replies(groups, count, self.carry, **known)
        self.begun[planned.step + 1] = rest
        tasks = [rollout.task for rollout in played]
        return played, greedy_replies(player, tasks, self.reward, range(len(tasks)))

    def _play_ahead(self, planned: PlannedStep) -> tuple[Played, float]:
        player = copy(self.player)
        player.clock, player.progress = Clock(), Progress()
        player.progress.step = planned.step
        self.weights = None
        player.engine.sync(self.kept.of(planned.version).policy, planned.version)
        return self._play(player, planned), sum(player.clock.take().values())

    def state_dict(self) -> dict[str, object]:
        """The planned steps, and the groups that the first of them continues; `kept` has the weights that play them."""
        planned = [{"step": p.step, "version": p.version, "tasks": p.tasks} for p in self.planned]
        if not self.carry:
            return {"planned": planned}
        first = self.planned[0].step if self.planned else self.learner.progress.step
        begun = [group.state_dict() for group in self.begun.get(first, [])]
        return {"planned": planned, "first": first, "begun": begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Plan the same steps, to be played again."""
        self.planned = deque(PlannedStep(**planned) for planned in state["planned"])
        if self.carry:
            self.begun = {state["first"]: [PartialGroup.of(group) for group in state["begun"]]}


class InTurn:
    """An engine with weights of its own that the thread plays with, as the rest of the run uses it: in turn.

    Weights are copied when they are needed, not after each step.
    """

    own_weights = True

    def __init__(self, engine: Engine, ahead: Ahead):
        self.engine, self.ahead = engine, ahead
        self.sync(ahead.learner.policy, ahead.learner.policy.version)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["engine"], name)

    def sync(self, policy: Policy, version: int) -> None:
        self.wanted = policy, version

    def generate(self, prompts: Sequence[list[int]], sampling: Sampling, keys: Sequence[int]) -> list[Completion]:
        return self._ready().generate(prompts, sampling, keys)

    def choose(
        self, prompts: Sequence[list[int]], options: Sequence[list[list[int]]], sampling: Sampling, keys: Sequence[int]
    ) -> list[tuple[int, Completion]]:
        return self._ready().choose(prompts, options, sampling, keys)

    def _ready(self) -> Engine:
        self.ahead.rest()
        if self.ahead.weights is not self.wanted:
            self.engine.sync(*self.wanted)
            self.ahead.weights = self.wanted
        return self.engine
