"""Rewards that run in worker processes: they may loop, crash, fork or fill memory, and the run continues.

reward = isolated("my_rewards:politeness", timeout=30, memory=4, workers=2)
judged = judge(reward, rollouts)
judged.outcomes      # ["ok", "timeout", ...]
reward.level         # "pid namespace: ended by the kernel, ..."
reward.close()       # at the end of a run; the next call starts new workers
"""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

from operant.rewards import INSTALLED
from operant.rewards.evaluate import CallFailure, Judged, SampleResult, check_answer
from operant.rewards.failure_policy import IsolationOptions, Tolerant, apply_policy
from operant.rewards.text_scores import RewardBase
from operant.rewards.wrapper import Wrapper
from operant.sandbox.pool import START, Job, Pool, Response
from operant.sandbox.process import Limits
from operant.sandbox.serialise import answer_from_plain, rollout_to_plain
from operant.sandbox.worker import spec_of
from operant.types import OperantError, RewardFn, Rollout, Total, said_of


def isolated(
    reward: str | RewardFn,
    *,
    timeout: float = 60.0,
    sample_timeout: float | None = None,
    memory: float | None = 4.0,
    processes: int = 512,
    workers: int = 1,
    each: bool = False,
    again: bool = True,
    retries: int = 0,
    retry_seconds: float = 1.0,
    on_error: float | str = "drop",
    on_timeout: float | str = "drop",
    on_abstain: float | str = "drop",
    level: str = "auto",
) -> "IsolatedReward":
    """A reward that runs in `workers` processes of its own, which live until `close` or the end of the run.

    `reward`: `module:function`, `file.py:function`, or a function that another process can find by its name.
    `timeout`: seconds for a whole batch, which is judged within `timeout` + 2 s; `sample_timeout`: seconds for a sample
    that is judged alone. `memory`: GB of address space per process, None for no limit. `IsolationOptions` explains
    the other options; `memory` is its `memory_gb`. No level of isolation is a security boundary: the reward may read,
    write and delete whatever the run may.
    Raises: OperantError for a function that no other process can find, or an option out of range.
    """
    limits, calls = (timeout, sample_timeout, memory, processes, workers), (each, again, retries, retry_seconds)
    return IsolatedReward(reward, IsolationOptions(*limits, *calls, on_error, on_timeout, on_abstain, level))


def named(spec: str) -> "IsolatedReward":
    """The reward `isolated:SPEC` of a run, whose options are those of the run; SPEC may be an installed name."""
    return IsolatedReward(INSTALLED.place(spec))


def under(reward: RewardFn, options: IsolationOptions) -> RewardFn:
    """The reward with a run's options, for isolated parts without their own and for the handling of failures."""
    if isinstance(reward, Wrapper):
        return reward.rebuilt(lambda part: under(part, options))
    if isinstance(reward, IsolatedReward):
        return reward.under(options)
    strict = options.handling("error", "stop") == "stop" and options.on_abstain == "drop"
    return reward if strict or hasattr(reward, "judged") else Tolerant(reward, options)


