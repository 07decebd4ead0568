"""The run folder: all files that a run writes, which docs/design.md lists.

    with RunFolder.create("runs/sentiment", config) as folder:
        folder.log(1, {"reward/mean": 0.52})
        folder.rollouts(1, rows)

The folder is the record of a run, and trackers copy it. If the disk refuses a write, the method raises, and
`trackers.trackers` logs that and training goes on. Lines (metrics, distributions, the log) then wait in memory and are
written, in order, once the disk works again; the replies of such a step, which are large, are not written.
"""

import io
import json
import re
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import yaml

from operant.options import read_mapping
from operant.runs import lock
from operant.runs.trackers.console import plain
from operant.storage import atomic_io, old_names
from operant.storage.hub import CONFIGS, OWN
from operant.types import OperantError, require, shown

FAILED = "the run failed: "
"""How the line of `log.txt` begins, after its time, that an error which ended the run leaves."""
NOT_RESUMED, GOING_ON = "the resume failed: ", "going on after step "
"""The same of an error before a resumed run goes on, which leaves it as it was; and the line with which it goes on."""
MOST_WAITING = 64 << 20
"""The most characters of lines that wait; above that, the oldest lines are dropped."""
_PROBE = 1 << 20  # bytes: a disk with less free space could not hold a report

State = Literal["running", "finished", "failed", "interrupted"]
"""How a run stands."""


class Journal:
    """Appends lines to a file, complete and in order, even if writes fail in between."""

    def __init__(self, path: Path):
        self.path = path
        self.waiting: list[str] = []
        """Lines that could not be written yet."""
        self._writing = False
        self._good: int | None = None
        """The size of the file before a write that failed, which may have left half a line."""

    def add(self, line: str) -> None:
        """Write the waiting lines and this one. Raises: OperantError if the disk refuses; all of them then wait."""
        self.waiting.append(line)
        self.flush()

    def flush(self) -> None:
        """Write the waiting lines. Raises: OperantError if the disk refuses."""
        if self._writing or not self.waiting:  # what a signal adds meanwhile is written by the call that it interrupts
            return
        self._writing = True
        try:
            if self._good is not None and self.size() > self._good:  # a failed write has left half a line
                with atomic_io.explained(self.path):
                    atomic_io.truncate(self.path, self._good)
            while lines := self.waiting[:]:
                self._good = self.size()
                atomic_io.append_text(self.path, "".join(lines))
                del self.waiting[: len(lines)]
        except OperantError:
            while sum(map(len, self.waiting)) > MOST_WAITING:
                self.waiting.pop(0)
            raise
        finally:
            self._writing = False
        self._good = None

    def size(self) -> int:
        """Size of the file in bytes; 0 if it does not exist. Raises: OperantError if the disk does not say."""
        with atomic_io.explained(self.path, "look at"):
            return self.path.stat().st_size if self.path.exists() else 0


