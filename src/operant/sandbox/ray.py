"""Ray: one connection of the process for engines, worlds and programs, and pools and jails of other machines.

session = RaySession(WORLDS, address=None, count=4)
session.begin()       # connects to Ray, or starts one on this machine
pool = RayPool(Job("operant.envs.world_job:WorldHandler", argument), Limits(), session)
session.end()         # ends what was started, after the last session that uses it

An actor is a transport: it `Holds` a `Pool` or a `Jail` of its node, where the same limits apply. `engines/ray.py` has
the actors that generate.
"""

import os
import secrets
import socket
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from math import inf
from queue import Queue
from typing import Any, NamedTuple, TypeVar

from operant.sandbox.jail import Jail, JailOptions, Program, Verdict
from operant.sandbox.levels import UNTRUSTED
from operant.sandbox.pool import LATE, Job, Pool, Response
from operant.sandbox.process import Limits
from operant.types import OperantError, cores, require, shown

__all__ = ["ENGINE", "PROGRAMS", "WORLDS", "RayActors", "RayJail", "RayPool", "RaySession", "answers", "ask_all"]
START = 600.0
"""Seconds within which actors have to be ready."""
PER_CORE = 4
"""Most actors of one use for each core of this machine, of a Ray that is started here: each is a process."""
PLENTY = 4096
"""Processors of a Ray that is started here. They are only numbers there, and no actor is to wait for another's."""
GRACE = 10.0
"""Seconds that an answer may take on its way, beside the time that its work has."""
LOOK = 3.0
"""Seconds between two looks at whether Ray has a node left, while an answer is awaited."""
DEATHS = 3

Actor = TypeVar("Actor")
Part = TypeVar("Part")


class Names(NamedTuple):
    """What messages call a use of Ray, and its options."""

    part: str
    address: str
    count: str
    cpus: str
    """The option that lowers the processors of an actor."""


ENGINE = Names("engine ray", "engine.address", "engine.actors", "engine.cpus")
WORLDS = Names("worlds on Ray", "env.address", "env.workers", "env.cpus")
PROGRAMS = Names("programs on Ray", "reward.ray_address", "reward.ray", "reward.at_once")


class RaySession:
    """The use of this process's Ray by an engine, a world or a reward.

    names: what messages call it. address: the cluster (`host:port` or `auto`); None: the Ray that the process is
    connected to, or else one of this process alone. count, cpus, gpus: actors, and what Ray reserves for each.
    """

    _lock = threading.RLock()
    _open: tuple["RaySession", ...] = ()
    """Those that use the Ray to which the first of them has connected."""

    def __init__(
        self, names: Names, *, address: str | None = None, count: int = 1, cpus: float = 1.0, gpus: float = 0.0
    ):
        require(find_spec("ray") is not None, f"{names.part} needs the package ray: pip install 'operant[ray]'")
        for kind, each in (("cpus", cpus), ("gpus", gpus)):
            require(0 <= each < inf, f"{names.cpus.replace('cpus', kind)}={each!r}: it must be at least 0")
        ready = "ray" in sys.modules and sys.modules["ray"].is_initialized()
        if address is None and not ready and count > PER_CORE * cores():
            how = f"each actor is a process: use at most {PER_CORE} for each core, or a cluster ({names.address})"
            raise OperantError(f"{names.count}={count}: this machine has {cores()} cores, and {how}")
        self.names, self.address, self.count = names, address, count
        self.placed = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0}

    def begin(self) -> None:
        """Connect to Ray, or start one on this machine, unless this process is connected already.

        Ray's statistics and its dashboard are off. Some of its servers listen on every network interface: that of this
        machine answers those who know a token of its own only.
        A Ray of the caller's own is used, and left alone at the end.
        """
        with RaySession._lock:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            os.environ.setdefault("RAY_worker_niceness", "0")  # otherwise actors get what the processor has left
            if self.address is None and "ray" not in sys.modules:  # Ray reads this when it is imported
                os.environ.setdefault("RAY_AUTH_MODE", "token")
                os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            import ray

            if not ray.is_initialized():
                connect(self.address, self.names)
                RaySession._open = ()
                mine = True
            elif self in RaySession._open:
                return
            elif mine := bool(RaySession._open):
                first = RaySession._open[0]
                if self.address not in (None, first.address):
                    raise OperantError(
                        f"{self.names.address}={shown(self.address)}: this process uses another Ray already, with "
                        f"{first.names.address}={shown(first.address)}; give both the same address"
                    )
            RaySession._open += (self,) if mine else ()
            have = ray.cluster_resources()
            for kind in ("CPU", "GPU"):
                each, option = self.placed[f"num_{kind.lower()}s"], f"{kind.lower()}s"
                if self.count * each > have.get(kind, 0.0):
                    self.end()
                    raise OperantError(
                        f"{self.names.count}={self.count} with {each:g} {kind} each: Ray has {have.get(kind, 0.0):g}; "
                        f"use fewer, or lower {self.names.cpus.replace('cpus', option)}"
                    )

    def end(self) -> None:
        """Disconnect from Ray, if nothing else uses it: one that was started here ends."""
        with RaySession._lock:
            if self not in RaySession._open:
                return
            RaySession._open = tuple(session for session in RaySession._open if session is not self)
            if not RaySession._open:
                import ray

                ray.shutdown()

    def actor(self, kind: type, *arguments: object) -> Any:
        """A new actor of a class. `answers` waits for it."""
        import ray

        return ray.remote(**self.placed)(kind).remote(*arguments)


