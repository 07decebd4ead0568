"""Layer 3: the loop, from a configuration to a run folder.

tasks -> play -> judge -> collate -> observe -> advantage -> update -> sync -> track

for run in runs("runs/sentiment", recipe="sentiment"): ...
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from operant import __version__, distributed, machine
from operant.rewards import isolated_parts
from operant.runs.build import build
from operant.runs.config import Config, as_mapping, configure
from operant.runs.folder import RunFolder
from operant.runs.initial_models import keep, pinned, restored
from operant.runs.resume import Change, changed_since, changes, in_force, stored
from operant.runs.run import Observer, Run
from operant.runs.signals import Asked, asked_to_end
from operant.storage.checkpoint_store import about, to_resume
from operant.trackers.trackers import Tracker, Trackers, make_trackers
from operant.types import Env, OperantError
from operant.watchdog import Watchdog


def runs(
    out: Any = None,
    *,
    tokenizer: Any = None,
    env: Env | None = None,
    recipe: str | None = None,
    resume: bool = False,
    fresh_optimizer: bool = False,
    show: Iterable[Tracker] = (),
    observers: Sequence[Observer] = (),
    **given: Any,
) -> Iterator[Run]:
    """The run itself, handed out before the first step, after every step, and when it is done.

    `show`: trackers of the caller's own, beside those that the option `trackers` names. `fresh_optimizer`, with
    `resume`: the weights of the newest checkpoint, also of a light one, and an optimizer that begins anew.
    `observers`: called after every step and at the end.
    """
    out = Path(out or f"runs/{recipe or 'run'}")
    if fresh_optimizer and not resume:
        raise OperantError("fresh_optimizer goes with resume: a run that begins has a fresh one anyway")
    pays = env is not None
    config = configure(stored(out, given), pays=pays) if resume else pinned(configure(given, recipe, pays=pays))
    changed = changes(out, config, fresh_optimizer=fresh_optimizer) if resume else []
    with ExitStack() as during:
        asked = during.enter_context(asked_to_end())
        during.enter_context(distributed.launched())
        folder = during.enter_context(_folder(out, config, resume))
        asked.told = folder.say
        path = to_resume(folder.checkpoints, folder.say, fresh_optimizer=fresh_optimizer) if resume else None
        during.enter_context(_threads(config.learner["learner"].threads, path, folder.say))
        models = restored(config, out, folder.say) if resume else config
        run = _made(config, models, folder, resume, tokenizer=tokenizer, env=env, show=show)
        run.observers = observers
        for reward in isolated_parts(run.built.reward):
            during.callback(reward.close)
        run.tell_isolation()
        run.tell_crowded()
        if not resume:
            run.tell_left_out()
        if resume:
            _go_on(run, path, changed, fresh_optimizer=fresh_optimizer)
        if _first():
            keep(config, folder.path)
        yield from _loop(run, asked)


def _made(
    config: Config,
    models: Config,
    folder: RunFolder,
    resume: bool,
    *,
    tokenizer: Any,
    env: Any,
    show: Iterable[Tracker],
) -> Run:
    """`models`: the same options, with the folders that models are loaded from."""
    clock = machine.Clock()
    try:
        with Watchdog(clock, folder.say, folder.log_path), clock.timing("loading"):
            trackers = [*show, *make_trackers(config.train.trackers, folder.path, folder.say)] if _first() else []
            built = build(models, tokenizer=tokenizer, env=env)
    except BaseException:
        folder.close()
        if not resume:  # nothing has happened in it yet
            shutil.rmtree(folder.path, ignore_errors=True)
            with suppress(OSError):
                folder.path.parent.rmdir()  # succeeds where nothing else lies there
        raise
    return Run(config, built, folder, Trackers(folder, trackers, folder.say))


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


@contextmanager
def _threads(own: int | str, path: Path | None, say: Callable[[str], None]) -> Iterator[None]:
    """While this lasts, torch computes with the option's number of threads, or where the option leaves it open, with
    that with which the run began: they decide its bits."""
    here = torch.get_num_threads()
    began = about(path)["made_by"].get("threads") if path is not None else None
    if isinstance(own, int):
        count = own
    elif isinstance(began, int) and began >= 1 and began != here:
        count, asked = began, os.environ.get("OMP_NUM_THREADS")
        wish = f" and not with OMP_NUM_THREADS={asked}" if asked not in (None, str(began)) else f", not {here}"
        say(f"torch computes with {began} threads as when the run began{wish}: another number would change its bits")
    else:
        count = here
    with machine.threads(count):
        yield


def _enough_prompts(config: Config) -> None:
    prompts = config.train.batch // config.train.samples
    if prompts < distributed.world():
        raise OperantError(f"{prompts} prompts a step for {distributed.world()} ranks: each needs one; raise batch")


def _loop(run: Run, asked: Asked) -> Iterator[Run]:
    run.trackers.start(run.folder.config)
    try:
        if not _asked_to_end(run, asked):
            with run.watched("the start"):
                run.start()
        yield run
        while run.learner.progress.step < run.config.train.steps and not _asked_to_end(run, asked):
            with run.watched(f"step {run.learner.progress.step + 1}"):
                run.step()
                run.save_when_due()
                run.observe(lambda observer: observer.after_step(run))
            yield run
    finally:
        run.trackers.close()
    with run.watched("the end"):
        try:
            (run.save_last if run.interrupted else run.finish)()
        finally:
            run.observe(lambda observer: observer.at_end(run))
    yield run


def _asked_to_end(run: Run, asked: Asked) -> bool:
    """Whether any rank was: all end after the same step."""
    run.interrupted = bool(distributed.largest(int(bool(asked) or run.interrupted)))
    return run.interrupted


def _go_on(run: Run, path: Path | None, changed: list[Change], *, fresh_optimizer: bool) -> None:
    """Put the checkpoint back; without one, the run starts anew."""
    folder = run.folder
    step = run.go_on(path, fresh_optimizer=fresh_optimizer) if path is not None else 0
    in_force(changed + changed_since(folder.path, step, run.config), run.learner)
    if not run.first:
        return
    folder.cut_after(step, about(path)["lengths"] if path is not None else None)
    try:
        run.metrics = folder.metrics()
    except OperantError as error:
        folder.say(f"the metrics so far are not shown: {error}")
    if changed:
        folder.change(as_mapping(run.config), [{"step": step, **asdict(change)} for change in changed])
        told = "; ".join(f"{change.name} is {change.new!r}, was {change.old!r}" for change in changed)
        folder.say(f"changed from step {step + 1} on: {told}")
    fresh = f", of {path.name}, with a fresh optimizer" if path is not None and fresh_optimizer else ""
    folder.say(f"going on after step {step}{fresh}")
    if path is not None and not (changed or fresh_optimizer):
        run.complete()


def _environment() -> dict[str, Any]:
    """What the run began on, for `environment.json`."""
    started = {"started": time.strftime("%Y-%m-%d %H:%M:%S"), "command": machine.command()}
    size = {"cores": os.cpu_count(), "memory_gb": machine.size_gb()}
    return {"operant": __version__} | machine.about() | size | started