class RunFolder:
    """An open run folder, locked by this process until `close()`. Made by `create` or `open`."""

    def __init__(self, path: Path, config: Mapping[str, object]) -> None:
        self.path, self.config = path, dict(config)
        self.metrics_path, self.distributions_path = path / "metrics.jsonl", path / "distributions.jsonl"
        self.rollouts_path, self.probes_path = path / "rollouts", path / "probes"
        self.checkpoints, self.export, self.best = path / "checkpoints", path / "export", path / "best"
        self.report, self.log_path = path / "report.html", path / "log.txt"
        self.going_on = True
        """False for a run that is being resumed, until it goes on."""
        lines = (self.metrics_path, self.distributions_path, self.log_path)
        self._metrics, self._distributions, self._log = map(Journal, lines)

    @classmethod
    def create(
        cls, out: str | Path, config: Mapping[str, object], *, environment: Mapping[str, object] | None = None
    ) -> "RunFolder":
        """Create a new folder at `out`, or at `out-2`, `out-3` ... if `out` has files in it.

        environment: content of `environment.json`: versions, machine, command.
        """
        text = _dump(config)
        require(not Path(out).is_file(), f"--out {out}: that is a file, and a run writes a folder; choose another name")
        name = str(out)  # its model's files could not be written
        require(name.encode(errors="ignore").decode() == name, f"--out {shown(name)} is not UTF-8; choose another name")
        path = _claim(Path(out))
        try:
            atomic_io.write(path / "probe", bytes(_PROBE))
            atomic_io.remove(path / "probe")
            atomic_io.write(path / "config.yaml", text)
            if environment is not None:
                atomic_io.write(path / "environment.json", atomic_io.strict_json(environment) + "\n")
        except OperantError:
            _discard(path)
            raise
        return cls(path, config)

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """Open the folder of an earlier run to resume it. Next, `resume.cut_after` takes the step of the checkpoint."""
        path = Path(path)
        folder = cls(path, read_config(path))
        folder.going_on = False
        for entry in path.iterdir():
            if entry.is_symlink():  # in an untrusted folder, it may lead to any file of this user
                raise OperantError(f"{entry} is a link, and a run writes its own files: put what it leads to there")
        left = lock.take(path / "lock")
        for directory in (path, folder.rollouts_path, folder.probes_path):
            for unfinished in directory.glob(".*.tmp"):  # left by a killed process
                with suppress(OSError):
                    (atomic_io.remove_tree if unfinished.is_dir() else atomic_io.remove)(unfinished)
        if left:
            folder.log_message(f"took over from process {left['pid']}, which ended without closing this run")
        return folder

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step to `metrics.jsonl`. NaN and infinity are written as null.

        Raises: OperantError if the disk refuses; the line then waits, and is written before the next one.
        """
        self._metrics.add(as_line({"step": step} | {k: v for k, v in metrics.items() if k != "step"}))

    def metrics(self) -> list[dict[str, Any]]:
        """The metrics so far, one mapping per step."""
        return atomic_io.records(self.metrics_path)

    def distributions(self, step: int, parts: Mapping[str, object]) -> None:
        """Append one step's histograms and norms to `distributions.jsonl`. Raises: OperantError like `log`."""
        self._distributions.add(as_line({"step": step} | dict(parts)))

    def rollouts(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Write the replies of a step: one row per turn, as `runs.scored_rollouts.as_rows` returns them."""
        _write_rows(self.rollouts_path / f"{atomic_io.step_name(step)}.parquet", rows)

    def probes(self, step: int | None, rows: Sequence[Mapping[str, object]]) -> None:
        """Write the answers to the probe prompts at a step; None: those of the reference."""
        _write_rows(self.probes_path / f"{'reference' if step is None else atomic_io.step_name(step)}.parquet", rows)

    def lengths(self) -> dict[str, int]:
        """Sizes in bytes of the growing files, for a checkpoint's manifest: a resume truncates the files to them.

        The files are synced first, as the checkpoint will be. Raises: OperantError if the disk refuses.
        """
        sizes = {journal.path: journal.size() for journal in (self._metrics, self._distributions)}
        with atomic_io.explained(self.path):
            for path in (path for path in sizes if path.exists()):
                atomic_io.sync(path)
            atomic_io.sync_folder(self.path)
        return {path.name: size for path, size in sizes.items()}

    def change_config(self, config: Mapping[str, object], changes: Sequence[Mapping[str, object]]) -> None:
        """Replace the configuration, and append the changes (`step`, `name`, `old`, `new`) to `changes.jsonl`."""
        path = self.path / "changes.jsonl"
        records = [*atomic_io.records(path), *({"schema": old_names.SCHEMA, **change} for change in changes)]
        atomic_io.write(path, "".join(map(as_line, records)))
        atomic_io.write(self.path / "config.yaml", _dump(config))
        self.config = dict(config)

    def add_environment(self, **facts: object) -> None:
        """Add facts to `environment.json`. A disk that refuses that is ignored."""
        path = self.path / "environment.json"
        with suppress(OperantError, OSError, ValueError):
            known = json.loads(path.read_text(encoding="utf-8"))
            atomic_io.write(path, atomic_io.strict_json({**known, **facts}) + "\n")

    def log_message(self, text: str) -> None:
        """Append a line with the time to `log.txt`, and further ones indented. If the disk refuses, they wait."""
        with suppress(OperantError):
            lines = "\n  ".join(map(plain, text.split("\n")))
            self._log.add(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {lines}\n")

    def close(self) -> None:
        """Release the lock, so that another process can open the folder."""
        for journal in (self._metrics, self._distributions, self._log):
            with suppress(OperantError):
                journal.flush()
        lock.release(self.path / "lock")

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):  # a signal, or a generator that its user closed, is no failure
            behind = error.__cause__ if isinstance(error, OperantError) else error
            if behind is not None and not isinstance(behind, (OperantError, OSError)):  # such as of a user's reward
                self.log_message("".join(traceback.format_exception(behind)).rstrip())
            what = FAILED if self.going_on else NOT_RESUMED
            self.log_message(f"{what}{' '.join(str(error).split()) or type(error).__name__}")
        self.close()


def run_folders(*places: str | Path) -> list[Path]:
    """The run folders among `places` and up to two levels below them, as those of a sweep, newest first."""
    patterns = ("config.yaml", "*/config.yaml", "*/*/config.yaml")
    found = {path.parent for place in places for pattern in patterns for path in Path(place).glob(pattern)}
    return sorted(found, key=changed, reverse=True)


def changed(folder: Path) -> float:
    """When a run folder last got a step, in seconds since 1970; before the first step, when it was made."""
    metrics, config = folder / "metrics.jsonl", folder / "config.yaml"
    return (metrics if metrics.exists() else config).stat().st_mtime


def state(folder: Path, done: int, steps: int) -> State:
    """How the run in `folder` stands, with `done` of `steps` steps.

    It failed if an error ended it, and was interrupted if a signal did, or if its process is gone without a trace: what
    is killed leaves its lock, maybe beside the export of a run of fewer steps.
    """
    if lock.held(folder / "lock"):
        return "running"
    log = folder / "log.txt"
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    if re.findall(rf"^[-\d]{{10}} [:\d]{{8}} ({FAILED}|{GOING_ON})", text, re.MULTILINE)[-1:] == [FAILED]:
        return "failed"
    ended = done >= steps and is_export(folder / "export") and not (folder / "lock").exists()
    return "finished" if ended else "interrupted"


def of_scores(name: str) -> bool:
    """Whether scores before and after a change of the option `name` cannot be compared."""
    scored = ("reward", "env", "sampling", "data", "condition", "mask")
    return name.partition(".")[0] in scored and name.rpartition(".")[2] not in COMPUTED


COMPUTED = ("workers", "device", "batch", "at_once", "seconds", "ray", "ray_address", "cache")
"""Options of a reward or a world that say how it is computed."""


def is_export(folder: Path) -> bool:
    """Whether a folder has an exported policy: a transformers model, a soft prompt, or another with `policy.json`."""
    return any((folder / name).is_file() for name in (*CONFIGS, OWN))


def read_config(path: str | Path) -> dict[str, Any]:
    """The configuration of a run folder. Raises: OperantError, with the runs nearby, if there is none."""
    file = (path := Path(path)) / "config.yaml"
    if not file.is_file():
        within = next((above for above in path.absolute().parents[:3] if (above / "config.yaml").is_file()), None)
        hint = f"it lies in the run folder {within}: give that" if within else runs_near(path)
        raise OperantError(f"{path} is not a run folder: it has no config.yaml; {hint}")
    return old_names.current(read_mapping(file), file)


def runs_near(path: Path) -> str:
    """The runs beside a path that is no run folder, or else those in runs/, as a part of a sentence: the newest ten."""
    for place in (path.parent, Path("runs")):
        if found := sorted(place.glob("*/config.yaml"), key=lambda file: -file.stat().st_mtime):
            more = f" and {len(found) - 10} more" if len(found) > 10 else ""
            return f"runs in {place}: {', '.join(file.parent.name for file in found[:10])}{more}"
    return f"there is no run in {path.parent}"


def _dump(config: Mapping[str, object]) -> str:
    try:
        return yaml.safe_dump({"schema": old_names.SCHEMA, **config}, sort_keys=False, allow_unicode=True, width=120)
    except yaml.YAMLError as error:
        why = f"{error}; use numbers, strings, lists, mappings"
        raise OperantError(f"the configuration cannot be written: {why}") from error


def _claim(out: Path) -> Path:
    """Make and lock the first folder of `out`, `out-2`, `out-3` ... that is missing or empty."""
    if out.name in ("", ".."):
        out = out.resolve()
    number = 0
    while True:
        number += 1
        path = out if number == 1 else out.with_name(f"{out.name}-{number}")
        with atomic_io.explained(path):
            atomic_io.mkdir(path.parent)
            try:
                atomic_io.mkdir(path, exist_ok=False)
            except FileExistsError:
                if not path.is_dir() or any(path.iterdir()):
                    continue
        try:
            if lock.take_free(path / "lock"):  # else another run has just taken it
                return path
        except OperantError:
            _discard(path)
            raise


def _discard(path: Path) -> None:
    with suppress(OSError):
        atomic_io.remove_tree(path)


def as_line(record: Mapping[str, object]) -> str:
    return atomic_io.strict_json(record) + "\n"


def _write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    with atomic_io.explained(path.parent):
        atomic_io.mkdir(path.parent)
    atomic_io.write(path, as_parquet(rows))


def as_parquet(rows: Sequence[Mapping[str, object]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # pyarrow takes the schema from the first row only, and a reward may be missing there.
    names = list(dict.fromkeys(name for row in rows for name in row))
    kinds = {n: pa.float64() for n in names if n.partition("/")[0] == "reward"}
    columns, sink = {n: pa.array([row.get(n) for row in rows], kinds.get(n)) for n in names}, io.BytesIO()
    pq.write_table(pa.table(columns), sink, compression="zstd")
    return sink.getvalue()