class RayActors:
    """The base of what has some actors."""

    session: RaySession
    """Where they live, and their number."""
    actors: list[Any]
    """Empty after `close`."""

    def close(self) -> None:
        """End the actors and, if it was begun here and nothing else uses it, Ray."""
        import ray

        for actor in self.actors if ray.is_initialized() else ():
            ray.kill(actor)
        self.actors = []
        self.session.end()


def connect(address: str | None, names: Names) -> None:
    """Connect to the Ray at the address, or start one."""
    import ray

    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        try:
            socket.create_connection((host, int(port)), 5.0).close()
        except OSError as error:
            raise OperantError(f"{names.address}={shown(address)}: no Ray answers there ({error})") from error
    started: dict[str, Any] = {"num_cpus": PLENTY, "include_dashboard": False}
    started["_system_config"] = {"prestart_worker_first_driver": False}  # it would start a process for each processor
    answer: Queue[Exception | None] = Queue()

    def stay() -> None:
        """Connect, and keep the thread: on Linux, the processes that it has started end with it."""
        try:
            more = {} if address else started
            ray.init(address=address or "local", log_to_driver=False, logging_level="error", **more)
        except Exception as error:
            answer.put(error)
            return
        answer.put(None)
        threading.Event().wait()

    # In the main thread, Ray would replace the handler of SIGTERM, which ends a run after its step.
    threading.Thread(target=stay, name="ray", daemon=True).start()
    if (error := answer.get()) is not None:
        why = " ".join(str(error).split())[:300]
        what = "Ray cannot be started" if address is None else f"{names.address}={shown(address)}: no Ray answers there"
        raise OperantError(f"{what} ({type(error).__name__}: {why})") from error


def answers(asked: Sequence[Any], names: Names, seconds: float = 0.0) -> list[Any]:
    """What new actors answer, once all have been made. seconds: what the answers may take after that."""
    from ray import exceptions, get

    waiting, until = list(asked), time.monotonic() + START + seconds
    try:
        while waiting:
            ready, waiting = some_ready(waiting, names)
            get(ready)  # an error of one does not wait for the others
            if waiting and time.monotonic() > until:
                raise OperantError(
                    f"Ray has not started {len(asked)} actors within {START:.0f} s: others may use its processors"
                )
        return get(list(asked))
    except exceptions.RayTaskError as error:
        raise explained(error.cause, names) from error
    except exceptions.RayActorError as error:
        if (cause := getattr(error, "cause", None)) is not None:
            raise explained(cause, names) from error
        why = " ".join(str(error).split())[:200]
        raise OperantError(
            f"one of {len(asked)} actors of {names.part} died before it was ready: {why}; start the run again, "
            f"with fewer {names.count} if the memory ran out"
        ) from error