class IsolatedReward(RewardBase):
    """A reward that runs in worker processes; `isolated` creates one.

    Raises: OperantError for a function that no other process can find.
    """

    ends_with_run = True

    def __init__(self, reward: str | RewardFn, options: IsolationOptions | None = None):
        """Without `options`, the reward uses those of its run (see `under`)."""
        self.spec, self.options, self.has_options = spec_of(reward), options or IsolationOptions(), options is not None
        self.__name__ = self.spec.rpartition(":")[2]
        memory = None if self.options.memory_gb is None else int(self.options.memory_gb * (1 << 30))
        limits = Limits(level=self.options.level, memory=memory, processes=self.options.processes)
        self._pool = Pool(Job("operant.sandbox.reward_call:judge_plain", self.spec), limits, self.options.workers)

    def under(self, options: IsolationOptions) -> "IsolatedReward":
        """The reward with the run's options, unless it has options of its own."""
        return self if self.has_options else IsolatedReward(self.spec, options)

    @property
    def level(self) -> str:
        """How it is ended and limited on this machine; empty before `check` and after `close`."""
        return self._pool.level

    def check(self) -> None:
        """Start the workers. Raises: OperantError if the reward cannot be imported."""
        try:
            self._pool.start(max(self.options.timeout, START))
        except OperantError as error:
            short = any(sign in str(error) for sign in ("MemoryError", "allocate memory", "failed to map"))
            memory = self.options.memory_gb
            hint = f"; is memory={memory:g} GB of address space too little?" if short and memory else ""
            raise OperantError(f"isolated reward {self.spec!r}: {error}{hint}") from error

    def close(self) -> None:
        self._pool.close()

    def __call__(self, rollouts: list[Rollout]) -> list[Total]:
        return self.judged(rollouts).scores

    def judged(self, rollouts: list[Rollout]) -> Judged:
        """Judge all samples in one call, then one by one those whose call failed.

        Raises: OperantError for a rollout that holds something else than plain data, or if a failure stops the run.
        """
        if not rollouts:
            return Judged([])
        until = time.monotonic() + self.options.timeout
        with said_of(f"isolated reward {self.__name__!r}"):
            plain = [rollout_to_plain(rollout) for rollout in rollouts]
        left_before = self._pool.left_behind
        results: dict[int, SampleResult] = {}
        notes = [] if self.options.each else self._together(plain, rollouts, results)
        remaining = [i for i in range(len(rollouts)) if i not in results]  # these are judged one by one
        share = min(4, -(-len(remaining) // self.options.workers))

        def allowance() -> float:
            return self.options.sample_timeout or max((until - time.monotonic()) / share, 0.01)

        responses = self._run([[plain[i]] for i in remaining], until, allowance)
        for i, response in zip(remaining, responses):
            try:
                [results[i]] = self._read(response, [rollouts[i]])
            except CallFailure as failure:
                results[i] = failure.result
        judged = apply_policy([results[i] for i in range(len(rollouts))], rollouts, self.__name__, self.options, "drop")
        notes += judged.notes
        if left := self._pool.left_behind - left_before:
            notes.append(f"reward {self.__name__!r} had left {left} processes behind; they were killed")
        return replace(judged, notes=notes)

    def _together(self, plain: list[object], rollouts: list[Rollout], results: dict[int, SampleResult]) -> list[str]:
        """Send each worker its share of the batch, and add the results by index; returns notes on calls that failed.

        Samples of a failed call get no result yet if they are to be judged again.
        """
        pieces = _pieces(rollouts, self.options.workers)
        if all(len(piece) == 1 for piece in pieces):
            return []
        until = time.monotonic() + self.options.timeout / (2 if self.options.again else 1)
        responses = self._run([[plain[i] for i in piece] for piece in pieces], until)
        notes = []
        for piece, response in zip(pieces, responses):
            try:
                results.update(zip(piece, self._read(response, [rollouts[i] for i in piece])))
            except CallFailure as failure:
                if self.options.again:
                    notes.append(f"reward {self.__name__!r} {failure} with {len(piece)} samples, now judged one by one")
                else:
                    results.update(dict.fromkeys(piece, failure.result))
        return notes

    def _run(
        self, requests: list[object], until: float, allowance: Callable[[], float | None] = lambda: None
    ) -> list[Response]:
        """The responses of the workers; requests that failed are repeated after a pause that doubles."""
        responses = self._pool.run(requests, until=until, allowance=allowance)
        for attempt in range(self.options.retries):
            failed = [i for i, response in enumerate(responses) if response.outcome == "error"]
            pause = self.options.retry_seconds * 2**attempt
            if not failed or time.monotonic() + pause >= until:
                break
            time.sleep(pause)
            repeated = self._pool.run([requests[i] for i in failed], until=until, allowance=allowance)
            for i, response in zip(failed, repeated):
                responses[i] = response
        return responses

    def _read(self, response: Response, rollouts: list[Rollout]) -> list[SampleResult]:
        """The results of one call, which come from an untrusted process. Raises: CallFailure."""
        if response.outcome != "ok":
            raise CallFailure(response.reason, response.outcome)
        content = response.content if isinstance(response.content, dict) else {"odd": "nonsense"}
        answers = content.get("answers")
        if not isinstance(answers, list) or len(answers) != len(rollouts):
            odd = content.get("odd", "nothing that can be read")
            what = f"{len(answers)} scores" if isinstance(answers, list) else odd
            raise CallFailure(f"returned {what} for {len(rollouts)} rollouts; return a list with one entry for each")
        results = []
        for answer, rollout in zip(answers, rollouts):
            try:
                results.append(check_answer(answer_from_plain(answer), rollout, self.__name__))
            except OperantError as odd:
                results.append(SampleResult("error", reason=f"returned {odd}"))
        return results


def _pieces(rollouts: list[Rollout], count: int) -> list[list[int]]:
    """Indices of the rollouts in at most `count` pieces of similar length; those of one group stay together."""
    groups = [list(indices) for _, indices in groupby(range(len(rollouts)), key=lambda i: rollouts[i].group)]
    pieces: list[list[int]] = [[]]
    for group in groups:
        fair = (len(rollouts) - sum(map(len, pieces[:-1]))) / (count - len(pieces) + 1)
        if pieces[-1] and len(pieces) < count and len(pieces[-1]) + len(group) / 2 > fair:
            pieces.append([])
        pieces[-1] += group
    return pieces
