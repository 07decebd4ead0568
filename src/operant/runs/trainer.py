"""Layer 3: from a configuration to a run folder.

tasks -> play -> reward -> select -> rows -> score -> credit -> update -> sync -> log

for run in runs("runs/sentiment", recipe="sentiment"): ...
"""

import shutil
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

from operant import distributed, machine
from operant.runs import notes
from operant.runs.build import build
from operant.runs.config import Config, configure
from operant.runs.folder import Journal, RunFolder
from operant.runs.named_models import copy_initial_models, pin_names, with_copies
from operant.runs.ranks import check_ranks, open_folder, threads
from operant.runs.resume import changes, elsewhere, go_on, stored_options
from operant.runs.run import Observer, Run
from operant.runs.signals import stop_on_signal
from operant.runs.trackers.trackers import Tracker, Trackers, make_trackers
from operant.storage import atomic_io
from operant.storage.checkpoint_store import about, to_resume
from operant.training.own_optimizer import check_given, with_kind
from operant.types import OperantError
from operant.watchdog import Watchdog


def runs(
    out: str | Path | None = None,
    *,
    tokenizer: object = None,
    optimizer: object = None,
    lr_scheduler: object = None,
    recipe: str | None = None,
    resume: bool = False,
    fresh_optimizer: bool = False,
    show: Iterable[Tracker] = (),
    observers: Sequence[Observer] = (),
    **given: object,
) -> Generator[Run]:
    """Train, and yield the run before the first step, after every step, and at the end.

    resume: continue the run in `out`. fresh_optimizer: with `resume`, load only the weights of the newest checkpoint,
    which may be a light one, and start with a new optimizer. optimizer, lr_scheduler: as in `Learner`; pass them again
    to resume. show: further trackers. observers: called at the start, after every step and at the end.
    """
    out = Path(out or f"runs/{Path(recipe or 'run').stem}")
    if fresh_optimizer and not resume:
        raise OperantError("fresh_optimizer without resume: a new run has a fresh optimizer anyway; leave it out")
    optimizer, given = with_kind(optimizer, given)
    with elsewhere(out) if resume else nullcontext():
        config = configure(stored_options(out, given)) if resume else pin_names(configure(given, recipe))
    changed = changes(out, config, fresh_optimizer=fresh_optimizer) if resume else []
    check_given(config.learner, optimizer, lr_scheduler)
    with ExitStack() as stack:
        stop = stack.enter_context(stop_on_signal())
        stack.enter_context(distributed.launched(config.train.silence_minutes))
        check_ranks(config, out, resume)
        folder = stack.enter_context(open_folder(out, config, resume))
        folder.checkpoints = distributed.gathered(folder.checkpoints)[0]  # where the first rank's folder is
        stop.on_request = log_message = folder.log_message
        path = to_resume(folder.checkpoints, log_message, fresh_optimizer=fresh_optimizer) if resume else None
        if path is not None:
            for lines in (folder.metrics_path, folder.distributions_path):  # raises for a damaged one
                atomic_io.records(lines, about(path)["lengths"].get(lines.name))
        # A folder that not all machines share would resume each of them elsewhere.
        distributed.check_equal("checkpoints", {"the newest checkpoint": path and path.name})
        stack.enter_context(threads(config, path, log_message))
        models = with_copies(config, out, log_message) if resume else config
        objects = {"closing": stack, "tokenizer": tokenizer, "optimizer": optimizer, "lr_scheduler": lr_scheduler}
        with elsewhere(out) if resume else nullcontext():
            run = _load(config, models, folder, resume, show, **objects)
        run.observers = observers
        if run.parts.ahead is not None:
            stack.callback(run.parts.ahead.close)
        notes.tell(config, run.parts, folder, run.trackers, resumed=resume)
        if resume:
            go_on(run, path, changed, fresh_optimizer=fresh_optimizer)
        if run.first:
            copy_initial_models(config, folder.path)
        try:
            yield from run.train(stop)
        except OperantError:
            if not (resume or run.evaluation.started):  # refused before the first step, by a reward perhaps
                _discard(folder)
            raise


def _load(
    config: Config, models: Config, folder: RunFolder, resume: bool, show: Iterable[Tracker], **objects: object
) -> Run:
    """Load everything that the run needs. If that fails, a new folder is deleted.

    models: the same options as `config`, with the folders that models are loaded from. objects: the other arguments of
    `build`.
    """
    clock, first, log_message = machine.Clock(), distributed.rank() == 0, folder.log_message
    try:
        with Watchdog(clock, log_message, folder.log_path), clock.timing("loading"):
            named, own = config.train.trackers, config.parts.get("trackers")
            named = named if own is None or isinstance(named, Mapping) else {named[0]: own}
            trackers = [*show, *make_trackers(named, folder.path, log_message)] if first else []
            verdicts = folder.checkpoints.parent / f"verdicts-{distributed.rank()}.jsonl"
            parts = build(models, journal=Journal(verdicts), **objects)
            tasks, ranks = len(parts.tasks), distributed.world()
            few = f"{tasks} tasks for {ranks} ranks: each needs one; give more tasks, or start fewer ranks"
            distributed.agree(OperantError(few) if tasks < ranks else None)
    except BaseException:
        if not resume:
            _discard(folder)
        raise
    return Run(config, parts, folder, Trackers(folder, trackers, log_message))


def _discard(folder: RunFolder) -> None:
    folder.close()
    shutil.rmtree(folder.path, ignore_errors=True)
    with suppress(OSError):
        folder.path.parent.rmdir()  # succeeds only if the parent is empty
