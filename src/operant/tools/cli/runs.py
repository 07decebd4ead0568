"""`operant runs`: the runs below a folder, with their verdicts."""

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from operant.runs.folder import changed, run_folders, state
from operant.runs.trackers.console import emit, plain
from operant.tools.cli.arguments import Options
from operant.tools.report.diagnosis import diagnose, read_history, short_verdict, verdict
from operant.tools.report.diagnosis.foreign import audit_log
from operant.tools.report.diagnosis.history import number
from operant.tools.report.diagnosis.progress import progress
from operant.tools.report.display import print_diagnosis, print_findings
from operant.tools.report.downsample import short
from operant.tools.report.parquet import reading_run
from operant.types import OperantError, require

LEAST = 18
"""The narrowest that a name or a verdict becomes before other columns are left out, in characters."""
SPARE = ("method", "score of", "KL")
"""Columns that a narrow terminal leaves out, in this order."""


def runs(words: Sequence[str], options: Options) -> int:
    """`operant runs [FOLDER ...]` prints a table of the runs, newest first."""
    where = list(words) or ["runs"]
    if missing := [place for place in words if not Path(place).is_dir()]:
        raise OperantError(f"there is no folder {missing[0]}: name one that runs are in, as in operant runs runs")
    found = [_row(folder) for folder in run_folders(*where)]
    if options.pop("json", False):
        print(json.dumps(found, indent=1, allow_nan=False))
    elif not found:
        print(f"no run in {', '.join(where)}: `operant train letters` makes one, `operant runs FOLDER` looks elsewhere")
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        emit("\n".join(table([_texts(row) for row in found], width)))
    return 0


def _row(folder: Path) -> dict[str, object]:
    """Return the facts about a run; for one that cannot be read, the reason is its verdict."""
    row: dict[str, object] = {"run": os.path.relpath(folder), "changed": changed(folder)}
    try:
        with reading_run(folder):  # a folder of another program may have a config.yaml, too
            history = read_history(folder)
            score, steps = progress(history), int(history.option("steps") or 0)
            known: dict[str, object] = {"method": history.option("algorithm", "ppo")}
            known |= {"state": state(folder, history.step, steps)}
            known |= {"step": history.step, "steps": steps, "score": score and score.label}
            known |= {"before": score and short(score.before), "after": score and short(score.after)}
            known |= {"interval": score and score.interval and [short(x) for x in score.interval]}
            return row | known | {"kl": short(history.kl), "verdict": short_verdict(history, diagnose(history))}
    except OperantError as error:
        return row | {"state": "unreadable", "verdict": str(error)}


def _texts(row: Mapping[str, object]) -> dict[str, str]:
    """Return a row of the table."""
    known, seconds = row.get("before") is not None, time.time() - row["changed"]
    units = (("d", 86400), ("h", 3600), ("min", 60))
    age = next((f"{seconds / length:.0f} {unit}" for unit, length in units if seconds >= length), "now")
    steps = f" {row['step']}" if row["state"] == "finished" else f" {row.get('step', 0)}/{row.get('steps', 0)}"
    texts = {"run": row["run"], "method": str(row.get("method", ""))}
    texts |= {"state": row["state"] + (steps if "step" in row else "")}
    texts |= {"score": f"{number(row['before'])} -> {number(row['after'])}" if known else ""}
    texts |= {"score of": str(row.get("score") or "")}
    texts |= {"KL": f"{row['kl']:z.1f}" if row.get("kl") is not None else ""}
    return {name: plain(text) for name, text in {**texts, "age": age, "verdict": row["verdict"]}.items()}


def table(rows: Sequence[Mapping[str, str]], width: int | None) -> list[str]:
    """Return the lines of a table with headings. width: of the terminal; None: as wide as the texts are.

    Where the terminal is narrow, verdicts and names are cut, and then columns are left out.
    """
    columns = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in columns}
    lines = [{name: name for name in columns}, *rows]
    for spare in (*SPARE, None):
        over = sum(widths[name] + 2 for name in columns) - 2 - (width or sys.maxsize)
        if spare is None or over <= sum(max(widths[name] - LEAST, 0) for name in ("run", "verdict")):
            break
        columns.remove(spare)
    for name in ("run", "verdict"):
        less = max(min(over, widths[name] - LEAST), 0)
        widths[name], over = widths[name] - less, over - less
    cells = [[_cut(line[name], widths[name], name).ljust(widths[name]) for name in columns] for line in lines]
    return ["  ".join(line).rstrip() for line in cells]


def _cut(text: str, width: int, column: str) -> str:
    """Return the text in at most `width` characters. Of a folder the end stays, which tells runs apart."""
    if len(text) <= width:
        return text
    return f"…{text[len(text) - width + 1 :]}" if column == "run" else f"{text[: width - 1]}…"


def diagnose_log(words: Sequence[str], options: Options) -> int:
    """`operant diagnose FILE` says what looks wrong with a run, also of another library, and what it could not see."""
    require(len(words) == 1, "expected a run folder or a log: operant diagnose runs/sentiment")
    path = Path(words[0])
    if (path / "config.yaml").is_file() and (path / "metrics.jsonl").is_file():
        print_diagnosis(path)
        return 0
    audit = audit_log(path)
    findings = diagnose(audit.history)
    print(f"{path}: {len(audit.history.metrics)} steps, in the names of {audit.title}")
    print_findings(verdict(audit.history, findings), findings, audit.remedy)
    read = (f"{name}" if name == ours else f"{name} ({ours})" for name, ours in audit.understood.items())
    print(plain(f"understood: {', '.join(read)}"))
    if audit.unknown:
        print(plain(f"not understood: {', '.join(audit.unknown)}"))
    for name, why in audit.differs.items():
        print(plain(f"{name}: {why}"))
    lacking = [f"{', '.join(names)} (no {metrics})" for metrics, names in audit.unchecked(findings).items()]
    print(plain(f"not checked: {'; '.join(lacking).replace('|', ', ')}"))
    return 0