def ask_all(
    actors: list[Actor],
    parts: Sequence[Part],
    ask: Callable[[Actor, Part], object],
    start: Callable[[], Actor],
    names: Names,
    deaths: int,
    remedy: str,
) -> list[Any]:
    """The answer to each part, in order. Each actor has one part at a time, and takes the next when it has answered.

    ask: sends a part to an actor. start: makes an actor in place of one that has died, whose part is then asked again.
    Raises: OperantError of an actor, or with `remedy` if more than `deaths` of them die.
    """
    from ray import exceptions, get

    found: list[Any] = [None] * len(parts)
    waiting, free, died = deque(range(len(parts))), deque(range(len(actors))), 0
    asked: dict[Any, tuple[int, int]] = {}
    while waiting or asked:
        while waiting and free:
            actor, part = free.popleft(), waiting.popleft()
            asked[ask(actors[actor], parts[part])] = actor, part
        while not (ready := some_ready(list(asked), names)[0]):
            pass
        done = ready[0]
        actor, part = asked.pop(done)
        try:
            found[part] = get(done)
        except exceptions.RayActorError as error:
            died += 1
            why = " ".join(str(error).split())[:300]
            if died > deaths:
                text = f"{died} actors of {names.part} died in one call, the last one: {why}; {remedy}"
                raise OperantError(text) from error
            warnings.warn(f"actor {actor} of {names.part} died and is started again: {why}", stacklevel=3)
            actors[actor] = start()
            waiting.appendleft(part)
        except exceptions.RayTaskError as error:
            raise explained(error.cause, names) from error
        free.append(actor)
    return found


def some_ready(asked: list[Any], names: Names) -> tuple[list[Any], list[Any]]:
    """Those of the answers that are ready within `LOOK` seconds, one at most, and the others."""
    from ray import nodes, wait

    ready, waiting = wait(asked, num_returns=1, timeout=LOOK)
    if not ready and not any(node["Alive"] for node in nodes()):
        raise OperantError(
            f"{names.part}: Ray has no node left, because its processes were killed or their machine is gone; "
            "start the run again with --resume"
        )
    return ready, waiting


def explained(error: BaseException, names: Names) -> OperantError:
    if isinstance(error, OperantError):
        return error
    why = " ".join(str(error).split())[:500]
    return OperantError(f"an actor of {names.part} failed: {type(error).__name__}: {why}")


class Holds:
    """What runs in a process of Ray for a `RayPool` or a `RayJail`: one of its node, and who asks it."""

    def __init__(self, path: Sequence[str], kind: type[Pool | Jail], *arguments: object):
        sys.path += [folder for folder in path if folder not in sys.path]  # where the user's world is found
        self.kind, self.arguments = kind, arguments

    @cached_property
    def held(self) -> Any:
        """Made by the first call, whose errors reach the caller; Ray reports an error of `__init__` as a dead actor."""
        return self.kind(*self.arguments)

    def ask(self, name: str, *arguments: object) -> object:
        found = getattr(self.held, name)
        return found(*arguments) if callable(found) else found

    def run(self, requests: list[object], seconds: float, keep_orphans: bool) -> list[Response]:
        """As `Pool.run`, within `seconds`: the clocks of two machines differ."""
        return self.held.run(requests, until=time.monotonic() + seconds, keep_orphans=keep_orphans)


