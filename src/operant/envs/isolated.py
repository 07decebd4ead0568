"""Worlds in worker processes: they may raise, hang or crash, and it costs one episode.

env = IsolatedEnv("my_world.py:Maze", {"size": 5}, workers=16, isolation={"timeout": 10})
run = operant.train(..., env=env)
"""

import inspect
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from operant.rollouts.answers import fault
from operant.sandbox.pool import START, Job, Pool, Response
from operant.sandbox.process import Limits
from operant.sandbox.serialise import task_to_plain
from operant.sandbox.spec import spec_of
from operant.types import Env, Failure, OperantError, Step, Task

__all__ = ["DEFAULTS", "IsolatedEnv", "isolated"]

DEFAULTS = {
    "timeout": 60.0,
    "memory_gb": 4.0,
    "processes": 512,
    "level": "auto",
    "on_error": "drop",
    "on_timeout": "drop",
}
"""The options `isolation.*` that apply to a world, with the values that they have outside of a run."""


def isolated(spec: str, **options: Any) -> "IsolatedEnv":
    """The world `module:World` or `file.py:World` with its options, each episode in a process of its own.

    Raises: OperantError as `IsolatedEnv` does.
    """
    return IsolatedEnv(spec, options)


def isolated_maker(spec: str, world: Any) -> Callable[..., "IsolatedEnv"]:
    """What `env="isolated:SPEC"` calls: it has the arguments of `world`, which SPEC names, and makes it isolated."""

    lacking = [name for name in ("reset", "step") if inspect.isclass(world) and not hasattr(world, name)]
    if lacking:
        raise OperantError(f"environment isolated:{spec} lacks the methods {', '.join(lacking)} (docs/worlds.md)")

    def make(**options: Any) -> "IsolatedEnv":
        return isolated(spec if ":" in spec else spec_of(world), **options)

    make.__signature__ = inspect.signature(world)  # pyright: ignore[reportFunctionMemberAccess]
    make.__annotations__ = getattr(world.__init__ if inspect.isclass(world) else world, "__annotations__", {})
    make.pays = getattr(world, "pays", True)  # pyright: ignore[reportFunctionMemberAccess]
    return make


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

    def __init__(
        self,
        world: str | Callable[..., Env],
        options: Mapping[str, Any] | None = None,
        *,
        workers: int = 64,
        isolation: Mapping[str, Any] | None = None,
    ):
        self.spec, self.options, self.most = spec_of(world), dict(options or {}), workers
        self.__name__ = self.spec.rpartition(":")[2]
        self._own, self._limits = dict(isolation or {}), DEFAULTS | dict(isolation or {})
        self._check_limits()
        memory = self._limits["memory_gb"]
        limits = Limits(memory and int(memory * (1 << 30)), self._limits["processes"], self._limits["level"])
        job = Job("operant.envs.world_job:world", {"spec": self.spec, "options": self.options})
        self._make_pool = lambda: Pool(job, limits)
        self._pools: list[Pool] = []
        self._pool_of: dict[int, Pool] = {}
        self._pays: bool | None = None

    def under(self, isolation: Any) -> "IsolatedEnv":
        """The world with a run's `IsolationOptions`; its own values win."""
        theirs = {name: getattr(isolation, name) for name in DEFAULTS}
        theirs["on_error"] = theirs["on_error"] or DEFAULTS["on_error"]
        made = IsolatedEnv(self.spec, self.options, workers=self.most, isolation=theirs | self._own)
        made._own = self._own
        return made

    @property
    def level(self) -> str:
        """How it is ended and limited on this machine; empty before `check` and after `close`."""
        return self._pools[0].level if self._pools else ""

    @property
    def pays(self) -> bool:
        """Whether the world pays rewards. It is asked in a worker, which ends at once if none was running."""
        if self._pays is None:
            idle = not self._pools
            self.check()
            if idle:  # who asks need not be who plays: a run plays in a copy, and closes that one alone
                self.close()
        return bool(self._pays)

    def check(self) -> None:
        """Start a worker and make a world in it. Raises: OperantError with the reason if that fails."""
        [pool] = self._started(1)
        response = pool.run([{}], until=time.monotonic() + max(self._limits["timeout"], START))[0]
        if response.outcome != "ok":
            raise OperantError(f"isolated world {self.spec!r} with options {self.options} {response.reason}")
        self._pays = bool(response.content["pays"])

    def close(self) -> None:
        """End the workers, with every process that they have started."""
        self._in_parallel(Pool.close, self._pools)

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step]:
        """Begin episodes. Raises: OperantError for a task that is no plain data, or if no worker can be started."""
        requests = {slot: {"slot": slot, "task": task_to_plain(task)} for slot, task in tasks.items()}
        self._pool_of = dict(zip(tasks, self._started(len(tasks))))
        return self._ask(requests)

    def step(self, replies: Mapping[int, str]) -> dict[int, Step]:
        """Send each reply to its episode. Raises: OperantError if a failure stops the run."""
        return self._ask({slot: {"slot": slot, "reply": reply} for slot, reply in replies.items()})

    # --- inside -------------------------------------------------------------------------------------------------------

    def _check_limits(self) -> None:
        """Raises: OperantError for an unknown name or a value that is not allowed."""
        for name, value in self._limits.items():
            if name not in DEFAULTS:
                raise OperantError(f"isolation.{name} does not apply to a world; these do: {', '.join(DEFAULTS)}")
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
            good, rule = {
                "timeout": (number, "a number of seconds above 0"),
                "memory_gb": (number or value is None, "a number above 0, or None"),
                "on_error": (value in ("drop", "stop"), "drop or stop, because an episode that failed has no score"),
                "on_timeout": (value in ("drop", "stop"), "drop or stop, because an episode that failed has no score"),
            }.get(name, (True, ""))
            if not good:
                raise OperantError(f"isolation.{name}={value!r} for world {self.__name__!r}: it must be {rule}")
        if self.most < 1:
            raise OperantError(f"workers={self.most} for world {self.__name__!r}: it must be at least 1")

    def _started(self, count: int) -> list[Pool]:
        """The first `count` workers, running, without the orphans of earlier episodes."""

        def start(pool: Pool) -> None:
            if pool.level:
                pool.run([], until=0.0)  # kills orphans
            else:
                pool.start(max(self._limits["timeout"], START))

        self._pools += [self._make_pool() for _ in range(count - len(self._pools))]
        try:
            self._in_parallel(start, self._pools[:count])
        except OperantError as error:
            raise OperantError(f"isolated world {self.spec!r}: {error}") from error
        return self._pools[:count]

    def _in_parallel(self, work: Callable[[Any], Any], items: list[Any]) -> list[Any]:
        with ThreadPoolExecutor(max(len(items), 1)) as threads:
            return list(threads.map(work, items))

    def _ask(self, requests: Mapping[int, Any]) -> dict[int, Step]:
        until = time.monotonic() + self._limits["timeout"]

        def run(slot: int) -> Response:
            return self._pool_of[slot].run([requests[slot]], until=until, keep_orphans=True)[0]

        return dict(zip(requests, map(self._read, self._in_parallel(run, list(requests)))))

    def _read(self, response: Response) -> Step:
        """The step in a response, which comes from an untrusted process; if there is none, how the world failed.

        Raises: OperantError if the failure stops the run.
        """
        kind: Failure = "timeout" if response.outcome == "timeout" else "raised" if response.reusable else "crashed"
        reason = response.reason
        if response.outcome == "ok":
            try:
                step = Step(**response.content)
                reason = fault(step)
            except TypeError:
                kind, reason = "crashed", "has lost the process of its episode"
            else:
                if reason is None:
                    return step
        if self._limits["on_timeout" if kind == "timeout" else "on_error"] == "stop":
            raise OperantError(f"world {self.__name__!r} {reason}; fix it, or let such episodes be dropped")
        return Step(failed=kind, info={"failure": reason})
