"""Layer 3: the loop, from a configuration to a run folder.

tasks -> play -> judge -> collate -> observe -> advantage -> update -> sync -> track

run = train("builtin:reviews-lm", tasks="builtin:openings/train", reward="builtin:sentiment", steps=50)
for metrics in steps(...): ...          # the same, a step at a time
"""

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from operant import __version__, distributed, machine
from operant.build import build
from operant.checkpoint import newest_whole
from operant.config import Config, as_mapping, configure
from operant.evaluate import Evaluation
from operant.run import RunFolder, read_config
from operant.running import Run
from operant.tracking.copies import make_trackers
from operant.tracking.sink import Tracker, Trackers
from operant.types import Env, OperantError, shown


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
    show: Iterable[Tracker] = (),
    **given: Any,
) -> Iterator[Run]:
    """The run itself, handed out before the first step, after every step, and when it is done.

    `show`: trackers of the caller's own, beside those that the option `trackers` names.
    """
    out = _place(out or f"runs/{recipe or 'run'}")
    config = configure(_stored(out, given) | given if resume else given, recipe)
    with distributed.launched(), _folder(out, config, resume) as folder:
        try:
            copies = [*show, *make_trackers(config.train.trackers, folder.path, folder.say)] if _first() else []
            built = build(config, tokenizer=tokenizer, env=env)
        except BaseException:
            folder.close()
            if not resume:  # nothing has happened in it yet
                shutil.rmtree(folder.path, ignore_errors=True)
                with suppress(OSError):
                    folder.path.parent.rmdir()  # succeeds where nothing else lies there
            raise
        run = Run(config, built, folder, Trackers(folder, copies, say=folder.say))
        with _signals(run):
            yield from _loop(run, resume)


def _place(out: Any) -> Path:
    if not isinstance(out, (str, Path)) or "\0" in str(out):
        raise OperantError(f"out={shown(out)}: give the folder of the run, as in runs/sentiment")
    return Path(out)


def _first() -> bool:
    return distributed.rank() == 0


@contextmanager
def _folder(out: Path, config: Config, resume: bool) -> Iterator[RunFolder]:
    """The run folder, open; of the ranks but the first, a scratch folder that looks for checkpoints in the run's."""
    _enough_prompts(config)
    if _first():
        made = RunFolder.open(out) if resume else RunFolder.create(out, as_mapping(config), environment=_environment())
        with made:
            yield made
        return
    with tempfile.TemporaryDirectory() as scratch, RunFolder.create(Path(scratch) / "run", as_mapping(config)) as made:
        made.checkpoints = out / "checkpoints"
        yield made


def _enough_prompts(config: Config) -> None:
    prompts = config.train.batch // config.train.samples
    if prompts < distributed.world():
        raise OperantError(f"{prompts} prompts a step for {distributed.world()} ranks: each needs one; raise batch")


def _loop(run: Run, resume: bool) -> Iterator[Run]:
    if resume:
        _go_on(run)
    run.trackers.start(run.folder.config)
    try:
        run.start()
        yield run
        while run.learner.progress.step < run.config.train.steps and not _asked_to_stop(run):
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


def _asked_to_stop(run: Run) -> bool:
    """Whether any rank was: all end after the same step."""
    run.interrupted = bool(distributed.largest(int(run.interrupted)))
    return run.interrupted


def _go_on(run: Run) -> None:
    """Put the newest whole checkpoint back; without one, the run starts anew."""
    path = newest_whole(run.folder.checkpoints, run.folder.say)
    step = 0
    if path is not None:
        step, extra = run.state.load(path, run.folder.say)
        run.before = Evaluation.from_plain(extra["before"]) if extra["before"] is not None else None
        run.best, run.probed, run.started = extra.get("best"), extra.get("probed") or {}, True
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


def _environment() -> dict[str, Any]:
    """What the run began on, for `environment.json`."""
    started = {"started": time.strftime("%Y-%m-%d %H:%M:%S"), "command": machine.command()}
    size = {"cores": os.cpu_count(), "memory_gb": machine.size_gb()}
    return {"operant": __version__} | machine.about() | size | started