class RayPool:
    """A `Pool` of one worker in an actor of Ray, which is made by `start`, and made again if it has died."""

    def __init__(self, job: Job, limits: Limits, session: RaySession):
        self.job, self.limits, self.session = job, limits, session
        self._actor: Any = None
        self._level = ""

    def start(self, seconds: float) -> None:
        self.session.begin()
        if self._actor is None:
            self._actor = self.session.actor(Holds, sys.path, Pool, self.job, self.limits)
        try:
            answers([self._actor.ask.remote("start", seconds)], self.session.names, seconds)
        except OperantError:
            self.close()
            raise

    @property
    def level(self) -> str:
        """As `Pool.level`; empty if the actor has died."""
        from ray import exceptions, get

        if self._actor is not None:
            try:
                [self._level] = get([self._actor.ask.remote("level")], timeout=GRACE)
            except exceptions.GetTimeoutError:
                pass  # `run` waits no longer than its time, and then ends the actor
            except exceptions.RayError:
                self.close()
        return self._level

    def run(self, requests: Sequence[object], *, until: float, keep_orphans: bool = False) -> list[Response]:
        """As `Pool.run`. If the actor has died, every response is an error; `start` makes it again."""
        from ray import exceptions, get

        if self._actor is None:
            return [Response("error", reason="has lost its actor of Ray") for _ in requests]
        seconds = max(until - time.monotonic(), 0.0)
        try:
            asked = self._actor.run.remote(list(requests), seconds, keep_orphans)
            return get(asked, timeout=seconds + GRACE)
        except exceptions.RayTaskError as error:
            raise explained(error.cause, self.session.names) from error
        except exceptions.GetTimeoutError:
            failed = Response("timeout", reason=LATE)
        except exceptions.RayError as error:
            failed = Response("error", reason=f"has died with its actor of Ray: {' '.join(str(error).split())[:300]}")
        self.close()
        return [failed for _ in requests]

    def close(self) -> None:
        from ray import exceptions, get, is_initialized, kill

        if self._actor is not None and is_initialized():
            with suppress(exceptions.RayError):
                get(self._actor.ask.remote("close"), timeout=GRACE)
            kill(self._actor)
        self._actor, self._level = None, ""


class RayJail(RayActors):
    """A `Jail` in each of some actors of Ray. The verdicts are those of a jail on this machine.

    session: where they live, and their number. options: as of `Jail`, on each node; `at_once` counts the programs of an
    actor, by default one.
    Raises: OperantError as `Jail` and `RaySession.begin` do.
    """

    def __init__(self, session: RaySession, options: JailOptions):
        self.session, self.at_once = session, options.at_once or 1
        self.options = replace(options, at_once=self.at_once)
        self.actors = []
        try:
            self.session.begin()
            self.actors = [self._start() for _ in range(session.count)]
            found = answers([actor.ask.remote("describe") for actor in self.actors], PROGRAMS)
        except BaseException:
            self.close()
            raise
        self._about = max(found, key=lambda about: UNTRUSTED.index(about.partition(":")[0]))
        """How the actor with the weakest level describes itself."""
        self.level = self._about.partition(":")[0]

    def describe(self) -> str:
        """The level of the weakest actor and the limits, for a log."""
        return f"{self._about}; in each of {len(self.actors)} actors of Ray, or at a stronger level"

    def run(self, programs: Sequence[Program]) -> list[Verdict]:
        """The verdict of each program, in order. Raises: OperantError as `Jail.run`, or if too many actors die."""
        parts = [list(programs[i : i + self.at_once]) for i in range(0, len(programs), self.at_once)]
        remedy = "resume the run, with fewer reward.ray if the memory ran out"
        found = ask_all(
            self.actors, parts, lambda actor, part: actor.ask.remote("run", part), self._start, PROGRAMS, DEATHS, remedy
        )
        return [verdict for verdicts in found for verdict in verdicts]

    def _start(self) -> Any:
        return self.session.actor(Holds, sys.path, Jail, self.options)
