"""Rewards that are judged in processes of their own: they may loop, crash, fork or fill memory, and the run goes on.

reward = isolated("my_rewards:politeness", timeout=30, memory=4, workers=2)
judged = judge(reward, rollouts)
judged.outcomes      # ["ok", "timeout", ...]
reward.level         # "pid namespace: ended by the kernel, ..."
reward.close()       # at the end of a run; the next question starts other workers
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from operant.rewards.evaluate import Judged, Total
from operant.rewards.failure_policy import IsolationOptions, Said, checked, settled
from operant.sandbox import worker
from operant.sandbox.pool import Job, Pool, Reply
from operant.sandbox.process import Limits
from operant.sandbox.serialise import rollout_to_plain
from operant.types import OperantError, Rollout

START = 60.0
"""Seconds that importing a reward may take at least, before the run; it may take `timeout` where that is longer."""


def isolated(
    reward: str | Callable[..., Any],
    *,
    timeout: float = 60.0,
    sample_timeout: float | None = None,
    memory: float | None = 4.0,
    processes: int = 512,
    workers: int = 1,
    each: bool = False,
    again: bool = True,
    on_error: float | str = "drop",
    on_timeout: float | str = "drop",
    on_abstain: float | str = "drop",
    level: str = "auto",
) -> "IsolatedReward":
    """A reward that is judged by `workers` processes of its own, which live until `close` or the end of the run.

    `reward`: `module:function`, `file.py:function`, or a function that can be found again by its name. `timeout`:
    seconds for a whole batch, which is judged within `timeout` + 2 s; `sample_timeout`: for a sample that is judged
    alone. `memory`: GB of address space a process, None for no limit (`memory_gb` in `IsolationOptions`, which explains
    the others). No level of isolation is a security boundary: what cannot be undone is not prevented.
    Raises: OperantError for a function that no other process can find, or an option out of range.
    """
    return IsolatedReward(
        reward,
        IsolationOptions(
            timeout=timeout,
            sample_timeout=sample_timeout,
            memory_gb=memory,
            processes=processes,
            workers=workers,
            each=each,
            again=again,
            on_error=on_error,
            on_timeout=on_timeout,
            on_abstain=on_abstain,
            level=level,
        ),
    )


class IsolatedReward:
    """A reward in other processes; `isolated` makes it."""

    def __init__(self, reward: str | Callable[..., Any], options: IsolationOptions | None = None):
        """Without `options`, those of the run that it is used in."""
        self.spec, self.options, self.own = _spec_of(reward), options or IsolationOptions(), options is not None
        self.__name__ = self.spec.rpartition(":")[2]
        memory = None if self.options.memory_gb is None else int(self.options.memory_gb * (1 << 30))
        limits = Limits(memory, self.options.processes, self.options.level)
        self._pool = Pool(Job("operant.sandbox.reward_job:reward", self.spec), limits, self.options.workers)

    def under(self, options: IsolationOptions) -> "IsolatedReward":
        """With the run's options, unless it has its own."""
        return self if self.own else IsolatedReward(self.spec, options)

    @property
    def level(self) -> str:
        """What ends and limits it on this machine; empty before `check` and after `close`."""
        return self._pool.level

    def check(self) -> None:
        """Start the workers. Raises: OperantError where the reward cannot be imported."""
        try:
            self._pool.start(max(self.options.timeout, START))
        except OperantError as error:
            short = any(sign in str(error) for sign in ("MemoryError", "allocate memory", "failed to map"))
            hint = f"; is memory={self.options.memory_gb:g} GB of address space too little for it?" if short else ""
            raise OperantError(f"isolated reward {self.spec!r}: {error}{hint}") from error

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def __call__(self, rollouts: list[Rollout]) -> list[Total]:
        return self.judged(rollouts).scores

    def judged(self, rollouts: list[Rollout]) -> Judged:
        """Ask about all, then again about each sample of what failed.

        Raises: OperantError for a rollout with something else than plain data, and where a fate is to stop.
        """
        if not rollouts:
            return Judged([])
        until = time.monotonic() + self.options.timeout
        plain, left_before = self._plain(rollouts), self._pool.left_behind
        said: list[Said | None] = [None] * len(rollouts)
        reason = "" if self.options.each else self._together(plain, rollouts, said)
        self._alone(plain, rollouts, said, until)
        judged = settled([s for s in said if s is not None], rollouts, self.__name__, self.options, "drop")
        return replace(judged, notes=[*reason, *judged.notes, *self._swept(left_before)])

    # --- inside -------------------------------------------------------------------------------------------------------

    def _plain(self, rollouts: list[Rollout]) -> list[dict[str, Any]]:
        try:
            return [rollout_to_plain(rollout) for rollout in rollouts]
        except OperantError as error:
            raise OperantError(f"isolated reward {self.__name__!r}: {error}") from error

    def _together(self, plain: Sequence[Any], rollouts: list[Rollout], said: list[Said | None]) -> list[str]:
        """Ask about many at once and fill `said` with what came of it; what failed stays open to be asked again."""
        pieces = _pieces(rollouts, self.options.workers)
        if all(len(piece) == 1 for piece in pieces):
            return []
        until = time.monotonic() + self.options.timeout / (2 if self.options.again else 1)
        replies = self._pool.run([[plain[i] for i in piece] for piece in pieces], until=until)
        notes = []
        for piece, reply in zip(pieces, replies):
            read = self._read(reply, [rollouts[i] for i in piece])
            if not isinstance(read, list) and self.options.again:
                notes.append(
                    f"reward {self.__name__!r} {read.why} with {len(piece)} samples, which are judged alone now"
                )
                continue
            for i, one in zip(piece, read if isinstance(read, list) else [read] * len(piece)):
                said[i] = one
        return notes

    def _alone(self, plain: Sequence[Any], rollouts: list[Rollout], said: list[Said | None], until: float) -> None:
        """Ask about each sample that is open, and fill `said`."""
        still_open = [i for i, one in enumerate(said) if one is None]
        share = min(4, -(-len(still_open) // self.options.workers))

        def allowance() -> float:
            return self.options.sample_timeout or max((until - time.monotonic()) / share, 0.01)

        replies = self._pool.run([[plain[i]] for i in still_open], until=until, allowance=allowance)
        for i, reply in zip(still_open, replies):
            read = self._read(reply, [rollouts[i]])
            said[i] = read[0] if isinstance(read, list) else read

    def _read(self, reply: Reply, rollouts: list[Rollout]) -> list[Said] | Said:
        """What came of each, or what became of all."""
        if reply.outcome != "ok":
            return Said("timeout" if reply.outcome == "timeout" else "error", why=reply.why)
        answers = reply.answer.get("answers") if isinstance(reply.answer, dict) else None
        if not isinstance(answers, list) or len(answers) != len(rollouts):
            odd = reply.answer.get("odd", "nothing that can be read") if isinstance(reply.answer, dict) else "nonsense"
            what = f"{len(answers)} scores" if isinstance(answers, list) else odd
            return Said("error", why=f"returned {what} for {len(rollouts)} rollouts")
        return [self._checked(answer, rollout) for answer, rollout in zip(answers, rollouts)]

    def _checked(self, answer: Any, rollout: Rollout) -> Said:
        if not isinstance(answer, dict) or "value" not in answer:
            odd = answer.get("odd") if isinstance(answer, dict) else "nonsense"
            return Said("error", why=f"returned {odd}")
        return checked(answer["value"], rollout, self.__name__)

    def _swept(self, before: int) -> list[str]:
        left = self._pool.left_behind - before
        return [f"reward {self.__name__!r} had left {left} processes behind; they were killed"] if left else []


def _pieces(rollouts: list[Rollout], count: int) -> list[list[int]]:
    """Places of the rollouts in at most `count` pieces of similar length; those of one group stay together."""
    groups = [list(places) for _, places in groupby(range(len(rollouts)), key=lambda i: rollouts[i].group)]
    pieces: list[list[int]] = [[]]
    for group in groups:
        fair = (len(rollouts) - sum(map(len, pieces[:-1]))) / (count - len(pieces) + 1)
        if pieces[-1] and len(pieces) < count and len(pieces[-1]) + len(group) / 2 > fair:
            pieces.append([])
        pieces[-1] += group
    return pieces


def _spec_of(reward: str | Callable[..., Any]) -> str:
    """`module:function` or `/whole/path/file.py:function`, under which another process finds the reward."""
    if worker.INSIDE:
        raise OperantError(
            "isolated() was called by a worker that imports your file: begin what starts the run with "
            'if __name__ == "__main__":'
        )
    if not isinstance(reward, str):
        return _spec_of_function(reward)
    place, _, name = reward.strip().rpartition(":")
    if not place or not name:
        raise OperantError(f"isolated({reward!r}): give module:function or file.py:function")
    if place.endswith(".py"):
        if not os.path.exists(place):
            raise OperantError(f"isolated({reward!r}): there is no file {place!r}")
        place = os.path.abspath(place)
    return f"{place}:{name}"


def _spec_of_function(reward: Any) -> str:
    module, name = getattr(reward, "__module__", None), getattr(reward, "__qualname__", None)
    remedy = "put it at the top level of a file, and give isolated('file.py:function')"
    if not callable(reward) or module is None or name is None or "<" in name:
        what = name.rpartition(".")[2] if name else f"a {type(reward).__name__}"
        raise OperantError(f"isolated: no other process can find {what} again by a name; {remedy}")
    held: Any = sys.modules.get(module)
    found = held
    for part in name.split("."):
        found = getattr(found, part, None)
    file = getattr(reward, "__code__", None) and reward.__code__.co_filename
    if found is reward and module != "__main__":
        return f"{module}:{name}"
    if file and os.path.exists(file) and (found is reward or held is None):
        return f"{os.path.abspath(file)}:{name}"
    raise OperantError(f"isolated: {module}:{name} is not what another process finds under that name; {remedy}")
