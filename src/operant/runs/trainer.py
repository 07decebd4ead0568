"""Layer 3: from a configuration to a run folder.

tasks -> play -> reward -> select -> rows -> score -> credit -> update -> sync -> log

for run in runs("runs/sentiment", recipe="sentiment"): ...
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from operant import __version__, distributed, machine
from operant.runs import named_parts, notes
from operant.runs.build import build
from operant.runs.config import Config, as_mapping, configure
from operant.runs.folder import Journal, RunFolder
from operant.runs.named_models import copy_initial_models, pin_names, with_copies
from operant.runs.resume import by_name, changes, elsewhere, go_on, stored_options
from operant.runs.run import Observer, Run
from operant.runs.signals import stop_on_signal
from operant.storage import atomic_io
from operant.storage.checkpoint_store import about, to_resume
from operant.trackers.trackers import Tracker, Trackers, make_trackers
from operant.training.own_optimizer import check_given, with_kind
from operant.types import OperantError
from operant.watchdog import Watchdog

BYTES_OF_A_REPLY = 1900
"""Memory of a reply of one token while it is generated, measured with tracemalloc."""


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
) -> Iterator[Run]:
    """Train, and yield the run before the first step, after every step, and at the end.

    resume: continue the run in `out`. fresh_optimizer: with `resume`, load only the weights of the newest checkpoint,
    which may be a light one, and start with a new optimizer. optimizer, lr_scheduler: as in `Learner`; pass them again
    to resume. show: trackers in addition to the option `trackers`.
    observers: called at the start, after every step and at the end.
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
        _check_ranks(config, out, resume)
        folder = stack.enter_context(_open_folder(out, config, resume))
        folder.checkpoints = distributed.gathered(folder.checkpoints)[0]  # where the first rank's folder is
        stop.on_request = log_message = folder.log_message
        path = to_resume(folder.checkpoints, log_message, fresh_optimizer=fresh_optimizer) if resume else None
        if path is not None:
            for lines in (folder.metrics_path, folder.distributions_path):  # raises for a damaged one
                atomic_io.records(lines, about(path)["lengths"].get(lines.name))
        # A folder that not all machines share would resume each of them elsewhere.
        distributed.check_equal("checkpoints", {"the newest checkpoint": path and path.name})
        stack.enter_context(_threads(config, path, log_message))
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


def _check_ranks(config: Config, out: Path, resume: bool) -> None:
    """Raise OperantError on all ranks if they differ in options or versions, or are too many for a step."""
    versions = {name: value for name, value in machine.about().items() if name in ("torch", "transformers", "python")}
    start = {"operant": __version__} | versions | {"resume": resume, "out": str(out)}
    distributed.check_equal("options or versions", start | by_name(as_mapping(config)))
    train, ranks = config.train, distributed.world()
    replies, prompts, have = train.batch // ranks, train.batch // train.samples, machine.size_gb()
    error = None
    if (need := replies * BYTES_OF_A_REPLY / 1e9) > have:
        error = OperantError(
            f"batch={train.batch}: even replies of one token would take {need:,.0f} GB of memory, and this "
            f"machine has {have:,.0f}; 64 to 1,024 are usual, and `operant doctor --plan` estimates what fits"
        )
    if prompts < ranks:
        error = OperantError(f"{prompts} prompts a step for {ranks} ranks: each needs one; raise batch")
    if train.partial_rollout_tokens and ranks > 1:
        error = OperantError(
            f"partial_rollout_tokens={train.partial_rollout_tokens} with {ranks} ranks: their steps would end "
            "unequally; use engine=ray"
        )
    distributed.agree(error)


@contextmanager
def _threads(config: Config, path: Path | None, log_message: Callable[[str], None]) -> Iterator[None]:
    """Let torch compute with the number of threads of the option `learner.threads`.

    If that is `auto`, a resumed run has as many as at its checkpoint `path`, since the last bits depend on it. Training
    and a thread that generates ahead of it in this process have half of them each.
    """
    option, here = config.learner["learner"].threads, torch.get_num_threads()
    if config.train.rollouts_ahead and not named_parts.has_own_weights(config.train.engine):
        here = max(1, here // 2)
    count = option if isinstance(option, int) else here
    began = about(path)["made_by"].get("threads") if path is not None and option == "auto" else None
    if isinstance(began, int) and began >= 1 and began != here:
        count, wanted = began, os.environ.get("OMP_NUM_THREADS")
        instead = f"not with OMP_NUM_THREADS={wanted}" if wanted not in (None, str(began)) else f"not with {here}"
        log_message(
            f"torch computes with {began} threads as when the run began and {instead}: "
            "another number would change the last bits of the results"
        )
    with machine.threads(count):
        yield


@contextmanager
def _open_folder(out: Path, config: Config, resume: bool) -> Iterator[RunFolder]:
    """Open the run folder. Other ranks than the first get a temporary one."""
    if distributed.rank() == 0:
        if resume:
            folder = RunFolder.open(out)
        else:
            size = {"cores": os.cpu_count(), "memory_gb": machine.size_gb()}
            started = {"started": time.strftime("%Y-%m-%d %H:%M:%S"), "command": machine.command()}
            environment = {"operant": __version__, **machine.about(), **size, **started, "folder": os.getcwd()}
            folder = RunFolder.create(out, as_mapping(config), environment=environment)
        with folder:
            yield folder
        return
    with tempfile.TemporaryDirectory() as path, RunFolder.create(Path(path) / "run", as_mapping(config)) as folder:
        yield folder


def _load(
    config: Config, models: Config, folder: RunFolder, resume: bool, show: Iterable[Tracker], **objects: Any
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
    """Delete the folder of a new run, which holds no results yet."""
    folder.close()
    shutil.rmtree(folder.path, ignore_errors=True)
    with suppress(OSError):
        folder.path.parent.rmdir()  # succeeds only if the parent is empty
