"""What the processes of a run have in common: equal options, memory for their replies, the folder, and threads."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from operant import __version__, distributed, machine
from operant.runs import named_parts
from operant.runs.config import Config, as_mapping
from operant.runs.folder import RunFolder
from operant.runs.resume import by_name
from operant.storage.checkpoint_store import about
from operant.types import OperantError


def check_ranks(config: Config, out: Path, resume: bool) -> None:
    """Raise OperantError on all ranks if they differ in options or versions, or are too many for a step."""
    versions = {name: value for name, value in machine.about().items() if name in ("torch", "transformers", "python")}
    start = {"operant": __version__} | versions | {"resume": resume, "out": str(out)}
    distributed.check_equal("options or versions", start | by_name(as_mapping(config)))
    train, ranks = config.train, distributed.world()
    prompts, have, error = train.batch // train.samples, machine.size_gb(), None
    if (need := train.batch // ranks * 1900 / 1e9) > have:  # bytes of a reply, measured with tracemalloc
        takes = f"even replies of one token would take {need:,.0f} GB of memory, and this machine has {have:,.0f}"
        usual = "64 to 1,024 are usual, and `operant doctor --plan` estimates what fits"
        error = OperantError(f"batch={train.batch}: {takes}; {usual}")
    if prompts < ranks:
        error = OperantError(f"{prompts} prompts a step for {ranks} ranks: each needs one; raise batch")
    if train.partial_rollout_tokens and ranks > 1:
        why = "their steps would end unequally; use engine=ray"
        error = OperantError(f"partial_rollout_tokens={train.partial_rollout_tokens} with {ranks} ranks: {why}")
    distributed.agree(error)


@contextmanager
def open_folder(out: Path, config: Config, resume: bool) -> Iterator[RunFolder]:
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


@contextmanager
def threads(config: Config, path: Path | None, log_message: Callable[[str], None]) -> Iterator[None]:
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
        why = "another number would change the last bits of the results"
        log_message(f"torch computes with {began} threads as when the run began and {instead}: {why}")
    with machine.threads(count):
        yield
