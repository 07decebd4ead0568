"""Examines the logs of other libraries by the rules for operant's own runs.

    audit = audit_log("outputs/checkpoint-200/trainer_state.json")
    print(verdict(audit.history, found := diagnose(audit.history)), audit.unchecked(found), audit.unknown)

`foreign.toml` says what each library calls the metrics that the rules read, and which of them mean something else.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from operant.metrics.registry import describe
from operant.tools.report.diagnosis.history import FINDINGS, Finding, History, is_finite
from operant.tools.report.diagnosis.logs import read_log
from operant.types import OperantError

_FILE = Path(__file__).parent / "foreign.toml"
LIBRARIES: dict[str, dict[str, Any]] = tomllib.loads(_FILE.read_text(encoding="utf-8"))
"""By library: its title, the names that only it logs, its names of metrics and options, and what differs."""
OWN: dict[str, Any] = {"title": "operant", "names": {}}
"""A log with none of the marks: names of this library are understood in any log."""
OTHER_RUNS = ("actions/", "game/", "outcome/", "trust/", "rollout/outgrown")
"""Metrics of games, programs and trust regions: without them, their rules do not apply."""
SUPERVISED = {"overfits", "guesses", "not_finite", "refused"}
"""The findings on given replies, or on labels."""
LENGTH = "rollout/reply_tokens"


@dataclass(frozen=True)
class Audit:
    """A log of another library, as the rules read it."""

    title: str
    """The library that has written it."""
    history: History
    understood: Mapping[str, str]
    """Its names and the names here."""
    unknown: Sequence[str]
    """Its names that no rule reads."""
    differs: Mapping[str, str]
    """What another thing its names mean."""
    options: Mapping[str, str] = field(default_factory=dict)
    """What it calls the options that remedies name."""

    def remedy(self, finding: Finding) -> str:
        """The remedy of a finding, with what the library calls its options: `--optimizer.lr is learning_rate`."""
        text = FINDINGS[finding.name].get("elsewhere", finding.remedy)
        named = dict.fromkeys(name.replace("-", "_") for name in re.findall(r"--([\w.-]+\w)", text))
        known = "; ".join(f"--{name} is {self.options[name]}" for name in named if name in self.options)
        return f"{text} (there {known})" if known else text

    def unchecked(self, findings: Sequence[Finding]) -> dict[str, list[str]]:
        """By what is not logged, the names of the findings that could not be looked for."""
        lacking: dict[str, list[str]] = {}
        for name in (SUPERVISED if self.history.supervised else FINDINGS.keys()) - {f.name for f in findings}:
            needed = FINDINGS[name].get("needs", FINDINGS[name]["metrics"][:1])
            absent = [metric for metric in needed if not any(map(self.history.values, metric.split("|")))]
            if absent and not absent[0].startswith(OTHER_RUNS):
                lacking.setdefault(", ".join(absent), []).append(name)
        return {metrics: sorted(names) for metrics, names in sorted(lacking.items())}


def audit_log(path: str | Path) -> Audit:
    """Read a log of TRL, verl or OpenRLHF, of W&B or TensorBoard, or any table with operant's names.

    Raises: OperantError for a log that cannot be read, or none of whose names is known.
    """
    # Trackers of transformers have `train/loss` and `eval/loss` where its own files have `loss` and `eval_loss`.
    rows = [{re.sub("^eval/", "eval_", n.removeprefix("train/")): x for n, x in row.items()} for row in read_log(path)]
    names = list(dict.fromkeys(name for row in rows for name in row if name != "step"))
    library = next((one for one in LIBRARIES.values() if set(one["marks"]) & set(names)), OWN)
    known = library["names"] | {n: n for n in names if n not in library["names"] and describe(n) is not None}
    understood = {name: known[name] for name in names if name in known}
    if not understood:
        raise OperantError(
            f"{path}: none of its {len(names)} names is a metric of operant, or one by which TRL, verl or OpenRLHF is "
            f"told ({', '.join(names[:8])}): rename the columns as docs/metrics.md does"
        )
    used = {ours: name for name, ours in reversed(known.items()) if name in names}  # the first name of each counts
    steps = list[dict[str, float | None]]()
    for row in (row for row in rows if any(name in row for name in understood)):
        step = {ours: row[name] if is_finite(row[name]) else None for ours, name in used.items() if name in row}
        per_token, length = step.get("kl/per_token"), step.get(LENGTH)
        if "kl/per_reply" not in used and per_token is not None and length is not None:
            step["kl/per_reply"] = per_token * length
        steps.append({"step": row["step"], **step})
    differs = {name: why for name, why in library.get("differs", {}).items() if name in names}
    unknown = [name for name in names if name not in understood]
    return Audit(library["title"], History(steps), understood, unknown, differs, library.get("options", {}))


def markdown() -> str:
    lines = ["| library | there | here | what differs |\n|---|---|---|---|\n"]
    for library in LIBRARIES.values():
        differs = library["differs"]
        for name in dict.fromkeys([*library["names"], *differs]):
            ours = f"`{library['names'][name]}`" if name in library["names"] else ""
            lines.append(f"| {library['title']} | `{name}` | {ours} | {differs.get(name, '')} |\n")
    return "".join(lines)
