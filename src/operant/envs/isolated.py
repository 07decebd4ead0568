"""Worlds in worker processes, which may raise, hang or crash: one process for each episode, or a few for all of them,
on this machine or on the nodes of Ray.

env = IsolatedEnv("my_world.py:Maze", {"size": 5}, workers=16, isolation={"timeout": 10})
env = WorkerEnv("my_world.py:Maze", {"size": 5}, workers=4)
env = RayEnv("my_world.py:Maze", {"size": 5}, workers=4, address="auto")
run = operant.train(..., env=env)
"""

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import Any, Self, TypeVar

from operant.envs.functions import declared_as, maker
from operant.rollouts.answers import read_step
from operant.sampling import TokenCount
from operant.sandbox.pool import START, Job, Pool, Response
from operant.sandbox.process import Limits
from operant.sandbox.ray import WORLDS, RayPool, RaySession
from operant.sandbox.serialise import task_from_plain, task_to_plain
from operant.sandbox.worker import spec_of
from operant.types import Env, Failure, OperantError, Step, Task, require, said_of

Item = TypeVar("Item")
Answer = TypeVar("Answer")

__all__ = ["DEFAULTS", "FORMS", "IsolatedEnv", "RayEnv", "WorkerEnv"]

DEFAULTS: dict[str, Any] = {"timeout": 60.0, "memory_gb": 4.0, "processes": 512, "level": "auto"}
"""The options `isolation.*` that apply to a world, with the values that they have outside of a run."""
DEFAULTS |= {"on_error": "drop", "on_timeout": "drop"}


def isolated_maker(prefix: str, spec: str, world: object) -> Callable[..., "IsolatedEnv"]:
    """What `env="PREFIX:SPEC"` calls, for a prefix of `FORMS`: it has the arguments of `world`, which SPEC names, and
    those of the form that can be options of a run."""
    lacking = [name for name in ("reset", "step") if inspect.isclass(world) and not hasattr(world, name)]
    require(not lacking, f"environment {prefix}:{spec} lacks the methods {', '.join(lacking)} (docs/worlds.md)")
    place, make_world, form = spec if ":" in spec else spec_of(world), maker(world), FORMS[prefix]
    form_parameters = [p for p in inspect.signature(form).parameters.values() if p.name in form.options_of_runs]
    signature = inspect.signature(make_world)
    for taken in [p.name for p in form_parameters if p.name in signature.parameters]:
        what = f"its argument {taken!r} is an option of {prefix} too"
        raise OperantError(f"environment {prefix}:{spec}: {what}; rename the world's")

    def make(**options: object) -> "IsolatedEnv":
        of_form = {p.name: options.pop(p.name) for p in form_parameters if p.name in options}
        return form(place, options, **of_form)

    parameters = [*signature.parameters.values(), *form_parameters]
    in_order = sorted(parameters, key=lambda p: p.kind is p.VAR_KEYWORD)
    make.__signature__ = signature.replace(parameters=in_order)  # pyright: ignore[reportFunctionMemberAccess]
    annotated = make_world.__init__ if inspect.isclass(make_world) else make_world
    make.__wrapped__ = annotated  # pyright: ignore[reportFunctionMemberAccess]  its annotations are read there
    make.__annotations__ = {**inspect.get_annotations(annotated), **{p.name: p.annotation for p in form_parameters}}
    return declared_as(make_world, make)


