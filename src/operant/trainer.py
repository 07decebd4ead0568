"""Layer 3: the loop, from a configuration to a run folder.

    tasks -> play -> judge -> collate -> observe -> advantage -> update -> sync -> track

    run = train("builtin:reviews-lm", tasks="builtin:openings/train", reward="builtin:sentiment", steps=50)
    for metrics in steps(...): ...          # the same, a step at a time

A step changes the run as a whole or not at all: where a reward fails, the state from before the step is saved, and
`resume` plays that step again. Where the update itself fails, the last checkpoint stands.
"""

import json
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from operant import files
from operant.build import Built, build
from operant.checkpoint import RunState, newest_whole
from operant.config import Config, as_mapping, configure
from operant.evaluate import Evaluation, divergence, totals
from operant.policy.loading import export
from operant.rewards import Judged, judge
from operant.rewards.scaling import as_seen
from operant.run import RunFolder, read_config
from operant.tally import Tally
from operant.tracking.report import write_report
from operant.tracking.rows import rows
from operant.tracking.sink import Tracker, Trackers
from operant.types import Env, OperantError, Rollout

REPORT_SECONDS = 20.0
"""The report is written anew at most this often while a run goes on."""


class Run:
    """A run in progress or done: its folder, what it is made of, and its metrics so far."""

    def __init__(self, config: Config, built: Built, folder: RunFolder, trackers: Trackers):
        self.config, self.built, self.folder, self.trackers = config, built, folder, trackers
        self.learner, self.path = built.learner, folder.path
        self.metrics: list[dict[str, float]] = []
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None
        self.interrupted = False
        self.state = RunState()
        for name, part in self.learner.parts().items():
            self.state.register(name, part)
        self.state.register("tasks", built.order)
        self._saved = self._reported = time.monotonic()

    @property
    def policy(self) -> Any:
        return self.learner.policy

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> dict[str, float]:
        """Play, judge, learn, track. Raises: OperantError with the state from before the step saved."""
        start, learner, train = time.perf_counter(), self.learner, self.config.train
        before = self.state.snapshot(only=("tasks", "moments", "controller", "progress"))
        try:
            picked = [self.built.tasks[i] for i in self.built.order.take(train.batch // train.samples)]
            rollouts = learner.play([task for task in picked for _ in range(train.samples)])
            with learner.timing("reward"):
                judged = judge(self.built.reward, self._seen(rollouts))
            metrics = learner.learn(rollouts, judged.scores)
        except OperantError:  # raised by whatever comes before the update: no weight has moved
            self.state.restore(before)
            self.save()
            raise
        metrics |= _parts(judged)
        self._track(metrics, rollouts, judged, start)
        return metrics

    def _seen(self, rollouts: list[Rollout]) -> list[Rollout]:
        learner = self.learner
        return as_seen(rollouts, learner.options["score"], learner.policy.tokenizer, learner.sampling)

    def _track(self, metrics: dict[str, float], rollouts: list[Rollout], judged: Judged, start: float) -> None:
        begun, step = time.perf_counter(), int(metrics["step"])
        learnt = self.learner.learnt
        self.trackers.rollouts(step, rows(rollouts, judged.scores, judged.parts, learnt.batch, learnt.kept))
        every = self.config.train.evaluate_every
        if every and step % every == 0 and step < self.config.train.steps:
            metrics |= self._told(self.evaluate())
        now = time.perf_counter()
        metrics |= {"time/track": now - begun, "time/step": now - start}
        metrics["tokens/per_second"] = metrics["rollout/reply_tokens"] * metrics["rollout/count"] / (now - start)
        self.metrics.append(metrics)
        self.trackers.log(step, metrics)

    # --- held-out tasks -----------------------------------------------------------------------------------------------

    def evaluate(self) -> Evaluation | None:
        """Judge the held-out tasks, with the same random numbers every time; None where there are none."""
        if not self.built.held_out:
            return None
        learner = self.learner
        rollouts = learner.play(self.built.held_out, stream="evaluate")
        learner.clock.pop("generate", None)
        scores = totals(rollouts, self.built.reward)
        kl = None
        if learner.reference is not None:
            kl = divergence(rollouts, learner.policy, learner.reference.policy, learner.sampling)
        return Evaluation(rollouts, scores, kl)

    @staticmethod
    def _told(evaluation: Evaluation | None) -> dict[str, float]:
        if evaluation is None:
            return {}
        told = {"evaluate/reward": evaluation.mean}
        return told if evaluation.kl is None else told | {"evaluate/kl_per_reply": evaluation.kl}

    # --- what stays ---------------------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write a checkpoint of everything that changes."""
        path = self.state.save(
            self.folder.checkpoints, self.learner.progress.step, extra=self._extra(), keep=self.config.train.keep
        )
        self._saved = time.monotonic()
        return path

    def _extra(self) -> dict[str, Any]:
        return {"before": self.before.as_plain() if self.before is not None else None}

    def save_when_due(self) -> None:
        if time.monotonic() - self._saved >= 60 * self.config.train.checkpoint_minutes:
            self.save()
        if time.monotonic() - self._reported >= REPORT_SECONDS:
            self.report()

    def report(self) -> Path | None:
        """Write the report; a report that fails is told in the log and stops nothing."""
        self._reported = time.monotonic()
        try:
            return write_report(self.path)
        except (OSError, OperantError, ValueError, KeyError) as error:
            self.folder.say(f"the report could not be written: {error}")
            return None

    def finish(self) -> None:
        """The last checkpoint, the held-out tasks again, the exported model, the report."""
        self.save()
        self.after = self.evaluate()
        if self.after is not None:
            self._write_comparison()
        export(self.policy, self.folder.export)
        self.report()

    def _write_comparison(self) -> None:
        told = {k: e.as_plain() if e else None for k, e in (("before", self.before), ("after", self.after))}
        files.write(self.path / "evaluation.json", json.dumps(told, indent=1))


def train(
    policy: Any = None, tasks: Any = None, reward: Any = None, *, algorithm: str = "ppo", out: Any = None, **given: Any
) -> Run:
    """Train to the end and return the run. Options are those of the command line: `kl={"coef": 0.1}`, `steps=50`.

    `policy`: a name, a transformers model (with `tokenizer=`) or a Policy. `reward`: any function from rollouts to
    scores. `resume=True` goes on with the run in `out`. Ctrl-C ends after the step, and saves.
    Raises: OperantError for whatever the user can mend.
    """
    *_, run = runs(out, **_given(policy, tasks, reward, algorithm), **given)
    return run


def steps(
    policy: Any = None, tasks: Any = None, reward: Any = None, *, algorithm: str = "ppo", out: Any = None, **given: Any
) -> Iterator[dict[str, float]]:
    """As `train`, handing out the metrics of every step; stop asking, and the run ends with that step."""
    seen = 0
    for run in runs(out, **_given(policy, tasks, reward, algorithm), **given):
        if len(run.metrics) > seen:
            seen = len(run.metrics)
            yield run.metrics[-1]


def _given(policy: Any, tasks: Any, reward: Any, algorithm: str) -> dict[str, Any]:
    own = {"policy": policy, "tasks": tasks, "reward": reward}
    return {k: v for k, v in own.items() if v is not None} | ({"algorithm": algorithm} if algorithm != "ppo" else {})


def runs(
    out: Any = None,
    *,
    tokenizer: Any = None,
    env: Env | None = None,
    recipe: str | None = None,
    resume: bool = False,
    trackers: list[Tracker] | None = None,
    **given: Any,
) -> Iterator[Run]:
    """The run itself, handed out before the first step, after every step, and when it is done."""
    out = Path(out or f"runs/{recipe or 'run'}")
    config = configure(_stored(out, given) | given if resume else given, recipe)
    folder = RunFolder.open(out) if resume else RunFolder.create(out, as_mapping(config))
    try:
        built = build(config, tokenizer=tokenizer, env=env)
    except BaseException:
        folder.close()
        if not resume:  # nothing has happened in it yet
            shutil.rmtree(folder.path, ignore_errors=True)
            with suppress(OSError):
                folder.path.parent.rmdir()  # succeeds where nothing else lies there
        raise
    run = Run(config, built, folder, Trackers(folder, trackers or [], say=folder.say))
    with folder, _signals(run):
        yield from _loop(run, resume)


def _loop(run: Run, resume: bool) -> Iterator[Run]:
    if resume:
        _go_on(run)
    run.trackers.start(run.folder.config)
    try:
        if run.before is None:
            run.before = run.evaluate()
        yield run
        while run.learner.progress.step < run.config.train.steps and not run.interrupted:
            run.step()
            run.save_when_due()
            yield run
    finally:
        run.trackers.close()
    if run.interrupted:
        run.save()
        run.report()
    else:
        run.finish()
    yield run


def _go_on(run: Run) -> None:
    """Put the newest whole checkpoint back; without one, the run starts anew."""
    path = newest_whole(run.folder.checkpoints, run.folder.say)
    step = 0
    if path is not None:
        step, extra = run.state.load(path, run.folder.say)
        run.before = Evaluation.from_plain(extra["before"]) if extra["before"] is not None else None
        run.policy.version = step
        run.learner.engine.sync(run.policy, step)
    run.folder.cut_after(step)
    run.metrics = run.folder.metrics()
    run.folder.say(f"going on after step {step}")


def _stored(out: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration in the run folder; what was a Python object there has to be given again."""
    held = read_config(out)
    for name in ("policy", "tasks", "reward", "reference", "evaluate"):
        if str(held.get(name, "")).startswith("<"):
            if name not in given:
                raise OperantError(
                    f"{out} was started from Python with {name}={held[name]}: go on from there, with "
                    f"operant.train(..., {name}=..., out={str(out)!r}, resume=True)"
                )
            held.pop(name)
    return held


def _parts(judged: Judged) -> dict[str, float]:
    """Means of the reward's named parts, where it has several."""
    tally = Tally()
    if len(judged.parts) > 1:
        judged.report(tally)
    return tally.result()


@contextmanager
def _signals(run: Run) -> Iterator[None]:
    """The first SIGINT or SIGTERM ends the run after the step; the second ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: Any) -> None:
        if run.interrupted:
            raise KeyboardInterrupt
        run.interrupted = True
        run.folder.say(f"signal {number}: the run ends after this step")

    old = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
