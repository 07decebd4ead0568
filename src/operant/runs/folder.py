"""The run folder: everything that a run leaves behind.

    runs/sentiment/
      config.yaml                  complete and resolved
      environment.json             versions, machine, command
      metrics.jsonl                one object a step
      distributions.jsonl          one object a step: histograms, norms by block
      rollouts/step-00012.parquet  what was said, one row a turn
      probes/step-00010.parquet    answers to the probe queries; probes/reference.parquet: the reference's
      checkpoints/  export/  best/  report.html  log.txt
      lock                         who writes here now

    with RunFolder.create("runs/sentiment", config) as folder:
        folder.log(1, {"reward/mean": 0.52})
        folder.rollouts(1, rows)

Trackers are copies of this folder; the folder is the record. A disk that refuses stops no training: each call raises,
`trackers.trackers` says so and goes on. Lines (metrics, distributions, the log) then wait in memory and are written, in
order, as soon as the disk takes them; of a step's replies, which are large, the file is missing.
"""

import io
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from operant.options import read_mapping
from operant.runs import lock
from operant.runs.journal import Journal
from operant.storage import atomic_io, old_names
from operant.types import OperantError

_PROBE = 1 << 20  # bytes: a disk with less room than this could not hold a report


class RunFolder:
    """An open run folder, held by this process until `close()`. Made by `create` or `open`."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path = path
        self.config = dict(config)
        self.metrics_path = path / "metrics.jsonl"
        self.distributions_path = path / "distributions.jsonl"
        self.rollouts_path = path / "rollouts"
        self.probes_path = path / "probes"
        self.checkpoints = path / "checkpoints"
        self.export = path / "export"
        self.best = path / "best"
        self.report = path / "report.html"
        self.log_path = path / "log.txt"
        self._reference: list[dict[str, Any]] | None = None
        lines = (self.metrics_path, self.distributions_path, self.log_path)
        self._metrics, self._distributions, self._log = map(Journal, lines)

    @classmethod
    def create(
        cls,
        out: str | Path,
        config: Mapping[str, Any],
        *,
        needs: int = 0,
        environment: Mapping[str, Any] | None = None,
    ) -> "RunFolder":
        """A new folder at `out`, or at `out-2`, `out-3` ... where a run lies there already.

        `environment`: what the run begins on, for `environment.json`.
        `needs`: bytes that the run is going to write; a disk with less room is refused now, not in an hour.
        Raises `OperantError` when nothing can be written there.
        """
        text = _dump(config)
        path = _claim(Path(out))
        try:
            _probe(path, needs)
            atomic_io.write(path / "config.yaml", text)
            if environment is not None:
                atomic_io.write(path / "environment.json", atomic_io.strict_json(environment) + "\n")
        except OperantError:
            _discard(path)
            raise
        return cls(path, config)

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """The folder of an earlier run, to go on with it. Follow with `cut_after` of the step resumed from."""
        path = Path(path)
        config = read_config(path)
        folder = cls(path, config)
        for file in (folder.metrics_path, folder.distributions_path, folder.log_path):
            if file.is_symlink():  # of a folder from somebody else, it may lead to any file of this user
                raise OperantError(f"{file} is a link, and a run writes its own files: put the file itself there")
        left = lock.take(path / "lock")
        folder._sweep()
        if left:
            folder.say(f"took over from process {left['pid']}, which ended without closing this run")
        return folder

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step to `metrics.jsonl`. A number that is not finite is written as null.

        Raises: OperantError where the disk refuses; the line then waits, and is written with the next that it takes.
        """
        self._metrics.add(_line({"step": step} | {k: v for k, v in metrics.items() if k != "step"}))

    def metrics(self) -> list[dict[str, Any]]:
        """What was logged so far, one mapping a step."""
        return atomic_io.records(self.metrics_path)

    def distributions(self, step: int, told: Mapping[str, Any]) -> None:
        """Append one step's histograms and norms to `distributions.jsonl`. Raises: OperantError as `log`."""
        self._distributions.add(_line({"step": step} | dict(told)))

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write what was said at a step: one row a turn, as `metrics.rollout_table.rows` makes them."""
        _write_rows(self.rollouts_path / f"{atomic_io.step_name(step)}.parquet", rows)

    def probes(self, step: int | None, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the answers to the probe queries at a step; None: the reference's."""
        _write_rows(self.probes_path / f"{'reference' if step is None else atomic_io.step_name(step)}.parquet", rows)

    def reference_probes(self) -> list[dict[str, Any]]:
        """The reference's answers to the probe queries; empty where there are none. Read once."""
        if self._reference is None:
            import pyarrow.parquet as pq

            path = self.probes_path / "reference.parquet"
            with atomic_io.explained(path, "read"):
                self._reference = pq.read_table(path).to_pylist() if path.exists() else []
        return self._reference

    def lengths(self) -> dict[str, int]:
        """Bytes of the files that grow, for a checkpoint's manifest: what comes after them is cut on resume.

        They are brought to the disk first, as the checkpoint will be. Raises: OperantError where it refuses.
        """
        told = {journal.path: journal.size() for journal in (self._metrics, self._distributions)}
        with atomic_io.explained(self.path):
            for path in (path for path in told if path.exists()):
                atomic_io.sync(path)
            atomic_io.sync_folder(self.path)
        return {path.name: size for path, size in told.items()}

    def cut_after(self, step: int, lengths: Mapping[str, int] | None = None) -> None:
        """Forget the steps after `step`: on resume they are played again, and must not stand there twice.

        lengths: as `lengths` gave them when the checkpoint was written; {}: it is of a time that did not know them.
        Raises: OperantError where the disk refuses.
        """
        for path in (self.metrics_path, self.distributions_path):
            if not path.exists():
                if (lengths or {}).get(path.name):
                    self.say(f"{path.name} is gone: what it told of the steps up to {step} is lost")
            elif step == 0 or path.name in (lengths or {}):
                self._cut(path, 0 if step == 0 else (lengths or {})[path.name])
            else:
                kept = [record for record in atomic_io.records(path) if record["step"] <= step]
                atomic_io.write(path, "".join(map(_line, kept)))
        for folder in (self.rollouts_path, self.probes_path, self.path / "refused"):
            for left in folder.glob("step-*"):
                if (atomic_io.step_of(left) or 0) > step:
                    with atomic_io.explained(left, "delete"):
                        (atomic_io.remove_tree if left.is_dir() else atomic_io.remove)(left)

    def _cut(self, path: Path, length: int) -> None:
        """Cut a file of lines back to `length` bytes; one that is shorter, to its last whole line."""
        size = path.stat().st_size
        if size < length:
            self.say(f"{path.name} has {size} bytes, the checkpoint knew {length}: lines of earlier steps are lost")
            with atomic_io.explained(path, "read"):
                length = path.read_bytes().rfind(b"\n") + 1
        if size > length:
            with atomic_io.explained(path):
                atomic_io.truncate(path, length)

    def _sweep(self) -> None:
        """Take away what writes left that were killed."""
        for folder in (self.path, self.rollouts_path, self.probes_path):
            for left in folder.glob(".*.tmp"):
                with suppress(OSError):
                    (atomic_io.remove_tree if left.is_dir() else atomic_io.remove)(left)

    def change(self, config: Mapping[str, Any], changes: Sequence[Mapping[str, Any]]) -> None:
        """The run goes on with another configuration: `changes.jsonl` says which names changed, from what to what."""
        atomic_io.append_text(self.path / "changes.jsonl", "".join(map(_line, changes)))
        atomic_io.write(self.path / "config.yaml", _dump(config))
        self.config = dict(config)

    def know(self, **facts: Any) -> None:
        """Add to `environment.json` what is known only now; a disk that refuses that stops nothing."""
        path = self.path / "environment.json"
        with suppress(OperantError, OSError, ValueError):
            atomic_io.write(
                path, atomic_io.strict_json({**json.loads(path.read_text(encoding="utf-8")), **facts}) + "\n"
            )

    def say(self, text: str) -> None:
        """Add a line with the time to `log.txt`. A log that cannot be written stops nothing: its lines wait."""
        with suppress(OperantError):
            self._log.add(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def close(self) -> None:
        """Let go of the folder, so that another process may open it."""
        for journal in (self._metrics, self._distributions, self._log):
            with suppress(OperantError):
                journal.flush()
        lock.release(self.path / "lock")

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_config(path: str | Path) -> dict[str, Any]:
    """The configuration that a run folder was made with."""
    path = Path(path)
    file = path / "config.yaml"
    if not file.is_file():
        runs = sorted(p.parent.name for p in path.parent.glob("*/config.yaml"))
        have = f"runs in {path.parent}: {', '.join(runs)}" if runs else f"no run lies in {path.parent}"
        raise OperantError(f"{path} is no run folder: it has no config.yaml; {have}")
    return old_names.current(read_mapping(file), file)


def _dump(config: Mapping[str, Any]) -> str:
    try:
        return yaml.safe_dump({"schema": old_names.SCHEMA, **config}, sort_keys=False, allow_unicode=True, width=120)
    except yaml.YAMLError as error:
        raise OperantError(
            f"the configuration cannot be written: {error}; use numbers, strings, lists, mappings"
        ) from error


def _claim(out: Path) -> Path:
    """Make and lock the first folder of `out`, `out-2`, `out-3` ... that holds nothing yet."""
    if out.name in ("", ".."):
        out = out.resolve()
    number = 1
    while True:
        path = out if number == 1 else out.with_name(f"{out.name}-{number}")
        with atomic_io.explained(path):
            atomic_io.mkdir(path.parent)
            try:
                atomic_io.mkdir(path, exist_ok=False)
            except FileExistsError:
                if not path.is_dir() or any(path.iterdir()):
                    number += 1
                    continue
        try:
            if lock.take_free(path / "lock"):  # another run may have been quicker
                return path
        except OperantError:
            _discard(path)
            raise
        number += 1


def _discard(path: Path) -> None:
    with suppress(OSError):
        atomic_io.remove_tree(path)


def _probe(path: Path, needs: int) -> None:
    """Raise now, and not after an hour of training, where the disk takes nothing."""
    probe = path / "probe"
    atomic_io.write(probe, bytes(_PROBE))
    free = shutil.disk_usage(path).free
    atomic_io.remove(probe)
    if free < needs:
        raise OperantError(
            f"{path} has {free / 1e9:.1f} GB free and the run needs {needs / 1e9:.1f} GB; free some space there, "
            "or choose a folder on another disk with --out"
        )


def _line(record: Mapping[str, Any]) -> str:
    return atomic_io.strict_json(record) + "\n"


def _write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with atomic_io.explained(path.parent):
        atomic_io.mkdir(path.parent)
    atomic_io.write(path, _parquet(rows))


def _parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # The schema of pyarrow comes from the first row alone, and a reward may be absent there.
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {n: pa.array([row.get(n) for row in rows], pa.float64() if _is_reward(n) else None) for n in names}
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, compression="zstd")
    return sink.getvalue()


def _is_reward(name: str) -> bool:
    return name == "reward" or name.startswith("reward/")