class IsolatedEnv:
    """An `Env` whose episodes are played in worker processes, one process for each episode that is live.

    world: `module:World`, `file.py:World`, or a class or function that another process can find by its name. For each
    episode it is called anew with `options` and returns an `Env`, which sees the slot of this episode only. Nothing is
    kept from one episode to the next, except what the world's module keeps for itself.
    workers: most episodes at a time; a worker process stays for later episodes until `close` or the end of the run.
    isolation: values of the run's options `isolation.*` that differ for this world. `timeout`: seconds for a call of
    `reset` or `step`, in which the worlds of all episodes answer at the same time; `on_error`, `on_timeout`: drop (the
    episode ends and is left out) or stop (the run stops).
    Raises: OperantError for a world that no other process can find, or a value that is not allowed.
    """

    anew = True
    """Whether the world is made anew for each episode."""
    options_of_runs: tuple[str, ...] = ()
    """The arguments that are options of a run, beside the world's own."""

    def __init__(
        self,
        world: str | Callable[..., Env],
        options: Mapping[str, object] | None = None,
        *,
        workers: int = 64,
        isolation: Mapping[str, object] | None = None,
    ):
        self.spec, self.options, self.workers = spec_of(world), dict(options or {}), workers
        self.__name__ = self.spec.rpartition(":")[2]
        self._overrides = dict(isolation or {})
        self._limits = DEFAULTS | self._overrides
        self._check_limits()
        self._pools: list[Pool | RayPool] = []
        self._pool_of: dict[int, Pool | RayPool] = {}
        self._about: dict[str, Any] = {}
        self._counting: dict[str, Any] | None = None
        self._evaluating, self._evaluation = False, None

    def under(self, isolation: object) -> Self:
        """A copy of the world with a run's `IsolationOptions`; its own values win.

        Raises: OperantError for a value that is not allowed.
        """
        of_run = {name: getattr(isolation, name) for name in DEFAULTS}
        of_run["on_error"] = of_run["on_error"] or DEFAULTS["on_error"]
        world = copy(self)
        world._limits, world._pools, world._pool_of, world._evaluation = of_run | self._overrides, [], {}, None
        world._check_limits()
        return world

    @property
    def level(self) -> str:
        """How it is ended and limited on this machine; empty before `check` and after `close`."""
        return self._pools[0].level if self._pools else ""

    @property
    def most(self) -> int | None:
        """The largest number of episodes at the same time."""
        return self.workers

    @property
    def pays(self) -> bool:
        """Whether the world pays rewards."""
        return bool(self._known("pays"))

    @property
    def games(self) -> Callable[[str], list[Task]] | None:
        """What returns the world's own tasks for a split; None if it has none."""
        return self.games_of if self._known("games") else None

    @property
    def measure(self) -> Callable[[Callable[[str], int], int | None], None] | None:
        """What gives the worlds their count of tokens and the room of a prompt; None if they have no such method."""
        return self._count_with if self._known("measure") else None

    def _count_with(self, count: Callable[[str], int], room: int | None) -> None:
        """Workers start with this, so those that run are ended. A tokenizer in Python cannot be sent to them."""
        plain = count.plain() if isinstance(count, TokenCount) else None
        self._counting = {"tokenizer": plain, "room": room} if plain else None
        self._end()
        self._pools, self._pool_of, self._evaluation = [], {}, None
        self.check()  # what `measure` raises is said before training

    def on_leave(self, slots: Sequence[int]) -> None:
        """Tell the worlds which episodes go no further. Raises: OperantError for what a world's `on_leave` raises."""
        leaving = {slot: None for slot in slots if slot in self._pool_of and self._known("on_leave")}
        for raised in [step.info["raised"] for step in self._ask("leave", leaving).values() if "raised" in step.info]:
            raise OperantError(f"world {self.__name__!r}: on_leave raised {raised}")

    @property
    def for_evaluation(self) -> Callable[[], "IsolatedEnv"] | None:
        """What returns the world in which a policy is measured, with workers of its own; None if it is this one."""
        return self._copy_for_evaluation if self._known("for_evaluation") and not self._evaluating else None

    def _copy_for_evaluation(self) -> "IsolatedEnv":
        if self._evaluation is None:
            self._evaluation = world = copy(self)
            world._evaluating, world._pools, world._pool_of = True, [], {}
        return self._evaluation

    def check(self) -> None:
        """Start a worker and make a world in it. Raises: OperantError with the reason if that fails."""
        about = self._ask_one(self._started(1)[0], {"call": "about"})
        out = "no worker is sent: leave workers: or isolated: out"
        require(not about.pop("reads"), f"world {self.__name__!r} reads tokens, which {out}")
        self._about = about

    def close(self) -> None:
        """End the workers, with every process that they have started."""
        self._end()
        if self._evaluation is not None:
            self._evaluation.close()

    def _end(self) -> None:
        self._in_parallel(self._pools, lambda pool: pool.close())

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step]:
        """Begin episodes. Raises: OperantError for a task that is no plain data, or if no worker can be started."""
        plain = {slot: task_to_plain(task) for slot, task in tasks.items()}
        self._pool_of = dict(zip(tasks, self._started(len(tasks))))
        return self._ask("reset", plain, lambda pool: {"version": 0, "state": None})

    def step(self, replies: Mapping[int, str]) -> dict[int, Step]:
        """Send each reply to its episode. Raises: OperantError if a failure stops the run."""
        return self._ask("step", replies)

    def _check_limits(self) -> None:
        """Raises: OperantError for an unknown name or a value that is not allowed."""
        for name, value in self._limits.items():
            require(name in DEFAULTS, f"isolation.{name} does not apply to a world; these do: {', '.join(DEFAULTS)}")
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
            good, rule = True, ""
            if name in ("timeout", "memory_gb"):
                good = number or (name == "memory_gb" and value is None)
                rule = "a number of seconds above 0" if name == "timeout" else "a number above 0, or None"
            elif name in ("on_error", "on_timeout"):
                good, rule = value in ("drop", "stop"), "drop or stop, because an episode that failed has no score"
            require(good, f"isolation.{name}={value!r} for world {self.__name__!r}: it must be {rule}")
        require(self.workers >= 1, f"workers={self.workers} for world {self.__name__!r}: it must be at least 1")

    def _started(self, count: int) -> list[Pool | RayPool]:
        """The first `count` workers, running, without the orphans of earlier episodes."""

        def start(pool: Pool | RayPool) -> None:
            if pool.level and self.anew:
                pool.run([], until=0.0)  # kills orphans
            elif not pool.level:
                pool.start(max(self._limits["timeout"], START))

        memory, kept = self._limits["memory_gb"], {name: self._limits[name] for name in ("level", "processes")}
        limits = Limits(memory=memory and int(memory * (1 << 30)), **kept)
        argument = {"spec": self.spec, "options": self.options, "anew": self.anew}
        argument |= {"counting": self._counting, "evaluating": self._evaluating}
        job = Job("operant.envs.world_job:WorldHandler", argument)
        self._pools += [self.pool(job, limits) for _ in range(count - len(self._pools))]
        with said_of(f"isolated world {self.spec!r}"):
            self._in_parallel(self._pools[:count], start)
        return self._pools[:count]

    def pool(self, job: Job, limits: Limits) -> Pool | RayPool:
        """What holds one worker."""
        return Pool(job, limits)

    def _in_parallel(self, items: Sequence[Item], work: Callable[[Item], Answer]) -> list[Answer]:
        with ThreadPoolExecutor(max(len(items), 1)) as threads:
            return list(threads.map(work, items))

    def _known(self, name: str) -> Any:
        """What the world says about itself. It is asked in a worker, which ends at once if none was running."""
        if not self._about:
            idle = not self._pools
            self.check()
            if idle:  # who asks need not be who plays: a run plays in a copy, and closes that one alone
                self._end()
        return self._about[name]

    def games_of(self, split: str) -> list[Task]:
        """The world's own tasks, from a worker. Raises: OperantError as `check` does."""
        plain = self._ask_one(self._started(1)[0], {"call": "games", "split": split})
        return [task_from_plain(task) for task in plain]

    def _ask_one(self, pool: Pool | RayPool, request: dict[str, object]) -> Any:
        until = time.monotonic() + max(self._limits["timeout"], START)
        response = pool.run([request], until=until, keep_orphans=True)[0]
        require(response.outcome == "ok", f"isolated world {self.spec!r} with options {self.options} {response.reason}")
        return response.content

    def _ask(
        self,
        call: str,
        given: Mapping[int, object],
        more: Callable[[Pool | RayPool], dict[str, object]] = lambda pool: {},
    ) -> dict[int, Step]:
        """The answer for each slot; the workers answer at the same time. more: what else a worker's request has."""
        until, slots_of = time.monotonic() + self._limits["timeout"], dict[Pool | RayPool, list[int]]()
        for slot in given:
            slots_of.setdefault(self._pool_of[slot], []).append(slot)

        def run(pool: Pool | RayPool) -> dict[int, Step]:
            slots = slots_of[pool]
            request = {"call": call, "given": [[slot, given[slot]] for slot in slots], **more(pool)}
            response = pool.run([request], until=until, keep_orphans=True)[0]
            answers, fine = response.content, isinstance(response.content, list) and len(response.content) == len(slots)
            if not fine and response.reusable and not self.anew:
                pool.close()  # its world is in an unknown state
            return {slot: self._read(response, answers[i] if fine else None) for i, slot in enumerate(slots)}

        answered = {slot: step for steps in self._in_parallel(list(slots_of), run) for slot, step in steps.items()}
        return {slot: answered[slot] for slot in given}

    def _read(self, response: Response, answer: object) -> Step:
        """The step in a worker's answer, which is not trusted; if there is none, how the world failed."""
        kind: Failure = "timeout" if response.outcome == "timeout" else "raised" if response.reusable else "crashed"
        reason = response.reason
        if response.outcome == "ok" and isinstance(answer, dict) and "raised" in answer:
            reason = str(answer["raised"])
        elif response.outcome == "ok":
            step, reason = read_step(answer)
            if step is None:
                kind, reason = "crashed", "has lost the process of its episode"
            elif reason is None:
                return step
        stops = self._limits["on_timeout" if kind == "timeout" else "on_error"] == "stop"
        require(not stops, f"world {self.__name__!r} {reason}; fix it, or let such episodes be dropped")
        return Step(failed=kind, info={"failure": reason})


