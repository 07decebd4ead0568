"""Rewards of maths by name: `maths`, whether the answer is right, and `think_answer`, whether a reply has the form.

operant train maths --reward "{maths: 1, think_answer: 0.1, 'length:<=300': 0.1}"
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from operant.apps.maths import reasoning_gym
from operant.apps.maths.answers import after_thought, is_equal, is_thought_and_answer, makes, marked, number
from operant.apps.maths.verifier import judged, suite_of
from operant.rewards import RewardBase
from operant.rewards.evaluate import Judged, judge
from operant.sandbox.pool import START, Job, Pool, Response
from operant.sandbox.process import Limits
from operant.types import Judgement, OperantError, RewardFn, Rollout, Task, require, shown


class Maths(RewardBase):
    """1 for a reply whose answer is right, else 0, as a `Judgement` with the outcome right, wrong, no answer, hang or
    crash; sets of reasoning-gym and verifiers also pay between, the outcome partly.

    The answer is the marked one (<answer>, \\boxed{}, ####), or else the last number. Plain numbers are compared
    exactly, and Countdown's expressions calculated, in this process. Where the answer to some task is no plain number,
    math-verify (the extra `maths`) judges every reply that marks no plain number, and looks for the answer itself if
    none is marked; sets of reasoning-gym and tasksets of verifiers are judged by their own functions. All of these are
    in `workers` processes.
    verifier: `auto`, as just said; `exact`: refuse tasks with other answers; `math_verify`: for all numbers too.
    only_marked: an answer that is not marked is none. every: Countdown must use every number.
    seconds, memory_gb: of a reply that is judged in a worker; one that needs more is a hang or a crash, and scores 0.
    Raises: OperantError for an option out of range.
    """

    __name__ = "maths"
    ends_with_run = True

    def __init__(
        self,
        *,
        verifier: Literal["auto", "exact", "math_verify"] = "auto",
        only_marked: bool = False,
        every: bool = True,
        seconds: float = 5.0,
        memory_gb: float = 4.0,
        workers: int = 1,
    ):
        if verifier not in ("auto", "exact", "math_verify") or not (0 < seconds < 1e6 and memory_gb > 0 < workers):
            raise OperantError(
                f"verifier={shown(verifier)}, seconds={seconds}, memory_gb={memory_gb}, workers={workers}: give auto, "
                "exact or math_verify, and numbers above 0"
            )
        self.verifier, self.only_marked, self.every, self.seconds = verifier, only_marked, every, seconds
        self._symbolic = verifier == "math_verify"
        job, limits = Job("operant.apps.maths.verifier:verifier", []), Limits(memory=int(memory_gb * (1 << 30)))
        self._pool = Pool(job, limits, workers)
        self._tested = set[tuple[object, object]]()
        self.notes: list[str] = []
        """Sentences for the log of a run: what the tests of its sets found."""

    def __call__(self, rollouts: list[Rollout]) -> list[Judgement]:
        """The judgement of the answer in each last reply. Workers get equal requests once."""
        opened = ["<think>" * r.query.rstrip().endswith("<think>") for r in rollouts]  # by the chat template
        pairs = [(begun + r.reply, target_of(r.task)) for begun, r in zip(opened, rollouts, strict=True)]
        requests = [self._request(*pair) for pair in pairs]
        different = {repr(request): request for request in requests if request is not None}
        until = time.monotonic() + START + self.seconds * len(different)
        responses = self._pool.run([*different.values()], until=until, allowance=lambda: self.seconds)
        found = dict(zip(different, map(self._read, responses), strict=True))
        return [found.get(repr(request)) or self.exactly(*pair) for pair, request in zip(pairs, requests, strict=True)]

    def judged(self, rollouts: list[Rollout]) -> Judged:
        """The checked answers, with a sentence if the verifier failed on every reply that has an answer."""
        judged = judge(self.__call__, rollouts, self.__name__)
        failed = [remark for remark in judged.remarks if {"hang", "crash"} & set(remark.classes)]
        silent = sum("no answer" in remark.classes for remark in judged.remarks)
        if not failed or len(failed) + silent < len(rollouts):
            return judged
        why = f"the verifier of reward 'maths' failed on each of {len(failed)} replies: {failed[0].message}"
        return replace(judged, notes=[f"{why}; each scored 0, so nothing can be learned from them"])

    def exactly(self, reply: str, target: Mapping[str, object]) -> Judgement:
        """The verdict on a plain number or an expression."""
        if "numbers" not in target:
            answer, order = str(target["answer"]), target.get("order", "usual")
            return Judgement(**judged(is_equal(reply, answer, order=order, only_marked=self.only_marked)))
        found = marked(reply)
        lines = (after_thought(reply) or "").strip().splitlines() if found is None and not self.only_marked else []
        found = lines[-1] if lines else found
        odd = None if found is None else makes(found, target["numbers"], target["target"], every=self.every)
        return Judgement(**judged(None if odd is None else not odd), message=odd or "")

    def check_task(self, task: Task) -> None:
        """Raises: OperantError for a task without an answer, or one that needs a package that is missing."""
        target = target_of(task)
        if "set" in target:
            suite, _ = suite_of(target["set"])
            reasoning_gym.need(suite.PACKAGE, suite.EXTRA, f"task {task.id!r} of {suite.PACKAGE}")
        elif self.verifier == "math_verify" or not plain(target):
            odd = f"the answer {shown(target['answer'])} of task {task.id!r} is no plain number"
            require(self.verifier != "exact", f"{odd}, and verifier=exact compares these alone: use verifier=auto")
            what = "verifier=math_verify" if self.verifier == "math_verify" else odd
            reasoning_gym.need("math_verify", "maths", what)

    def read_tasks(self, tasks: Sequence[Task]) -> None:
        """Start the workers if the tasks need them, with their packages loaded beforehand, and test each set once.

        Raises: OperantError for a set that makes other problems in another process.
        """
        targets = [target_of(task) for task in tasks]
        sets = dict.fromkeys((target["set"], target["options"]) for target in targets if "set" in target)
        self._symbolic |= any("set" not in target and not plain(target) for target in targets)
        needed = {suite_of(name)[0].LOADS for name, _ in sets} | ({"math_verify"} if self._symbolic else set())
        if needed - {*self._pool.job.argument}:
            self._pool.close()
            self._pool.job = replace(self._pool.job, argument=sorted(needed | {*self._pool.job.argument}))
            self._pool.start(START)
        self.notes += [self._found(name, options) for name, options in sets if (name, options) not in self._tested]
        self._tested.update(sets)

    read_held_out = read_tasks

    def close(self) -> None:
        """End the workers; replies that are judged later start others."""
        self._pool.close()

    def _request(self, reply: str, target: dict[str, object]) -> dict[str, object] | None:
        """What a worker is asked about a reply; None: this process judges it."""
        asks = not plain(target)
        if not asks and "numbers" not in target and target.get("order") != "units":
            asks = self.verifier == "math_verify" or (self._symbolic and number(marked(reply) or "") is None)
        if "set" in target and suite_of(target["set"])[0] is reasoning_gym:
            target = target | {"entry": reasoning_gym.packed(target["set"], target["options"], target["index"])}
        return {"reply": reply, "marked": self.only_marked} | target if asks else None

    def _read(self, response: Response) -> Judgement:
        if response.outcome == "ok" and isinstance(found := response.content, dict):
            return Judgement(float(found["score"]), outcome=str(found["outcome"]))
        late = response.outcome == "timeout"
        why = f"it took more than {self.seconds:g} s" if late else f"it {response.reason}"
        return Judgement(0.0, outcome="hang" if late else "crash", message=why)

    def _found(self, name: str, options: str) -> str:
        """A sentence on what a set pays. Raises: OperantError for one that makes other problems in another process."""
        suite, bare = suite_of(name)
        title = f"{suite.PACKAGE}:{bare}"
        request = {"tested": True, "set": name, "options": options}
        [response] = self._pool.run([request], until=time.monotonic() + START, allowance=lambda: START)
        require(response.outcome == "ok", f"{title} cannot be tested: it {response.reason}")
        here = suite.first(bare, options)
        if response.content["asked"] != here:
            raise OperantError(
                f"{title} makes other problems in another process from the same seed, so that a resumed "
                "run would have others; start it with PYTHONHASHSEED=0, and if that does not help, choose another set"
            )
        return f"{title}, {len(here)} problems tested: {'; '.join(findings(response.content))}"


def findings(found: Mapping[str, Any]) -> list[str]:
    """What `tested` found, in parts of a sentence."""
    known = [paid for paid in found["known"] if paid is not None]
    right = sum(isinstance(paid, (int, float)) and paid >= 1 for paid in known)
    said = [f"its own answer pays 1 for {right} of {len(known)}" if known else "it has no answers of its own"]
    numbers = {text: [p for p in paid if not isinstance(p, str)] for text, paid in found["nonsense"].items()}
    text, most = max(((text, max(paid, default=0.0)) for text, paid in numbers.items()), key=lambda pair: pair[1])
    said.append(f"nonsense such as {text!r} pays up to {most:g}" if most > 0 else "nonsense pays 0")
    if raised := [paid for paids in (known, *found["nonsense"].values()) for paid in paids if isinstance(paid, str)]:
        said.append(f"it raises on some replies ({raised[0]}), which count as crash and score 0")
    return said


def target_of(task: Task) -> dict[str, object]:
    """What a reply is compared with; an answer alone may be the target itself. Raises: OperantError without one."""
    target = task.target if isinstance(task.target, Mapping) else {"answer": task.target}
    kinds = (("set", "index", "options"), ("numbers", "target"), ("answer",))
    needed = next((names for names in kinds if names[0] in target), kinds[-1])
    if any(target.get(name) in (None, "") for name in needed):
        raise OperantError(
            f"reward 'maths': task {task.id!r} has no {needed[0]} in its target {shown(task.target)}: read published "
            "rows with --form maths, name the field with --data.target-field answer, or give Task(target=...)"
        )
    return {**target, "answer": str(target["answer"])} if needed == ("answer",) else dict(target)


def plain(target: Mapping[str, object]) -> bool:
    """Whether this process judges the right reply to a target: a plain number, or numbers for an expression."""
    return "numbers" in target or ("answer" in target and number(str(target["answer"])) is not None)


def think_answer() -> RewardFn:
    """1 if the reply is one <think>...</think> and then one <answer>...</answer>, neither empty, and nothing else.

    A prompt may end with the opening <think>.
    """

    def think_answer(rollouts: list[Rollout]) -> list[float]:
        opened = ["<think>" * r.query.rstrip().endswith("<think>") for r in rollouts]
        return [float(is_thought_and_answer(begin + r.reply)) for begin, r in zip(opened, rollouts, strict=True)]

    return think_answer