class WorkerEnv(IsolatedEnv):
    """An `Env` whose episodes are spread over a few worker processes, each with one world for many of them.

    world, options, isolation: as in `IsolatedEnv`, except that the world is made once in each worker, and keeps its
    state. Each slot is stepped by a call of its own, so an exception costs one episode. A worker that crashes, or does
    not answer in time, costs all episodes that it plays, and is started again.
    workers: number of processes; the i-th episode of a `reset` is played by worker i modulo `workers`, so results do
    not depend on timing. A world that plays at most `most` episodes plays that many in each worker.
    waves: the live episodes are cut into this many parts; while the world answers one of them, the replies of the next
    are generated. With 1, all live episodes are generated together, nothing overlaps, and the results are bit-identical
    to those of the world in this process.
    Raises: OperantError as `IsolatedEnv` does, and for fewer than one worker or wave.
    """

    anew = False
    options_of_runs = ("workers", "waves")

    def __init__(
        self,
        world: str | Callable[..., Env],
        options: Mapping[str, object] | None = None,
        *,
        workers: int = 4,
        waves: int = 1,
        isolation: Mapping[str, object] | None = None,
    ):
        super().__init__(world, options, workers=workers, isolation=isolation)
        self.waves = waves
        """Parts that the live episodes are cut into."""
        require(waves >= 1, f"waves={waves} for world {self.__name__!r}: it must be at least 1")
        self._states: list[Any] = [None] * workers
        self._version = 0

    @property
    def most(self) -> int | None:
        """The largest number of episodes at the same time; None: no limit."""
        most = self._known("most")
        return None if most is None else most * self.workers

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step]:
        """Begin episodes. Raises: OperantError as `IsolatedEnv.reset` does."""
        plain = {slot: task_to_plain(task) for slot, task in tasks.items()}
        pools = self._started(self.workers)
        self._pool_of |= {slot: pools[i % self.workers] for i, slot in enumerate(tasks)}
        return self._ask("reset", plain, lambda pool: self._state_of(pools.index(pool)))

    @property
    def state_dict(self) -> Callable[[], dict[str, object]] | None:
        """What returns the states of the worlds in all workers; None if they have none."""
        return self.states if self._known("state_dict") else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the states; each worker loads its own with the next `reset`.

        Raises: OperantError for the states of another number of workers.
        """
        count = len(state["workers"])
        how = f"is that of {count} workers, and there are {self.workers}; set workers={count}"
        require(count == self.workers, f"the state of world {self.__name__!r} {how}")
        self._states, self._version = list(state["workers"]), self._version + 1

    def _state_of(self, worker: int) -> dict[str, object]:
        return {"version": self._version, "state": None if self._evaluating else self._states[worker]}

    def states(self) -> dict[str, object]:
        """The states of the worlds in all workers. Raises: OperantError for a state that is no plain data."""
        requests = [{"call": "state", **self._state_of(i)} for i in range(self.workers)]
        pairs = list(zip(self._started(self.workers), requests))
        self._states = self._in_parallel(pairs, lambda pair: self._ask_one(*pair))
        return {"workers": self._states}


class RayEnv(WorkerEnv):
    """A `WorkerEnv` whose worker processes live in actors of Ray, on this machine or on the nodes of a cluster.

    The episodes are those of a `WorkerEnv` with as many workers, to the bit. An actor or node that dies costs the
    episodes that it plays, as a worker that crashes does, and the actor is started again for later ones.
    workers: number of actors, with one worker process each. address: the cluster (`host:port` or `auto`); None: the Ray
    that this process uses already, or one of its own, which ends with `close` if nothing else uses it. cpus: what Ray
    reserves for a worker. The other arguments are those of `WorkerEnv`.
    Raises: OperantError as `WorkerEnv` does, if Ray is not installed or does not answer, or lacks room for the workers.
    """

    options_of_runs = ("workers", "waves", "address", "cpus")

    def __init__(
        self,
        world: str | Callable[..., Env],
        options: Mapping[str, object] | None = None,
        *,
        workers: int = 4,
        waves: int = 1,
        address: str | None = None,
        cpus: float = 1.0,
        isolation: Mapping[str, object] | None = None,
    ):
        super().__init__(world, options, workers=workers, waves=waves, isolation=isolation)
        self.session = RaySession(WORLDS, address=address, count=workers, cpus=cpus)
        """Shared with the copies of this world: the first that is closed ends it for all."""

    def pool(self, job: Job, limits: Limits) -> RayPool:
        """What holds one worker, on some node."""
        return RayPool(job, limits, self.session)

    def close(self) -> None:
        """End the workers with their actors, and Ray if it was started here and nothing else uses it."""
        super().close()
        self.session.end()


FORMS = {"isolated": IsolatedEnv, "workers": WorkerEnv, "ray": RayEnv}
"""The forms of worlds in worker processes, by the prefix of their names."""


def without_form(name: object) -> object:
    """`rooms` of `workers:rooms`; what is no name, or has no such prefix, as it is."""
    return name.partition(":")[2] if isinstance(name, str) and name.partition(":")[0] in FORMS else name
